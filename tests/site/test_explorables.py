"""Every explorable on the built site computes what its Python twin computes, and moves.

A page of examples is tested the same way: it has every control and every picture, so the checks
find something to check while the book's pages hold none.
"""

import importlib
import itertools
import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import browser as site_browser
from example_explorables import EXAMPLES, heads_alone, note_bytes
from places import HTML
from vendor import axe_script

from minimodel.lesson.explorable import Explorable, Numbers, Slider

pytestmark = pytest.mark.timeout(180)

FIGURE = "figure.ss-explorable"
EXAMPLE_PAGE = "examples"
MOST = 400                      # inputs tried for one explorable
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SHOWN = "root => ['.ss-picture', '.ss-says'].map(n => root.querySelector(n).innerHTML).join()"
COMPUTE = """(root, grid) => grid.map(inputs => {
  try { return {outputs: root.explorable.compute(inputs)} }
  catch (error) { return {refused: error.message} } })"""
# Both as a browser writes markup, so that only what is drawn counts.
BOTH_DRAWN = """(root, pairs) => {
  const written = text => { const box = document.createElement('div'); box.innerHTML = text;
                            return box.innerHTML };
  return pairs.map(([inputs, html]) =>
    [written(root.explorable.render(inputs).picture), written(html)]) }"""
REDRAWN = """root => {
  const drawn = root.explorable.render(root.explorable.spec.start);
  const written = text => { const box = document.createElement('div'); box.innerHTML = text;
                            return box.innerHTML };
  const table = document.createElement('tbody'); table.innerHTML = drawn.table;
  return [[root.querySelector('.ss-picture').innerHTML, written(drawn.picture)],
          [root.querySelector('.ss-says').textContent, drawn.says],
          [root.querySelector('tbody').innerHTML, table.innerHTML]] }"""


def pages() -> list[str]:
    """The page of examples, and the site's pages that hold an explorable."""
    return [EXAMPLE_PAGE, *(name for name in site_browser.pages(HTML) if "ss-explorable" in
                            (HTML / f"{name}.html").read_text(encoding="utf-8"))]


def page_of(*explorables: Explorable, theme: str = "light") -> str:
    body = "\n".join(explorable._repr_html_() for explorable in explorables)
    return (f'<!doctype html><html lang="en" data-theme="{theme}"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
            "<title>Examples</title><style>html[data-theme=dark]{background:#14171c;color:#e6e9ee}"
            f"</style></head><body><main><h1>Examples</h1>{body}</main></body></html>")


@pytest.fixture
def open_any(open_page, contexts, address):
    """A function that opens a page of the site, or one made of explorables, by its content."""

    def open_it(name: str, width: str = "wide", theme: str = "light", content: str = ""):
        if name != EXAMPLE_PAGE:
            return open_page(name, width, theme)
        content = content or page_of(*(make() for make in EXAMPLES), theme=theme)
        url = f"{address}/{EXAMPLE_PAGE}.html"
        contexts[width, theme].route(url, lambda route: route.fulfill(
            body=content, content_type="text/html; charset=utf-8"))
        try:
            return open_page(name, width, theme)
        finally:
            contexts[width, theme].unroute(url)

    return open_it


def figures(page) -> list:
    found = page.locator(FIGURE).all()
    assert found
    return found


# --- the same numbers ----------------------------------------------------------------------


def grid(controls: list[dict]) -> list[dict]:
    """Inputs that cross all that the controls want tried; where too many, a fixed draw of them."""
    keys = [control["key"] for control in controls]
    everything = list(itertools.product(*(control["tries"] for control in controls)))
    edges = [everything[0], everything[-1]]
    if len(everything) > MOST:
        everything = edges + random.Random(1).sample(everything, MOST - len(edges))
    return [dict(zip(keys, inputs, strict=True)) for inputs in everything]


def twin_of(figure):
    module, _, name = figure.get_attribute("data-twin").partition(":")
    return getattr(importlib.import_module(module), name)


