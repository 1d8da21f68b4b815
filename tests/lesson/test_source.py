"""Shown source is the real source, with a link to its lines."""

import inspect
import re
from pathlib import Path

import pytest

from minimodel.lesson import practice, site, source, timing
from minimodel.lesson.source import show


def test_a_function_is_shown_as_it_stands_in_its_file():
    shown = show(timing.seconds)
    assert inspect.getsource(timing.seconds).rstrip() in shown.text
    lines = Path(timing.__file__).read_text().splitlines()
    first = lines.index("def seconds(") + 1
    address = f"{site.REPOSITORY}/blob/{site.BRANCH}/minimodel/lesson/timing.py"
    assert f'href="{address}#L{first}-L' in shown.html


def test_a_module_is_shown_whole():
    text = Path(timing.__file__).read_text().rstrip()
    assert show(timing).text == (
        f"# minimodel/lesson/timing.py, lines 1 to {text.count(chr(10)) + 1}\n{text}"
    )


def test_parts_are_shown_one_after_the_other_without_indentation():
    shown = show(practice, "Practice.grade", "verdict_on")
    assert shown.html.count("<figure") == 2
    assert "\ndef grade(self" in shown.text and "\ndef verdict_on(" in shown.text


def test_markup_in_source_is_escaped():
    html = source.highlight('x = "<script>alert(1)</script>"')
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_a_notebooks_own_function_has_no_link():
    shown = show(test_a_notebooks_own_function_has_no_link)
    assert "<a " not in shown.html and "defined in this notebook" in shown.text


def test_the_same_source_gives_the_same_bytes():
    assert show(timing).html == show(timing).html


@pytest.mark.parametrize(("thing", "names", "said"), [
    (len, (), "no Python source"),
    (42, (), "no Python source"),
    (timing, ("hours",), "no part called 'hours'"),
])
def test_what_cannot_be_shown_is_said(thing, names, said):
    with pytest.raises(ValueError, match=said):
        show(thing, *names)


def test_the_repository_stands_in_the_books_configuration():
    config = Path(__file__).parents[2] / "_config.yml"
    if not config.exists():
        pytest.skip("there is no _config.yml here: the installed package is tested")
    stated = re.search(
        r"^repository:\s+url: (\S+).*\n\s+branch: (\S+)", config.read_text(), re.MULTILINE
    )
    assert stated.groups() == (site.REPOSITORY, site.BRANCH)
