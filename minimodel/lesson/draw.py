"""Small diagrams as SVG: boxes, words, arrows, cells of tokens, bars of work, memory slots.

Every function returns a piece of SVG as text; `svg` puts pieces together:

    svg(360, 80, "Five tokens; only the last one is computed",
        cells(10, 20, ["a", "b", "c", "d", "e"], ["notes"] * 4 + ["prefill"]))

Lengths are SVG units. A drawing shows one unit as one pixel where there is
room, and shrinks with the page where there is not; 360 units fit a phone.
Colours are the palette's meanings and follow the theme.
"""

from collections.abc import Sequence

from minimodel.lesson import palette
from minimodel.lesson.markup import escape, require_alt

WIDTH = 420         # of a chapter's drawing: words keep their size on a page, and shrink a little
                    # on a phone
CELL = 26           # side of a token's cell
GAP = 3             # between two cells
TEXT_SIZE = 13
_FONT = "var(--ss-font,system-ui),sans-serif"
_MARKS = {" ": "␣", "\n": "↵"}


class Drawing(str):
    """SVG text that notebooks show as the drawing; usable as a frame of a stepper."""

    alt: str

    def _repr_html_(self) -> str:
        return f"<style>{palette.css_for(self)}</style>{self}"

    def _repr_pretty_(self, printer, cycle) -> None:
        printer.text(f"[drawing: {self.alt}]")


def svg(width: float, height: float, alt: str, *children: str) -> Drawing:
    """A drawing of pieces; `alt` says what a sighted reader learns from it, never empty."""
    if width <= 0 or height <= 0:
        raise ValueError(f"a drawing of {width} by {height} has no room: both must be positive")
    alt = require_alt(alt, "drawing")
    # one unit around it, so that the outline of a box at the edge is drawn whole
    drawing = Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {_n(width + 2)} {_n(height + 2)}" '
        f'role="img" aria-label="{escape(alt)}" style="display:block;width:100%;'
        f'max-width:{_n(width)}px;height:auto;color:inherit;font-family:{_FONT}">'
        f"{''.join(children)}</svg>"
    )
    drawing.alt = alt
    return drawing


def rect(x, y, width, height, meaning: str = "ink", *, filled: bool = True,
         radius: float = 3) -> str:
    """A box in the colour of a meaning: filled, or only its outline (reserved, modelled)."""
    colour = palette.var(meaning)
    fill = colour if filled else "none"
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
        f'rx="{_n(radius)}" style="fill:{fill};stroke:{colour};stroke-width:1.5"/>'
    )


def text(x, y, words: object, meaning: str = "ink", *, anchor: str = "start",
         size: float = TEXT_SIZE, bold: bool = False) -> str:
    """Words whose vertical middle is at y; `anchor` is start, middle or end."""
    return _words(x, y, words, palette.text_var(meaning), anchor, size, bold)


def _words(x, y, words: object, colour: str, anchor: str, size: float, bold: bool) -> str:
    if anchor not in ("start", "middle", "end"):
        raise ValueError(f"anchor={anchor!r} is none of start, middle, end")
    weight = ";font-weight:650" if bold else ""
    return (
        f'<text x="{_n(x)}" y="{_n(y + 0.35 * size)}" text-anchor="{anchor}" '
        f'style="fill:{colour};font-size:{_n(size)}px{weight};'
        f'white-space:pre">{escape(words)}</text>'
    )


def shade(x, y, width, height, meaning: str, strength: float, *, edge: str | None = None) -> str:
    """A box filled as strongly as `strength` says, 0 to 1: a weight, a share. `edge`: a meaning."""
    stroke = f";stroke:{palette.var(edge)};stroke-width:1" if edge else ""
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="2" '
        f'style="fill:{palette.var(meaning)};fill-opacity:{strength:.2f}{stroke}"/>'
    )


def line(x1, y1, x2, y2, meaning: str = "ink", *, dashed: bool = False) -> str:
    """A straight line, dashed where it stands for something modelled."""
    dashes = ";stroke-dasharray:5 4" if dashed else ""
    return (
        f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" '
        f'style="stroke:{palette.var(meaning)};stroke-width:1.5{dashes}"/>'
    )


