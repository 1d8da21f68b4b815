"""The claims register on the site: complete, linkable, readable on a phone, and strict."""

import re

import facts_pages
import pytest
from facts_pages import RegisterError, anchor, plain, register_page, topic_of, unconfirmed_page
from places import ROOT

from minimodel.lesson.facts import load

pytestmark = pytest.mark.timeout(120)

CLAIMS = [claim for claim in load().values() if claim.kind != facts_pages.DISPUTES]
DISPUTES = [claim for claim in load().values() if claim.kind == facts_pages.DISPUTES]


def test_each_claim_has_one_topic():
    for claim in CLAIMS:
        fitting = [heading for pattern, heading in facts_pages.TOPICS
                   if re.match(pattern, claim.id)]
        assert fitting == [topic_of(claim)], claim.id
    assert {topic_of(claim) for claim in CLAIMS} == {topic for _, topic in facts_pages.TOPICS}


def test_a_claim_without_a_topic_is_a_fault(monkeypatch):
    monkeypatch.setattr(facts_pages, "TOPICS", ((r"S", "The video"),))
    with pytest.raises(RegisterError, match="no topic for fact P-OI01"):
        register_page("# Register")


def test_a_dispute_that_the_prose_does_not_tell_is_a_fault():
    prose = (ROOT / "book/unconfirmed.md").read_text(encoding="utf-8")
    assert "Only the video says so" in unconfirmed_page(prose)
    with pytest.raises(RegisterError, match=r"in these disputes: fact-c7$"):
        unconfirmed_page(prose.replace("(fact-c7)=", ""))
    with pytest.raises(RegisterError, match=r"in these disputes: fact-c99$"):
        unconfirmed_page(prose + "\n(fact-c99)=\n## One more\n")


def test_text_of_the_register_is_no_markup():
    assert plain("a|b  *c* <d> $1 [e]") == r"a\|b \*c\* \<d\> \$1 \[e\]"


def rendered(browser_page) -> dict[str, str]:
    """The text of each row of the register, by its anchor."""
    rows = browser_page.locator(".ss-register tbody tr").evaluate_all(
        "all => all.map(row => [row.querySelector('[id]').id, row.innerText])")
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def test_the_page_has_every_claim_with_its_value_and_standing(open_page):
    rows = rendered(open_page("book/facts"))
    assert set(rows) == {anchor(claim.id) for claim in CLAIMS}

    def letters(text: str) -> str:
        return re.sub(r"\W", "", text)      # typographic quotes and dashes are the site's own

    for claim in CLAIMS:
        shown = letters(rows[anchor(claim.id)])
        assert letters(claim.amount) in shown and letters(claim.id) in shown, claim.id
        assert ("nopublicsource" in shown) is claim.is_reported, claim.id
        assert ("Disputed" in rows[anchor(claim.id)]) is claim.is_disputed, claim.id


def test_each_dispute_is_told_and_what_only_the_video_says_is_listed(open_page):
    page = open_page("book/unconfirmed")
    for claim in DISPUTES:
        assert page.locator(f"#{anchor(claim.id)}").count() == 1
    links = page.locator("section#only-the-video-says-so li a").evaluate_all(
        "all => all.map(a => a.hash.slice(1))")
    assert links == [anchor(claim.id) for claim in load().values() if claim.is_reported]


@pytest.mark.parametrize(("width", "display"), [("wide", "table-row"), ("narrow", "block")])
def test_rows_become_cards_on_a_phone(open_page, width, display):
    page = open_page("book/facts", width)
    row = page.locator(".ss-register tbody tr").first
    assert row.evaluate("row => getComputedStyle(row).display") == display
    sideways = page.locator(".ss-register *").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).length")
    assert sideways == 0


def test_the_landing_page_leads_to_the_rows(open_page):
    page = open_page("book/index")
    link = page.locator("a[href$='#fact-p-pr03']")
    assert link.inner_text() == "0.15 dollars per million tokens"
    link.click()
    page.wait_for_url("**/facts.html#fact-p-pr03")
    assert page.locator("tr:has(:target)").inner_text().startswith("P-PR03")


def build(folder, page: str) -> tuple[str, str]:
    """A page rendered by Sphinx with the role; its HTML, and the warnings."""
    from io import StringIO

    from sphinx.application import Sphinx

    source = folder / "source"
    source.mkdir()
    (source / "index.md").write_text(
        f"# Page\n\n{page}\n\n[S39]{{#fact-s39}} is a row.\n", encoding="utf-8")
    warnings = StringIO()
    Sphinx(source, None, folder / "out", folder / "trees", "html", status=None, warning=warnings,
           confoverrides={"extensions": ["myst_parser", "fact_role"],
                          "myst_enable_extensions": ["attrs_inline"]}).build()
    return (folder / "out/index.html").read_text(encoding="utf-8"), warnings.getvalue()


def test_the_role_prints_the_amount_and_links_to_the_row(tmp_path):
    html, warnings = build(tmp_path, "It is {fact}`S39`.")
    assert warnings == ""
    assert re.search(r'<a [^>]*href="#fact-s39"[^>]*><span[^>]*>890 B/token</span></a>', html)


def test_an_unknown_id_is_a_warning_that_names_near_ones(tmp_path):
    _, warnings = build(tmp_path, "It is {fact}`S390`.")
    assert re.search(r"index\.md:\d+: WARNING: the claims register has no 'S390'; "
                     r"did you mean .*S39", warnings)


def test_a_row_that_is_missing_is_a_warning(tmp_path):
    _, warnings = build(tmp_path, "It is {fact}`S40`.")
    assert "undefined label: 'fact-s40'" in warnings
