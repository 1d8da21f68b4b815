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
        pasts = part.pasts or (part.past,) * part.count
        assert shapes[part.sequences] == [(part.new, past) for past in pasts]
        assert part.length == part.past + part.new
        assert part.lengths == tuple(past + part.new for past in pasts)


@given(SHAPES)
def test_only_rows_of_single_tokens_share_a_part_with_other_lengths(shapes):
    batch = Batch(new=[new for new, _ in shapes], past=[past for _, past in shapes])
    for part in batch.parts:
        assert not part.pasts or part.new == 1
        assert part.length <= 2 * min(part.lengths)         # at most half of a part is padding
    for one, following in pairwise(batch.parts):            # neighbours of one shape never part
        assert (one.new, one.lengths[-1]) != (following.new, following.lengths[0]) or (
            max(one.lengths) > min(following.lengths[0], *one.lengths))


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


@st.composite
def batches(draw):
    shapes = draw(SHAPES)
    rows = range(sum(new for new, _ in shapes))
    wanted = draw(st.none() | st.lists(st.sampled_from(rows), unique=True))
    sequences = draw(st.permutations(range(len(shapes) + 2)))[:len(shapes)]
    return Batch([new for new, _ in shapes], [past for _, past in shapes], wanted, sequences)


def places(batch):
    """Sequence and position of every row."""
    return [(sequence, past + i)
            for sequence, past, new in zip(batch.sequences, batch.past, batch.new, strict=True)
            for i in range(new)]


@given(batches())
def test_the_rest_holds_every_wanted_row_and_all_that_follow_it(batch):
    rest = batch.rest()
    wanted = batch.wanted_rows().tolist()
    if not wanted:
        assert rest is None
        return
    rows, after = rest
    kept = torch.arange(batch.num_rows)[rows].tolist()
    before = places(batch)
    assert places(after) == [before[row] for row in kept]
    assert [kept[row] for row in after.wanted_rows()] == wanted
    first = {}
    for row in sorted(wanted):
        first.setdefault(before[row][0], row)
    assert set(after.sequences) == set(first)
    assert all(before[row][0] in first and row >= first[before[row][0]] for row in kept)
    lengths = {sequence: past + new for sequence, past, new
               in zip(batch.sequences, batch.past, batch.new, strict=True)}
    assert all(past + new == lengths[sequence] for sequence, past, new
               in zip(after.sequences, after.past, after.new, strict=True))


def test_a_batch_without_rows_to_leave_behind_is_its_own_rest():
    for batch in (Batch(new=[1, 1, 1]), Batch(new=[3, 2], wanted=range(5))):
        rows, after = batch.rest()
        assert after is batch
        assert torch.equal(torch.arange(5)[rows], torch.arange(5))


def test_only_neighbours_in_the_cache_share_a_part():
    batch = Batch(new=[2, 2, 2, 2], sequences=[4, 5, 7, 6])
    assert [(part.first_sequence, part.count) for part in batch.parts] == [(4, 2), (7, 1), (6, 1)]
    assert [part.first_row for part in batch.parts] == [0, 4, 6]


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
    ({"new": [1, 2], "sequences": [4]}, r"sequences=\(4,\) must name 2 different sequences"),
    ({"new": [1, 2], "sequences": [4, 4]}, r"sequences=\(4, 4\) must name 2 different"),
    ({"new": [2, 3], "wanted": [5]}, r"wanted=\(5,\) must name rows of this batch, 0 to 4"),
    ({"new": [2, 3], "wanted": [-1]}, r"wanted=\(-1,\) must name rows of this batch, 0 to 4"),
])
def test_a_wrong_batch_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batch(**arguments)


def test_no_cache_cannot_continue_a_sequence():
    with pytest.raises(ValueError, match=r"past=\(3,\): NoCache keeps nothing .* DenseCache"):
        NoCache().write(0, torch.zeros(2, 5), Batch(new=[2], past=[3]))