def arrow(x1, y1, x2, y2, meaning: str = "ink", *, dashed: bool = False) -> str:
    """An arrow from the first point to the second."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    if length == 0:
        raise ValueError(f"an arrow from ({x1}, {y1}) to itself has no direction")
    ux, uy = (x2 - x1) / length, (y2 - y1) / length     # unit vector along the arrow
    bx, by = x2 - 8 * ux, y2 - 8 * uy                   # where the head begins
    corners = (x2, y2), (bx - 4 * uy, by + 4 * ux), (bx + 4 * uy, by - 4 * ux)
    head = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
    return (
        line(x1, y1, bx, by, meaning, dashed=dashed)
        + f'<polygon points="{head}" style="fill:{palette.var(meaning)}"/>'
    )


def cells(x, y, labels: Sequence, meanings: Sequence[str | None], *, size: float = CELL,
          per_row: int | None = None) -> str:
    """A row of cells, one a token: filled in its meaning's colour, an outline where that is None.

    per_row  begins a new row after so many cells
    """
    if len(labels) != len(meanings):
        raise ValueError(f"{len(labels)} labels but {len(meanings)} meanings; give one for each")
    per_row = per_row or max(1, len(labels))
    pieces = []
    for i, (label, meaning) in enumerate(zip(labels, meanings, strict=True)):
        row, column = divmod(i, per_row)
        pieces.append(
            _cell(x + column * (size + GAP), y + row * (size + GAP), size, label, meaning)
        )
    return "".join(pieces)


def cells_width(count: int, size: float = CELL) -> float:
    """How wide a row of so many cells is."""
    return count * (size + GAP) - GAP


def slots(x, y, used: int, total: int, meaning: str = "notes", *, per_row: int = 16,
          size: float = 14) -> str:
    """Memory as a grid of slots, `used` of `total` filled, the rest an outline in grey."""
    if not 0 <= used <= total:
        raise ValueError(f"{used} of {total} slots cannot be used: give 0 to {total}")
    meanings = [meaning] * used + [None] * (total - used)
    return cells(x, y, [""] * total, meanings, size=size, per_row=per_row)


def bar(x, y, length, label: object, meaning: str, *, height: float = 18,
        modelled: bool = False) -> str:
    """A bar of work with its label to the right; hollow where it is modelled."""
    if length < 0:
        raise ValueError(f"a bar cannot have the length {length}: give 0 or more")
    return rect(x, y, length, height, meaning, filled=not modelled, radius=2) + text(
        x + length + 8, y + height / 2, label
    )


def labelled_bar(y, share: float, label: object, meaning: str, *, modelled: bool = True) -> str:
    """A bar from the left, its words above it: `share` of the width, hollow where modelled."""
    length = max(1.5, share * (WIDTH - 4))          # never so short that it vanishes
    return text(0, y + 6, label) + rect(0, y + 18, length, 16, meaning, filled=not modelled,
                                        radius=2)


def legend(y, entries: Sequence[tuple[str, str]], *, step: float = 142) -> str:
    """What the colours of cells mean: (meaning, words) for each, in one line."""
    return "".join(
        rect(i * step, y - 6, 12, 12, meaning) + text(i * step + 18, y, words, size=12)
        for i, (meaning, words) in enumerate(entries)
    )


# --- words in drawings ---------------------------------------------------------------------


def marks(text: str) -> list[str]:
    """One sign a byte of a text, its blanks and line ends made visible."""
    return [_MARKS.get(character, character) for character in text]


def quantity(value: float) -> str:
    """A number with its prefix, a unit to follow: 1,234,000 is `1.2 M`."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.1f} {prefix}"
    return f"{value:,.0f} "


def _cell(x, y, size, label, meaning: str | None) -> str:
    box = rect(x, y, size, size, meaning or "waste", filled=meaning is not None)
    if label == "":
        return box
    colour = palette.inside_var(meaning) if meaning else palette.var("ink")
    return box + _words(x + size / 2, y + size / 2, label, colour, "middle", TEXT_SIZE, bold=True)


def _n(value: float) -> str:
    """A coordinate, to a hundredth, without needless zeros: the same drawing, the same bytes."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")
