"""Charts that chapters share: every mark where its number is, in the style of its kind."""

import pytest

from minimodel.lesson.charts import Size, compare_sizes
from minimodel.lesson.figures import Figure

SIZES = [
    Size("ours: 7 B", 7, "ink", "modelled"),
    Size("theirs: 890 B", 890, "notes"),
    Size("timed: 60 B", 60, "decode", "measured"),
]


def test_sizes_stand_from_top_to_bottom_in_the_style_of_their_kind():
    _, ax = compare_sizes(SIZES, "bytes", (1, 1e4), "One is larger")
    assert ax.get_xscale() == "log" and ax.get_xlabel() == "bytes (log scale)"
    lines = ax.get_lines()
    heights = {line.get_xdata()[0]: line.get_ydata()[0] for line in lines}
    assert heights[7] > heights[890] > heights[60]
    assert {line.get_xdata()[0]: line.get_marker() for line in lines}[890] == "D"
    assert {line.get_xdata()[0]: line.get_markerfacecolor() for line in lines}[7] == "none"
    assert sorted(words.get_text() for words in ax.texts) == sorted(size.words for size in SIZES)


def test_the_table_behind_it_says_which_kind_each_is():
    fig, _ = compare_sizes(SIZES, "bytes", (1, 1e4), "One is larger")
    table = Figure(fig, "one is larger").table
    kinds = dict(zip(table["series"], table["kind"], strict=True))
    assert kinds == {size.words: size.kind for size in SIZES}


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'a: 1' is 'guessed': give reported, measured"):
        compare_sizes([Size("a: 1", 1, "ink", "guessed")], "bytes", (1, 9), "x")
