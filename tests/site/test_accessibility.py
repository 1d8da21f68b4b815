"""Everyone can read and work the site: axe-core finds no fault, and a keyboard is enough."""

import pytest
from vendor import axe_script

pytestmark = pytest.mark.timeout(120)

THEMES = ["light", "dark"]
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
OTHER_PAGES = ["search", "genindex"]
# On a phone the bars fold away and tables scroll: these pages hold one of each thing there is.
ON_A_PHONE = ["book/index", "book/facts", "chapters/02_transformer", "chapters/05_kv_cache"]

# What is folded away has to pass as well.
UNFOLD = "document.querySelectorAll('details').forEach(fold => fold.open = true)"
# Gives [rule, help, address of the rule, [[the element's markup, what is wrong], ...]] for each
# rule broken. What moves is first brought to its end: a fold that fades in is judged as the
# reader will see it.
EXAMINE = """async levels => {
  for (const motion of document.getAnimations()) { try { motion.finish() } catch (endless) {} }
  const found = await axe.run(document, {runOnly: levels, resultTypes: ['violations'],
                                         elementRef: true});
  return found.violations.map(fault => [fault.id, fault.help, fault.helpUrl,
    fault.nodes.map(node => [node.element.outerHTML.slice(0, 300), node.failureSummary ?? ''])])}"""


@pytest.fixture(scope="session")
def axe() -> str:
    return axe_script().read_text(encoding="utf-8")


@pytest.fixture
def examine(axe):
    """A function that gives the faults of a page as text, by rule."""

    def examine_it(page) -> dict[str, str]:
        page.evaluate(axe)
        broken = page.evaluate(EXAMINE, LEVELS)
        return {rule: f"{rule}: {text} ({len(elements)} times; {url})\n"
                      f"  first: {elements[0][0]}\n  {elements[0][1]}"
                for rule, text, url, elements in broken}

    return examine_it


@pytest.fixture
def unfolded(open_page):
    """A function that opens a page with nothing folded away and nothing under the fixed bars."""

    def open_it(name: str, width: str, theme: str):
        page = open_page(name, width, theme)
        page.set_viewport_size({**page.viewport_size, "height": 2400})
        page.evaluate(UNFOLD)
        return page

    return open_it


def report(faults: dict[str, str], name: str, width: str, theme: str) -> str:
    return "\n".join([f"{name}, {width}, {theme}:", *faults.values()])


# --- what axe-core finds -------------------------------------------------------------------


@pytest.mark.parametrize("theme", THEMES)
def test_no_violation_on_a_desk(unfolded, examine, page_name, theme):
    faults = examine(unfolded(page_name, "wide", theme))
    assert not faults, report(faults, page_name, "wide", theme)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", OTHER_PAGES)
def test_no_violation_on_the_pages_that_sphinx_adds(unfolded, examine, name, theme):
    faults = examine(unfolded(name, "wide", theme))
    assert not faults, report(faults, name, "wide", theme)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ON_A_PHONE)
def test_no_violation_on_a_phone(unfolded, examine, name, theme):
    faults = examine(unfolded(name, "narrow", theme))
    assert not faults, report(faults, name, "narrow", theme)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("opener", ["button.primary-toggle", "button.secondary-toggle",
                                    "button.search-button:visible"])
def test_no_violation_in_what_a_phone_opens(open_page, examine, opener, theme):
    """The side bars and the search box are dialogs there, unseen until they are asked for."""
    page = open_page("chapters/05_kv_cache", "narrow", theme)
    page.locator(opener).first.click()
    page.wait_for_selector("dialog[open]")
    faults = examine(page)
    assert not faults, report(faults, opener, "narrow", theme)


def test_planted_faults_are_found(open_page, examine):
    """The checks above can fail: faint words and an image without words are reported."""
    page = open_page("book/notation")
    page.evaluate("""document.querySelector('article').insertAdjacentHTML('afterbegin',
        '<p style="color:#999;background:#fff">Too faint to read.</p><img src="data:,">')""")
    faults = examine(page)
    assert set(faults) == {"color-contrast", "image-alt"}
    assert "Too faint to read." in faults["color-contrast"]


# --- the keyboard alone --------------------------------------------------------------------

# Watches the focus: `missed` are the controls it has not visited, `unseen` those that were
# transparent or looked, with the focus, as they do without it.
WATCH = """() => {
  const all = [...document.querySelectorAll('a[href], button:enabled, input:enabled, select, ' +
    'textarea, summary, [tabindex="0"]')]
    .filter(e => e.checkVisibility({visibilityProperty: true}));
  const still = document.head.appendChild(document.createElement('style'));
  still.textContent = '*, ::before, ::after {transition: none !important}';
  const look = e => { const s = getComputedStyle(e); return [s.outlineStyle, s.outlineWidth,
    s.outlineColor, s.boxShadow, s.backgroundColor, s.borderColor].join() };
  const opacity = e => e ? getComputedStyle(e).opacity * opacity(e.parentElement) : 1;
  const atRest = new Map(all.map(e => [e, look(e)]));
  const visited = new Set(), unseen = new Set();
  const show = e => e.outerHTML.replace(/\\s+/g, ' ').slice(0, 140);
  document.addEventListener('focusin', ({target: e}) => { visited.add(e);
    if (opacity(e) < .9 || look(e) == atRest.get(e)) unseen.add(e) });
  window.walk = () => ({missed: all.filter(e => !visited.has(e)).map(show),
                        unseen: [...unseen].map(show)});
  return all.length }"""
