"""The store's index: what is found, what has expired, what goes first. Numbers only, no files."""

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minimodel.cache.record import NO_KEY
from minimodel.cache.store_index import AHEAD_S, StoreIndex
from minimodel.simulate.replay import VirtualClock

SIZE = 7                    # bytes of a record
CHAINS = {name: [key.encode() for key in keys] for name, keys in {
    "book": ["t", "to", "tow", "town", "town1"],                # five chains that share beginnings
    "town": ["t", "to", "tow", "town", "town2", "town23"],
    "tool": ["t", "to", "too", "tool"],
    "tea": ["t", "te", "tea"],
    "sea": ["s", "se", "sea"]}.items()}


@pytest.fixture
def index(clock):
    return StoreIndex(10 * SIZE, clock)


def save(index, keys, ttl_s=100):
    """As the store saves a chain: what is missing comes after what is here; then all is touched."""
    found = index.longest_prefix(keys)
    index.touch(keys[:found])
    for parent, key in list(zip([NO_KEY, *keys], keys, strict=False))[found:]:
        index.add(key, parent, SIZE, ttl_s)
    index.touch(keys)


def order(index):
    return [key.decode() for key in index.entries]


# --- what is here -------------------------------------------------------------------------------

def test_the_longest_prefix_ends_at_the_first_key_that_is_not_here(index):
    save(index, CHAINS["town"][:4])
    assert index.longest_prefix(CHAINS["town"]) == 4
    assert index.longest_prefix(CHAINS["tool"]) == 2
    assert index.longest_prefix(CHAINS["sea"]) == index.longest_prefix([]) == 0
    index.remove(b"to")
    assert index.longest_prefix(CHAINS["town"]) == 1
    assert index.longest_prefix(CHAINS["town"][2:]) == 2        # from the middle, as is asked
    assert b"tow" in index
    assert b"to" not in index


def test_bytes_are_counted_once_however_often_a_record_comes(index):
    index.add(b"t", NO_KEY, 5, 100)
    index.add(b"to", b"t", 8, 100)
    assert (len(index), index.num_bytes) == (2, 13)
    index.add(b"t", NO_KEY, 6, 100)
    assert (len(index), index.num_bytes) == (2, 14)
    assert index.remove(b"t").num_bytes == 6
    assert index.remove(b"t") is None
    assert (len(index), index.num_bytes) == (1, 8)


def test_looking_up_uses_nothing(index):
    save(index, CHAINS["tea"])
    save(index, CHAINS["sea"])
    before = order(index)
    index.longest_prefix(CHAINS["tea"])
    assert order(index) == before == ["tea", "te", "t", "sea", "se", "s"]


@pytest.mark.parametrize("capacity", [-1, -100])
def test_a_capacity_below_nothing_is_refused(capacity):
    with pytest.raises(ValueError, match=f"capacity_bytes={capacity} must be at least 0"):
        StoreIndex(capacity)


# --- what goes first ----------------------------------------------------------------------------

def test_a_chain_goes_from_its_end(index):
    save(index, CHAINS["town"])
    for left in range(6, 0, -1):
        assert index.longest_prefix(CHAINS["town"]) == left
        assert index.oldest() == CHAINS["town"][left - 1]
        index.remove(index.oldest())


def test_what_was_used_longest_ago_goes_first_and_shared_beginnings_last(index):
    for name in ("town", "tool", "book"):
        save(index, CHAINS[name])
    assert order(index) == ["town23", "town2", "tool", "too", "town1", "town", "tow", "to", "t"]
    index.touch(CHAINS["tool"])
    assert order(index) == ["town23", "town2", "town1", "town", "tow", "tool", "too", "to", "t"]


def test_those_that_are_kept_are_passed_over(index):
    save(index, CHAINS["tea"])
    save(index, CHAINS["sea"])
    assert index.oldest(kept={b"tea", b"te"}) == b"t"
    assert index.oldest(kept=set(CHAINS["tea"])) == b"sea"
    assert index.oldest(kept=set(index.entries)) is None
    assert StoreIndex(5).oldest() is None


def test_room_is_made_by_as_few_as_it_takes(index):
    save(index, CHAINS["town"])
    save(index, CHAINS["sea"])
    assert index.num_bytes == 9 * SIZE
    assert index.room_for(SIZE) == []
    assert index.room_for(SIZE + 1) == [b"town23"]
    assert index.room_for(4 * SIZE) == [b"town2", b"town"]
    assert index.num_bytes == 6 * SIZE
    assert index.room_for(10 * SIZE) == [b"tow", b"to", b"t", b"sea", b"se", b"s"]
    assert (len(index), index.num_bytes) == (0, 0)


