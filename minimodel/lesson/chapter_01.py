"""Chapter 01: the idea, strips of sends, ratios and times, and two prompts to compare.

The map of the machine has a file of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ..pricing import (
    PRICE_LISTS,
    Prices,
    Usage,
    advertised_ratio,
    bill_ratio,
    input_ratio,
    price_list,
)
from . import draw, facts, palette
from .chapter_01_map import BLOCK, diamond, machine_map
from .charts import Size, compare_sizes
from .draw import WIDTH
from .explorable import Bar, Bars, Choice, Explorable, Slider, Spans, Text
from .figures import Figure, direct_label, figure, finding, key, measured, modelled, reported
from .town import RED_DOOR, TOWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["compare", "lists_figure", "machine_map", "ratio_figure", "strips", "times_figure",
           "two_prompts", "two_times"]

# --- the idea --------------------------------------------------------------------------------


def two_times() -> draw.Drawing:
    """The idea in one picture: read once, take notes; the second time go to the notes."""
    return _larger(draw.svg(
        WIDTH, 224,
        "The first time, the model reads every token of a prompt and leaves notes; the second "
        "time the prompt leads straight to the notes, and to the same answer, for a fiftieth of "
        "the price a token.",
        _time(0, "the first time", "P-PR03", "miss", 60, "reads it all", "notes are made"),
        _time(118, "the second time", "P-PR01", "hit", 1, "reads one token", "notes are found")))


def _larger(drawn: draw.Drawing) -> draw.Drawing:
    """The same drawing, a third larger where the page has room."""
    larger = draw.Drawing(drawn.replace(f"max-width:{WIDTH}px", "max-width:560px"))
    larger.alt = drawn.alt
    return larger


def _time(y: float, words: str, claim: str, meaning: str, num_read: int, model: str,
          notes: str) -> str:
    """One send from left to right: a page, what is read of it, notes, the answer."""
    price = facts.find(claim)
    middle = y + 54
    way = [draw.arrow(52, middle, 88, middle, "muted"),
           draw.arrow(186, middle, 222, middle, "muted")]
    if num_read == 1:           # behind the model's back, all but one token
        way = [draw.line(52, middle, 204, middle, meaning),
               draw.arrow(204, middle, 222, middle, meaning)]
    dots = "".join(
        f'<circle cx="{98 + 7.2 * (i % 12):g}" cy="{y + 37 + 8.5 * (i // 12):g}" r="2.6" '
        f'style="fill:{palette.var("prefill" if i >= 60 - num_read else "grid")}"/>'
        for i in range(60))
    under = "".join(draw.text(x, y + 97, label, "muted", anchor="middle", size=12)
                    for x, label in ((22, "prompt"), (137, model), (249, notes),
                                     (374, "answer")))
    return "".join([
        draw.text(0, y + 8, words, bold=True), diamond(131, y + 8),
        draw.text(142, y + 8, f"{price.value} dollars a million prompt tokens", meaning, size=12),
        _page(y + 26, meaning), *way[:-1],
        f'<rect x="90" y="{y + 28:g}" width="94" height="52" rx="7" '
        f'style="fill:{palette.var("paper")};stroke:'
        f'{palette.var("prefill" if num_read > 1 else "grid")};stroke-width:1.5"/>', dots,
        way[-1], draw.slots(226, y + 27, 16, 16, per_row=4, size=10.6),
        draw.arrow(288, middle, 324, middle, "muted"),
        f'<rect x="328" y="{y + 39:g}" width="91" height="30" rx="15" '
        f'style="fill:{palette.var("decode")}"/>',
        f'<text x="373.5" y="{y + 58.5:g}" text-anchor="middle" style="font-size:13px;'
        f'font-weight:650;fill:{palette.inside_var("decode")}">{RED_DOOR.value}</text>', under])


def _page(y: float, meaning: str) -> str:
    """A page of text; of one sent before, only the last line is new."""
    lines = "".join(
        f'<path d="M7 {y + 10 + 9 * i:g}h{length}" style="stroke-width:3;stroke-linecap:round;'
        f'stroke:{palette.var("miss" if i == 4 else meaning)}"/>'
        for i, length in enumerate((30, 24, 30, 27, 14)))
    return (f'<rect x="0" y="{y:g}" width="44" height="56" rx="5" '
            f'style="fill:{palette.var("paper")};stroke:{palette.var("muted")};stroke-width:1.5"/>'
            f"{lines}")


# --- one strip a send ------------------------------------------------------------------------

_WORDS = {"hit": "remembered", "disk": "from disk", "miss": "computed", "decode": "answer"}
_ROW, _ANSWER = 50, 26      # height of a send; width set aside for the answer


def strips(sends: Mapping[str, Usage]) -> draw.Drawing:
    """What became of every block of a prompt, one strip a send, its answer at the end."""
    longest = max(1, *(usage.input_tokens for usage in sends.values()))
    rows, used = [], set()
    for i, (name, usage) in enumerate(sends.items()):
        kinds = _kinds(usage)
        used |= {*kinds, "decode"}
        rows.append(_strip(i * _ROW, name, usage, kinds, (WIDTH - _ANSWER) / longest))
    bottom = len(sends) * _ROW + 8
    entries = [(kind, words) for kind, words in _WORDS.items() if kind in used]
    return _larger(draw.svg(
        WIDTH, bottom + 10,
        "Of each send's prompt, how much is remembered and how much computed. " + " ".join(
            f"{name}: {usage.miss_tokens:,} of {usage.input_tokens:,} tokens computed."
            for name, usage in sends.items()),
        *rows, _legend(bottom, entries)))


def _legend(y: float, entries: Sequence[tuple[str, str]]) -> str:
    """What the colours mean, each word as far from the next as it is long."""
    pieces, x = [], 0.0
    for kind, words in entries:
        pieces.append(_cell(x, y - 8, 12, kind) + draw.text(x + 18, y, words, size=12))
        x += 34 + 6.6 * len(words)
    return "".join(pieces)


def _kinds(usage: Usage) -> list[str]:
    """What became of each block: found in memory, found on disk, or (partly) computed."""
    memory = usage.hit_tokens - usage.disk_hit_tokens
    return ["hit" if last <= memory else "disk" if last <= usage.hit_tokens else "miss"
            for last in range(BLOCK, usage.input_tokens + BLOCK, BLOCK)]


def _strip(y: float, name: str, usage: Usage, kinds: Sequence[str], scale: float) -> str:
    """One send: its name, how many tokens were computed, and a cell a block; scale: units a token.

    A block of a single token would be thinner than a hair: no cell is drawn under 2.5 units.
    """
    pieces = [draw.text(0, y + 8, name, bold=True),
              draw.text(WIDTH, y + 8, f"{usage.miss_tokens:,} of {usage.input_tokens:,} computed",
                        "miss" if usage.miss_tokens > usage.hit_tokens else "hit", anchor="end")]
    for i, kind in enumerate(kinds):
        tokens = min(BLOCK, usage.input_tokens - i * BLOCK)
        pieces.append(_cell(i * BLOCK * scale, y + 20, max(2.5, tokens * scale - 1.2), kind))
    end = usage.input_tokens * scale + 4
    pieces.append(_cell(end, y + 20, max(2.5, usage.output_tokens * scale), "decode"))
    return "".join(pieces)


def _cell(x: float, y: float, width: float, meaning: str) -> str:
    return (f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="16" rx="1" '
            f'style="fill:{palette.var(meaning)}"/>')


# --- plots -----------------------------------------------------------------------------------


_LENGTHS = [16 * 2**k + 1 for k in range(14)]      # whole blocks, and the last token


def ratio_figure(prices: Prices, short: int, long: int) -> Figure:
    """How many times cheaper a full second send is, by length: the input, and two whole bills.

    short, long  tokens of the two answers
    """
    def on_paper(ratio: Callable, answer: int) -> list[float]:
        return [float(ratio(Usage(n - 1, 1, answer), prices)) for n in _LENGTHS]

    top = float(advertised_ratio(prices))
    inputs, *bills = (on_paper(input_ratio, 0), on_paper(bill_ratio, short),
                      on_paper(bill_ratio, long))
    fig, ax = figure(5, 3.9)
    for ratios, meaning, label, at, dx, dy in (
            (inputs, "hit", "input alone", 3, 10, -6),
            (bills[0], "decode", f"bill, answer of {short:,}", 9, -10, 2),
            (bills[1], "decode", f"of {long:,}", 13, -1, 11)):
        modelled(ax, _LENGTHS, ratios, meaning, label)
        direct_label(ax, _LENGTHS[at], ratios[at], label, meaning, dx=dx, dy=dy)
    reported(ax, _LENGTHS[0], top, "ink", f"by the list: {top:g}")
    ax.texts[-1].set(position=(-4, 13))
    ax.axhline(top, color="#8e949e", linewidth=1)
    _ratio_axes(ax, top)
    finding(ax, f"The input nears {top:g} soon; the bill waits for long prompts")
    key(ax, "modelled", "reported", loc=(0.2, 0.19))
    return Figure(fig, f"Modelled from one price list: of {_LENGTHS[4]:,} tokens the input is "
                       f"{inputs[4]:.1f} times cheaper when sent again and the bill "
                       f"{bills[0][4]:.1f} times; of {_LENGTHS[-1]:,} tokens "
                       f"{inputs[-1]:.1f} and {bills[0][-1]:.1f} times, or "
                       f"{bills[1][-1]:.1f} if the answer has {long:,} tokens.")


def _ratio_axes(ax: "Axes", top: float) -> None:
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set(xlabel="tokens in the prompt (log scale)", ylabel="times cheaper than the first send",
           ylim=(0, top * 1.2))
    ax.set_xticks([100, 1_000, 10_000, 100_000], ["100", "1,000", "10,000", "100,000"])


def times_figure(lengths: Sequence[int], first: Sequence[float], memory: Sequence[float],
                 disk: Sequence[float]) -> Figure:
    """Milliseconds to the first token by length: read, from memory, from disk."""
    fig, ax = figure(5, 3.6)
    for times, meaning, label, dx, dy in ((first, "miss", "first send", -4, 12),
                                          (disk, "disk", "from disk", 0, 11),
                                          (memory, "hit", "from memory", 0, -13)):
        measured(ax, lengths, [1e3 * t for t in times], meaning, label)
        direct_label(ax, lengths[2], 1e3 * times[2], label, meaning, dx=dx, dy=dy)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.minorticks_off()
    ax.set(xlabel="tokens in the prompt (log scale)", ylabel="ms to the first token (log scale)",
           ylim=(250 * min(memory), 4e3 * max(first)))
    finding(ax, f"{lengths[-1]:,} tokens: first token {first[-1] / memory[-1]:.0f} times sooner "
                f"from memory, {first[-1] / disk[-1]:.0f} from disk")
    key(ax, "measured", loc="upper left")
    return Figure(fig, f"Measured time to the first token: at {lengths[-1]:,} tokens, "
                       f"{first[-1] / memory[-1]:.0f} times shorter from memory and "
                       f"{first[-1] / disk[-1]:.0f} times shorter from disk than when read; at "
                       f"{lengths[0]:,} tokens {first[0] / memory[0]:.1f} and "
                       f"{first[0] / disk[0]:.1f} times.")


def lists_figure() -> Figure:
    """What a remembered token cost beside a read one, in every price list that is known."""
    found = sorted(PRICE_LISTS, key=lambda one: (one.valid_from, one.model))
    ratios = [float(advertised_ratio(one.prices)) for one in found]
    fig, ax = compare_sizes(
        [Size(f"{one.valid_from:%Y-%m}  {one.model}: {ratio:.3g}", ratio, "hit")
         for one, ratio in zip(found, ratios, strict=True)],
        "times cheaper, a remembered token", (0.25, 1500),
        f"One vendor's ratio has been anything from {min(ratios):.1f} to {max(ratios):.0f}",
        height=4.6)
    ax.set_xticks([1, 10, 100], ["1", "10", "100"])
    key(ax, "reported", loc="lower right")
    return Figure(fig, "Price of a read token over that of a remembered one, by list: " + "; ".join(
        f"{one.model} from {one.valid_from:%Y-%m-%d}: {ratio:.3g}"
        for one, ratio in zip(found, ratios, strict=True)) + ".",
        table={"list": [one.model for one in found],
               "from": [f"{one.valid_from:%Y-%m-%d}" for one in found],
               "times": [f"{ratio:.3g}" for ratio in ratios],
               "claims": [", ".join(one.sources) for one in found]})


# --- two prompts of the reader's own ---------------------------------------------------------

_LISTS = {
    "flash": (price_list("deepseek-flash"), "deepseek-flash, autumn 2026"),
    "pro": (price_list("deepseek-v4-pro"), "deepseek-v4-pro, autumn 2026"),
    "old": (price_list("deepseek-chat", date(2025, 3, 3)), "deepseek-chat, spring 2025"),
}
_PAGE = TOWN.text[:TOWN.text.index("Then Nani")]
_LONGEST = 20_000        # characters of a prompt
_CLOCKS = {"none": "no clock", "top": "a clock on top", "end": "a clock before the last line"}


def compare(first: str, second: str, clock: str, answer: int, prices: str) -> dict:
    """Two prompts, sent a minute apart: what the second finds of the first, and its price.

    A start token, then one token a byte, in blocks of 16; the costs are dollars for a million
    such sends, which is tokens times dollars per million tokens.
    """
    one, two = ([None, *_with_clock(text, clock, minute).encode()]
                for text, minute in ((first, 41), (second, 42)))
    same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
                min(len(one), len(two)))
    hits = min(same, len(two) - 1) // BLOCK * BLOCK
    hit, miss, out = (float(p) for p in vars(_LISTS[prices][0].prices).values())
    full = len(two) * miss + answer * out
    cost = hits * hit + (len(two) - hits) * miss + answer * out
    return {"where": _where(same, len(one), len(two)), "hits": hits, "misses": len(two) - hits,
            "times": full / cost, "full": full, "cost": cost,
            "first_blocks": _near(hits, _spans(one, [(hits, "hit"), (len(one), None)])),
            "second_blocks": _near(hits, _spans(two, [(hits, "hit"), (same, "waste"),
                                                      (len(two), "miss")]))}


def _with_clock(text: str, clock: str, minute: int) -> str:
    """The prompt with the time of day in it: nowhere, on top, or before its last line."""
    at = text.rstrip("\n").rfind("\n") + 1 if clock == "end" else 0
    return text if clock == "none" else f"{text[:at]}It is 09:{minute}.\n{text[at:]}"


def _where(same: int, one: int, two: int) -> str:
    if same == one == two:
        return "The two are equal."
    if same in (one, two):
        return "One is the beginning of the other."
    return f"They first differ at byte {same}."


def _spans(tokens: Sequence, parts: Sequence[tuple]) -> list[list]:
    """Blocks of tokens as [text, meaning]; a block is cut again where the meaning changes."""
    spans, first = [], 0
    for end, meaning in parts:
        while first < end:
            last = min(end, first // BLOCK * BLOCK + BLOCK)
            text = bytes(t for t in tokens[first:last] if t is not None)
            spans.append([("" if first else "▸") + text.decode(errors="replace"), meaning])
            first = last
    return spans


_BEGINNING, _AROUND, _GAP = 6, 20, [" … ", None]


def _near(hits: int, spans: Sequence[list]) -> list[list]:
    """Of a long prompt, its beginning and the blocks around the end of what is remembered."""
    shown: list[list] = []
    for i, span in enumerate(spans):
        if i < _BEGINNING or abs(i - hits // BLOCK) <= _AROUND:
            shown.append(span)
        elif shown[-1] is not _GAP:
            shown.append(_GAP)
    return shown


def two_prompts() -> Explorable:
    """Where two prompts part, and what the second one costs."""
    known = {name: words for name, (_, words) in _LISTS.items()}
    return Explorable(
        alt="A second prompt is cheap up to the block in which it first differs from the first; "
            "one byte changed at its top makes all of it dear.",
        twin=compare, compute=Path(__file__).with_suffix(".js"),
        data={"block": BLOCK, "prices": {
            name: [float(p) for p in vars(one.prices).values()]
            for name, (one, _) in _LISTS.items()}},
        controls=[
            Text("first", "first prompt", _PAGE + RED_DOOR.question.strip(), rows=6,
                 more=["x" * 31, "x" * 32, "y" * 1_500], limit=_LONGEST),
            Text("second", "second prompt", _PAGE + TOWN.facts[1].question.strip(), rows=6,
                 more=["x" * 31, "x" * 47, "y" * 700 + "x" * 800], limit=_LONGEST),
            Choice("clock", "both with", _CLOCKS, start="none"),
            Slider("answer", "tokens of the answer", [0, 10, 37, 100, 300, 1000], start=37),
            Choice("prices", "price list", known, start="flash")],
        says="{where} Tokens of the second prompt: {hits} remembered, {misses} read.",
        names={"where": "comparison", "hits": "tokens remembered", "misses": "tokens read",
               "times": "times cheaper than unremembered", "full": "a million sends, unremembered",
               "cost": "a million sends", "first_blocks": "first prompt, cut",
               "second_blocks": "second prompt, cut"},
        picture=[
            Spans("Blocks of 16 tokens (▸ is the start token)",
                  [("first_blocks", "first prompt"), ("second_blocks", "second prompt")],
                  {"hit": "remembered", "waste": "equal, yet read again", "miss": "read"}),
            Bars("Dollars for a million such second sends: {times} times cheaper", [
                Bar("full", "if nothing were remembered:", "miss"),
                Bar("cost", "as it is:", "hit")])])
