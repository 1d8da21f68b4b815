"""Replays: what a cache would have remembered of a trace, counted in virtual time.

A replay sends a trace's requests, one after the other, to the engine's own bookkeeping: to the
block pool (`in_memory`) or to the store's index (`in_store`). For each it

1. looks up the request's blocks and counts how many of its first ones are there;
2. lets the cache keep all its blocks, as after the request has finished;
3. lets the clock jump to the next arrival: what expires meanwhile is gone.

No model runs and nothing takes time, so requests never overlap: a pool that is busy keeps less.
Every number that comes out is *modelled*. `without_limit` is the slow, obvious count beside them.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..cache.blocks import BlockPool
from ..cache.store_index import RETENTION_S, StoreIndex
from .cost import V41_KV_BYTES_PER_TOKEN
from .traces import DAY_S, HOUR_S, TraceRequest, check_above_zero

RETENTIONS_S = (HOUR_S, 3 * HOUR_S, 12 * HOUR_S, DAY_S, 2 * DAY_S, 3 * DAY_S, 7 * DAY_S,
                14 * DAY_S, math.inf)           # inf: kept until there is no room


@dataclass
class Hits:
    """What was asked for and what was found, in blocks and in tokens of prompts.

    A prompt's last block counts as asked for even if it is not full and cannot be found.
    `refused` requests needed more blocks than the pool has: they found nothing and left nothing.
    """

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    refused: int = 0

    def count(self, request: TraceRequest, hit_blocks: int) -> None:
        """One more request, of which so many of the first blocks were found."""
        self.requests += 1
        self.blocks += request.prompt_blocks
        self.hit_blocks += hit_blocks
        self.tokens += request.prompt_tokens
        self.hit_tokens += min(hit_blocks * request.block_size, request.prompt_tokens)

    @property
    def by_block(self) -> float:
        """The hit rate in blocks, from 0 to 1."""
        return self.hit_blocks / max(1, self.blocks)

    @property
    def by_token(self) -> float:
        """The hit rate in tokens: what a bill is made of."""
        return self.hit_tokens / max(1, self.tokens)


@dataclass
class StoreReplay:
    """Hits of a store, and how many bytes it held: (seconds, bytes) at even distances."""

    hits: Hits = field(default_factory=Hits)
    held: list[tuple[float, int]] = field(default_factory=list)
    warmup_s: float = 0.0

    @property
    def mean_bytes(self) -> float:
        """Held on average, once warm; of a trace too short for a sample after that, 0."""
        return sum(self._warm()) / max(1, len(self._warm()))

    @property
    def peak_bytes(self) -> int:
        """The most that was held at any of these times, once warm."""
        return max(self._warm(), default=0)

    def _warm(self) -> list[int]:
        return [num_bytes for time_s, num_bytes in self.held if time_s >= self.warmup_s]


class VirtualClock:
    """Seconds that pass only when somebody sets them."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


# --- without any limit ---------------------------------------------------------------------


def without_limit(requests: Iterable[TraceRequest]) -> Hits:
    """A cache that keeps everything for ever: no other finds more."""
    return _all_seen((request, request.matchable, request.keys) for request in requests)


def with_tails(requests: Iterable[TraceRequest]) -> Hits:
    """The same, but a last block that is not full can be found as well, like any other.

    So does who counts the ids of a published trace: each that came before is a hit, and the rate
    by block is 1 - distinct ids / ids. On Mooncake's synthetic trace that gives 64.0 % (by token
    65.1 %, as claim P-MC06 notes); by our rule it is 63.8 % (65.0 %).
    """
    named = ((request, request.keys + (() if request.tail_key is None else (request.tail_key,)))
             for request in requests)
    return _all_seen((request, keys, keys) for request, keys in named)


def _all_seen(asked: Iterable[tuple[TraceRequest, Sequence, Sequence]]) -> Hits:
    """Count each request's first keys that some request before it has left."""
    hits, seen = Hits(), set()
    for request, wanted, left in asked:
        hits.count(request, next((i for i, key in enumerate(wanted) if key not in seen),
                                 len(wanted)))
        seen.update(left)
    return hits


# --- in memory -----------------------------------------------------------------------------


