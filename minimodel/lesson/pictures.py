"""The pictures of an explorable: declared once, drawn here for the page's first look.

`explorable.js` draws them again, to the same markup, whenever a control moves; a test
compares the two. What never moves (axes, grid, ticks) is drawn here only.

    kind="measured"    solid marks          numbers of a run
    kind="modelled"    dashed and hollow    numbers of a formula or a simulation
    kind="reported"    a diamond            one number of a source
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import ClassVar

from minimodel.lesson import palette
from minimodel.lesson.markup import escape

WIDTH, BAR_ROW, BAR_TOP, BAR = 360, 46, 20, 16      # SVG units; a phone shows one as one pixel
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 46, 352, 26, 214, 254
KINDS = ("measured", "modelled", "reported")
MAX_MARKS = 12                                      # a longer line is drawn without its points
ADVANCE = 6.6                                       # width of a letter, about


# --- values and words ----------------------------------------------------------------------


def number(value: object) -> str:
    """A value for readers: 32,768 or 0.0312 (three digits of a fraction); text as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number to show: let the function refuse such inputs")
    if value == int(value):
        return f"{int(value):,}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    shown = Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    return f"{shown:,f}".rstrip("0").rstrip(".") if places else f"{shown:,f}"


def value(values: Mapping, source: object):
    """An output or input by its name; anything that is not a name stands for itself."""
    if not isinstance(source, str):
        return source
    try:
        return values[source]
    except KeyError:
        known = ", ".join(values)
        raise ValueError(f"nothing is called {source!r}; the names are: {known}") from None


def fill(template: str, values: Mapping) -> str:
    """The template with every {name} replaced by that value."""
    return re.sub(r"\{(\w+)\}", lambda hit: number(value(values, hit[1])), template)


def plain(item: object) -> str:
    """An output in the table behind a picture: a long list shows its beginning."""
    if not isinstance(item, list | tuple):
        return number(item)
    words = [f"{one[0]} ({one[1] or 'unmarked'})" if isinstance(one, list | tuple) else number(one)
             for one in item[:MAX_MARKS]]
    return ", ".join(words) + (" ..." if len(item) > MAX_MARKS else "")


def coordinate(position: float) -> str:
    """A length to a hundredth, rounded as the script rounds it."""
    return f"{math.floor(position * 100 + 0.5) / 100:.2f}".rstrip("0").rstrip(".")


