"""What a replay counts equals the slow count; more room and more time never find less."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel.cache.blocks import BlockPool
from minimodel.cache.store import RETENTION_S
from minimodel.simulate.replay import (
    RETENTIONS_S,
    Hits,
    VirtualClock,
    in_memory,
    in_store,
    retention_curve,
    with_tails,
    without_limit,
)
from minimodel.simulate.traces import (
    AGENT,
    CHAT,
    DAY_S,
    HOUR_S,
    TraceRequest,
    Traffic,
    full_trace,
    load_mooncake,
    return_times,
    synthesise,
)

DATA = Path(__file__).parent.parent / "data"
BLOCK = 3


def request_of(prompt, output=1, arrival_s=0.0, retention="chat") -> TraceRequest:
    """A request whose keys are the very tokens up to the end of each block, answer included."""
    text = (*prompt, *(("answer", arrival_s),) * output)
    ends = range(BLOCK, len(text), BLOCK)           # the last token's notes do not exist
    return TraceRequest(arrival_s, len(prompt), output, tuple(text[:end] for end in ends), BLOCK,
                        retention)


# Few tokens and long prompts, so that beginnings often agree and often part.
PROMPTS = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=17), min_size=1,
                   max_size=40)
UNEVEN = PROMPTS.map(lambda prompts: [p for p in prompts if len(p) % BLOCK] or ["a"])


def requests_of(prompts, step_s=10.0) -> list[TraceRequest]:
    """One every `step_s`, with answers of 1 to 4 tokens that no other gets."""
    return [request_of(prompt, 1 + place % 4, step_s * place)
            for place, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def days() -> list[TraceRequest]:
    """Some days of lively traffic in coarse blocks."""
    kinds = (replace(CHAT, sessions_per_day=25), replace(AGENT, sessions_per_day=2, mean_turns=9))
    return synthesise(Traffic(days=12, kinds=kinds), seed=4)


# --- counting ------------------------------------------------------------------------------


def test_hits_by_hand():
    hits = Hits()
    hits.count(TraceRequest(0.0, 11, 1, block_size=5), 2)
    hits.count(TraceRequest(1.0, 3, 1, block_size=5), 0)
    hits.count(TraceRequest(2.0, 3, 1, block_size=5), 1)        # a published trace's last block
    assert hits == Hits(requests=3, blocks=5, hit_blocks=3, tokens=17, hit_tokens=13)
    assert (hits.by_block, hits.by_token) == (3 / 5, 13 / 17)
    assert (Hits().by_block, Hits().by_token) == (0, 0)


def test_a_small_file_without_limit():
    """Of 3, 3, 3, 1 and 4 blocks: 0, 2, 2, 0 and 3 found, and a partial one if they may be."""
    requests = load_mooncake(DATA / "mooncake_sample.jsonl")
    ours, all_ids = without_limit(requests), with_tails(requests)
    assert (ours.hit_blocks, all_ids.hit_blocks) == (7, 8)
    assert ours.blocks == all_ids.blocks == 14
    assert ours.hit_tokens == 7 * 512
    assert all_ids.hit_tokens == 2 * 512 + 1300 + 3 * 512


@given(PROMPTS)
def test_without_limit_asks_what_any_request_before_has_left(prompts):
    requests = requests_of(prompts)
    expected = 0
    for place, request in enumerate(requests):
        left = {key for earlier in requests[:place] for key in earlier.keys}
        expected += sum(key in left for key in request.matchable)
    assert without_limit(requests).hit_blocks == expected


@given(PROMPTS)
def test_with_tails_the_rate_is_one_minus_the_distinct(prompts):
    """In a chain, an id that came before came with all that precede it."""
    requests = [replace(request, keys=request.keys[:len(prompt) // BLOCK],
                        tail_key=tuple(prompt) if len(prompt) % BLOCK else None)
                for prompt, request in zip(prompts, requests_of(prompts), strict=True)]
    ids = [tuple(prompt[:first + BLOCK]) for prompt in prompts
           for first in range(0, len(prompt), BLOCK)]
    assert with_tails(requests).blocks == len(ids)
    assert with_tails(requests).hit_blocks == len(ids) - len(set(ids))


# --- in memory -----------------------------------------------------------------------------


def test_a_pool_by_hand():
    """Four blocks of three tokens, prompts of seven: two full blocks and one for the rest."""
    a, b = request_of("aaaaaaa"), request_of("bbbbbbb")
    assert in_memory([a, a], 4).hit_blocks == 2
    assert in_memory([a, b, b], 4).hit_blocks == 2
    assert in_memory([a, b, a], 4).hit_blocks == 1      # b took a's last full block, not its first
    assert in_memory([a, b, a], 5).hit_blocks == 2
    assert in_memory([a, a], 2) == Hits(requests=2, blocks=6, tokens=14, refused=2)


@settings(max_examples=300)
@given(UNEVEN, st.integers(7, 30))
def test_a_pool_finds_what_the_longest_unused_order_leaves(prompts, num_blocks):
    """Against a plain list in the order of use, a chain's first block the newest.

    A last block that is not full has no key, and lies in the pool until the next request.
    """
    requests, recent, expected = requests_of(prompts), [], 0
    for request in requests:
        expected += next((i for i, key in enumerate(request.matchable) if key not in recent),
                         len(request.matchable))
        older = [key for key in recent if key not in request.keys]
        recent = [*request.keys, *older][:num_blocks - (request.noted_tokens % BLOCK > 0)]
    assert in_memory(requests, num_blocks).hit_blocks == expected


@settings(max_examples=300)
@given(UNEVEN, st.integers(7, 30), st.integers(0, 20))
def test_a_larger_pool_never_finds_less(prompts, num_blocks, more):
    requests = requests_of(prompts)
    smaller, larger = in_memory(requests, num_blocks), in_memory(requests, num_blocks + more)
    assert smaller.refused == 0
    assert smaller.hit_blocks <= larger.hit_blocks <= without_limit(requests).hit_blocks


def test_a_larger_pool_that_refuses_less_may_find_less():
    """The theorem's first condition is needed: what was refused has disturbed nobody."""
    short, long = request_of("aaaa"), request_of("b" * 13)
    requests = [short, long, short]
    assert in_memory(requests, 4).hit_blocks == 1 and in_memory(requests, 4).refused == 1
    assert in_memory(requests, 5).hit_blocks == 0