def in_memory(requests: Sequence[TraceRequest], num_blocks: int) -> Hits:
    """The engine's block pool: of `num_blocks`, the one unused for longest goes first, leaf first.

    A larger pool never finds less on the same trace, under two conditions: no pool refuses a
    request, and none computes a block that it knows (as happens where a prompt ends with a full
    block, which is never looked up). Then a pool holds the keys that were used last, so what is
    in a smaller one is in the larger one too: a *stack algorithm* (Mattson and others, IBM
    Systems Journal, 1970). But a known block that is computed anew does not count as used, and
    there pools of two sizes may part.
    """
    pool, hits = BlockPool(num_blocks, _block_size(requests)), Hits()
    for request in requests:
        found = pool.lookup(request.matchable)
        table = pool.admit(found, pool.blocks_for(request.noted_tokens) - len(found))
        hits.count(request, 0 if table is None else len(found))
        if table is None:
            hits.refused += 1
            continue
        pool.publish(table, request.keys, len(request.keys))
        pool.release(table)
    return hits


def _block_size(requests: Sequence[TraceRequest]) -> int:
    """The one block size of a trace."""
    sizes = {request.block_size for request in requests}
    if len(sizes) != 1:
        raise ValueError(f"a replay needs requests of one block size, not of {sorted(sizes)}: "
                         "give it one trace, with a request in it")
    return sizes.pop()


# --- in the store --------------------------------------------------------------------------


def in_store(requests: Sequence[TraceRequest], ttl_s: Mapping[str, float] = RETENTION_S,
             capacity_bytes: float = math.inf, *,
             bytes_per_token: float = V41_KV_BYTES_PER_TOKEN, warmup_s: float = 0.0,
             sample_s: float = 6 * HOUR_S) -> StoreReplay:
    """The store's index: `ttl_s` from the last use on, by class; and never more than its capacity.

    Hits are counted from `warmup_s` on: before, the store is emptier than it will be. Every
    `sample_s` the store drops what has expired, and its bytes are noted. What has expired is never
    found, whenever it is dropped; until then it takes up room.
    """
    block_bytes = round(_block_size(requests) * bytes_per_token)
    check_above_zero(block_bytes=block_bytes, sample_s=sample_s)
    if warmup_s > requests[-1].arrival_s:
        raise ValueError(f"warmup_s={warmup_s:g} leaves nothing to count: the last request comes "
                         f"at {requests[-1].arrival_s:g} s; warm up for less, or take more days")
    clock, replay = VirtualClock(), StoreReplay(warmup_s=warmup_s)
    index = StoreIndex(capacity_bytes, clock)
    for request in requests:
        _sample(replay, index, clock, request.arrival_s, sample_s)
        clock.now_s = request.arrival_s
        found = index.longest_prefix(request.matchable)
        if request.arrival_s >= warmup_s:
            replay.hits.count(request, found)
        _keep(index, request.keys, found, block_bytes, _ttl_of(request, ttl_s))
    return replay


def _sample(replay: StoreReplay, index: StoreIndex, clock: VirtualClock, until_s: float,
            sample_s: float) -> None:
    """Let the clock go on to a time; on the way, drop what expires and note what is held."""
    while (now_s := len(replay.held) * sample_s) <= until_s:
        clock.now_s = now_s
        index.expire()
        replay.held.append((now_s, index.num_bytes))


def _keep(index: StoreIndex, keys: Sequence[Hashable], found: int, block_bytes: int,
          ttl_s: float) -> None:
    """Save a chain's missing blocks, as the store does: its own blocks never make room for it.

    Of a chain longer than the whole store, the beginning is kept.
    """
    if index.capacity_bytes < len(keys) * block_bytes:
        keys = keys[:int(index.capacity_bytes // block_bytes)]
    num_here = found + index.longest_prefix(keys[found:])
    index.touch(keys[:num_here])
    if num_here < len(keys):
        index.room_for((len(keys) - num_here) * block_bytes)
        for parent, key in pairwise((None, *keys)[num_here:]):
            index.add(key, parent, block_bytes, ttl_s)
        index.touch(keys)


def _ttl_of(request: TraceRequest, ttl_s: Mapping[str, float]) -> float:
    if request.retention not in ttl_s:
        raise ValueError(f"no ttl_s for the class {request.retention!r} of a request, only for "
                         f"{', '.join(ttl_s)}: add it")
    return ttl_s[request.retention]


def retention_curve(requests: Sequence[TraceRequest],
                    retentions_s: Iterable[float] = RETENTIONS_S,
                    **options) -> dict[float, StoreReplay]:
    """A replay for each time to live, the same for all classes; `options` are `in_store`'s."""
    classes = {request.retention for request in requests}
    return {kept_s: in_store(requests, dict.fromkeys(classes, kept_s), **options)
            for kept_s in retentions_s}
