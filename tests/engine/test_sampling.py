"""From logits to a token: against a slow and obvious way, and the frequencies of chance."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from minimodel.engine.request import Sampling
from minimodel.engine.sampling import candidates, sample

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 2.5, 0.0, 1.5])
ORDER = [4, 1, 6, 3, 0, 5, 2]                       # of the same, the likeliest first


def slow_candidates(logits, sampling):
    """Plain Python: (token, share) in order; how near `top_p` came to another cut."""
    best = max(logits)
    weights = [math.exp((logit - best) / sampling.temperature) for logit in logits]
    shares = [weight / sum(weights) for weight in weights]
    kept = sorted(range(len(logits)), key=lambda token: (-shares[token], token))
    if sampling.top_k:
        kept = kept[:sampling.top_k]
    goal = sampling.top_p * sum(shares[token] for token in kept)
    nucleus, reached, nearest = [], 0.0, math.inf
    for token in kept:
        if reached >= goal and sampling.top_p < 1:
            break
        nucleus.append((token, shares[token]))
        reached += shares[token]
        nearest = min(nearest, abs(reached - goal)) if sampling.top_p < 1 else nearest
    return nucleus, nearest


@given(logits=st.lists(st.integers(-9, 9).map(lambda x: x / 2), min_size=1, max_size=9),
       temperature=st.sampled_from([0.1, 0.7, 1.0, 2.3]), top_k=st.integers(0, 11),
       top_p=st.sampled_from([0.05, 0.33, 0.61, 0.9, 0.999, 1.0]))
def test_candidates_are_those_of_the_slow_way(logits, temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    expected, nearest = slow_candidates(logits, sampling)
    assume(nearest > 1e-9)                          # else rounding decides where to cut
    ids, shares = candidates(torch.tensor(logits), sampling)
    assert ids.tolist() == [token for token, _ in expected]
    assert shares.tolist() == pytest.approx([share for _, share in expected], rel=1e-9)
    assert sample(torch.tensor(logits), sampling, place=3) in ids


def test_greedy_is_the_best_and_of_equals_the_first():
    assert sample(LOGITS, Sampling(), place=0) == 4
    assert sample(torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0]), Sampling(), place=5) == 1
    assert {sample(LOGITS, Sampling(seed=seed), place) for seed in range(3)
            for place in range(3)} == {4}


@pytest.mark.parametrize("only_the_best", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0.01}])
def test_three_ways_to_be_greedy_by_chance(only_the_best):
    sampling = Sampling(**{"temperature": 5.0, **only_the_best})
    assert {sample(LOGITS, sampling, place) for place in range(50)} == {4}


@pytest.mark.parametrize("k", [1, 3, 6, 7, 0, 99])
def test_top_k_keeps_the_k_best(k):
    ids, _ = candidates(LOGITS, Sampling(temperature=1.0, top_k=k))
    assert ids.tolist() == ORDER[:k or 7]


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    for top_p, kept in ((0.3, [1]), (0.49, [1]), (0.51, [1, 2]), (0.74, [1, 2]), (0.76, [1, 2, 3]),
                        (0.91, [1, 2, 3, 0]), (1.0, [1, 2, 3, 0])):
        assert candidates(logits, Sampling(temperature=1.0, top_p=top_p))[0].tolist() == kept


def test_top_p_is_a_part_of_what_top_k_left():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()     # two best: two thirds and one third
    kept = [candidates(logits, Sampling(temperature=1.0, top_k=2, top_p=p))[0].tolist()
            for p in (0.6, 0.7)]
    assert kept == [[1], [1, 2]]


def test_temperature_comes_before_top_p():
    assert len(candidates(LOGITS, Sampling(temperature=0.5, top_p=0.8))[0]) < len(
        candidates(LOGITS, Sampling(temperature=3.0, top_p=0.8))[0])


@pytest.mark.parametrize("vary", ["place", "seed"])
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.75, "temperature": 1.6}],
                         ids=str)
def test_frequencies_are_the_probabilities(vary, options):
    """Chi-square, over places of one seed and over seeds at one place. Draws are fixed."""
    sampling = {"temperature": 1.0, **options}
    draws = 2_000
    counts = Counter(
        sample(LOGITS, Sampling(**sampling, seed=11 if vary == "place" else i),
               i if vary == "place" else 2) for i in range(draws))
    nucleus, _ = slow_candidates(LOGITS.tolist(), Sampling(**sampling))
    whole = sum(share for _, share in nucleus)
    assert set(counts) <= {token for token, _ in nucleus}
    chi_square = sum((counts[token] - draws * share / whole) ** 2 / (draws * share / whole)
                     for token, share in nucleus)
    critical = {2: 13.8, 3: 16.3, 4: 18.5, 6: 22.5}         # one in a thousand goes beyond
    assert chi_square < critical[len(nucleus) - 1]


def test_the_same_seed_gives_the_same_tokens_and_another_does_not():
    def answer(seed):
        return [sample(LOGITS, Sampling(temperature=1.0, seed=seed), place) for place in range(40)]
    assert answer(3) == answer(3)
    assert answer(3) != answer(4)
    assert answer(3)[1:] != answer(4)[:-1]          # nor the same moved by a place


def test_a_draw_leaves_the_world_s_chance_alone():
    torch_before, python_before = torch.random.get_rng_state(), random.getstate()
    sample(LOGITS, Sampling(temperature=1.0), place=0)
    assert torch.equal(torch.random.get_rng_state(), torch_before)
    assert random.getstate() == python_before


def test_a_forbidden_token_is_never_drawn():
    logits = torch.full((9,), -math.inf)
    logits[[2, 6]] = 0.0
    drawn = {sample(logits, Sampling(temperature=2.0), place) for place in range(60)}
    assert drawn == {2, 6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_number_type_is_served(dtype):
    assert sample(LOGITS.to(dtype), Sampling(temperature=0.8, top_p=0.9), place=1) in ORDER
