# ruff: noqa: E402
"""Plots in the book's visual language, as drawings that follow the page's theme.

    fig, ax = figure()
    measured(ax, lengths, seconds, "prefill", "first send")
    modelled(ax, lengths, predicted, "prefill", "predicted")
    finding(ax, "Reading costs grow with the square of the length")
    Figure(fig, alt="Two rising curves: ...", caption="...")

* measured: a solid line, filled marks;
* modelled: a dashed line, hollow marks;
* reported by a source: a diamond with its label.

A `Figure` becomes inline SVG whose text is text and whose colours are CSS
variables, with its numbers in a folded table behind it. The same numbers give
the same bytes.
"""

import io
import logging
import re
import textwrap
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

# before anything of matplotlib looks for a font: its remarks would stand in the page
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plot
from matplotlib.lines import Line2D

from minimodel.lesson import palette
from minimodel.lesson.markup import escape, fingerprint, folded, require_alt

_INK = palette.COLOURS["ink"].light
_GRID = palette.COLOURS["grid"].light
_MUTED = palette.COLOURS["muted"].light

STYLE = {
    "figure.dpi": 100,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "second-send",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": _INK,
    "axes.facecolor": "none",
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.labelsize": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(
        color=[palette.COLOURS[name].light for name in palette.MEANINGS]
    ),
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.fontsize": 11,
}
_CSS = (
    ".ss-figure{margin:.6rem 0;max-width:100%}.ss-figure svg{display:block}"
    ".ss-figure figcaption{color:var(--ss-muted,#5b6472);font-size:.9em;margin:.3rem 0}"
    ".ss-data{overflow-x:auto;font-size:.9em}"
    ".ss-data summary{cursor:pointer;color:var(--ss-muted,#5b6472);padding:.6rem 0}"
    ".ss-data table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".ss-data th,.ss-data td{padding:.15rem .9rem .15rem 0;text-align:left}"
)
_FONT = "var(--ss-font,system-ui),sans-serif"
_MAX_ROWS = 24
_CHARACTERS_PER_INCH = 7.6      # of a bold 12-point title
_PASSES = 3                     # of the layout, until nothing moves any more

_KINDS = {
    "measured": {"linestyle": "-", "marker": "o"},
    "modelled": {"linestyle": "--", "marker": "o", "markerfacecolor": "none"},
    "reported": {"linestyle": "", "marker": "D", "markersize": 8},
}
# what was drawn on each plot, for the table behind it: (series, kind, x, y)
_drawn: WeakKeyDictionary = WeakKeyDictionary()


def figure(width: float = 5, height: float = 3, rows: int = 1, columns: int = 1):
    """A plot in the book's style and its axes (an array of them where there are several).

    width, height  inches; wider than 5 would make words too small on a phone
    Returns (fig, ax), as `pyplot.subplots` does, without opening a window.
    """
    matplotlib.rcParams.update(STYLE)
    fig = Plot(figsize=(width, height))
    return fig, fig.subplots(rows, columns)


# --- what a mark means ---------------------------------------------------------------------


def measured(ax: Axes, x: Sequence, y: Sequence, meaning: str, label: str) -> Line2D:
    """Numbers of this run: a solid line with filled marks."""
    return _line(ax, x, y, meaning, label, "measured")


def modelled(ax: Axes, x: Sequence, y: Sequence, meaning: str, label: str) -> Line2D:
    """Numbers of a formula or a simulation: a dashed line with hollow marks."""
    return _line(ax, x, y, meaning, label, "modelled")


def reported(ax: Axes, x: float, y: float, meaning: str, label: str) -> Line2D:
    """One number of a source: a diamond, its label beside it."""
    mark = _line(ax, [x], [y], meaning, label, "reported")
    direct_label(ax, x, y, label, meaning)
    return mark


def measured_bars(ax: Axes, names: Sequence[str], values: Sequence, meaning: str, label: str):
    """Numbers of this run, one filled bar a name, from top to bottom."""
    return _bars(ax, names, values, meaning, label, "measured")


def modelled_bars(ax: Axes, names: Sequence[str], values: Sequence, meaning: str, label: str):
    """Numbers of a formula or a simulation, one hollow bar with a dashed edge a name."""
    return _bars(ax, names, values, meaning, label, "modelled")


def direct_label(ax: Axes, x, y, text: str, meaning: str, dx: float = 8, dy: float = 0):
    """Words beside a point instead of a legend; dx and dy are points to the right and up."""
    side = {"ha": "left"} if dx > 0 else {"ha": "right"} if dx < 0 else {"ha": "center"}
    return ax.annotate(
        text, (x, y), xytext=(dx, dy), textcoords="offset points", va="center", **side,
        color=palette.colour(meaning).light_text, fontweight="bold",
    )


def finding(ax: Axes, text: str) -> None:
    """The title: what the plot shows, as a sentence, broken to the width of the axes' figure."""
    width_inches = ax.figure.get_figwidth() / ax.get_gridspec().ncols
    ax.set_title(textwrap.fill(text, int(width_inches * _CHARACTERS_PER_INCH)))


def key(ax: Axes, *kinds: str, **placement) -> None:
    """A legend of the kinds of numbers: all that were drawn, or those named."""
    present = dict.fromkeys(kind for _, kind, _, _ in _drawn.get(ax.figure, []))
    marks = [Line2D([], [], color=_INK, label=kind, **_KINDS[kind]) for kind in kinds or present]
    ax.legend(handles=marks, **placement)


