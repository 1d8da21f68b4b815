"""Chapter 13: its cells agree with the shipped experts, its drawings say what they were given."""

import random

import pytest
import torch
from notebooks import Notebook, refusals

from minimodel.cluster.balance import Placement, in_order, pack, place_experts, replicate
from minimodel.lesson import chapter_13
from minimodel.lesson.exercises import chapter_13 as exercises
from minimodel.lesson.exercises.engine import judge
from minimodel.lesson.facts import find
from minimodel.model import checkpoint
from minimodel.model.moe import sorted_experts

NOTEBOOK = Notebook("13_expert_parallelism")
run, verdict = NOTEBOOK.run, refusals(exercises)


# --- the notebook's own code ---------------------------------------------------------------


@pytest.mark.parametrize("held", [(7, 4), (11, 0)])
@torch.no_grad()
def test_two_halves_on_paper_are_the_whole(held):
    """Also where one rank has no rows at all."""
    layer = checkpoint.load().layers[3].mlp
    x = torch.randn(11, 128, generator=torch.Generator().manual_seed(13))
    weights, chosen = layer.gate(x)
    ours = [*zip(x.split(held), chosen.split(held), weights.split(held), strict=True)]
    found = run("pack", "exchange", "combine", torch=torch, layer=layer, x=x, weights=weights,
                chosen=chosen, ours=ours, held=list(held), drawing=chapter_13,
                sorted_experts=sorted_experts)
    assert sum(map(sum, found["counts"])) == 22
    assert found["apart"] < 1e-5


@torch.no_grad()
def test_a_half_holds_its_own_experts_only():
    experts = checkpoint.load().layers[-1].mlp.experts
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(3))
    which = torch.tensor([9, 15, 9, 8, 12])
    found = chapter_13.half_of_experts(1)(rows, which)
    expected = torch.stack([experts.run(int(e), row[None])[0]
                            for e, row in zip(which, rows, strict=True)])
    assert torch.allclose(found, expected, rtol=1e-4)
    with pytest.raises(ValueError, match="expert 7 is not on rank 1: it holds 8 to 15"):
        chapter_13.half_of_experts(1)(rows[:1], torch.tensor([7]))