def same(ours, theirs) -> bool:
    """Equal, numbers to a billionth; 3 and 3.0 are one number, true and 1 are not."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, bool) or isinstance(theirs, bool) or isinstance(ours, str):
        return type(ours) is type(theirs) and ours == theirs
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isfinite(ours) and math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)
    return ours is None and theirs is None


def differences(figure) -> list[str]:
    """Where the function on the page and its twin differ, over the whole grid."""
    twin, inputs = twin_of(figure), grid(figure.evaluate("root => root.explorable.spec.controls"))
    assert len(inputs) > 1
    found = []
    for given, theirs in zip(inputs, figure.evaluate(COMPUTE, inputs), strict=True):
        try:
            ours = twin(**given)
        except ValueError as error:
            if theirs.get("refused") != str(error):
                found.append(f"{given}: the twin refuses ({error}), the page says {theirs}")
            continue
        outputs = theirs.get("outputs", {})
        if list(ours) != list(outputs):
            found.append(f"{given}: the twin gives {list(ours)}, the page {theirs}")
        found += [f"{given}: {name} is {ours[name]!r} by the twin, {outputs[name]!r} on the page"
                  for name in ours if name in outputs and not same(ours[name], outputs[name])]
    return found


@pytest.mark.parametrize("name", pages())
def test_the_page_computes_what_its_twin_computes(open_any, name):
    page = open_any(name)
    for figure in figures(page):
        assert differences(figure)[:3] == []
    assert page.faults == []


@pytest.mark.parametrize(("compute", "complaint"), [
    ("({kv_heads}) => ({owners: 31, per_token: 4096 * kv_heads, tokens: 1})", "'per_token'"),
    ("() => ({owners: 31})", "the twin gives"),
    ("() => { throw new Error('no') }", "the twin gives"),
])
def test_planted_differences_are_found(open_any, compute, complaint):
    """The check above can fail: on a wrong number, a missing one, a function that refuses."""
    wrong = Explorable(alt="x", twin=heads_alone, compute=compute, says="{owners}",
                       controls=[Slider("kv_heads", "heads", [1, 2, 3], start=2)],
                       picture=[Numbers([("{owners}", "layers")])])
    [figure] = figures(open_any(EXAMPLE_PAGE, content=page_of(wrong)))
    found = differences(figure)
    assert len(found) >= 3 and complaint.strip("'") in found[0]


# --- the same drawing ----------------------------------------------------------------------


@pytest.mark.parametrize("name", pages())
def test_the_first_picture_is_the_one_the_page_would_draw(open_any, name):
    """Picture, words and table that Python wrote are what the script makes of the same inputs."""
    for figure in figures(open_any(name)):
        for written, drawn in figure.evaluate(REDRAWN):
            assert written == drawn != ""


def test_both_draw_the_same_everywhere(open_any):
    for figure, make in zip(figures(open_any(EXAMPLE_PAGE)), EXAMPLES, strict=True):
        explorable = make()
        tried = grid(figure.evaluate("root => root.explorable.spec.controls"))
        pairs = [[inputs, explorable.drawn(**inputs)] for inputs in tried
                 if inputs.get("first") != ""]      # refused
        for on_page, in_python in figure.evaluate(BOTH_DRAWN, pairs):
            assert on_page == in_python
        assert len({html for _, html in pairs}) > 9


# --- controls ------------------------------------------------------------------------------


def shown(figure) -> str:
    """What a reader sees or hears of a figure's state, in a picture that has some size."""
    assert figure.locator(".ss-picture").bounding_box()["height"] > 40
    return figure.evaluate(SHOWN)


def by_keyboard(control: dict, box) -> list:
    """Ways to move a control with keys alone."""
    box.focus()
    if control["kind"] in ("slider", "choice"):
        return [lambda key=key: box.press(key) for key in ("Home", "ArrowRight", "End", "ArrowUp")]
    if control["kind"] == "checkbox":
        return [lambda: box.press("Space")] * 2
    return [lambda text=text: type_into(box, str(text)) for text in control["tries"]
            if "\n" not in str(text)]


def type_into(box, text: str) -> None:
    """Letter by letter, in place of what stands there; of a long text, the rest is pasted."""
    box.press("ControlOrMeta+a")
    box.press_sequentially(text[:200])
    box.page.keyboard.insert_text(text[200:])


def by_pointer(control: dict, box) -> list:
    """Ways to move it with a pointer; a menu's entries belong to the system, so they are chosen."""
    if control["kind"] == "slider":
        size = box.bounding_box()
        return [lambda share=share: box.click(position={"x": 3 + share * (size["width"] - 6),
                                                        "y": size["height"] / 2})
                for share in (0, 0.5, 1)]
    if control["kind"] == "choice":
        return [lambda i=i: box.select_option(index=i) for i in range(len(control["options"]))]
    if control["kind"] == "checkbox":
        return [box.click] * 2
    return [lambda text=text: (box.click(), box.fill(str(text))) for text in control["tries"]]