def test_what_could_never_fit_removes_nothing(index):
    save(index, CHAINS["tea"])
    with pytest.raises(ValueError, match="71 bytes do not fit into a store of 70: give it more"):
        index.room_for(71)
    assert len(index) == 3


# --- what has expired ---------------------------------------------------------------------------

def test_what_nobody_uses_for_its_time_is_missing_and_then_gone(index, clock):
    save(index, CHAINS["tea"], ttl_s=100)
    save(index, CHAINS["sea"], ttl_s=300)
    clock.now_s += 100
    assert index.longest_prefix(CHAINS["tea"]) == 3         # to the second
    clock.now_s += 1
    assert index.longest_prefix(CHAINS["tea"]) == 0
    assert b"tea" not in index
    assert index.longest_prefix(CHAINS["sea"]) == 3
    assert index.num_bytes == 6 * SIZE                      # missing, but still here
    assert sorted(index.expire()) == [b"t", b"te", b"tea"]
    assert index.num_bytes == 3 * SIZE
    assert index.expire() == []


def test_a_use_starts_the_time_anew(index, clock):
    save(index, CHAINS["tea"], ttl_s=100)
    for _ in range(5):
        clock.now_s += 90
        index.touch(CHAINS["tea"][:2])
    assert index.longest_prefix(CHAINS["tea"]) == 2
    assert index.expire() == [b"tea"]


def test_a_clock_that_goes_back_expires_nothing(index, clock):
    save(index, CHAINS["tea"], ttl_s=100)
    clock.now_s -= 1_000_000
    assert index.longest_prefix(CHAINS["tea"]) == 3
    assert index.expire() == []


def test_a_use_while_the_clock_ran_ahead_makes_nothing_immortal(index, clock):
    right_s, clock.now_s = clock.now_s, clock.now_s + 1_000_000
    save(index, CHAINS["tea"], ttl_s=100)
    clock.now_s = right_s
    index.expire()
    clock.now_s += 101
    assert sorted(index.expire()) == [b"t", b"te", b"tea"]


def test_a_time_just_ahead_is_left_alone(index, clock):
    """Two machines' clocks never agree to the second."""
    index.add(b"t", NO_KEY, SIZE, 100, clock.now_s + AHEAD_S)
    index.expire()
    clock.now_s += AHEAD_S + 100
    assert index.expire() == []
    clock.now_s += 1
    assert index.expire() == [b"t"]


def test_records_may_be_kept_for_ever(index, clock):
    save(index, CHAINS["tea"], ttl_s=math.inf)
    clock.now_s += 1e12
    assert index.expire() == []


# --- the order after reopening ------------------------------------------------------------------

def reopened(index, clock, seed=3):
    """A second index that learns of the same records in any order, with the times of their use."""
    pairs = list(index.entries.items())
    random.Random(seed).shuffle(pairs)
    again = StoreIndex(index.capacity_bytes, clock)
    for key, entry in pairs:
        again.add(key, entry.parent, entry.num_bytes, entry.ttl_s, entry.last_used_s)
    again.sort()
    return again


@pytest.mark.parametrize("seed", range(5))
def test_g31_the_order_is_the_same_after_reopening(index, clock, seed):
    for name in ("town", "tool", "sea"):
        save(index, CHAINS[name])
        clock.now_s += 1
    index.touch(CHAINS["book"][:4])
    assert order(reopened(index, clock, seed)) == order(index)


def test_no_block_goes_before_those_that_follow_it(clock):
    """Uses are noted on disk now and then: a beginning's note may be older than its end's."""
    index = StoreIndex(100, clock)
    for age_s, keys in ((50, CHAINS["town"][:3]), (20, CHAINS["town"][3:]), (30, CHAINS["sea"]),
                        (40, [b"te"])):
        for key in keys:
            parent = key[:-1] or NO_KEY if len(key) < 5 else CHAINS["town"][len(key) - 2]
            index.add(key, parent, SIZE, 100, clock.now_s - age_s)
    index.sort()
    assert order(index) == ["te", "sea", "se", "s", "town23", "town2", "town", "tow", "to", "t"]
    assert index.entries[b"t"].last_used_s == clock.now_s - 50      # an order, and no other times


def test_records_that_follow_each_other_in_a_ring_are_put_in_some_order(index):
    """No chain has one. A damaged or forged head may say so, and opening must not hang."""
    index.add(b"a", b"a", SIZE, 100)
    index.add(b"b", b"c", SIZE, 100)
    index.add(b"c", b"b", SIZE, 100)
    index.sort()
    assert sorted(order(index)) == ["a", "b", "c"]
    assert sorted(index.path(b"c")) == [b"b", b"c"]
    assert index.num_bytes == 3 * SIZE


