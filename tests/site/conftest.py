"""The built site, served on loopback, and a browser to look at it with."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book/tools"))

import browser as site_browser  # noqa: E402
from places import HTML  # noqa: E402

DEADLINE_MS = 30_000
# Resolves when the last that a page does by itself is done: fonts are here, formulas are set.
SETTLED = """Promise.all([document.fonts.ready, window.MathJax?.startup?.promise])
             .then(() => document.fonts.ready).then(() => null)"""


def built_pages() -> list[str]:
    """All pages; an impossible one where the site is not built, so that tests fail, not vanish."""
    return site_browser.pages(HTML) or ["(the site is not built)"]


def pages_with_steppers() -> list[str]:
    """The pages that hold a stepper; chapter 5 always counts, so that none at all is a failure."""
    holds_one = {name for name in site_browser.pages(HTML)
                 if 'class="ss-stepper' in (HTML / f"{name}.html").read_text(encoding="utf-8")}
    return sorted(holds_one | {"chapters/05_kv_cache"})


def chapter_pages() -> list[str]:
    return [name for name in built_pages() if not name.startswith("book/")]


def pytest_generate_tests(metafunc) -> None:
    if "page_name" in metafunc.fixturenames:
        metafunc.parametrize("page_name", built_pages())
    if "chapter_page" in metafunc.fixturenames:
        metafunc.parametrize("chapter_page", chapter_pages())
    if "stepper_page" in metafunc.fixturenames:
        metafunc.parametrize("stepper_page", pages_with_steppers())


@pytest.fixture(scope="session")
def html() -> Path:
    """The folder of the built site."""
    if not (HTML / "book/index.html").exists():
        pytest.fail("the site is not built: run `make book` first", pytrace=False)
    return HTML


@pytest.fixture(scope="session")
def address(html: Path):
    """Where the site is served during the tests."""
    with site_browser.serve(html) as url:
        yield url


@pytest.fixture(scope="session")
def browser():
    with site_browser.chromium() as running:
        yield running


@pytest.fixture(scope="session")
def contexts(browser):
    """One browser context for each width and theme: pages of a kind share their cached files."""
    made = {}
    for width in site_browser.WIDTHS:
        for theme in site_browser.THEMES:
            made[width, theme] = site_browser.context(browser, width, theme)
            made[width, theme].set_default_timeout(DEADLINE_MS)
    yield made
    for context in made.values():
        context.close()


@pytest.fixture
def open_page(contexts, address):
    """A function that opens a page and records all that goes wrong on it."""
    opened = []

    def open_it(name: str, width: str = "wide", theme: str = "light"):
        page = contexts[width, theme].new_page()
        opened.append(page)
        page.faults = watch(page, address)
        page.goto(f"{address}/{name}.html", wait_until="load")
        page.evaluate(SETTLED)
        return page

    yield open_it
    for page in opened:
        page.close()


def watch(page, address: str) -> list[str]:
    """A list that fills with a page's errors, failed requests and requests to other hosts."""
    faults = []
    own = (address, "data:", "blob:", "about:")

    def on_request(request) -> None:
        if not request.url.startswith(own):
            faults.append(f"asks another host: {request.url}")

    def on_response(response) -> None:
        if response.status >= 400:
            faults.append(f"status {response.status}: {response.url}")

    def on_console(message) -> None:
        if message.type == "error":
            faults.append(f"console: {message.text}")

    page.on("request", on_request)
    page.on("response", on_response)
    page.on("console", on_console)
    page.on("requestfailed", lambda request: faults.append(f"failed: {request.url}"))
    page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
    return faults
