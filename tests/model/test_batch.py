"""The ragged batch: every row has one place, and a wrong batch is refused."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimodel.model.batch import Batch, NoCache

SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=9)


@given(SHAPES)
def test_parts_cover_every_row_and_sequence_once_and_in_order(shapes):
    batch = Batch(new=[new for new, _ in shapes], past=[past for _, past in shapes])
    rows = [row for part in batch.parts for row in range(batch.num_rows)[part.rows]]
    sequences = [i for part in batch.parts for i in range(len(shapes))[part.sequences]]
    assert rows == list(range(batch.num_rows))
    assert sequences == list(range(len(shapes)))
    for part in batch.parts:
        assert set(shapes[part.sequences]) == {(part.new, part.past)}
        assert part.length == part.past + part.new


@given(SHAPES)
def test_neighbours_of_one_shape_always_share_a_part(shapes):
    batch = Batch(new=[new for new, _ in shapes], past=[past for _, past in shapes])
    kinds = [(part.new, part.past) for part in batch.parts]
    assert all(one != following for one, following in pairwise(kinds))


@given(SHAPES)
def test_positions_and_wanted_rows_follow_the_sequences(shapes):
    batch = Batch(new=[new for new, _ in shapes], past=[past for _, past in shapes])
    positions = [past + i for new, past in shapes for i in range(new)]
    assert batch.positions().tolist() == positions
    last = [sum(new for new, _ in shapes[:i + 1]) - 1 for i in range(len(shapes))]
    assert batch.wanted_rows().tolist() == last


def test_wanted_rows_may_be_chosen_and_may_be_none():
    assert Batch(new=[3, 2], wanted=[4, 0]).wanted_rows().tolist() == [4, 0]
    none = Batch(new=[3, 2], wanted=[]).wanted_rows()
    assert none.shape == (0,)
    assert none.dtype == torch.long


def test_a_batch_keeps_its_own_counts():
    new, past, wanted = [3, 2], [0, 5], [1]
    batch = Batch(new=new, past=past, wanted=wanted)
    for counts in (new, past, wanted):
        counts[0] = 9
    assert (batch.new, batch.past, batch.wanted) == ((3, 2), (0, 5), (1,))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"new": []}, "at least one sequence"),
    ({"new": [3, 0]}, r"new=\(3, 0\): every sequence .* at least 1"),
    ({"new": [-2]}, r"new=\(-2,\)"),
    ({"new": [1, 2], "past": [4]}, r"past=\(4,\) must hold one count .* 2 sequences"),
    ({"new": [1], "past": [-1]}, r"past=\(-1,\) must hold one count of at least 0"),
    ({"new": [2, 3], "wanted": [5]}, r"wanted=\(5,\) must name rows of this batch, 0 to 4"),
    ({"new": [2, 3], "wanted": [-1]}, r"wanted=\(-1,\) must name rows of this batch, 0 to 4"),
])
def test_a_wrong_batch_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batch(**arguments)


def test_no_cache_cannot_continue_a_sequence():
    with pytest.raises(ValueError, match=r"past=\(3,\): NoCache keeps nothing .* DenseCache"):
        NoCache().write(0, torch.zeros(2, 5), Batch(new=[2], past=[3]))
