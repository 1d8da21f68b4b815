"""Append the claims register to the two pages that show it.

The prose of both pages is written by hand, in `book/facts.md` and `book/unconfirmed.md`; the rows
come from the register (`minimodel/lesson/facts.csv`) while the book is built, so that no page can
say something else than the register. Each row has an anchor, `fact-` and its id in small letters:
`{fact}` roles and links from anywhere lead to it.
"""

import re
import sys
from pathlib import Path

from places import ROOT

sys.path.insert(0, str(ROOT))
from minimodel.lesson.facts import Fact, load

# Topics in the order of the page: what their ids begin with, and their headings.
TOPICS = (
    (r"S", "What the video says"),
    (r"P-PR", "Prices"),
    (r"P-KV", "Rules of the service's cache"),
    (r"P-(DI|V4|DYN|HF|5090)", "DeepSeek-V4.1-Flash and its engine"),
    (r"P-OI", "DeepSeek's service in February 2025"),
    (r"P-(V3|IS|PD)", "DeepSeek-V3"),
    (r"P-(VB|VP)", "Paged memory"),
    (r"P-(DS|SW|SG|MC)", "Two clocks, shared prefixes, and a trace"),
    (r"P-LM", "An open engine on 96 GPUs"),
    (r"P-(EP|EB)", "Moving tokens to experts"),
    (r"P-FS", "The file system below the cache"),
    (r"P-LL", "Failures"),
    (r"P-HW", "Chips and drives"),
    (r"P-CO", "What machines cost"),
    (r"D-", "Worked out from the rows above"),
)
DISPUTES = "conflict"                       # the kind of row that has a section of its own
SPECIAL = re.compile(r"([\\`*_{}\[\]<>|$~&^#])")
HEAD = ("| id | what | value | where it comes from |\n"
        "|---|---|---|---|")


class RegisterError(Exception):
    """The hand-written part of a page and the register do not fit together."""


def anchor(id: str) -> str:
    """Where a claim stands on its page."""
    return f"fact-{id.lower()}"


def topic_of(claim: Fact) -> str:
    """The heading under which a claim stands; raises where there is none."""
    for pattern, heading in TOPICS:
        if re.match(pattern, claim.id):
            return heading
    raise RegisterError(f"no topic for fact {claim.id}: add one to TOPICS in facts_pages.py")


def plain(text: str) -> str:
    """Text of the register as Markdown that shows it as it is."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def source(claim: Fact) -> str:
    """Title, link, place and date of a source, as Markdown."""
    if claim.is_derived:
        return ""
    if claim.kind == "video":
        return f"Video, {plain(claim.source_url.split('@')[-1].strip())}."
    title = plain(claim.source_title)
    if claim.source_url.startswith(("https://", "http://")):
        title = f"[{title}](<{claim.source_url}>)"
    return f"{title}, {plain(claim.source_date)}." if claim.source_date else f"{title}."


def standing(claim: Fact) -> str:
    """How far to trust a claim; the video, which heads its own table, is not named in each row."""
    words = plain(claim.standing.replace("s reported in the video, said by ", "s said by "))
    words = words.replace("Disputed", "[Disputed](unconfirmed.md)", 1)
    if claim.kind == "video" or claim.is_disputed or claim.is_derived:
        return f"{words}."
    return "" if claim.checked == "yes" else f"{words}."


def row(claim: Fact) -> str:
    """One line of a table."""
    value = "" if claim.amount == "-" else f"**{plain(claim.amount)}**"
    what = plain(claim.quantity[0].upper() + claim.quantity[1:])
    where = " ".join(part for part in (standing(claim), source(claim)) if part)
    conditions = f" [{plain(claim.conditions)}]{{.ss-conditions}}" if claim.conditions else ""
    return f"| [{claim.id}]{{#{anchor(claim.id)}}} | {what}{conditions} | {value} | {where} |"


def table(claims: list[Fact]) -> str:
    """Claims as a table that becomes a list of cards on a phone."""
    rows = "\n".join([HEAD, *map(row, claims)])
    return f"::::{{div}} ss-register\n{rows}\n::::\n"


def register_page(prose: str) -> str:
    """The whole register below the prose of `book/facts.md`, topic by topic."""
    sections = []
    claims = [claim for claim in load().values() if claim.kind != DISPUTES]
    for _, heading in TOPICS:
        chosen = [claim for claim in claims if topic_of(claim) == heading]
        if chosen:
            sections.append(f"## {heading}\n\n{table(chosen)}")
    return "\n".join([prose.rstrip(), "", *sections])


def unconfirmed_page(prose: str) -> str:
    """Below the prose of `book/unconfirmed.md`, all that only one source says, linked."""
    wanted = {anchor(id) for id, claim in load().items() if claim.kind == DISPUTES}
    told = set(re.findall(r"^\((fact-c\d+)\)=$", prose, flags=re.MULTILINE))
    if wanted != told:
        raise RegisterError("book/unconfirmed.md and the register differ in these disputes: "
                            + ", ".join(sorted(wanted ^ told)))
    lines = [f"- {plain(claim.quantity[0].upper() + claim.quantity[1:])}"
             + (f": **{plain(claim.amount)}**" if claim.amount != "-" else "")
             + f" ([{claim.id}](#{anchor(claim.id)}))"
             for claim in load().values() if claim.is_reported]
    return "\n".join([prose.rstrip(), "", *lines, ""])


def pages(book: Path = ROOT / "book") -> dict[str, bytes]:
    """Both pages complete, by their place in the rendered tree."""
    made = {"facts.md": register_page, "unconfirmed.md": unconfirmed_page}
    return {f"book/{name}": make((book / name).read_text(encoding="utf-8")).encode()
            for name, make in made.items()}