@pytest.mark.parametrize("move", [by_keyboard, by_pointer])
@pytest.mark.parametrize("width", ["wide", "narrow"])
@pytest.mark.parametrize("name", pages())
def test_every_control_moves_the_picture(open_any, name, width, move):
    page = open_any(name, width)
    for figure in figures(page):
        controls = figure.evaluate("root => root.explorable.spec.controls")
        boxes = figure.locator(".ss-panel").locator("input, select, textarea").all()
        for control, box in zip(controls, boxes, strict=True):
            states = {shown(figure)}
            for step in move(control, box):
                step()
                states.add(shown(figure))
                assert page.evaluate(SIDEWAYS) <= 0
            assert len(states) > 1, f"{control['key']} moves nothing"
    assert page.faults == []


def test_what_cannot_be_is_said_and_the_picture_stays(open_any):
    page = open_any(EXAMPLE_PAGE)
    counter, _, openings = figures(page)
    layers, says = counter.locator("input[type=number]"), counter.locator("output")
    before = counter.locator(".ss-picture").inner_html()
    for typed in ("0", "129", "2.5", ""):
        layers.fill(typed)
        assert says.inner_text() == "layers: give a number from 1 to 128, in steps of 1"
        assert layers.get_attribute("aria-invalid") == "true"
        assert counter.locator(".ss-picture").inner_html() == before
    layers.fill("62")
    assert says.inner_text().startswith("62 layers")
    assert layers.get_attribute("aria-invalid") == "false"
    openings.locator("textarea").first.fill("")
    assert "the first prompt is empty" in openings.locator("output").inner_text()
    assert page.faults == []


def test_figures_leave_each_other_and_the_page_alone(open_any):
    """One moves, the others stay, the same one a second time too; the page gets no new names."""
    counter = EXAMPLES[0]()
    page = open_any(EXAMPLE_PAGE, content=page_of(counter, EXAMPLES[1](), counter))
    first, other, again = figures(page)
    before = shown(other), shown(again)
    first.locator("input[type=checkbox]").click()
    assert (shown(other), shown(again)) == before
    again.locator("input[type=checkbox]").click()
    assert shown(again) == shown(first) != before[1]
    assert page.evaluate("""() => {
      const frame = document.body.appendChild(document.createElement('iframe'));
      const usual = new Set(Object.getOwnPropertyNames(frame.contentWindow));
      return Object.getOwnPropertyNames(window).filter(n => !usual.has(n) && !/^\\d+$/.test(n)) }
      """) == []


def test_a_typed_text_stays_text(open_any):
    page = open_any(EXAMPLE_PAGE)
    openings = figures(page)[2]
    openings.locator("textarea").first.fill('<img src=x onerror="document.title=1"> & {same} "')
    assert openings.locator(".ss-picture img").count() == 0
    assert '& {same} "' in openings.locator(".ss-spans").first.inner_text()
    assert page.title() == "Examples" and page.faults == []


# --- for everyone --------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_examples_have_no_violation(open_any, width, theme):
    page = open_any(EXAMPLE_PAGE, width, theme)
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    page.evaluate(axe_script().read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(found => found.violations.map("
                          "v => [v.id, v.nodes[0].html.slice(0, 200)]))")
    assert found == []
    assert page.evaluate(SIDEWAYS) <= 0


@pytest.mark.parametrize("name", pages())
def test_without_scripts_the_picture_stands_and_no_dead_control_shows(browser, address, name):
    if name == EXAMPLE_PAGE:
        def show(page):
            page.set_content(page_of(*(make() for make in EXAMPLES)))
    else:
        def show(page):
            page.goto(f"{address}/{name}.html")
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        show(page)
        for figure in figures(page):
            assert figure.locator(".ss-picture").bounding_box()["height"] > 40
            assert figure.locator("output").inner_text() != ""
            assert figure.locator("input:visible, select:visible").count() == 0
    finally:
        context.close()


def test_the_page_of_examples_has_every_control_and_picture():
    specs = [make()._spec() for make in EXAMPLES]
    assert {c["kind"] for spec in specs for c in spec["controls"]} == {
        "slider", "number", "choice", "checkbox", "text"}
    assert {part["draw"] for spec in specs for part in spec["picture"]} == {
        "numbers", "bars", "lines", "spans"}
    assert note_bytes(31, 8, 16, False)["per_token"] == 126_976
