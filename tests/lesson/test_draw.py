"""Drawings are well-formed, safe and exact."""

from xml.etree import ElementTree

import pytest

from minimodel.lesson import draw, palette

SVG = "{http://www.w3.org/2000/svg}"


def elements(drawing, tag):
    return list(ElementTree.fromstring(drawing).iter(SVG + tag))


def test_words_are_escaped_and_stay_words():
    drawing = draw.svg(100, 50, 'a "quoted" <alt>', draw.text(1, 9, "<b> & \"c\""))
    (word,) = elements(drawing, "text")
    assert word.text == '<b> & "c"'
    assert ElementTree.fromstring(drawing).get("aria-label") == 'a "quoted" <alt>'


def test_a_drawing_scales_and_never_overflows():
    root = ElementTree.fromstring(draw.svg(360, 80.5, "x"))
    assert root.get("viewBox") == "-1 -1 362 82.5"
    assert "width:100%" in root.get("style") and "max-width:360px" in root.get("style")


def test_cells_have_their_meanings_colours():
    drawing = draw.svg(200, 60, "x", draw.cells(0, 0, "abcde", ["notes"] * 3 + ["prefill", None],
                                                 per_row=3))
    boxes = elements(drawing, "rect")
    fills = [box.get("style").split(";")[0].removeprefix("fill:") for box in boxes]
    assert fills == [palette.var("notes")] * 3 + [palette.var("prefill"), "none"]
    step = draw.CELL + draw.GAP
    assert [float(box.get("x")) for box in boxes] == [0, step, 2 * step, 0, step]
    assert [float(box.get("y")) for box in boxes] == [0, 0, 0, step, step]
    assert draw.cells_width(3) == 2 * step + draw.CELL


def test_slots_show_how_full_memory_is():
    boxes = elements(draw.svg(300, 50, "x", draw.slots(0, 0, 5, 32)), "rect")
    filled = [box for box in boxes if "fill:none" not in box.get("style")]
    assert (len(filled), len(boxes)) == (5, 32)
    with pytest.raises(ValueError, match="33 of 32"):
        draw.slots(0, 0, 33, 32)


def test_bars_are_as_long_as_the_work_and_hollow_when_modelled():
    drawing = draw.svg(300, 50, "x", draw.bar(0, 0, 120, "120 tokens", "prefill"),
                       draw.bar(0, 25, 7, "7", "prefill", modelled=True))
    solid, hollow = elements(drawing, "rect")
    assert (solid.get("width"), hollow.get("width")) == ("120", "7")
    assert "fill:none" in hollow.get("style") and "fill:none" not in solid.get("style")
    with pytest.raises(ValueError, match="-1"):
        draw.bar(0, 0, -1, "x", "hit")


def test_an_arrow_ends_at_its_point():
    drawing = draw.svg(100, 50, "x", draw.arrow(0, 10, 60, 10, "hit", dashed=True))
    (head,) = elements(drawing, "polygon")
    assert head.get("points").split()[0] == "60,10"
    (shaft,) = elements(drawing, "line")
    assert shaft.get("x2") == "52" and "dasharray" in shaft.get("style")
    with pytest.raises(ValueError, match="no direction"):
        draw.arrow(1, 1, 1, 1)


@pytest.mark.parametrize("wrong", [
    lambda: draw.svg(100, 50, " "),
    lambda: draw.svg(0, 50, "x"),
    lambda: draw.text(0, 0, "x", anchor="left"),
    lambda: draw.cells(0, 0, "abc", ["hit"]),
    lambda: draw.rect(0, 0, 1, 1, "cash"),
])
def test_bad_input_is_refused(wrong):
    with pytest.raises(ValueError):
        wrong()


def test_a_drawing_shows_itself():
    drawing = draw.svg(10, 10, "a box", draw.rect(0, 0, 5, 5, "disk"))
    assert drawing._repr_html_().endswith(drawing)
    assert palette.COLOURS["disk"].dark in drawing._repr_html_()


def test_a_shade_is_as_strong_as_its_share():
    drawing = draw.svg(90, 30, "x", draw.shade(1, 2, 17, 9, "notes", 0.25, edge="grid"))
    (box,) = elements(drawing, "rect")
    assert (box.get("width"), box.get("height")) == ("17", "9")
    style = box.get("style")
    assert palette.var("notes") in style and "fill-opacity:0.25" in style
    assert f"stroke:{palette.var('grid')}" in style


def test_a_labelled_bar_fills_its_share_of_the_width_and_never_vanishes():
    drawing = draw.svg(draw.WIDTH, 99, "x", draw.labelled_bar(0, 0.5, "half", "prefill"),
                       draw.labelled_bar(40, 0, "none", "prefill", modelled=False))
    hollow, solid = elements(drawing, "rect")
    assert float(hollow.get("width")) == (draw.WIDTH - 4) / 2
    assert float(solid.get("width")) > 0
    assert "fill:none" in hollow.get("style") and "fill:none" not in solid.get("style")
    assert [word.text for word in elements(drawing, "text")] == ["half", "none"]


def test_a_legend_names_each_colour():
    drawing = draw.svg(400, 30, "x", draw.legend(9, [("notes", "read"), ("decode", "new")]))
    assert [word.text for word in elements(drawing, "text")] == ["read", "new"]
    first, second = elements(drawing, "rect")
    assert palette.var("notes") in first.get("style") and palette.var("decode") in second.get(
        "style")
    assert float(second.get("x")) - float(first.get("x")) == 142


def test_blanks_and_numbers_can_be_read():
    assert draw.marks("a b\n") == ["a", "␣", "b", "↵"]
    assert [draw.quantity(n) for n in (7, 1_234, 1_234_000, 2.5e9, 3e12)] == [
        "7 ", "1.2 k", "1.2 M", "2.5 G", "3.0 T"]
