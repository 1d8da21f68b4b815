"""Every claim about the outside world, with its source: the claims register, `facts.csv`.

A notebook never states such a number by itself: `fact("S39")` prints the value,
its unit and where it comes from. What only the video says is shown as reported,
what sources disagree about is shown as disputed.
"""

import csv
import difflib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from minimodel.lesson import palette
from minimodel.lesson.markup import Fragment, escape, present

_SAID_BY = "said by: "
# Units that go without saying, those that are spelled out, and those that have a plural.
_SILENT = {"-", "count", "date", "year", "version", "metric", "fraction", "layer,ratio",
           "total (active)"}
_SPELLED = {
    "USD": "dollars", "USD/GB": "dollars per GB", "M USD": "million dollars",
    "USD/1M": "dollars per million tokens", "USD/1M token": "dollars per million tokens",
    "USD/1M hit/miss": "dollars per million tokens (hit / miss)",
    "USD/1M hit/miss/out": "dollars per million tokens (hit / miss / output)",
    "CNY/1M hit/miss/out": "yuan per million tokens (hit / miss / output)",
    "USD/GPU-h": "dollars per GPU-hour", "USD/day": "dollars a day", "token/day": "tokens a day",
    "token/s": "tokens/s", "token/s/node": "tokens/s per node", "us": "µs",
}
_NO_VALUE = "-"         # the register's mark
_COUNTED = {"GPU", "token", "parameter", "node", "day", "month", "request", "layer"}
_LARGE = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
_CSS = (
    ".ss-fact{border-left:4px solid var(--ss-muted,#5b6472);padding-left:.9rem;margin:.6rem 0;"
    "max-width:46rem;overflow-wrap:anywhere}.ss-fact p{margin:.2rem 0}"
    ".ss-fact .ss-value{font-weight:650;font-size:1.15em}"
    ".ss-fact .ss-cite{color:var(--ss-muted,#5b6472);font-size:.9em}.ss-fact a{color:inherit}"
)


class UnknownFactError(LookupError):
    """No claim has that id; the message names those that look like it."""


@dataclass(frozen=True)
class Fact:
    """One claim, as it stands in the register.

    kind     video, docs, paper, spec, or conflict (a whole disagreement, told in one row)
    checked  yes: a public source agrees; no: none was found; conflict: sources disagree
    context  who said it, or under which conditions it holds
    """

    id: str
    quantity: str
    value: str
    unit: str
    context: str
    source_title: str
    source_url: str
    source_date: str
    kind: str
    checked: str
    note: str
    used: str
    why_not: str

    @property
    def is_disputed(self) -> bool:
        """Sources disagree about it, or it leaves out what changes its meaning."""
        return self.checked == "conflict"

    @property
    def is_derived(self) -> bool:
        """Computed from other claims rather than read somewhere."""
        return self.source_title.startswith("derived")

    @property
    def is_reported(self) -> bool:
        """Only the source itself says so."""
        return self.checked == "no" and not self.is_derived

    @property
    def has_value(self) -> bool:
        """False where the quantity says it all, as in "larger batch -> slower stream"."""
        return self.value != _NO_VALUE

    @property
    def amount(self) -> str:
        """Value and unit as one reads them: 890 B/token, <4 %, 50x."""
        value, unit = _plain(self.value), _spelled(self.unit)
        if unit == "x":
            return f"{value}x" if value[-1].isdigit() else value
        number, at, condition = value.partition(" at ")         # 276 GB at 4 bit
        return f"{number} {unit}".rstrip() + at + condition

    @property
    def number(self) -> float:
        """The value to compute with; a claim that is no single number raises and says so."""
        try:
            return float(self.value)
        except ValueError:
            message = f"fact {self.id} is {self.value!r}, no single number to compute with"
            raise ValueError(message) from None

    @property
    def standing(self) -> str:
        """How far to trust it, in a few words."""
        origin = self._origin
        if self.is_disputed:
            return f"Disputed; {origin}" if self.kind == "video" else "Disputed"
        if self.is_derived:
            return "Computed from other facts"
        if self.is_reported:
            return f"{origin[0].upper()}{origin[1:]}; no public source was found that confirms it"
        if self.kind == "video":
            return f"{origin[0].upper()}{origin[1:]}; a public source agrees"
        return "From its source"

    @property
    def citation(self) -> str:
        """Title, place and date of the source, or an empty text where there is none."""
        if self.is_derived:
            return ""
        parts = (self.source_title, self.source_url, self.source_date)
        return ", ".join(part for part in parts if part)

    @property
    def conditions(self) -> str:
        """What must be known to read the value rightly; for a dispute, what the others say."""
        context = "" if self.context.startswith(_SAID_BY) else self.context
        note = self.note if self.is_disputed else ""
        return "; ".join(part for part in (context, note) if part)

    @property
    def _origin(self) -> str:
        if self.context.startswith(_SAID_BY):
            return f"as reported in the video, said by {self.context.removeprefix(_SAID_BY)}"
        return f"as reported by {self.source_title}"


