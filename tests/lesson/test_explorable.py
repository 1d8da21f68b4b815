"""The explorable's page: well-formed, self-contained, small, reproducible; bad input is refused."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from minimodel.lesson import explorable as module
from minimodel.lesson.explorable import (
    Axis,
    Bar,
    Bars,
    Checkbox,
    Choice,
    Explorable,
    Line,
    Lines,
    Number,
    Numbers,
    Slider,
    Spans,
    Text,
)
from minimodel.lesson.pictures import coordinate, fill, number

VOID = {"input", "br", "meta"}


def double(size: int, word: str = "") -> dict:
    """A twin of no depth."""
    return {"twice": 2 * size, "parts": [["ab", "hit"], [word, None]], "xs": [1, 2, 3]}


def make(**changes) -> Explorable:
    given = {
        "alt": "Twice as much", "twin": double,
        "compute": "({size, word}) => ({twice: 2 * size, parts: [['ab', 'hit'], [word, null]],"
                   "xs: [1, 2, 3]})",
        "controls": [Slider("size", "size <of> it", [1, 5, 9], start=5), Text("word", "word", "w")],
        "says": "{size} doubled is {twice}.",
        "picture": [Numbers([("{twice}", "twice")]),
                    Bars("Bars", [Bar("twice", "double", "notes")])],
    }
    return Explorable(**{**given, **changes})


class Outline(HTMLParser):
    """Start tags with their attributes; complains where a tag is closed out of turn."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, name: str) -> list[dict]:
        return [attributes for tag, attributes in self.tags if tag == name]


# --- the page ------------------------------------------------------------------------------


def test_it_is_well_formed_and_labelled():
    page = Outline(make()._repr_html_())
    [figure] = page.all("figure")
    assert figure["aria-label"] == "Twice as much" and figure["class"] == "ss-explorable"
    assert figure["data-twin"].endswith(":double")
    assert [output["aria-live"] for output in page.all("output")] == ["polite"]
    assert [svg["aria-label"] for svg in page.all("svg") if svg.get("role") == "img"] == ["Bars"]
    [panel] = [div for div in page.all("div") if div.get("class") == "ss-panel"]
    assert "hidden" in panel            # no script, no dead controls


def test_without_a_script_it_shows_the_start():
    html = make()._repr_html_()
    assert "5 doubled is 10." in html and "<dd>10</dd>" in html
    assert '<th scope="row">size &lt;of&gt; it</th><td>5</td>' in html
    assert "5 doubled is 10." in repr(make())


def test_the_script_holds_the_declaration_and_asks_no_host():
    html = make()._repr_html_()
    name = re.search(r'id="(ss[0-9a-f]+)"', html)[1]
    assert f'querySelectorAll("#{name}")' in html
    assert not re.search(r"https?:|//\w", html)
    script = html[html.index("<script>"):]
    assert "size \\u003cof> it" in script and script.count("<script") == 1
    assert script.rstrip().endswith("</script>")


def test_content_decides_the_id():
    assert make()._repr_html_() == make()._repr_html_()
    ids = {re.search(r'id="(ss[0-9a-f]+)"', made._repr_html_())[1]
           for made in (make(), make(alt="Other"), make(data=[1]), make(says="{size}"))}
    assert len(ids) == 4


def test_every_colour_in_use_travels_with_it():
    made = make(picture=[Spans("Texts", [("parts", "word")], {"hit": "found", "miss": "read"})])
    style = made._repr_html_().split("</style>")[0]
    for name in ("--ss-hit:", "--ss-miss:", "--ss-miss-inside:", "--ss-muted:"):
        assert name in style


def test_runtime_and_style_stay_small():
    lines = Path(module.RUNTIME).read_text(encoding="utf-8").splitlines()
    assert len(lines) < 250
    assert len(module._runtime()) < 11_000 and len(module._style()) < 5_000
    assert not re.search(r"(?m)^\s*//", module._runtime())


# --- words and numbers ---------------------------------------------------------------------


@pytest.mark.parametrize(("value", "words"), [
    (0, "0"), (32768, "32,768"), (-1234567, "-1,234,567"), (4.0, "4"), (True, "yes"), ("a", "a"),
    (1234.5, "1,235"), (107.24, "107"), (3.14159, "3.14"), (0.5, "0.5"), (0.03125, "0.0313"),
    (0.00001234, "0.0000123"), (9.999, "10"), (99.96, "100"), (-2.345, "-2.35"), (2.125, "2.13"),
])
def test_numbers_are_written_for_readers(value, words):
    assert number(value) == words


