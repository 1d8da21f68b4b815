"""The gate and the ways to run the chosen experts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimodel.config import ModelConfig
from minimodel.model import moe
from minimodel.model.moe import (
    FEW_ROWS,
    Experts,
    Gate,
    MoE,
    batched_experts,
    dense_experts,
    quick_experts,
    sorted_experts,
)
from minimodel.model.transformer import Transformer


def sizes(num_experts: int, top_k: int) -> ModelConfig:
    return ModelConfig(hidden_size=10, num_experts=num_experts, experts_per_token=top_k,
                       expert_size=6, expert_scale=2.5)


@pytest.mark.parametrize("run_experts", [sorted_experts, batched_experts, quick_experts])
@given(st.data(), st.integers(1, 9), st.integers(0, FEW_ROWS + 3), st.integers(0, 1000))
def test_every_way_equals_the_dense_oracle(run_experts, data, num_experts, rows, seed):
    """No row, one and many; one expert a token and all of them; experts that nobody chose."""
    top_k = data.draw(st.integers(1, num_experts))
    torch.manual_seed(seed)
    experts = Experts(sizes(num_experts, top_k)).double()
    x = torch.randn(rows, 10, dtype=torch.float64)
    chosen = torch.rand(rows, num_experts).argsort(-1)[:, :top_k]
    weights = torch.rand(rows, top_k, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(run_experts(x, chosen, weights, experts),
                                   dense_experts(x, chosen, weights, experts), rtol=0, atol=1e-12)


def test_all_rows_on_one_expert_leave_the_others_idle():
    experts, ran = Experts(sizes(5, 1)).double(), []
    plain_run = experts.run
    experts.run = lambda expert, x: (ran.append((expert, len(x))), plain_run(expert, x))[1]
    x = torch.randn(7, 10, dtype=torch.float64)
    chosen, weights = torch.full((7, 1), 3), torch.ones(7, 1, dtype=torch.float64)
    with torch.no_grad():
        out = sorted_experts(x, chosen, weights, experts)
    assert ran == [(3, 7)]
    torch.testing.assert_close(out, plain_run(3, x), rtol=0, atol=1e-12)


def test_batched_experts_fetch_only_what_somebody_chose():
    """Experts that nobody chose may hold anything: here, what would spoil any sum."""
    experts, x = Experts(sizes(5, 2)).double(), torch.randn(3, 10, dtype=torch.float64)
    chosen = torch.tensor([[4, 1], [1, 4], [3, 1]])
    weights = torch.rand(3, 2, dtype=torch.float64)
    with torch.no_grad():
        expected = dense_experts(x, chosen, weights, experts)
        for matrices in experts.parameters():
            matrices[[0, 2]] = torch.nan
        torch.testing.assert_close(batched_experts(x, chosen, weights, experts), expected,
                                   rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "expected"), [
    (1, "batched_experts"), (FEW_ROWS, "batched_experts"), (FEW_ROWS + 1, "sorted_experts")])
def test_few_rows_are_batched_and_many_sorted(monkeypatch, rows, expected):
    ran = []
    for name in ("batched_experts", "sorted_experts"):
        monkeypatch.setattr(moe, name, lambda *_, name=name: ran.append(name))
    quick_experts(torch.zeros(rows, 10), None, None, None)
    assert ran == [expected]


@pytest.mark.parametrize("run_experts", [sorted_experts, batched_experts])
def test_gradients_flow_through_every_way_alike(run_experts):
    experts = Experts(sizes(5, 2)).double()
    x = torch.randn(8, 10, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(8, 2, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(8)])
    inputs = [x, weights, *experts.parameters()]
    fast, slow = (torch.autograd.grad(run(x, chosen, weights, experts).pow(2).sum(), inputs)
                  for run in (run_experts, dense_experts))
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_the_weights_of_a_token_sum_to_the_expert_scale(top_k):
    gate = Gate(sizes(7, top_k))
    with torch.no_grad():
        weights, chosen = gate(torch.randn(11, 10))
    torch.testing.assert_close(weights.sum(-1), torch.full((11,), 2.5))
    assert all(len(set(row)) == top_k for row in chosen.tolist())


def test_the_bias_takes_part_in_the_choice_only():
    gate, x = Gate(sizes(7, 3)), torch.randn(11, 10)
    with torch.no_grad():
        scores = (x @ gate.weight.T).sigmoid()
        gate.e_score_correction_bias[5] = 100.0     # chosen by all from now on
        weights, chosen = gate(x)
    assert (chosen == 5).any(-1).all()
    bare = scores.gather(-1, chosen)
    torch.testing.assert_close(weights, 2.5 * bare / bare.sum(-1, keepdim=True))


def test_the_best_scores_are_chosen_without_a_bias():
    gate, x = Gate(sizes(7, 2)), torch.randn(11, 10)
    with torch.no_grad():
        _, chosen = gate(x)
        best = (x @ gate.weight.T).argsort(-1, descending=True)[:, :2]
    assert torch.equal(chosen.sort(-1).values, best.sort(-1).values)


def test_a_bias_moves_choices_that_are_not_all_or_nothing(make_model):
    model = make_model()
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        before = model.logits_everywhere(tokens)
        for layer in model.moe_layers():
            layer.gate.e_score_correction_bias.zero_()
        after = model.logits_everywhere(tokens)
    assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize("changes", [{}, {"experts_per_token": 1}, {"experts_per_token": 7},
                                     {"num_shared_experts": 0}, {"num_shared_experts": 2}], ids=str)
def test_a_whole_model_gives_the_same_logits_by_either_way(make_model, changes):
    fast = make_model(**changes)
    slow = Transformer(fast.config, run_experts=dense_experts).double()
    slow.load_state_dict(fast.state_dict())
    with torch.inference_mode():
        for tokens in (torch.arange(1)[None], torch.arange(30).view(2, 15), torch.arange(45)[None]):
            torch.testing.assert_close(fast.logits_everywhere(tokens),
                                       slow.logits_everywhere(tokens), rtol=0, atol=1e-10)


def test_the_gate_computes_in_float32_under_autocast():
    layer, x = MoE(sizes(7, 3)), torch.randn(11, 10)
    with torch.no_grad():
        weights, chosen = layer.gate(x)
        with torch.autocast("cpu", torch.bfloat16):
            mixed_weights, mixed_chosen = layer.gate(x)
    assert torch.equal(chosen, mixed_chosen)
    assert torch.equal(weights, mixed_weights)


@pytest.mark.parametrize("rows", [4, FEW_ROWS + 4])
def test_a_bfloat16_layer_answers_in_bfloat16(rows):
    layer = MoE(sizes(7, 3)).bfloat16()
    with torch.no_grad():
        assert layer(torch.randn(rows, 10, dtype=torch.bfloat16)).dtype == torch.bfloat16