def _line(ax: Axes, x, y, meaning: str, label: str, kind: str) -> Line2D:
    x, y = list(x), list(y)
    _remember(ax, label, kind, x, y)
    (line,) = ax.plot(x, y, color=palette.colour(meaning).light, label=label, **_KINDS[kind])
    return line


def _bars(ax: Axes, names, values, meaning: str, label: str, kind: str):
    names, values = list(names), list(values)
    _remember(ax, label, kind, names, values)
    shade = palette.colour(meaning).light
    fill = {"color": shade} if kind == "measured" else {"color": "none", "linestyle": "--"}
    bars = ax.barh(names, values, edgecolor=shade, linewidth=1.5, height=0.6, label=label, **fill)
    if not ax.yaxis_inverted():
        ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return bars


def _remember(ax: Axes, label: str, kind: str, x: list, y: list) -> None:
    if len(x) != len(y):
        raise ValueError(f"{label!r} has {len(x)} places but {len(y)} values; give as many of each")
    _drawn.setdefault(ax.figure, []).append((label, kind, x, y))


# --- from plot to page ---------------------------------------------------------------------


class Figure:
    """A plot with the words and numbers that belong to it.

    fig      what `figure` returned
    alt      what a sighted reader learns from it; never empty
    table    {column: values}; by default what `measured` and its kin have drawn
    caption  a sentence under the plot
    """

    def __init__(self, fig: Plot, alt: str, table: Mapping | None = None, caption: str = ""):
        self.fig, self.alt, self.caption = fig, require_alt(alt, "figure"), caption or ""
        _settle(fig)
        self.table = dict(table) if table is not None else _table_of(fig)
        if len({len(list(values)) for values in self.table.values()}) > 1:
            raise ValueError("the columns of a figure's table must be equally long")

    def svg(self) -> str:
        """The plot alone, as SVG that can stand in a page with many others."""
        return inline_svg(self.fig, self.alt)

    def png(self) -> bytes:
        """The plot on white paper, for where neither SVG nor a theme exists."""
        target = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.fig.savefig(
                target, format="png", facecolor="white", metadata={"Software": None}
            )
        return target.getvalue()

    def html(self) -> str:
        """Plot, caption and folded table; needs nothing else of the page."""
        caption = f"<figcaption>{escape(self.caption)}</figcaption>" if self.caption else ""
        body = self.svg() + caption + _table_html(self.table)
        style = f"<style>{palette.css_for(body + _CSS)}{_CSS}</style>"
        return f'{style}<figure class="ss-figure">{body}</figure>'

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/html": self.html(), "image/png": self.png(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"[figure: {self.alt}]"


def inline_svg(fig: Plot, alt: str) -> str:
    """A plot as an `<svg>` element: themed colours, unique ids, the page's font, fluid width."""
    _settle(fig)
    drawn = _raw_svg(fig)
    # a plot's own ids repeat from plot to plot: its content makes them unique
    drawn = _with_unique_ids(drawn, fingerprint(drawn))
    width = round(fig.get_figwidth() * 96)      # CSS pixels an inch
    attributes = (
        f'role="img" aria-label="{escape(require_alt(alt, "figure"))}" '
        f'style="width:100%;max-width:{width}px;height:auto;color:inherit;'
        'stroke-linejoin:round;stroke-linecap:butt"'
    )
    drawn = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    return palette.themed(drawn.replace("<svg", f"<svg {attributes}", 1))


def _settle(fig: Plot) -> None:
    """Lay the plot out and keep it so: every drawing of it then has the same bytes."""
    if fig.get_layout_engine() is None:
        return
    with matplotlib.rc_context(STYLE):
        for _ in range(_PASSES):
            fig.draw_without_rendering()
    fig.set_layout_engine("none")


def _raw_svg(fig: Plot) -> str:
    target = io.StringIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    drawn = target.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    # matplotlib's own style sheet would reach every drawing of the page
    drawn = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r' (d|x|y|points|transform)="[^"]*"', _rounded, drawn)
    return re.sub(r"'DejaVu Sans'[^;\"]*", _FONT, drawn)


def _rounded(attribute: re.Match) -> str:
    """Coordinates to a hundredth of a point, which is finer than any screen."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])


def _with_unique_ids(svg: str, prefix: str) -> str:
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    return re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)


def _table_of(fig: Plot) -> dict[str, list]:
    """The numbers behind a plot, as columns; long series thinned to what one can read."""
    table = {"series": [], "kind": [], "x": [], "y": []}
    series = _drawn.get(fig, [])
    for label, kind, x, y in series:
        for i in _thinned(len(x), max(2, _MAX_ROWS // len(series))):
            for column, value in zip(table.values(), (label, kind, x[i], y[i]), strict=True):
                column.append(value)
    return table if series else {}


def _thinned(length: int, most: int) -> list[int]:
    """At most `most` positions out of `length`, evenly spread, the first and the last included."""
    if length <= most:
        return list(range(length))
    return [round(i * (length - 1) / (most - 1)) for i in range(most)]


def _table_html(table: Mapping) -> str:
    if not table:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_number(value))}</td>" for value in row) + "</tr>"
        for row in zip(*table.values(), strict=True)
    )
    content = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return folded("The numbers behind this figure", content, "ss-data")


def _number(value: object) -> str:
    """A number as one reads it in a table; anything else as it is."""
    if isinstance(value, int | str):
        return str(value)
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