def test_values_fill_sentences():
    assert fill("{a} and {b}: {a}", {"a": 1000, "b": "x"}) == "1,000 and x: 1,000"
    with pytest.raises(ValueError, match="nothing is called 'c'; the names are: a, b"):
        fill("{c}", {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="inf is no number"):
        number(math.inf)


@pytest.mark.parametrize(("position", "words"), [(1.005, "1"), (1.015, "1.01"), (2.5, "2.5"),
                                                 (-0.001, "0"), (120, "120"), (-3.456, "-3.46")])
def test_lengths_have_two_places(position, words):
    assert coordinate(position) == words


def test_axes_place_values_and_choose_ticks():
    line = Axis("bytes", 0, 350)
    assert line.place(70, 10, 110) == 30
    assert line.ticks() == [0, 100, 200, 300]
    log = Axis("bytes", 1, 10_000, log=True)
    assert log.place(100, 0, 80) == pytest.approx(40)
    assert log.ticks() == [1, 10, 100, 1000, 10_000]
    assert log.place(0, 0, 80) < -80                # far outside, no error
    assert Axis("x", 0.001, 0.5, log=True).ticks() == [0.001, 0.01, 0.1]
    assert len(Axis("x", 1, 1e12, log=True).ticks()) == 7


# --- controls ------------------------------------------------------------------------------


def test_controls_name_the_values_worth_trying():
    assert Slider("a", "a", range(1, 101), start=7).tries() == [1, 7, 34, 50, 67, 100]
    assert Number("a", "a", 1, 128, start=31).tries() == [1, 2, 31, 65, 128]
    assert Choice("a", "a", {8: "eight", 16: "sixteen"}, start=8).tries() == [8, 16]
    assert Checkbox("a", "a").tries() == [False, True]
    assert Text("a", "a", "start", more=["x"]).tries()[:3] == ["start", "x", ""]
    assert any(len(text.encode()) > len(text) + 3 for text in Text("a", "a", "b").tries())


def test_the_specification_is_plain_data():
    spec = json.loads(json.dumps(make(data={"chips": [1, 2]})._spec()))
    assert spec["start"] == {"size": 5, "word": "w"} and spec["data"] == {"chips": [1, 2]}
    assert [control["kind"] for control in spec["controls"]] == ["slider", "text"]


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "said"), [
    (lambda: make(alt=" "), "alternative text"),
    (lambda: make(controls=[]), "needs a control at least"),
    (lambda: make(controls=[Checkbox("size", "a"), Checkbox("size", "b")]), "its own key"),
    (lambda: make(compute="() => '</SCRIPT>'"), "must not hold '</script'"),
    (lambda: make(says="{other}")._repr_html_(), "nothing is called 'other'"),
    (lambda: make(data={"x": math.nan})._repr_html_(), "what JSON can hold"),
    (lambda: make(data={"x": object()})._repr_html_(), "what JSON can hold"),
    (lambda: Slider("a", "a", [1, 2], start=3), "start=3 of 'a' is none of"),
    (lambda: Number("a", "a", 1, 5, start=9), "start=9 of 'a' is not from 1 to 5"),
    (lambda: Choice("a", "a", ["x"], start="y"), "start='y'"),
    (lambda: Text("a", "a", "two\nlines"), "rows=3"),
    (lambda: Axis("a", 5, 5), "cannot run from 5 to 5"),
    (lambda: Axis("a", 0, 5, log=True), "above 0"),
    (lambda: Bar("twice", "a", "purple"), "no colour is called 'purple'"),
    (lambda: Bar("twice", "a", "notes", kind="guessed"), "kind='guessed' of 'a' is none of"),
    (lambda: make(picture=[Lines("t", Axis("x", 0, 9), Axis("y", 0, 9),
                                 [Line("xs", "twice", "l", "hit")])])._repr_html_(), "3 x but 1 y"),
    (lambda: make(picture=[Spans("t", [("parts", "p")], {"miss": "m"})])._repr_html_(),
     "the legend lacks hit"),
])
def test_bad_input_is_refused(build, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        build()
