"""Chapters' notebooks hold their exercises, word for word as the chapter's file has them."""

import json
from pathlib import Path

import pytest

from minimodel.lesson.exercises import engine

NOTEBOOKS = {int(path.name[:2]): path
             for path in (Path(__file__).parents[2] / "chapters").glob("*.ipynb")}
BOTH = sorted(NOTEBOOKS.keys() & set(engine.chapter_numbers()))


def test_there_are_such_chapters():
    assert {2, 5} <= set(BOTH)


@pytest.mark.parametrize("number", BOTH)
def test_the_notebook_holds_every_exercise_as_its_file_has_it(number):
    notebook = json.loads(NOTEBOOKS[number].read_text(encoding="utf-8"))
    found = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}
    for exercise in engine.load_chapter(number).exercises.values():
        place = exercise.id.replace(".", "-")
        assert found[f"exercise-{place}"] == f'exercise("{exercise.id}")'
        if exercise.check:
            assert found[f"try-{place}"] == exercise.cell
    shown = [id for id in found if id.startswith("exercise-")]
    assert len(shown) == len(engine.load_chapter(number).exercises)
