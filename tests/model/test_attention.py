"""Attention against three nested loops, and what rotary positions promise."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimodel.cache.dense import DenseCache
from minimodel.config import ModelConfig
from minimodel.model.attention import Attention, rotary_angles, rotate
from minimodel.model.batch import Batch, NoCache, Part


def turned(vector: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """One head's vector, its pairs turned one by one."""
    half, out = len(vector) // 2, vector.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / len(vector))
        a, b = vector[i].item(), vector[i + half].item()
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def slow_attention(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """One sequence x [length, hidden]: every head, every token, every token before it."""
    config = layer.config
    q = layer.q_proj(x).view(len(x), config.num_heads, config.head_dim)
    k = layer.k_proj(x).view(len(x), config.num_kv_heads, config.head_dim)
    v = layer.v_proj(x).view(len(x), config.num_kv_heads, config.head_dim)
    out = torch.zeros_like(q)
    for head in range(config.num_heads):
        group = head // (config.num_heads // config.num_kv_heads)
        for i in range(len(x)):
            query, scores = turned(q[i, head], i, config.rope_theta), []
            for j in range(i + 1):
                key = turned(k[j, group], j, config.rope_theta)
                scores.append(float(query @ key) / math.sqrt(config.head_dim))
            shares = torch.tensor(scores, dtype=x.dtype).softmax(0)
            out[i, head] = sum(shares[j] * v[j, group] for j in range(i + 1))
    return layer.o_proj(out.flatten(1))


@pytest.mark.parametrize("heads", [(6, 2), (6, 6), (5, 1)], ids=str)
def test_attention_equals_three_nested_loops(make_model, heads):
    num_heads, num_kv_heads = heads
    model = make_model(num_heads=num_heads, num_kv_heads=num_kv_heads)
    layer, lengths = model.layers[0].self_attn, [5, 1, 9, 9]
    batch = Batch(new=lengths)
    x = torch.randn(batch.num_rows, 46, dtype=torch.float64)
    angles = rotary_angles(batch.positions(), layer.config, x.dtype)
    with torch.no_grad():
        fast = layer(x, angles, 0, NoCache(), batch)
        slow = torch.cat([slow_attention(layer, rows) for rows in x.split(lengths)])
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changed", [0, 4, 9, 10])
def test_a_later_token_never_changes_an_earlier_row(make_model, changed):
    model, tokens = make_model(), torch.arange(11)
    other = tokens.clone()
    other[changed] = 200
    with torch.inference_mode():
        before, after = (model.logits_everywhere(text[None])[0] for text in (tokens, other))
    torch.testing.assert_close(before[:changed], after[:changed], rtol=0, atol=1e-12)
    assert (before[changed:] - after[changed:]).abs().amax(-1).min() > 1e-6


def test_the_sequences_of_a_batch_do_not_see_each_other(make_model):
    model = make_model()
    first, second = torch.arange(7), torch.arange(50, 59)
    with torch.inference_mode():
        together = model(torch.cat([first, second]), Batch(new=[7, 9]))
        alone = torch.cat([model(first, Batch(new=[7])), model(second, Batch(new=[9]))])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 3000))
def test_the_score_of_two_tokens_depends_on_their_distance_alone(one, other, shift):
    config = ModelConfig()
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def score(query_at: int, key_at: int) -> float:
        at = [rotary_angles(torch.tensor([p]), config, torch.float64) for p in (query_at, key_at)]
        return float((rotate(q, *at[0]) * rotate(k, *at[1])).sum())
    assert score(one, other) == pytest.approx(score(one + shift, other + shift), abs=1e-9)


def test_a_shift_of_all_positions_changes_no_logit(make_model):
    model, tokens, batch = make_model(), torch.arange(9), Batch(new=[9])
    with torch.inference_mode():
        here = model(tokens, batch)
        there = model(tokens, batch, positions=batch.positions() + 31)
        stretched = model(tokens, batch, positions=batch.positions() * 2)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-10)
    assert (here - stretched).abs().max() > 1e-3


@pytest.mark.parametrize("positions", [torch.zeros(1), torch.zeros(8), torch.zeros(9, 1)], ids=str)
def test_positions_must_be_one_a_row(make_model, positions):
    with pytest.raises(ValueError, match="give one position a row"):
        make_model()(torch.arange(9), Batch(new=[9]), positions=positions)


def test_the_order_of_the_noted_entries_does_not_matter_to_a_decode(make_model):
    """Position is in the key, not in the place: any order of the slots gives the same row."""
    model, tokens = make_model(), torch.arange(13)
    caches = [DenseCache(model.config, capacity=17, dtype=torch.float64) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            batch = cache.batch([13])
            model(tokens, batch, cache)
            cache.commit(batch)
        caches[1].entries[:, :, :13] = caches[1].entries[:, :, torch.randperm(13)]
        kept, shuffled = (model(torch.tensor([99]), cache.batch([1]), cache) for cache in caches)
    assert not torch.equal(caches[0].entries, caches[1].entries)
    torch.testing.assert_close(kept, shuffled, rtol=0, atol=1e-12)


def test_the_mask_of_a_chunk_is_the_one_in_the_docstring():
    part = Part(first_row=0, first_sequence=0, count=1, new=2, past=3)
    assert part.mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert Part(0, 0, 5, 1, 3).mask is None
    ragged = Part(0, 0, 2, 1, 3, pasts=(3, 1))
    assert ragged.mask.shape == (2, 1, 1, 4)
    assert ragged.mask[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_tokens_of_another_shape_than_the_batch_are_refused(make_model):
    for shape in [(1, 9), (8,), (10,)]:
        with pytest.raises(ValueError, match="do not fit a batch of 9 rows"):
            make_model()(torch.zeros(shape, dtype=torch.long), Batch(new=[9]))
