"""The stepper's page: well-formed, self-contained, small, reproducible."""

import re
from html.parser import HTMLParser

import pytest

from minimodel.lesson import draw, figures, stepper
from minimodel.lesson.stepper import Stepper

VOID = {"input", "br", "meta"}


class Outline(HTMLParser):
    """Every start tag with its attributes; complains where a tag is closed out of turn."""

    def __init__(self):
        super().__init__()
        self.tags, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def outline(html):
    parser = Outline()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser.tags


def frames(count=3):
    return [draw.svg(100, 20, f"{i} cells", draw.slots(0, 0, i, 5)) for i in range(count)]


@pytest.fixture
def html():
    labels = ["none", 'one <&> "two"', "two"]
    return Stepper(frames(), labels, "cells used", "Cells fill up")._repr_html_()


def test_it_is_well_formed_and_labelled(html):
    tags = outline(html)
    (figure,) = [a for tag, a in tags if tag == "figure"]
    assert figure["class"] == "ss-stepper" and figure["aria-label"] == "Cells fill up"
    (slider,) = [a for tag, a in tags if tag == "input"]
    assert (slider["type"], slider["min"], slider["max"]) == ("range", "0", "2")
    assert slider["aria-label"] == "cells used"
    buttons = [a["aria-label"] for tag, a in tags if tag == "button"]
    assert buttons == ["previous: cells used", "next: cells used"]
    (output,) = [a for tag, a in tags if tag == "output"]
    assert output["aria-live"] == "polite"


def test_only_the_first_frame_shows_without_a_script(html):
    shown = [a for tag, a in outline(html) if a.get("class") == "ss-frame"]
    assert ["hidden" in a for a in shown] == [False, True, True]
    assert [a["data-label"] for a in shown] == ["none", 'one <&> "two"', "two"]


def test_the_script_looks_for_its_own_id(html):
    name = re.search(r'<figure class="ss-stepper" id="([^"]+)"', html)[1]
    assert f'querySelectorAll("#{name}")' in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html


def test_content_decides_the_id():
    def page(labels):
        return Stepper(frames(), labels, "n", "alt")._repr_html_()

    assert page("abc") == page("abc")
    ids = [re.search(r'id="(ss[0-9a-f]+)"', page(labels))[1] for labels in ("abc", "abd")]
    assert ids[0] != ids[1]


def test_style_and_script_stay_under_two_kilobytes():
    assert len((stepper._CSS + stepper._JS).encode()) < 2048


def test_print_shows_the_first_and_the_last_frame():
    assert "@media print" in stepper._CSS
    assert ".ss-frame:first-child,.ss-frame:last-child{display:block!important}" in stepper._CSS


def test_figures_can_be_frames():
    def figure(count):
        fig, ax = figures.figure()
        figures.measured(ax, range(count), range(count), "decode", "tokens")
        return figures.Figure(fig, f"{count} points")

    html = Stepper([figure(2), figure(3)], [2, 3], "points", "The line grows")._repr_html_()
    ids = [a["id"] for _, a in outline(html) if "id" in a]
    assert len(ids) == len(set(ids)) > 10
    assert html.count('role="img"') == 2


@pytest.mark.parametrize(("count", "labels", "alt", "said"), [
    (3, ["a", "b"], "x", "3 frames but 2 labels"),
    (1, ["a"], "x", "two at least"),
    (2, ["a", "b"], "", "alternative text"),
])
def test_bad_input_is_refused(count, labels, alt, said):
    with pytest.raises(ValueError, match=said):
        Stepper(frames(count), labels, "n", alt)
