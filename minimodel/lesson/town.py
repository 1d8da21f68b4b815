"""The running example: one town notebook, the same in every chapter.

`TOWN` holds eight facts among twenty story lines; `RED_DOOR` is the fact most chapters
ask for. With the start token and that question the prompt is 1,025 tokens long: 64 full
blocks of 16, and one token more.
"""

import re
from pathlib import Path

from ..model.corpus import TITLE, Fact, Notebook

TOWN_FILE = Path(__file__).parent.parent / "data" / "town_notebook.txt"
_FACT = re.compile(r"The (code|owner|phone) of (.+) is (.+)\.\n")


def read_notebook(text: str) -> Notebook:
    """A notebook from its text. Raises ValueError where the title is missing."""
    if not text.startswith(TITLE):
        raise ValueError(f"a town notebook begins with the line {TITLE.strip()!r}; "
                         f"this text begins with {text[:20]!r}")
    lines = text.removeprefix(TITLE).splitlines(keepends=True)
    facts = [Fact(*match.groups()) for match in map(_FACT.fullmatch, lines) if match]
    return Notebook(tuple(lines), tuple(facts))


TOWN = read_notebook(TOWN_FILE.read_text(encoding="ascii"))
RED_DOOR = TOWN.facts[0]