def test_the_path_to_a_block_begins_with_the_first_that_is_here(index):
    save(index, CHAINS["town"])
    assert index.path(b"town2") == CHAINS["town"][:5]
    index.remove(b"to")
    assert index.path(b"town2") == [b"tow", b"town", b"town2"]
    assert index.path(b"to") == []


# --- random lives -------------------------------------------------------------------------------

NAMES = st.sampled_from(sorted(CHAINS))
TTLS = {"agent": 300, "chat": 700}


class Lives(RuleBasedStateMachine):
    """Five chains are saved, used, evicted and forgotten. The model is a plain table of what was
    used when; since every use is of a whole path, no block may go before those that follow it."""

    def __init__(self):
        super().__init__()
        self.clock = VirtualClock()
        self.clock.now_s = 1_800_000_000.0
        self.index = StoreIndex(9 * SIZE + 3, self.clock)
        self.used = {}                      # by key: when, in which class
        self.parents = {key: parent for keys in CHAINS.values()
                        for parent, key in zip([NO_KEY, *keys], keys, strict=False)}

    def is_fresh(self, key):
        return key in self.used and self.clock.now_s - self.used[key][0] <= self.used[key][1]

    def prefix(self, keys):
        return next((place for place, key in enumerate(keys) if not self.is_fresh(key)), len(keys))

    def use(self, keys, ttl_s):
        for key in keys:
            kept_s = self.used[key][1] if key in self.used else ttl_s
            self.used[key] = (self.clock.now_s, kept_s)

    @rule(name=NAMES, retention=st.sampled_from(sorted(TTLS)), length=st.integers(1, 6))
    def save(self, name, retention, length):
        keys = CHAINS[name][:length]
        self.make_room(keys)
        for key in keys[self.prefix(keys):]:
            self.used.pop(key, None)        # an expired one is written anew, in the new class
        save(self.index, keys, TTLS[retention])
        self.use(keys, TTLS[retention])

    def make_room(self, keys):
        """As many as are missing; who is used longest ago goes, and the chain's own beginning is
        used now."""
        found = self.prefix(keys)
        assert self.index.longest_prefix(keys) == found
        self.index.touch(keys[:found])
        self.use(keys[:found], 0)
        for key in keys[found:]:
            self.index.remove(key)
            self.used.pop(key, None)
        gone = self.index.room_for((len(keys) - found) * SIZE)
        assert not set(gone) & set(keys[:found])
        latest = max((self.used[key][0] for key in gone), default=0)
        for key in gone:
            del self.used[key]
        assert all(used_s >= latest for used_s, _ in self.used.values())

    @rule(name=NAMES, length=st.integers(1, 6))
    def send(self, name, length):
        keys = CHAINS[name][:length]
        found = self.index.longest_prefix(keys)
        assert found == self.prefix(keys)
        self.index.touch(keys[:found])
        self.use(keys[:found], 0)

    @rule(seconds=st.sampled_from([1, 299, 301, 699, 701]))
    def wait(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def expire(self):
        gone = self.index.expire()
        assert set(gone) == {key for key in self.used if not self.is_fresh(key)}
        for key in gone:
            del self.used[key]

    @precondition(lambda self: self.used)
    @rule()
    def evict(self):
        key = self.index.oldest()
        assert self.used[key][0] == min(used_s for used_s, _ in self.used.values())
        self.index.remove(key)
        del self.used[key]

    @rule(seed=st.integers(0, 99))
    def reopen(self, seed):
        again = reopened(self.index, self.clock, seed)
        assert set(again.entries) == set(self.index.entries)
        assert again.num_bytes == self.index.num_bytes
        self.index = again

    @invariant()
    def bytes_are_exact_and_never_too_many(self):
        assert set(self.index.entries) == set(self.used)
        assert self.index.num_bytes == SIZE * len(self.used) <= self.index.capacity_bytes

    @invariant()
    def who_follows_goes_first(self):
        place_of = {key: place for place, key in enumerate(self.index.entries)}
        for key, place in place_of.items():
            parent = self.parents[key]
            assert place_of.get(parent, place + 1) > place
            if self.is_fresh(key) and parent in self.used:
                assert self.used[parent][0] >= self.used[key][0]

    @invariant()
    def only_what_is_fresh_is_found(self):
        for keys in CHAINS.values():
            assert self.index.longest_prefix(keys) == self.prefix(keys)
        for key in self.used:
            assert (key in self.index) == self.is_fresh(key)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