def test_the_hand_built_rules_are_the_shipped_ones():
    found, rng = run("greedy"), random.Random(5)
    for _ in range(50):
        load = [rng.randint(0, 30) for _ in range(rng.randint(1, 9))]
        copies = len(load) + rng.randint(0, 6)
        assert found["replicate"](load, copies) == replicate(load, copies)
        ranks = rng.randint(1, 4)
        slots = -(-len(load) // ranks)
        assert found["pack_ranks"](load, ranks, slots) == pack(load, ranks, slots)


def test_the_comparison_finds_a_packing_that_ignores_loads():
    """The notebook's check is one that can fail."""
    def careless(loads, num_ranks, slots):
        return [[*range(i * slots, (i + 1) * slots)] for i in range(num_ranks)]
    given = {"Random": random.Random, "place_experts": place_experts, "replicate": replicate}
    run("agree-balance", pack_ranks=pack, **given)
    with pytest.raises(AssertionError):
        run("agree-balance", pack_ranks=careless, **given)


# --- the same tokens -------------------------------------------------------------------------


class Torn:
    """A model to which tokens 3 and 4 are equally good, up to a hair, and 5 is not."""

    read: list

    def logits_everywhere(self, tokens):
        self.read = tokens.tolist()
        logits = torch.zeros(*tokens.shape, 7)
        logits[0, -1, 3:6] = torch.tensor([2.0, 2.0 + 1e-5, 1.5])
        return logits


def test_the_same_answers_are_counted():
    assert chapter_13.same_tokens(None, [[1], [2]], [[3, 4], [5, 6, 3]], [[3, 4], [5, 6, 3]]) == 5


def test_answers_may_part_at_a_tie_and_nowhere_else():
    model = Torn()
    assert chapter_13.same_tokens(model, [[1, 2]], [[6, 4, 0]], [[6, 3, 5]]) == 1
    assert model.read == [[1, 2, 6]]
    with pytest.raises(AssertionError, match="token 1 of an answer is 5, not 3"):
        chapter_13.same_tokens(model, [[1, 2]], [[6, 5, 0]], [[6, 3, 5]])
    with pytest.raises(ValueError):
        chapter_13.same_tokens(model, [[1, 2]], [[6, 3]], [[6, 3, 5]])


# --- texts and counts ------------------------------------------------------------------------


def test_the_strangers_are_seven_and_unlike():
    prompts = chapter_13.strangers()
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 7
    assert [len(prompt) for prompt in prompts] == [200, 210, 220, 230, 240, 250, 260]


class Run:
    """Stands in for a layer's experts: what they have counted."""

    def __init__(self, **counts):
        zeros = dict.fromkeys(chapter_13.COUNTED, 0)
        self.traffic = type("Traffic", (), {**zeros, "chosen": [1, 2], **counts})


def test_traffic_is_summed_over_layers_and_divided_by_steps():
    before = chapter_13.traffic_of([Run(rows_run=1), Run(rows_run=4, bytes_sent=3)])
    assert before["rows_run"] == 5 and before["bytes_sent"] == 3
    step = chapter_13.per_step(before, [Run(rows_run=26), Run(bytes_sent=24)], 7)
    assert step["rows_run"] == 3 and step["bytes_sent"] == 3
    counts = chapter_13.counts_of([Run(rows_run=8), Run(rows_run=9)])
    assert counts == {"rows": [8, 9], "chosen": [[1, 2], [1, 2]]}


def test_every_row_is_counted_where_its_copy_lies():
    placement = Placement(((0, 1), (1, 2)))
    chosen = [[1, 2], [1, 0], [1, 2], [2, 1], [1, 0]]   # expert 1: tokens 0, 2, 4 there, 1, 3 here
    assert chapter_13.rows_per_rank(placement, chosen) == [5, 5]
    assert chapter_13.rows_per_rank(placement, chosen[:1]) == [1, 1]
    assert chapter_13.counted_imbalance(placement, [[0, 2], [0, 1], [0, 1]]) == 4 / 3


def test_copies_help_where_one_expert_is_hot():
    generator = torch.Generator().manual_seed(2)
    even = torch.rand(3, 500, 16, generator=generator).topk(2).indices
    hot = even.clone()
    hot[..., 0] = 5
    found = chapter_13.imbalances(even, hot)
    assert found["mixed text"]["in order"] < 1.3
    assert found["sums"]["placed for mixed text"] > 1.8
    assert found["sums"]["and four copies"] < 1.2


# --- equations ---------------------------------------------------------------------------------


def test_the_sizes_are_those_of_the_toy():
    config = checkpoint.load().config
    assert (config.num_moe_layers, config.num_experts, config.experts_per_token,
            config.hidden_size) == (chapter_13.TOY_LAYERS, chapter_13.TOY_EXPERTS,
                                    chapter_13.TOY_CHOICES, chapter_13.TOY_HIDDEN)
    assert 3 * config.hidden_size * config.expert_size * 4 == chapter_13.TOY_EXPERT_BYTES


def test_the_sizes_are_those_of_the_register():
    layers, experts, k, hidden, expert_bytes, _ = chapter_13.MODELS["V4.1-Flash"]
    assert find("P-V404").value.startswith(f"{layers} ")
    assert find("P-V406").value.startswith(f"{experts} / {k} ")
    assert find("P-V407").value.startswith(f"{hidden} ")
    assert layers * experts * expert_bytes == pytest.approx(289e9, rel=0.001)
    assert find("P-V412").value == "289"
    assert find("P-HW06").value.endswith(f" {chapter_13.MEMORY_BYTES_PER_S / 1e12:.0f}")


def test_the_worked_examples_come_out():
    """E5 and E6 of the book's list of equations."""
    eight, all_64 = (chapter_13.spread("V4.1-Flash", width, 64, 900) for width in (8, 64))
    assert eight["read_now"] == pytest.approx(36_100, rel=0.001)
    assert eight["read_ms"] == pytest.approx(4.51, rel=0.001) and eight["rows"] == 8
    assert all_64["read_now"] == pytest.approx(4_510, rel=0.001)
    assert all_64["read_ms"] == pytest.approx(0.56, rel=0.01) and all_64["rows"] == 64
    out, back = chapter_13.on_paper_us()
    assert out == pytest.approx(146.8, rel=0.001) and back == pytest.approx(2 * out)


def test_one_rank_sends_nothing_and_reads_all():
    assert chapter_13.expected_sent_bytes(8, 1) == 0
    assert chapter_13.expected_sent_bytes(8, 4) == 3 * 2 * 1.5 * 128 * 8
    assert chapter_13.expected_expert_bytes(8, 4) * 4 == chapter_13.expected_expert_bytes(8, 1)
    assert chapter_13.expected_expert_bytes(10_000, 2) == pytest.approx(3 * 8 * 98_304)


def test_the_toy_has_no_more_than_sixteen_chips():
    most = chapter_13.spread("the toy", 16, 1, 50)
    assert most["widths"] == [1, 2, 4, 8, 16] and most["chips"] == 16
    assert chapter_13.spread("the toy", 128, 1, 50) == most


# --- drawings ------------------------------------------------------------------------------


def test_the_exchange_is_drawn_with_its_numbers():
    drawing = str(chapter_13.exchange_drawing([31, 17], [[40, 22], [15, 19]]))
    for words in (">40<", ">22<", ">15<", ">19<", "rank 0: 31", "rank 1: 17"):
        assert words in drawing
    assert drawing.count("<polygon") == 8 and "37 of 96 travel" in drawing


def rank(**step) -> dict:
    return {"step": dict.fromkeys((*chapter_13.COUNTED, "seconds"), 0.0) | step}


def test_the_bytes_are_those_that_were_counted():
    found = {1: [rank(expert_bytes=3e6)],
             2: [rank(expert_bytes=1e6, bytes_sent=7e3), rank(expert_bytes=2e6, bytes_sent=5e3)],
             4: [rank(expert_bytes=6e5, bytes_sent=4e3)] * 4}
    shown = chapter_13.bytes_figure(found)
    assert "each reads 20%" in " ".join(shown.fig.axes[0].get_title("left").split())
    assert sorted(set(shown.table["kind"])) == ["measured", "modelled"]
    assert chapter_13.mean(found[2], "bytes_sent") == 6e3


def test_placements_are_drawn_with_their_imbalance():
    load = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    drawing = str(chapter_13.placements_drawing({"before": in_order(12, 6)}, load))
    assert ">before: 1.56 times the mean<" in drawing
    assert "GPU 5 holds 10 and 11" in drawing and drawing.count(">GPU ") == 6


def test_balance_is_drawn_from_counted_rows():
    chosen = torch.rand(3, 200, 16, generator=torch.Generator().manual_seed(4)).topk(2).indices
    shown = chapter_13.balance_figure(chosen, chosen)
    assert set(shown.table["kind"]) == {"measured"} and len(shown.table["kind"]) == 8


def test_reports_and_paper_keep_their_styles():
    shown = chapter_13.deepep_figure()
    kinds = [*shown.table["kind"]]
    assert kinds.count("reported") == 12 and kinds.count("modelled") == 4
    assert chapter_13.deepep_us()[64] == (173, 314)


# --- exercises: wrong answers are told why ----------------------------------------------------


def test_near_misses_get_their_own_sentence():
    assert "other way round" in verdict("13.1", (30, 7.29))
    assert "one part in twelve" in verdict("13.1", (87.48, 30))
    assert "27 layers" in verdict("13.1", (0.27, 30))
    assert "all twelve" in verdict("13.1", (7.29, 2.5))
    assert "stays at home" in verdict("13.2", (53.76, 0.896))
    assert "all eight send" in verdict("13.2", (376.32, 6.272))
    assert "each of the 28" in verdict("13.2", (1.68, 0.028))
    assert "come back" in verdict("13.2", (15.68, 0.26))
    assert "milliseconds" in verdict("13.2", (47.04, 784))
    assert "first over the second" in verdict("13.5", (80, 1.06))
    assert "greedy" not in verdict("13.5", (4 / 3, 1.0))


def test_a_combine_that_loses_or_misplaces_is_told_which():
    def bare(back, order, weights):
        out = torch.zeros(len(weights), back.shape[1], dtype=back.dtype)
        return out.index_add(0, order // weights.shape[1], back)

    def misplaced(back, order, weights):
        out = torch.zeros(len(weights), back.shape[1], dtype=back.dtype)
        return out.index_add(0, order // weights.shape[1], back * weights.flatten()[:, None])
    assert "weights are missing" in verdict("13.3", bare)
    assert "not the i-th weight" in verdict("13.3", misplaced)


def test_a_combine_of_the_chapter_is_accepted_for_any_k():
    def plain(back, order, weights):
        out = torch.zeros(len(weights), back.shape[1])          # float32, as the chapter's own
        return out.index_add(0, order // weights.shape[1], back * weights.flatten()[order, None])
    assert judge(exercises.CHAPTER["13.3"], plain)


def test_counts_may_be_an_array():
    import numpy

    def rows_to(chosen, owner, num_ranks):
        visits = [rank for experts in chosen for rank in {owner[expert] for expert in experts}]
        return numpy.bincount(numpy.array(visits, int), minlength=num_ranks)
    assert judge(exercises.CHAPTER["13.4"], rows_to)


def test_rows_for_absent_tokens_and_ranks_are_asked_for():
    def short(chosen, owner, num_ranks):
        ranks = [rank for experts in chosen for rank in {owner[expert] for expert in experts}]
        return [ranks.count(rank) for rank in range(max(ranks, default=-1) + 1)]
    assert "zeros" in verdict("13.4", short)


def test_the_wider_group_is_worked_out():
    said = judge(exercises.CHAPTER["13.1"], (7.29, 30)).message
    assert f"{27 * 108 / 36 * 0.03:.2f} GB and {36 * 45 * 6 // 108} rows" in said
