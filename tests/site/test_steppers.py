"""Every stepper on the built site moves its drawing, by keyboard and by button."""

import pytest

pytestmark = pytest.mark.timeout(120)

STEPPER = "figure.ss-stepper"
FRAME = ".ss-frame:not([hidden])"


@pytest.fixture(params=["wide", "narrow"])
def page(request, open_page, stepper_page):
    """A page that holds a stepper, at both widths."""
    page = open_page(stepper_page, request.param)
    assert page.locator(STEPPER).count() >= 1
    return page


def drawing(figure) -> str:
    """What the one visible frame of a stepper shows."""
    frames = figure.locator(FRAME)
    assert frames.count() == 1
    assert frames.bounding_box()["height"] > 40
    return frames.inner_html()


def to_the_start(figure):
    """Put a stepper's slider, which has the focus then, on its first frame."""
    slider = figure.locator("input[type=range]")
    slider.focus()
    slider.press("Home")
    return slider


def test_arrow_keys_move_the_drawing(page):
    for figure in page.locator(STEPPER).all():
        slider = to_the_start(figure)
        first = drawing(figure)
        slider.press("ArrowRight")
        assert drawing(figure) != first
        slider.press("ArrowLeft")
        assert drawing(figure) == first
    assert page.faults == []


def test_the_next_button_moves_the_drawing(page):
    for figure in page.locator(STEPPER).all():
        slider = to_the_start(figure)
        first, before = drawing(figure), slider.input_value()
        figure.locator("button").last.click()
        assert slider.input_value() != before
        assert drawing(figure) != first
    assert page.faults == []
