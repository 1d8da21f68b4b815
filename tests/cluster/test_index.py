"""The router's index: what replicas remember, heard from the router itself or from events."""

import random

import pytest

from minimodel.cache.blocks import BlockPool
from minimodel.cluster.index import Event, EventLog, Listener, PrefixIndex

# --- matching -----------------------------------------------------------------------------------

def test_the_longest_beginning_of_each_replica_is_found():
    index = PrefixIndex()
    index.stored("a", "pqrs")
    index.stored("b", "pq")
    index.stored("c", "xq")
    assert index.match("pqrst") == {"a": 4, "b": 2}
    assert index.match("pqz") == {"a": 2, "b": 2}
    assert index.match("xqr") == {"c": 2}
    assert index.match("zpq") == {}
    assert index.match("") == {}
    index.check()


def test_a_block_in_the_middle_alone_is_no_beginning():
    index = PrefixIndex()
    index.stored("a", "pqr")
    index.removed("a", "q")
    assert index.match("pqr") == {"a": 1}
    index.removed("a", "p")
    assert index.match("pqr") == {}
    index.check()


def test_what_was_never_heard_of_can_be_removed():
    index = PrefixIndex()
    index.removed("a", "pq")
    index.drop("b")
    index.stored("a", "p")
    index.removed("b", "p")
    assert index.match("p") == {"a": 1}
    index.check()


def test_a_dropped_replica_holds_nothing():
    index = PrefixIndex()
    index.stored("a", "pq")
    index.stored("b", "p")
    index.drop("a")
    assert index.match("pq") == {"b": 1}
    index.check()


def test_an_index_of_limited_size_forgets_the_end_of_the_oldest_chain():
    index = PrefixIndex(capacity=5)
    index.stored("a", "pqr")
    index.stored("a", "xy")
    index.stored("b", "pqrst")
    index.stored("a", "z")
    assert index.match("pqr") == {"a": 2, "b": 3}
    index.stored("a", "pq")                     # used again: now x y is the oldest
    index.stored("a", "wv")
    assert index.match("pq")["a"] == 2
    assert index.match("xy") == {}
    index.check()
    with pytest.raises(ValueError, match="capacity=0 blocks hold nothing"):
        PrefixIndex(capacity=0)


# --- events -------------------------------------------------------------------------------------

def publish(pool, keys):
    table = pool.admit(pool.lookup(keys), len(keys) - len(pool.lookup(keys)))
    pool.publish(table, keys, len(keys))
    pool.release(table)


def test_the_index_follows_a_pool_block_by_block():
    """Random chains in a small pool: after each the index says what a lookup would find."""
    rng, pool, index, log = random.Random(4), BlockPool(9, 3), PrefixIndex(), EventLog(epoch=0)
    pool.listener = log
    listener, heard = Listener(index, "a"), 0
    for _ in range(400):
        chain = [f"{rng.randint(0, 2)}"]
        for _ in range(rng.randint(0, 4)):
            chain.append(chain[-1] + rng.choice("xy"))
        publish(pool, chain)
        for event in log.since(heard):
            listener.hear(event, log)
        heard = log.num_events
        assert index.match(chain).get("a", 0) == len(pool.lookup(chain))
        assert set(index.blocks_of["a"]) == set(pool.block_of) == set(log.keys)
        index.check()
    assert pool.num_evicted > 100
    pool.forget()
    listener.catch_up(log)
    assert index.match(chain) == {}
    index.check()


@pytest.mark.parametrize(("keep", "begins_anew"), [(1_000, False), (3, True)])
def test_a_gap_is_noticed_and_filled(keep, begins_anew):
    pool, index, log = BlockPool(6, 3), PrefixIndex(), EventLog(epoch=2, keep=keep)
    pool.listener = log
    listener = Listener(index, "a")
    for chain in (["p", "pq"], ["x"], ["y"], ["z"], ["w"], ["v"]):
        publish(pool, chain)
    assert (log.since(0) is None) == begins_anew
    listener.hear(log.events[-1], log)          # all but the last were lost on the way
    assert set(index.blocks_of["a"]) == set(pool.block_of)
    assert listener.next_number == log.num_events
    index.check()


def test_events_may_come_twice_and_late():
    log, index = EventLog(epoch=1), PrefixIndex()
    log.stored("p")
    log.removed("p")
    log.stored("q")
    listener = Listener(index, "a")
    for event in (*log.events, *log.events, log.events[0]):
        listener.hear(event, log)
    assert index.match("p") == {}
    assert index.match("q") == {"a": 1}


def test_g63_a_restarted_replica_has_none_of_its_earlier_blocks():
    """And what its earlier life still had to say, when it comes late, is passed over."""
    index = PrefixIndex()
    listener, old, new = Listener(index, "a"), EventLog(epoch=1), EventLog(epoch=2)
    for key in "pq":
        old.stored(key)
        listener.hear(old.events[-1], old)
    new.stored("x")
    listener.hear(new.events[0], new)
    assert index.match("pq") == {}
    assert index.match("x") == {"a": 1}
    old.stored("r")
    listener.hear(old.events[-1], old)
    assert set(index.blocks_of["a"]) == {"x"}
    assert (listener.epoch, listener.next_number) == (2, 1)


def test_a_silent_restart_is_noticed_by_asking():
    index, listener, log = PrefixIndex(), None, EventLog(epoch=0)
    listener = Listener(index, "a")
    log.stored("p")
    listener.catch_up(log)
    assert index.match("p") == {"a": 1}
    listener.catch_up(EventLog(epoch=1))
    assert index.match("p") == {}


def test_who_was_dropped_and_comes_back_in_the_same_life_is_heard_anew():
    """A replica that was thought lost: its blocks are still there."""
    index, log = PrefixIndex(), EventLog(epoch=0)
    listener = Listener(index, "a")
    for key in "pq":
        log.stored(key)
        listener.hear(log.events[-1], log)
    index.drop("a")
    log.stored("r")
    listener.hear(log.events[-1], log)
    assert set(index.blocks_of["a"]) == {"p", "q", "r"}
    index.check()


def test_a_log_keeps_the_last_events_only():
    log = EventLog(epoch=0, keep=2)
    for key in "pqr":
        log.stored(key)
    assert log.since(0) is None
    assert log.since(1) == [Event(0, 1, "q", True), Event(0, 2, "r", True)]
    assert log.since(3) == []
