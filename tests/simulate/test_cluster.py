"""Replicas in virtual time: counts that can be done on paper, and the engine's own rules."""

from dataclasses import replace

import pytest

from minimodel.cache.store import StoreIndex
from minimodel.cluster.index import PrefixIndex
from minimodel.cluster.router import Cost, Router, least_loaded, longest_prefix, round_robin
from minimodel.engine.scheduler import Limits
from minimodel.simulate.cluster import Cluster, Replica, StepCost, equal_replicas
from minimodel.simulate.traces import TraceRequest, Traffic, synthesise

COST = StepCost(fixed_s=0.5, read_s=0.01, write_s=0.1)


def request(at, prompt, output=1, keys=(), **options):
    return TraceRequest(at, prompt, output, tuple(keys), block_size=10, **options)


def cluster(names="a", policy=round_robin, cost=COST, **options):
    options = {"memory_tokens": 1_000, "block_size": 10, "tokens_per_step": 100, "unit": 1,
               **options}
    return Cluster(equal_replicas(names, cost, **options), Router(names, policy))


def test_one_request_takes_what_its_steps_take():
    """A prompt of 30 tokens in one step; two more tokens in two."""
    served, = cluster().serve([request(2.0, 30, 3)])
    assert served.first_token_s == pytest.approx(0.5 + 30 * 0.01)
    assert served.finished_s == pytest.approx(2.0 + 0.8 + 2 * 0.6)
    assert served.hit_tokens == 0


def test_a_long_prompt_is_read_in_chunks():
    served, = cluster().serve([request(0.0, 250)])
    assert served.first_token_s == pytest.approx(3 * 0.5 + 250 * 0.01)


def test_whoever_writes_shares_steps_with_whoever_reads():
    one, two = cluster().serve([request(0.0, 10, 2), request(0.1, 50, 1)])
    assert one.first_token_s == pytest.approx(0.6)
    assert two.first_token_s == pytest.approx(0.6 + (0.5 + 0.1 + 0.5) - 0.1)
    assert one.finished_s == two.finished_s == pytest.approx(1.7)


def test_what_was_read_before_is_found():
    keys = ["p", "pq", "pqr"]
    first, second, third = cluster().serve([
        request(0.0, 35, keys=keys), request(10.0, 35, keys=keys), request(20.0, 30, keys=keys)])
    assert [one.hit_tokens for one in (first, second, third)] == [0, 30, 20]
    assert second.first_token_s == pytest.approx(0.5 + 5 * 0.01)


def test_requests_of_no_keys_share_nothing():
    served = cluster().serve([request(10.0 * i, 35) for i in range(3)])
    assert [one.hit_tokens for one in served] == [0, 0, 0]


def test_two_replicas_remember_apart():
    keys = ["p", "pq"]
    trace = [request(10.0 * i, 25, keys=keys) for i in range(4)]
    turns = cluster("ab", round_robin).serve(trace)
    assert [(one.replica, one.hit_tokens) for one in turns] == [
        ("a", 0), ("b", 0), ("a", 20), ("b", 20)]
    together = cluster("ab", longest_prefix).serve(trace)
    assert [one.hit_tokens for one in together] == [0, 20, 20, 20]
    assert len({one.replica for one in together}) == 1


def test_a_small_memory_forgets():
    trace = [request(10.0 * i, 95, keys=[f"{i % 3}/{place}" for place in range(9)])
             for i in range(9)]
    roomy, tight = cluster(memory_tokens=1_000), cluster(memory_tokens=120)
    assert [one.hit_tokens for one in roomy.serve(trace)] == [0] * 3 + [90] * 6
    assert sum(one.hit_tokens for one in tight.serve(trace)) < 6 * 90
    for world in (roomy, tight):
        world.replicas["a"].scheduler.check()
        assert world.replicas["a"].scheduler.is_idle


def test_a_store_remembers_what_memory_forgot():
    """All blocks in one step, and the time to load them instead of the time to read them."""
    world = cluster(cost=replace(COST, load_s=0.001))
    store = StoreIndex(1_000, world)
    world.replicas["a"] = Replica("a", 12, 10, world.replicas["a"].cost,
                                  Limits(max_tokens_per_step=100, context=1_000), 1, store)
    served = world.serve([request(10.0 * i, 95, keys=[f"{i % 2}/{place}" for place in range(9)])
                          for i in range(4)])
    assert [one.hit_tokens for one in served] == [0, 0, 90, 90]
    load, read = world.replicas["a"].records[-2:]
    loaded, = load.shares
    assert loaded.kind == "load"
    assert read.num_tokens == 5
    assert served[-1].first_token_s == pytest.approx(
        0.5 + loaded.num_tokens * 0.001 + 0.5 + 5 * 0.01)
    assert len(store) == 18


def test_units_change_little():
    """Sixteen tokens at a time: the same choices, and times within a step or two."""
    trace = [replace(one, arrival_s=one.arrival_s / 300)
             for one in synthesise(Traffic(days=1), seed=5)][:200]
    cost = StepCost(0.005, 1 / 20_000, 0.0002)
    found = []
    for unit in (4, 16):
        world = Cluster(equal_replicas("ab", cost, memory_tokens=1_000_000, unit=unit),
                        Router("ab", least_loaded, PrefixIndex(2_000)))
        found.append(world.serve(trace))
    fine, coarse = ({id(one.request): one for one in served} for served in found)
    assert set(fine) == set(coarse) == {id(one) for one in trace}
    hits = [sum(one.hit_tokens for one in served) for served in found]
    assert hits[0] == pytest.approx(hits[1], rel=0.1)
    ends = [max(one.finished_s for one in served) for served in found]
    assert ends[0] == pytest.approx(ends[1], rel=0.05)


@pytest.mark.parametrize("policy", [round_robin, least_loaded, longest_prefix, Cost(1 / 20_000)])
def test_a_busy_hour_leaves_nothing_behind(policy):
    trace = [replace(one, arrival_s=one.arrival_s / 400)
             for one in synthesise(Traffic(days=1), seed=6)]
    world = Cluster(equal_replicas("abc", StepCost(0.005, 1 / 20_000, 0.0002),
                                   memory_tokens=300_000),
                    Router("abc", policy, PrefixIndex(600)))
    served = world.serve(trace)
    assert len(served) == len(trace)
    assert not world.flights
    for one in served:
        assert one.first_token_s > 0
        assert one.finished_s >= one.request.arrival_s + one.first_token_s
        assert 0 <= one.hit_tokens < one.request.prompt_tokens
    for name, member in world.replicas.items():
        member.scheduler.check()
        assert member.scheduler.is_idle
        assert not world.router.replicas[name].flights
        assert all(before.ended_s <= after.started_s
                   for before, after in zip(member.records, member.records[1:], strict=False))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: StepCost(-1, 1, 1), "fixed_s=-1 must be 0 or more seconds"),
    (lambda: StepCost(1, 0, 1), "read_s=0 makes reading free"),
    (lambda: equal_replicas("a", COST, memory_tokens=100, block_size=10, unit=3), "unit=3 must"),
    (lambda: equal_replicas("a", COST, memory_tokens=5, block_size=10, unit=1), "memory_tokens=5"),
    (lambda: cluster(memory_tokens=20).serve([request(1.5, 30)]), "the request at 1.5 s was re"),
])
def test_impossible_clusters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