def paint(meaning: str) -> str:
    """The CSS variables that give a mark (--c) and its words (--t) the meaning's colour."""
    return f"--c:{palette.var(meaning)};--t:{palette.text_var(meaning)}"


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, for good: readers compare pictures, so the axis does not move."""

    label: str
    low: float
    high: float
    log: bool = False

    def __post_init__(self):
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"axis {self.label!r} cannot run from {self.low} to {self.high}: low "
                             "must be under high, and on a log axis above 0")

    def place(self, number: float, start: float, end: float) -> float:
        """Where a value stands between two positions; far outside for a log of nothing."""
        low, high, at = (self._scaled(v) for v in (self.low, self.high, number))
        return start + min(9, max(-9, (at - low) / (high - low))) * (end - start)

    def ticks(self) -> list[float]:
        """Powers of ten on a log axis, otherwise about five round numbers."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10**power if power >= 0 else 10.0**power
                    for power in powers[::math.ceil(len(powers) / 7)]]
        raw = (self.high - self.low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(step for step in (size, 2 * size, 5 * size, 10 * size) if step >= raw)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [count * step for count in range(first, last + 1)]

    def _scaled(self, number: float) -> float:
        if not self.log:
            return number
        return math.log10(number) if number > 0 else -math.inf


def _check_mark(mark) -> None:
    palette.colour(mark.meaning)
    if mark.kind not in KINDS:
        raise ValueError(f"kind={mark.kind!r} of {mark.label!r} is none of {', '.join(KINDS)}")


def _svg(height: float, title: str, inside: str) -> str:
    return (f'<svg viewBox="-1 0 {WIDTH + 2} {coordinate(height)}" role="img" '
            f'aria-label="{escape(title)}">{inside}</svg>')


def _tick(value: float) -> str:
    """A tick's words, short enough to stand beside the next: 10,000 but 1 M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{number(value / size)} {letter}"
    return number(value)


def _anchor(x: float) -> str:
    """How a tick's words stand: within the picture at its two edges, centred elsewhere."""
    return "start" if x < 20 else "end" if x > WIDTH - 30 else "middle"


def _titled(title: str, svg: str) -> str:
    return f'<div class="ss-part"><p class="ss-title">{escape(title)}</p>{svg}</div>'


# --- the four pictures ---------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """Large numbers with their labels: pairs of (template, label)."""

    items: Sequence[tuple[str, str]]
    kinds: ClassVar[tuple] = ()

    def spec(self) -> dict:
        return {"draw": "numbers", "items": [list(item) for item in self.items]}

    def html(self, values: Mapping) -> str:
        return '<dl class="ss-numbers">' + "".join(
            f"<div><dt>{escape(fill(label, values))}</dt>"
            f"<dd>{escape(fill(template, values))}</dd></div>"
            for template, label in self.items) + "</dl>"


@dataclass(frozen=True)
class Bar:
    """One bar: the name of an output or a number, its label, and the words of its value."""

    value: str | float
    label: str
    meaning: str
    kind: str = "modelled"
    text: str = ""

    __post_init__ = _check_mark


@dataclass(frozen=True)
class Bars:
    """Bars from 0 to `high` (the longest fills the width where that is None).

    log  (low, high) of a logarithmic axis instead, for values many times apart
    """

    title: str
    bars: Sequence[Bar]
    unit: str = ""
    high: float | None = None
    log: tuple[float, float] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(bar.kind for bar in self.bars)

    def spec(self) -> dict:
        bars = [{**asdict(bar), "paint": paint(bar.meaning)} for bar in self.bars]
        low, high = self.log or (0, self.high)
        return {"draw": "bars", "title": self.title, "bars": bars, "unit": self.unit, "low": low,
                "high": high, "log": self.log is not None, "frame": self._frame()}

    def html(self, values: Mapping) -> str:
        title = fill(self.title, values)
        lengths = [value(values, bar.value) for bar in self.bars]
        axis = Axis(title, *self.log, log=True) if self.log else Axis(
            title, 0, self.high or max(*lengths, 0) or 1)
        rows = [self._bar(bar, i * BAR_ROW, length, axis, values)
                for i, (bar, length) in enumerate(zip(self.bars, lengths, strict=True))]
        return _titled(title, _svg(self._height(), title, self._frame() + "".join(rows)))

    def _bar(self, bar: Bar, y: float, length: float, axis: Axis, values: Mapping) -> str:
        words = fill(bar.text, values) if bar.text else f"{number(length)} {self.unit}".strip()
        end = coordinate(min(WIDTH, max(0, axis.place(length, 0, WIDTH))))
        top, middle = y + BAR_TOP, y + BAR_TOP + BAR / 2
        mark = (f'<path class="reported" d="M0 {middle:g}H{end}m-7 0l7 -7l7 7l-7 7z"></path>'
                if bar.kind == "reported" else
                f'<rect class="{bar.kind}" y="{top}" width="{end}" height="{BAR}" rx="2"></rect>')
        label = f"{escape(fill(bar.label, values))} <tspan>{escape(words)}</tspan>"
        return (f'<g style="{escape(paint(bar.meaning))}"><text y="{y + 13}">{label}</text>'
                f"{mark}</g>")

    def _height(self) -> float:
        return len(self.bars) * BAR_ROW + (18 if self.log else 0)

    def _frame(self) -> str:
        """The powers of ten behind the bars; nothing on a linear axis, where labels suffice."""
        if not self.log:
            return ""
        axis, bottom = Axis(self.title, *self.log, log=True), len(self.bars) * BAR_ROW
        return "".join(
            f'<path class="grid" d="M{coordinate(x)} {BAR_TOP}V{bottom - 4}"></path><text '
            f'class="tick" x="{coordinate(x)}" y="{bottom + 11}" text-anchor="{_anchor(x)}">'
            f"{_tick(tick)}</text>"
            for tick in axis.ticks() for x in [axis.place(tick, 0, WIDTH)])


@dataclass(frozen=True)
class Line:
    """A line through points, or one mark: x and y name outputs (lists or single numbers).

    at, dy  the label stands at this point, so much lower
    dots    whether a short line's points are marked
    """

    x: str | float | Sequence[float]
    y: str | float | Sequence[float]
    label: str
    meaning: str
    kind: str = "modelled"
    at: int = -1
    dy: float = -10
    dots: bool = True

    __post_init__ = _check_mark


@dataclass(frozen=True)
class Lines:
    """Lines and marks on two axes that stay put."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(line.kind for line in self.lines)

    def spec(self) -> dict:
        lines = [{**asdict(line), "paint": paint(line.meaning)} for line in self.lines]
        return {"draw": "lines", "title": self.title, "lines": lines, "x": asdict(self.x),
                "y": asdict(self.y), "frame": self._frame()}

    def html(self, values: Mapping) -> str:
        title = fill(self.title, values)
        places = [self._places(line, values) for line in self.lines]
        drawn = "".join(_marks(line, at) for line, at in zip(self.lines, places, strict=True))
        words = "".join(_label(line, at[line.at], fill(line.label, values))
                        for line, at in zip(self.lines, places, strict=True) if at)
        # an inner picture cuts off what lies outside the axes
        inside = (f'<svg x="{LEFT - 8}" y="{TOP - 8}" width="{RIGHT - LEFT + 16}" '
                  f'height="{BOTTOM - TOP + 16}" viewBox="{LEFT - 8} {TOP - 8} '
                  f'{RIGHT - LEFT + 16} {BOTTOM - TOP + 16}">{drawn}</svg>')
        return _titled(title, _svg(HEIGHT, title, self._frame() + inside + words))

    def _places(self, line: Line, values: Mapping) -> list[tuple[float, float]]:
        xs, ys = (list(v) if isinstance(v, list | tuple) else [v]
                  for v in (value(values, line.x), value(values, line.y)))
        if len(xs) != len(ys):
            raise ValueError(f"line {line.label!r} has {len(xs)} x but {len(ys)} y")
        return [(self.x.place(x, LEFT, RIGHT), self.y.place(y, BOTTOM, TOP))
                for x, y in zip(xs, ys, strict=True)]

    def _frame(self) -> str:
        pieces = [f'<text class="tick" x="0" y="12">{escape(self.y.label)}</text>'
                  f'<text class="tick" x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">'
                  f"{escape(self.x.label)}</text>"]
        for tick in self.x.ticks():
            x = coordinate(self.x.place(tick, LEFT, RIGHT))
            pieces.append(f'<path class="grid" d="M{x} {TOP}V{BOTTOM}"></path><text class="tick" '
                          f'x="{x}" y="{BOTTOM + 16}" text-anchor="middle">{_tick(tick)}</text>')
        for tick in self.y.ticks():
            y = self.y.place(tick, BOTTOM, TOP)
            pieces.append(f'<path class="grid" d="M{LEFT} {coordinate(y)}H{RIGHT}"></path>'
                          f'<text class="tick" x="{LEFT - 6}" y="{coordinate(y + 4)}" '
                          f'text-anchor="end">{_tick(tick)}</text>')
        return "".join(pieces)


def _marks(line: Line, places: Sequence[tuple[float, float]]) -> str:
    at = [(coordinate(x), coordinate(y)) for x, y in places]
    path = "L".join(f"{x} {y}" for x, y in at)
    drawn = f'<path class="line {line.kind}" d="M{path}"></path>' if len(at) > 1 else ""
    dots = at if line.dots and len(at) <= MAX_MARKS else []
    drawn += "".join(f'<path class="reported" d="M{x} {y}m-7 0l7 -7l7 7l-7 7z"></path>'
                     if line.kind == "reported" else
                     f'<circle class="{line.kind} dot" cx="{x}" cy="{y}" r="5"></circle>'
                     for x, y in dots)
    return f'<g style="{escape(paint(line.meaning))}">{drawn}</g>'


def _label(line: Line, place: tuple[float, float], words: str) -> str:
    """Words to the right of a point where they fit, else to its left."""
    fits = place[0] + 10 + ADVANCE * len(words) <= WIDTH
    x, anchor = (place[0] + 10, "start") if fits else (place[0] - 10, "end")
    y = min(BOTTOM - 4, max(TOP + 8, place[1] + line.dy + 4))
    return (f'<text class="label" style="{escape(paint(line.meaning))}" x="{coordinate(x)}" '
            f'y="{coordinate(y)}" text-anchor="{anchor}">{escape(words)}</text>')


@dataclass(frozen=True)
class Spans:
    """Texts cut into blocks, each coloured by what became of it.

    rows    pairs of (name of an output, label); the output lists [text, meaning or None]
    legend  {meaning: words}, for every meaning that can come up
    """

    title: str
    rows: Sequence[tuple[str, str]]
    legend: Mapping[str, str]
    kinds: ClassVar[tuple] = ()

    def spec(self) -> dict:
        return {"draw": "spans", "title": self.title, "rows": [list(row) for row in self.rows],
                "legend": dict(self.legend), "fills": {name: _fill(name) for name in self.legend}}

    def html(self, values: Mapping) -> str:
        rows = "".join(f'<p class="ss-spans"><b>{escape(fill(label, values))}</b>'
                       f"{self._blocks(value(values, key))}</p>" for key, label in self.rows)
        key = "".join(f"<span>{_block(words, name)}</span> "
                      for name, words in self.legend.items())
        return _titled(fill(self.title, values), f'{rows}<p class="ss-legend">{key}</p>')

    def _blocks(self, blocks: Sequence) -> str:
        unknown = {meaning for _, meaning in blocks if meaning} - set(self.legend)
        if unknown:
            raise ValueError(f"the legend lacks {', '.join(sorted(unknown))}: say what it means")
        return "".join(_block(text, meaning) for text, meaning in blocks)


def _block(text: str, meaning: str | None) -> str:
    style = f' style="{escape(_fill(meaning))}"' if meaning else ""
    return f'<mark class="{meaning or "none"}"{style}>{escape(text)}</mark>'


def _fill(meaning: str) -> str:
    return f"background:{palette.var(meaning)};color:{palette.inside_var(meaning)}"
