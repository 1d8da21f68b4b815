"""Figures follow the theme, carry their words and numbers, and are the same every time."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from minimodel.lesson import figures, palette
from minimodel.lesson.figures import Figure

SVG = "{http://www.w3.org/2000/svg}"


def plot(top=9.0):
    fig, ax = figures.figure()
    figures.measured(ax, [1, 2, 3], [1, 4, top], "prefill", "first send")
    figures.modelled(ax, [1, 2, 3], [1.5, 4.5, 8.5], "decode", "formula")
    figures.reported(ax, 2, 7, "notes", "a source, 2025")
    figures.finding(ax, "Reading costs grow with the square of the length of the prompt")
    figures.key(ax)
    return fig


@pytest.fixture(scope="module")
def figure():
    return Figure(plot(), 'Two curves: "a" < b & c', caption="A <caption>.")


def test_the_same_numbers_give_the_same_bytes(figure):
    again = Figure(plot(), figure.alt, caption=figure.caption)
    assert figure.html() == again.html() == again.html()
    assert figure.png() == again.png()
    assert Figure(plot(top=8.0), figure.alt).svg() != figure.svg()


def test_the_svg_is_well_formed_and_described(figure):
    root = ElementTree.fromstring(figure.svg())
    assert root.get("role") == "img"
    assert root.get("aria-label") == figure.alt
    assert root.get("width") is None and root.get("viewBox")
    assert "max-width:480px" in root.get("style")


def test_text_stays_text(figure):
    texts = ElementTree.fromstring(figure.svg()).iter(SVG + "text")
    words = {"".join(text.itertext()).strip() for text in texts}
    assert "a source, 2025" in words and "measured" in words
    assert "DejaVu" not in figure.svg()


def test_colours_follow_the_theme(figure):
    svg = figure.svg()
    assert palette.var("prefill") in svg and palette.var("decode") in svg
    assert palette.text_var("notes") in svg
    assert "currentColor" in svg
    # no light value is left that a dark page could not replace
    assert not re.search(rf"(?<!,){palette.COLOURS['prefill'].light}", svg)
    assert palette.COLOURS["ink"].light not in svg
    assert palette.COLOURS["prefill"].dark in figure.html()


def test_two_figures_share_no_id(figure):
    both = (figure, Figure(plot(8.0), "other"))
    ids = [set(re.findall(r'\bid="([^"]+)"', one.svg())) for one in both]
    assert ids[0] and not ids[0] & ids[1]
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', figure.svg()))
    assert referred <= ids[0]


def test_nothing_of_a_figure_reaches_the_rest_of_the_page(figure):
    assert "<style" not in figure.svg()


def test_the_table_holds_what_was_drawn(figure):
    assert figure.table["series"].count("first send") == 3
    assert set(zip(figure.table["series"], figure.table["kind"], strict=True)) == {
        ("first send", "measured"), ("formula", "modelled"), ("a source, 2025", "reported"),
    }
    assert "<details" in figure.html() and "<td>8.5</td>" in figure.html()


def test_a_long_series_is_thinned_but_keeps_its_ends():
    fig, ax = figures.figure()
    figures.measured(ax, range(1000), range(1000), "hit", "long")
    x = Figure(fig, "long").table["x"]
    assert len(x) == 24 and x[0] == 0 and x[-1] == 999


def test_a_table_of_ones_own():
    fig, _ = figures.figure()
    assert "<td>0.1235</td>" in Figure(fig, "x", table={"share": [0.123456]}).html()
    assert "<details" not in Figure(fig, "x").html()
    with pytest.raises(ValueError, match="equally long"):
        Figure(fig, "x", table={"a": [1], "b": [1, 2]})


def test_every_form_is_offered(figure):
    bundle = figure._repr_mimebundle_()
    assert bundle["text/plain"] == f"[figure: {figure.alt}]"
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert "A &lt;caption&gt;." in bundle["text/html"]


@pytest.mark.parametrize("alt", ["", "   "])
def test_an_empty_alternative_text_raises(alt):
    with pytest.raises(ValueError, match="alternative text"):
        Figure(plot(), alt)


def test_kinds_of_numbers_look_different():
    _, ax = figures.figure()
    one = figures.measured(ax, [1], [1], "hit", "m")
    two = figures.modelled(ax, [1], [1], "hit", "f")
    three = figures.reported(ax, 1, 1, "hit", "r")
    assert (one.get_linestyle(), two.get_linestyle(), three.get_linestyle()) == ("-", "--", "None")
    assert one.get_markerfacecolor() == palette.COLOURS["hit"].light
    assert two.get_markerfacecolor() == "none"
    assert three.get_marker() == "D"
    solid = figures.measured_bars(ax, ["a"], [1], "hit", "bars")[0]
    hollow = figures.modelled_bars(ax, ["b"], [1], "hit", "bars")[0]
    assert solid.get_facecolor()[3] == 1 and hollow.get_facecolor()[3] == 0
    assert ax.yaxis_inverted()


def test_unequal_series_and_unknown_meanings_are_refused():
    _, ax = figures.figure()
    with pytest.raises(ValueError, match="3 places but 2 values"):
        figures.measured(ax, [1, 2, 3], [1, 2], "hit", "short")
    with pytest.raises(ValueError, match="no colour is called 'cash'"):
        figures.measured(ax, [1], [1], "cash", "money")


def test_drawing_prints_nothing():
    code = (
        "from minimodel.lesson.figures import *\n"
        "fig, ax = figure()\n"
        "measured(ax, [1, 2], [1, 2], 'hit', 'a'); finding(ax, 'bold title'); key(ax)\n"
        "Figure(fig, 'x')._repr_mimebundle_()"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
