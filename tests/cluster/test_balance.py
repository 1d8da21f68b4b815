"""Placing experts: every expert somewhere, ranks equally full, the published example."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.cluster.balance import Placement, in_order, pack, place_experts, replicate

# The two layers of EPLB's README (claim P-EB01): 12 experts in 4 groups, 16 slots, 8 GPUs, 2 nodes.
LAYERS = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
          [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
PUBLISHED = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
             [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]


@pytest.mark.parametrize(("load", "published"), [*zip(LAYERS, PUBLISHED, strict=True)])
def test_the_published_example_comes_out(load, published):
    """Same experts on each GPU; the order of GPUs of equal load, and of slots, means nothing."""
    placed = place_experts(load, ranks=8, redundant=4, nodes=2, groups=4)
    theirs = [tuple(published[i:i + 2]) for i in range(0, 16, 2)]
    assert sorted(map(sorted, placed.experts_of)) == sorted(map(sorted, theirs))
    for node in (slice(0, 4), slice(4, 8)):
        ours = sorted(map(sorted, placed.experts_of[node]))
        assert ours in [sorted(map(sorted, theirs[half])) for half in (slice(0, 4), slice(4, 8))]


def test_the_published_imbalance():
    assert in_order(12, 6).imbalance(LAYERS[0]) == pytest.approx(1.56, abs=0.005)
    placed = place_experts(LAYERS[0], ranks=8, redundant=4, nodes=2, groups=4)
    assert placed.imbalance(LAYERS[0]) == pytest.approx(1.21, abs=0.005)


def test_the_fullest_is_copied_first():
    assert replicate([10, 30, 5], 3) == [0, 1, 2]
    assert replicate([10, 30, 5], 4) == [0, 1, 2, 1]
    assert replicate([10, 30, 5], 6) == [0, 1, 2, 1, 1, 0]


def test_packing_fills_the_lightest_that_has_room():
    assert pack([1, 9, 4, 4, 2, 2], 2, 3) == [[1, 5, 0], [2, 3, 4]]
    assert pack([5, 5, 5, 0, 0, 0], 3, 2) == [[0, 3], [1, 4], [2, 5]]


def test_copies_share_the_load_and_tokens_agree_on_a_copy():
    placed = Placement(((0, 1), (1, 2)))
    assert placed.copies_of == {0: [(0, 0)], 1: [(0, 1), (1, 0)], 2: [(1, 1)]}
    assert placed.loads([4, 6, 1]) == [7, 4]
    assert placed.imbalance([4, 6, 1]) == 7 / 5.5
    assert [placed.home(1, token) for token in range(4)] == [(0, 1), (1, 0), (0, 1), (1, 0)]
    assert [placed.home(2, token) for token in range(3)] == [(1, 1)] * 3
    assert placed.imbalance([0, 0, 0]) == 1


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))


@given(sizes, st.randoms(use_true_random=False))
def test_any_load_is_placed(size, rng):
    """Every expert at least once, every slot filled, and never worse than the worst single one."""
    nodes, ranks_each, groups_each, extra = size
    ranks, groups = nodes * ranks_each, nodes * groups_each
    num_experts = ranks * groups
    load = [rng.choice([0, 1, rng.random() * 100]) for _ in range(num_experts)]
    placed = place_experts(load, ranks, redundant=extra * ranks, nodes=nodes, groups=groups)
    assert len(placed.experts_of) == ranks
    assert {len(experts) for experts in placed.experts_of} == {groups + extra}
    assert set(placed.copies_of) == set(range(num_experts))
    assert sum(placed.loads(load)) == pytest.approx(sum(load))
    for node in range(nodes):                           # a group's experts are on one node
        here = {expert // (num_experts // groups)
                for experts in placed.experts_of[node * ranks_each:(node + 1) * ranks_each]
                for expert in experts}
        assert len(here) == groups_each


def test_balancing_helps_where_loads_differ():
    rng = random.Random(13)
    for _ in range(20):
        load = [rng.paretovariate(1.2) for _ in range(32)]
        before, after = in_order(32, 8), place_experts(load, 8)
        copied = place_experts(load, 8, redundant=16)
        assert after.imbalance(load) <= before.imbalance(load) + 1e-9
        assert copied.imbalance(load) <= after.imbalance(load) + 1e-9


def test_groups_that_do_not_fit_nodes_are_given_up():
    load = [5, 1, 1, 9, 2, 2]
    assert place_experts(load, 2, nodes=2, groups=3) == place_experts(load, 2)


@pytest.mark.parametrize(("options", "message"), [
    ({"load": []}, "experts=0 must be at least 1"), ({"ranks": 0}, "ranks=0 must be"),
    ({"redundant": -1}, "redundant=-1 must be"), ({"load": [1, -2, 1, 1]}, "a load of -2 is no"),
    ({"load": [1, float("nan"), 1, 1]}, "a load of nan"),
    ({"redundant": 1}, "4 experts and 1 more copies do not divide among 2 ranks"),
    ({"nodes": 3}, "2 ranks do not divide among 3 nodes"),
    ({"groups": 3}, "4 experts do not divide among 3 groups")])
def test_what_cannot_be_placed_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        place_experts(**{"load": [1, 2, 3, 4], "ranks": 2, **options})
    with pytest.raises(ValueError, match="7 experts do not divide among 2 ranks"):
        in_order(7, 2)


@pytest.mark.parametrize(("experts_of", "nowhere"), [
    (((0, 2), (2, 3)), 1), (((1,), (2,)), 0), (((),), 0), (((-1, 0), (1, 0)), 0)])
def test_each_expert_needs_a_slot(experts_of, nowhere):
    with pytest.raises(ValueError, match=f"expert {nowhere} has no slot"):
        Placement(experts_of)


def test_loads_are_one_for_each_expert():
    with pytest.raises(ValueError, match="3 loads for 4 experts"):
        in_order(4, 2).imbalance([1, 2, 3])


@pytest.mark.parametrize("ranks", [0, -1, 3])
def test_experts_in_order_need_a_number_of_ranks_that_divides_them(ranks):
    with pytest.raises(ValueError, match=f"4 experts do not divide among {ranks} ranks"):
        in_order(4, ranks)