@cache
def load() -> dict[str, Fact]:
    """The whole register, by id, in its own order."""
    text = files("minimodel.lesson").joinpath("facts.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    names = {field.name for field in fields(Fact)}
    if rows and set(rows[0]) != names:
        raise ValueError(f"facts.csv has columns {sorted(rows[0])}, expected {sorted(names)}")
    return {row["id"]: Fact(**row) for row in rows}


def find(id: str) -> Fact:
    """One claim; an id that does not exist raises and names those that look like it."""
    register = load()
    if id in register:
        return register[id]
    near = difflib.get_close_matches(str(id).upper(), register, n=4, cutoff=0.5)
    remedy = f"did you mean {', '.join(near)}?" if near else "ids look like S39, P-DI07 or C1"
    raise UnknownFactError(f"the claims register has no {id!r}; {remedy}")


def fact(*ids: str) -> None:
    """Print claims of the register: value, unit, standing and citation."""
    for claim in [find(id) for id in ids]:
        present(card(claim))


def card(claim: Fact) -> Fragment:
    """A claim as a page shows it."""
    conditions = f"<p>{escape(claim.conditions)}</p>" if claim.conditions else ""
    value = f'<span class="ss-value">{escape(claim.amount)}</span> ' if claim.has_value else ""
    body = (
        f'<div class="ss-fact"><p>{value}{escape(_title(claim))}</p>{conditions}'
        f'<p class="ss-cite">{escape(claim.standing)}. {_citation_html(claim)} '
        f"[{escape(claim.id)}]</p>"
        "</div>"
    )
    words = f"{claim.amount}  {_title(claim)}" if claim.has_value else _title(claim)
    lines = [words, claim.conditions]
    lines.append(f"{claim.standing}. {claim.citation} [{claim.id}]".replace(".  [", ". ["))
    style = f"<style>{palette.css_for(_CSS)}{_CSS}</style>"
    return Fragment(style + body, "\n".join(line for line in lines if line))


def _title(claim: Fact) -> str:
    return claim.quantity.removeprefix("conflict: ")


def _citation_html(claim: Fact) -> str:
    if claim.is_derived or not claim.source_url.startswith(("https://", "http://")):
        return escape(claim.citation)
    link = f'<a href="{escape(claim.source_url)}">{escape(claim.source_title)}</a>'
    return f"{link}, {escape(claim.source_date)}" if claim.source_date else link


def _spelled(unit: str) -> str:
    """A unit as prose has it, empty where the value needs none."""
    if unit in _SILENT:
        return ""
    name, bracket, rest = unit.partition(" (")
    return f"{name}s{bracket}{rest}" if name in _COUNTED else _SPELLED.get(unit, unit)


def _plain(value: str) -> str:
    """A number as one reads it: 890, 12,031, 552 billion; any other text as it stands."""
    try:
        number = float(value)
    except ValueError:
        return value
    for size, name in _LARGE:
        if number >= size and number % (size // 1000) == 0:
            return f"{number / size:g} {name}"
    return f"{int(number):,}" if number.is_integer() and number >= 10_000 else value