def test_what_is_refused_has_found_nothing():
    """Its first block is there; but nobody computed the rest."""
    hits = in_memory([request_of("aaaa"), request_of("aaa" + "b" * 10)], 4)
    assert (hits.refused, hits.hit_blocks, hits.blocks) == (1, 0, 7)


def test_a_larger_pool_may_find_less_where_prompts_end_on_a_block():
    """Its second condition, too. The third request is one full block, so it is computed again:
    to the small pool it is new, but in the large one the older copy is still the next to go."""
    requests = list(map(request_of, ["bbb", "aaabbb", "bbb", "cccd", "bbbc"]))
    assert in_memory(requests, 3).hit_blocks == 1
    assert in_memory(requests, 4).hit_blocks == 0


@given(PROMPTS)
def test_a_pool_that_never_fills_finds_all(prompts):
    requests = requests_of(prompts)
    assert in_memory(requests, 7 * len(requests)) == without_limit(requests)


def test_more_memory_finds_more_in_days_of_traffic(days):
    rates = [in_memory(days, num_blocks).by_block for num_blocks in (300, 600, 1_200, 100_000)]
    assert rates == sorted(rates) and rates[0] < rates[-1] - 0.01
    assert rates[-1] == without_limit(days).by_block


def test_a_trace_of_two_block_sizes_or_none_is_refused():
    with pytest.raises(ValueError, match=r"one block size, not of \[3, 16\]"):
        in_memory([request_of("aaaa"), TraceRequest(1.0, 5, 1)], 9)
    with pytest.raises(ValueError, match=r"one block size, not of \[\]"):
        in_store([])


@pytest.mark.parametrize(("num_kept", "expected"), [(50, 0.461), (100, 0.577), (400, 0.825)])
def test_a_pool_follows_equation_e11(num_kept, expected):
    """Che's approximation of 1,000 beginnings chosen by Zipf's law; one block more for the rest."""
    names, shares = range(1_000), [1 / rank for rank in range(1, 1_001)]
    chosen = random.Random(1).choices(names, shares, k=60_000)
    requests = [TraceRequest(0.0, 7, 1, (name,), block_size=5) for name in chosen]
    hits = in_memory(requests, num_kept + 1)
    assert hits.hit_blocks / hits.requests == pytest.approx(expected, abs=0.01)


# --- the published trace -------------------------------------------------------------------


