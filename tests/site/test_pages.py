"""Every page, as a reader meets it: wide and narrow, light and dark."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.timeout(120)

SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_page_is_quiet_and_fits(open_page, page_name, width, theme):
    """No error, no failed request, no other host, no sideways scroll; and the theme asked for."""
    page = open_page(page_name, width, theme)
    assert page.faults == []
    assert page.locator("html").get_attribute("data-theme") == theme
    assert page.evaluate(SIDEWAYS) <= 0


def test_fonts_and_formulas_come_from_the_site(open_page):
    """The text is set in the vendored fonts, and MathJax has turned formulas into boxes."""
    page = open_page("book/notation")
    loaded = page.evaluate(
        "[...document.fonts].filter(f => f.status == 'loaded').map(f => f.family)")
    assert {"Source Serif 4", "Inter"} <= {family.strip('"') for family in loaded}
    assert page.locator("mjx-container").count() > 10


def test_search_finds_the_cache(open_page):
    page = open_page("search")
    box = page.locator("form.bd-search input[type=search]:visible").first
    box.fill("cache")
    box.press("Enter")
    page.wait_for_selector("#search-results ul.search li a")
    links = page.locator("#search-results ul.search li a").evaluate_all(
        "all => all.map(a => a.href)")
    assert any("chapters/05_kv_cache" in link for link in links)
    assert page.faults == []


def test_chapters_are_numbered_through_all_parts(open_page):
    """The side bar lists chapters 1 to 18 in one sequence, in the order of their files."""
    page = open_page("book/index")
    entries = page.locator("nav.bd-links li.toctree-l1 > a").evaluate_all(
        "all => all.map(a => [a.textContent.trim(), a.href])")
    chapters = [(text, link) for text, link in entries if "/chapters/" in link]
    expected = list(range(1, 19))
    assert [int(re.match(r"(\d+)\. ", text)[1]) for text, _ in chapters] == expected
    assert [int(re.search(r"/chapters/(\d+)_", link)[1]) for _, link in chapters] == expected


@pytest.mark.parametrize(
    ("width", "shown", "other"), [("wide", "wide", "tall"), ("narrow", "tall", "wide")])
def test_landing_page_shows_the_map_that_fits(open_page, width, shown, other):
    """One drawing of the machine is shown, its letters are legible, and its numbers are links."""
    page = open_page("book/index", width)
    assert page.locator(f".ss-map-{shown}").is_visible()
    assert not page.locator(f".ss-map-{other}").is_visible()
    heights = page.locator(f".ss-map-{shown} .ssm-sub").evaluate_all(
        "all => all.map(t => t.getBoundingClientRect().height)")
    assert min(heights) >= 12
    page.locator(f".ss-map-{shown} a[href*='05_kv_cache']").click()
    page.wait_for_url("**/chapters/05_kv_cache.html")


class Links(HTMLParser):
    """Collects the addresses and the ids of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links, self.ids = [], set()

    def handle_starttag(self, tag, attrs) -> None:
        for name, value in attrs:
            if name in ("href", "src", "xlink:href") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.ids.add(value)


def read(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def test_every_link_within_the_site_leads_somewhere(html):
    """Files exist and anchors too, in raw drawings as well, which the build does not check."""
    pages = {path: read(path) for path in html.rglob("*.html") if "_static" not in path.parts}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = parts.fragment if target in pages else ""
            if not target.exists() or (anchor and anchor not in pages[target].ids):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_no_page_names_a_script_or_style_of_another_host(html):
    """What a page loads is on the site: it works offline, from a folder too."""
    loads = re.compile(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"(https?:)?//|"
                       r"<link[^>]*rel=\"(?:stylesheet|preload)\"[^>]*href=\"(https?:)?//")
    pages = [path for path in html.rglob("*.html") if "_static" not in path.parts]
    assert len(pages) > 18
    assert [path.name for path in pages if loads.search(path.read_text(encoding="utf-8"))] == []


def test_launch_buttons_point_at_the_stated_address(html):
    """Colab, Binder and edit buttons of the finished chapter name repository, branch and file."""
    from address import pages_url, repository_url, slug_of

    url = repository_url()
    slug = slug_of(url)
    links = read(html / "chapters/05_kv_cache.html").links
    file = "chapters/05_kv_cache.ipynb"
    assert f"https://colab.research.google.com/github/{slug}/blob/main/{file}" in links
    assert f"https://mybinder.org/v2/gh/{slug}/main?urlpath=lab/tree/{file}" in links
    assert f"{url}/edit/main/{file}" in links
    assert f"{pages_url(url)}chapters/05_kv_cache.html" in links
