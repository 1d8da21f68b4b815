"""A chapter's own cells, and its exercises' verdicts, for the chapter's tests."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from minimodel.lesson.exercises.engine import judge

CHAPTERS = Path(__file__).parents[2] / "chapters"


class Notebook:
    """The notebook of a chapter. `given` are names that its cells expect to be there."""

    def __init__(self, name: str, **given):
        self.path, self.given = CHAPTERS / f"{name}.ipynb", given

    @cached_property
    def cells(self) -> dict[str, str]:
        """The text of each cell, by its id."""
        content = json.loads(self.path.read_text(encoding="utf-8"))
        return {cell["id"]: "".join(cell["source"]) for cell in content["cells"]}

    def run(self, *ids: str, **given) -> dict:
        """What some cells define, run as they stand there."""
        names = {**self.given, **given}
        for id in ids:
            exec(self.cells[id], names)
        return names


def refusals(exercises) -> Callable[[str, object], str]:
    """What a chapter's exercise says to a wrong answer; fails if it takes it for right."""
    def verdict(id: str, answer) -> str:
        found = judge(exercises.CHAPTER[id], answer)
        assert not found
        return found.message
    return verdict
