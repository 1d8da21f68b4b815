"""Charts that several chapters draw, in the marks of `figures`."""

from collections.abc import Sequence
from typing import NamedTuple

from .figures import direct_label, figure, finding, measured, modelled, reported


class Size(NamedTuple):
    """One size of a comparison, the words above its mark, and where it comes from."""

    words: str
    value: float
    meaning: str
    kind: str = "reported"      # or "measured", "modelled"


def compare_sizes(sizes: Sequence[Size], xlabel: str, xlim: tuple[float, float], title: str,
                  height: float = 3):
    """One mark a row on a log scale, from top to bottom, its words above it; gives (fig, ax).

    xlabel  what is counted, in which unit; "(log scale)" is added
    xlim    leave room for the words, which stand in the middle over their marks
    """
    fig, ax = figure(5, height)
    for y, size in enumerate(reversed(sizes)):
        _mark(ax, y, size)
        ax.texts[-1].set(position=(0, 13), ha="center")     # above the mark, not beside it
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set(xlim=xlim, ylim=(-0.5, len(sizes) - 0.2), yticks=[], xlabel=f"{xlabel} (log scale)")
    finding(ax, title)
    return fig, ax


def _mark(ax, y: float, size: Size) -> None:
    if size.kind == "reported":
        reported(ax, size.value, y, size.meaning, size.words)
        return
    kinds = {"measured": measured, "modelled": modelled}
    if size.kind not in kinds:
        raise ValueError(f"{size.words!r} is {size.kind!r}: give reported, measured or modelled")
    kinds[size.kind](ax, [size.value], [y], size.meaning, size.words)
    direct_label(ax, size.value, y, size.words, size.meaning)