@pytest.fixture(scope="module")
def mooncake() -> list[TraceRequest]:
    try:
        return load_mooncake(full_trace("mooncake_synthetic.jsonl"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_sixty_four_percent_count_the_partial_blocks(mooncake):
    all_ids, ours = with_tails(mooncake), without_limit(mooncake)
    assert round(all_ids.by_block, 3) == 0.640 and round(all_ids.by_token, 3) == 0.651
    assert round(ours.by_block, 3) == 0.638 and round(ours.by_token, 3) == 0.650
    assert (all_ids.hit_blocks, ours.hit_blocks) == (77_953, 77_740)


@pytest.mark.parametrize(("num_blocks", "all_ids", "ours"), [
    (1_000, 0.084, 0.085), (10_000, 0.424, 0.434), (50_000, 0.640, 0.638)])
def test_the_pool_on_the_published_trace(mooncake, num_blocks, all_ids, ours):
    """Leaf first and the longest unused first: the engine's own pool gives the known rates."""
    pool, found, asked = BlockPool(num_blocks, 512), 0, 0
    for request in mooncake:
        ids = request.keys + (() if request.tail_key is None else (request.tail_key,))
        hits = pool.lookup(ids)
        table = pool.admit(hits, len(ids) - len(hits))
        pool.publish(table, ids, len(ids))
        pool.release(table)
        found, asked = found + len(hits), asked + len(ids)
    assert round(found / asked, 3) == all_ids
    assert round(in_memory(mooncake, num_blocks).by_block, 3) == ours


# --- in the store --------------------------------------------------------------------------


def test_the_clock_stands_until_it_is_set():
    clock = VirtualClock()
    assert clock() == 0.0
    clock.now_s = 7.5
    assert clock() == 7.5


def test_time_to_live_slides():
    """Kept for 10 s from the last use on, not from the first."""
    def found(*arrivals_s):
        requests = [request_of("aaaaa", arrival_s=time_s) for time_s in arrivals_s]
        return in_store(requests, {"chat": 10.0}).hits.hit_blocks

    assert found(0.0, 10.0) == 1
    assert found(0.0, 10.5) == 0
    assert found(0.0, 8.0, 16.0, 24.0) == 3
    assert found(0.0, 8.0, 18.5, 24.0) == 2


@pytest.mark.parametrize(("kept_days", "expected"), [(3, 0.777), (7, 0.970)])
def test_time_to_live_follows_equation_e11(kept_days, expected):
    """One beginning that is wanted once in two days, at random: 1 - exp(-days / 2)."""
    kind = replace(CHAT, sessions_per_day=0.5, num_openings=1, opening_tokens=2_000, mean_turns=1)
    requests = [replace(request, keys=request.keys[:1])
                for request in synthesise(Traffic(days=8_000, kinds=(kind,)), seed=2)]
    hits = in_store(requests, {"chat": kept_days * DAY_S}, sample_s=30 * DAY_S).hits
    assert hits.hit_blocks / hits.requests == pytest.approx(expected, abs=0.015)


def test_each_class_has_its_own():
    requests = [request_of("aaaa", arrival_s=0.0, retention="agent"),
                request_of("bbbb", arrival_s=0.0),
                request_of("aaaa", arrival_s=5.0, retention="agent"),
                request_of("bbbb", arrival_s=5.0)]
    assert in_store(requests, {"agent": 4.0, "chat": 6.0}).hits.hit_blocks == 1
    assert in_store(requests, {"agent": 6.0, "chat": 4.0}).hits.hit_blocks == 1
    assert in_store(requests, {"agent": 6.0, "chat": 6.0}).hits.hit_blocks == 2
    assert in_store(requests).hits.hit_blocks == 2
    with pytest.raises(ValueError, match="no ttl_s for the class 'agent' of a request, only for"):
        in_store(requests, {"chat": 6.0})


def test_a_block_stays_in_the_class_that_saved_it_first():
    requests = [request_of("aaaa", arrival_s=0.0, retention="agent"),
                request_of("aaaaaaa", arrival_s=1.0), request_of("aaaa", arrival_s=6.0)]
    assert in_store(requests, {"agent": 4.0, "chat": 9.0}).hits.hit_blocks == 1
    assert in_store(requests, {"agent": 9.0, "chat": 9.0}).hits.hit_blocks == 2


def test_bytes_held_by_hand():
    """Two blocks of 3 tokens of 7 bytes, kept 25 s after the second use; looked at every 10 s."""
    requests = [request_of("aaaaaaa", arrival_s=1.0), request_of("aaaaaaa", arrival_s=12.0),
                request_of("b", arrival_s=60.0)]
    replay = in_store(requests, {"chat": 25.0}, bytes_per_token=7, sample_s=10.0)
    assert replay.held == [(0.0, 0), (10.0, 42), (20.0, 42), (30.0, 42), (40.0, 0), (50.0, 0),
                           (60.0, 0)]
    assert (replay.mean_bytes, replay.peak_bytes) == (18, 42)
    late = in_store(requests, {"chat": 25.0}, bytes_per_token=7, sample_s=10.0, warmup_s=30.0)
    assert (late.mean_bytes, late.peak_bytes) == (10.5, 42)
    assert late.hits.requests == 1 and replay.hits.requests == 3


def test_settings_that_count_nothing_are_refused():
    requests = requests_of(["aaaa", "aaaa", "aaaa"])
    with pytest.raises(ValueError, match=r"warmup_s=21 leaves nothing .* comes at 20 s; warm up"):
        in_store(requests, warmup_s=21)
    for wrong in ({"sample_s": 0}, {"sample_s": math.inf}, {"bytes_per_token": 0}):
        with pytest.raises(ValueError, match="must be above 0 and finite"):
            in_store(requests, **wrong)
    late = in_store(requests, warmup_s=20, sample_s=19)
    assert (late.hits.requests, late.mean_bytes, late.peak_bytes) == (1, 0, 0)


def test_the_register_says_how_large_a_token_is(days):
    """890 bytes a token (S39) and nothing forgotten: the distinct blocks, times 512 tokens."""
    replay = in_store(days, dict.fromkeys(RETENTION_S, math.inf), sample_s=HOUR_S)
    last_s = replay.held[-1][0]
    keys = {key for request in days if request.arrival_s < last_s for key in request.keys}
    assert replay.held[-1][1] == replay.peak_bytes == len(keys) * 512 * 890


@pytest.mark.parametrize("retention_s", RETENTIONS_S)
def test_the_retention_curve_is_the_running_sum_of_return_times(days, retention_s):
    """A block is there if it was used within its time to live, since those before it were too."""
    gaps = list(return_times(days))
    replay = in_store(days, dict.fromkeys(RETENTION_S, retention_s))
    assert replay.hits.hit_blocks == sum(gap <= min(retention_s, 1e12) for gap in gaps)


def test_longer_retention_finds_more_and_holds_more(days):
    curve = retention_curve(days)
    assert list(curve) == list(RETENTIONS_S)
    rates = [replay.hits.by_token for replay in curve.values()]
    means = [replay.mean_bytes for replay in curve.values()]
    peaks = [replay.peak_bytes for replay in curve.values()]
    assert rates == sorted(rates) and means == sorted(means) and peaks == sorted(peaks)
    assert rates[0] < rates[3] - 0.01 and means[0] * 5 < means[3]
    assert curve[math.inf].hits == without_limit(days)


def test_classes_that_share_nothing_add_up(days):
    """So two sliders need two curves, not a grid."""
    ttl_s = {"agent": 5 * HOUR_S, "chat": 2 * DAY_S}
    apart = [in_store([r for r in days if r.retention == name], ttl_s).hits for name in ttl_s]
    both = in_store(days, ttl_s).hits
    assert both.hit_blocks == sum(hits.hit_blocks for hits in apart)
    assert both.tokens == sum(hits.tokens for hits in apart)


@settings(max_examples=200)
@given(PROMPTS, st.integers(1, 12), st.sampled_from([5.0, 25.0, math.inf]))
def test_a_store_finds_what_a_plain_list_would(prompts, num_blocks, ttl_s):
    """Against a list of (key, time) in the order of use, expired ones gone at once."""
    requests, recent, expected = requests_of(prompts), [], 0
    for request in requests:
        recent = [(key, time_s) for key, time_s in recent if request.arrival_s - time_s <= ttl_s]
        known = [key for key, _ in recent]
        expected += next((i for i, key in enumerate(request.matchable) if key not in known),
                         len(request.matchable))
        kept = request.keys[:num_blocks]
        recent = ([(key, request.arrival_s) for key in kept]
                  + [pair for pair in recent if pair[0] not in kept])[:num_blocks]
    replay = in_store(requests, {"chat": ttl_s}, capacity_bytes=num_blocks * BLOCK,
                      bytes_per_token=1, sample_s=1.0)
    assert replay.hits.hit_blocks == expected
    assert replay.peak_bytes <= num_blocks * BLOCK


@settings(max_examples=200)
@given(PROMPTS, st.integers(1, 12), st.integers(0, 9), st.sampled_from([5.0, 25.0, 95.0]))
def test_more_disk_or_more_time_never_finds_less(prompts, num_blocks, more, ttl_s):
    """With one time to live for all, a store holds the keys used last, and late enough."""
    def found(num_blocks, ttl_s):
        return in_store(requests_of(prompts), {"chat": ttl_s}, num_blocks * BLOCK,
                        bytes_per_token=1).hits.hit_blocks

    assert found(num_blocks, ttl_s) <= found(num_blocks + more, ttl_s)
    assert found(num_blocks, ttl_s) <= found(num_blocks, 2 * ttl_s)


def test_more_disk_finds_more_and_is_never_exceeded(days):
    block_bytes, replays = 512 * 890, []
    for num_blocks in (100, 400, 1_600, 100_000):
        replays.append(in_store(days, capacity_bytes=num_blocks * block_bytes))
        assert replays[-1].peak_bytes <= num_blocks * block_bytes
    rates = [replay.hits.by_block for replay in replays]
    assert rates == sorted(rates) and rates[0] < rates[-1] - 0.01
    assert replays[-1].hits == in_store(days).hits


def test_a_store_too_small_for_one_block_finds_nothing(days):
    replay = in_store(days, capacity_bytes=512 * 890 - 1)
    assert (replay.hits.hit_blocks, replay.peak_bytes) == (0, 0)