FOCUS_IS_OUT = "document.activeElement === document.body"


def walk(page) -> dict[str, list[str]]:
    """Press Tab until the focus has left the page at its end; gives what `WATCH` has noted."""
    controls = page.evaluate(WATCH)
    assert controls > 5
    for _ in range(controls + 50):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUS_IS_OUT):
            return page.evaluate("walk()")
    pytest.fail(f"{page.url}: the focus is caught at "
                + page.evaluate("document.activeElement.outerHTML.slice(0, 200)"))


def assert_tab_leads_everywhere(page, where: str) -> None:
    seen = walk(page)
    assert seen["missed"] == [], f"{where}: Tab does not reach these"
    assert seen["unseen"] == [], f"{where}: nothing shows the focus on these"


def test_tab_reaches_every_control_and_shows_where_it_is(open_page, chapter_page):
    assert_tab_leads_everywhere(open_page(chapter_page), chapter_page)


def test_tab_reaches_every_control_on_a_phone(open_page, stepper_page):
    assert_tab_leads_everywhere(open_page(stepper_page, "narrow", "dark"), f"{stepper_page}, phone")


def test_planted_controls_are_missed(open_page):
    """The two tests above can fail: on a button out of Tab's way, on one that hides its focus."""
    page = open_page("book/notation")
    page.evaluate("""document.querySelector('article').insertAdjacentHTML('afterbegin',
        '<button tabindex="-1">out of the way</button>' +
        '<button style="outline:none!important;box-shadow:none!important">hidden</button>')""")
    seen = walk(page)
    assert ["out of the way" in markup for markup in seen["missed"]] == [True]
    assert ["hidden" in markup for markup in seen["unseen"]] == [True]


def test_the_first_tab_offers_to_skip_the_bars(open_page):
    page = open_page("chapters/05_kv_cache")
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to main content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main, .bd-main') !== null")


def test_folds_open_and_close(open_page, stepper_page):
    page = open_page(stepper_page)
    folds = page.locator("main details:visible").all()
    assert len(folds) > 5
    for fold in folds:
        line = fold.locator("summary").first
        line.press("Enter")
        assert fold.get_attribute("open") is not None, fold.inner_text()
        line.press("Space")
        assert fold.get_attribute("open") is None, fold.inner_text()


def test_steppers_go_to_their_end_and_keep_the_focus(open_page, stepper_page):
    """Tab leads from the slider to its button; the last step disables that one, not the reader."""
    page = open_page(stepper_page)
    for figure in page.locator("figure.ss-stepper").all():
        slider = figure.locator("input")
        slider.press("Home")
        page.keyboard.press("Tab")
        steps = int(slider.get_attribute("max"))
        for _ in range(steps):
            page.keyboard.press("Enter")
        assert slider.input_value() == str(steps)
        page.keyboard.press("Space")        # the focus is on the button that leads back
        assert slider.input_value() == str(steps - 1)


def test_code_is_copied(open_page, contexts, stepper_page):
    contexts["wide", "light"].grant_permissions(["clipboard-read", "clipboard-write"])
    page = open_page(stepper_page)
    button = page.locator("button.copybtn:visible").first
    code = page.locator(f"{button.get_attribute('data-clipboard-target')}").inner_text()
    button.press("Enter")
    page.wait_for_selector("button.copybtn.success")
    assert page.evaluate("navigator.clipboard.readText()").strip() == code.strip() != ""


def test_the_theme_is_switched(open_page):
    page = open_page("chapters/05_kv_cache")
    switch = page.locator("button.theme-switch-button:visible").first
    themes = []
    for _ in range(3):                      # light, dark, as the system has it
        switch.press("Enter")
        themes.append(page.locator("html").get_attribute("data-theme"))
    assert set(themes) == set(THEMES)


def test_search_opens_answers_and_closes(open_page):
    page = open_page("chapters/05_kv_cache")
    page.locator("button.search-button-field").press("Enter")
    box = page.locator("dialog[open] input[type=search]")
    box.wait_for()
    assert box.evaluate("box => box === document.activeElement")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    page.keyboard.press("Control+k")
    box.wait_for()
    page.keyboard.type("cache")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results ul.search li a")


@pytest.mark.parametrize("toggle", ["button.primary-toggle", "button.secondary-toggle"])
def test_side_bars_open_and_close_on_a_phone(open_page, toggle):
    """Inside, the focus goes from link to link; Escape gives it back."""
    page = open_page("chapters/05_kv_cache", "narrow")
    page.locator(toggle).first.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('dialog[open]') !== null")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")


def test_menus_above_the_text_open_and_close(open_page):
    """Launch, source and download: an arrow leads in, Escape leads out."""
    page = open_page("chapters/05_kv_cache")
    buttons = page.locator(".bd-header-article button.dropdown-toggle:visible").all()
    assert len(buttons) == 3
    for button in buttons:
        button.press("Enter")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.matches('.dropdown-menu.show .dropdown-item')")
        page.keyboard.press("Escape")
        assert button.get_attribute("aria-expanded") == "false"
