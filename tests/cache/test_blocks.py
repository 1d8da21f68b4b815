"""The block pool: every rule of its docstring, and random lives with the content followed.

The pool knows numbers only. `Memory` plays the storage: it holds a token a slot, so that a block
taken too early, copied too late or found under a wrong key shows as a wrong token.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minimodel.cache.blocks import BlockPool, BlockTable


@pytest.fixture
def pool():
    return BlockPool(num_blocks=7, block_size=3)


def snapshot(pool):
    return (list(pool.references), list(pool.free), dict(pool.block_of), dict(pool.key_of),
            {id(table): list(table) for table in pool.tables}, pool.num_evicted)


# --- sizes --------------------------------------------------------------------------------------

@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 3), (-1, 3), (7, 0), (7, -2)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=f"a pool of {num_blocks} blocks of {block_size} tokens "
                                         "holds nothing: both must be at least 1"):
        BlockPool(num_blocks, block_size)


def test_blocks_for_rounds_up(pool):
    assert [pool.blocks_for(n) for n in (0, 1, 2, 3, 4, 6, 7)] == [0, 1, 1, 1, 2, 2, 3]


# --- taking -------------------------------------------------------------------------------------

def test_blocks_are_taken_from_the_front_and_held(pool):
    table = pool.admit([], 3)
    assert list(table) == [0, 1, 2]
    assert pool.references == [1, 1, 1, 0, 0, 0, 0]
    assert pool.grow(table)
    assert list(table) == [0, 1, 2, 3]
    assert list(pool.free) == [4, 5, 6]
    pool.check()


def test_an_admit_that_fails_changes_nothing(pool):
    first = pool.admit([], 4)
    pool.publish(first, "abcd", 4)
    pool.release(first)
    pool.admit([], 2)
    hits = pool.lookup("ab")
    before = snapshot(pool)
    assert pool.admit(hits, 4) is None      # five are free, and two of those are the hits
    assert snapshot(pool) == before
    table = pool.admit(hits, 3)
    assert list(table[:2]) == hits
    assert not pool.free
    pool.check()


def test_held_hits_cost_no_free_block(pool):
    holder = pool.admit([], 5)
    pool.publish(holder, "abcde", 5)
    table = pool.admit(pool.lookup("abcde"), 2)
    assert list(table[:5]) == list(holder)
    assert pool.references == [2] * 5 + [1] * 2
    assert pool.stats()["shared"] == 5


def test_an_admit_of_nothing_is_a_table_all_the_same(pool):
    table = pool.admit([], 0)
    assert list(table) == []
    pool.grow(table)
    pool.release(table)
    pool.check()


def test_grow_of_a_full_pool_changes_nothing(pool):
    table = pool.admit([], 7)
    before = snapshot(pool)
    assert not pool.grow(table)
    assert snapshot(pool) == before


def test_lookup_ends_at_the_first_unknown_key_and_holds_nothing(pool):
    table = pool.admit([], 4)
    pool.publish(table, "abcd", 4)
    before = snapshot(pool)
    assert pool.lookup("abxd") == list(table[:2])
    assert pool.lookup("xabc") == pool.lookup("") == []
    assert snapshot(pool) == before


# --- giving -------------------------------------------------------------------------------------

def test_blocks_with_a_key_go_to_the_back_and_others_to_the_front(pool):
    table = pool.admit([], 5)
    pool.publish(table, "ab", 2)
    pool.release(table)
    # Unkeyed 4, 3, 2 to the front one after another; keyed 1, then 0, to the back.
    assert list(pool.free) == [2, 3, 4, 5, 6, 1, 0]
    assert list(table) == []
    assert pool.stats() == {"blocks": 7, "held": 0, "free": 7, "cached": 2, "shared": 0,
                            "evicted": 0}


def test_a_chain_is_evicted_from_its_end(pool):
    table = pool.admit([], 7)
    pool.publish(table, "abcdefg", 7)
    pool.release(table)
    for known in range(7, 0, -1):
        assert len(pool.lookup("abcdefg")) == known
        pool.admit([], 1)
        pool.check()
    assert pool.stats()["evicted"] == 7


def test_what_was_released_longest_ago_is_evicted_first(pool):
    old, new = pool.admit([], 3), pool.admit([], 4)
    pool.publish(old, "abc", 3)
    pool.publish(new, "wxyz", 4)
    pool.release(old)
    pool.release(new)
    again = pool.admit(pool.lookup("abc"), 0)       # used again: now the younger one
    pool.release(again)
    pool.admit([], 4)
    assert pool.lookup("wxyz") == []
    assert len(pool.lookup("abc")) == 3


def test_a_shared_block_is_free_when_its_last_holder_lets_go(pool):
    first = pool.admit([], 2)
    pool.publish(first, "ab", 2)
    second = pool.admit(pool.lookup("ab"), 1)
    pool.release(first)
    assert not {0, 1} & set(pool.free)
    pool.release(second)
    assert len(pool.free) == 7
    pool.check()


def test_publishing_again_and_further_keeps_what_was_said(pool):
    table = pool.admit([], 4)
    pool.publish(table, "abcd", 1)
    pool.publish(table, "abcd", 3)
    assert pool.lookup("abcd") == list(table[:3])
    pool.publish(table, "abcd", 0)
    assert pool.lookup("abcd") == list(table[:3])


@pytest.mark.parametrize(("keys", "num_full"), [("ab", 3), ("abcd", 4), ("abc", -1)])
def test_only_what_is_there_can_be_published(pool, keys, num_full):
    table = pool.admit([], 3)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=f"num_full={num_full} blocks to publish, of a table of 3 "
                                         f"and {len(keys)} keys: publish only what is there"):
        pool.publish(table, keys, num_full)
    assert snapshot(pool) == before


def test_a_released_or_foreign_table_is_refused_by_every_verb(pool):
    released, foreign = pool.admit([], 2), BlockPool(7, 3).admit([], 2)
    pool.release(released)
    before = snapshot(pool)
    for table in (released, foreign, BlockTable([0, 1])):
        for verb in (pool.grow, pool.fork, pool.release,
                     lambda table: pool.publish(table, "ab", 0),
                     lambda table: pool.writable(table, 0, None)):
            with pytest.raises(ValueError, match=r"not \(or no longer\) one of the pool"):
                verb(table)
    assert snapshot(pool) == before


def test_tables_are_told_apart_by_identity():
    one, other = BlockTable([1, 2]), BlockTable([1, 2])
    assert one == one
    assert one != other
    assert [one].index(one) == 0
    with pytest.raises(ValueError, match="not in list"):
        [one].index(other)
    assert len({one, other}) == 2


# --- copy on write ------------------------------------------------------------------------------

class Memory(dict):
    """A token in each (block, slot), as a cache would hold entries."""

    def write(self, pool, table, first, tokens):
        for position, token in enumerate(tokens, first):
            self[table[position // pool.block_size], position % pool.block_size] = token

    def read(self, pool, table, num_tokens):
        return [self[table[i // pool.block_size], i % pool.block_size] for i in range(num_tokens)]

    def copy(self, source, target):
        for (block, slot), token in list(self.items()):
            if block == source:
                self[target, slot] = token


def test_a_fork_shares_until_one_of_them_writes(pool):
    memory = Memory()
    table = pool.admit([], 2)
    memory.write(pool, table, 0, "abcd")
    twin = pool.fork(table)
    assert list(twin) == list(table)
    assert len(pool.free) == 5
    assert pool.writable(twin, 1, memory.copy)
    assert twin[0] == table[0]
    assert twin[1] != table[1]
    memory.write(pool, twin, 4, "X")
    assert pool.writable(table, 1, memory.copy)
    memory.write(pool, table, 4, "e")
    assert "".join(memory.read(pool, table, 5)) == "abcde"
    assert "".join(memory.read(pool, twin, 5)) == "abcdX"
    pool.check()


def test_a_block_of_one_s_own_is_not_copied(pool):
    table = pool.admit([], 2)
    assert pool.writable(table, 1, None)            # nobody calls the copy
    twin = pool.fork(table)
    pool.release(twin)
    assert pool.writable(table, 1, None)
    assert list(table) == [0, 1]


def test_the_last_of_several_forks_keeps_the_block(pool):
    table = pool.admit([], 1)
    twins = [table, pool.fork(table), pool.fork(table)]
    copies = []
    for twin in twins:
        assert pool.writable(twin, 0, lambda *pair: copies.append(pair))
    assert len({twin[0] for twin in twins}) == 3
    assert [source for source, _ in copies] == [0, 0]
    pool.check()


def test_the_source_is_held_until_it_is_copied(pool):
    table = pool.admit([], 1)
    pool.publish(table, "a", 1)

    def copy(source, target):
        assert pool.references[source] == 1
        assert source not in pool.free
        assert target not in pool.free
    assert pool.writable(table, 0, copy)
    assert pool.lookup("a") == [0]                  # still found, by others
    assert list(table) != [0]
    assert pool.stats()["cached"] == 1
    pool.check()


def test_without_a_free_block_nothing_is_copied(pool):
    table = pool.admit([], 7)
    pool.fork(table)
    before = snapshot(pool)
    assert not pool.writable(table, 3, None)
    assert snapshot(pool) == before


def test_a_copy_that_fails_leaves_the_pool_as_it_was(pool):
    table = pool.admit([], 2)
    twin = pool.fork(table)

    def copy(source, target):
        raise RuntimeError("power cut")
    with pytest.raises(RuntimeError, match="power cut"):
        pool.writable(twin, 1, copy)
    assert list(twin) == list(table) == [0, 1]
    assert len(pool.free) == 5
    pool.check()
    assert pool.writable(twin, 1, lambda source, target: None)


# --- situations that real engines met -----------------------------------------------------------

def test_g05_g13_a_block_taken_for_new_tokens_is_no_longer_found(pool):
    """A block is reused while its old key still leads to it: later hits read foreign notes."""
    table = pool.admit([], 7)
    pool.publish(table, "abcdefg", 7)
    pool.release(table)
    taken = pool.admit([], 2)                       # the chain's last two
    assert not set(taken) & set(pool.lookup("abcdefg"))
    assert len(pool.lookup("abcdefg")) == 5
    assert not set(taken) & set(pool.key_of)


def test_g09_hits_are_held_before_any_block_is_taken(pool):
    """Free hits lie where blocks are taken from: one is taken, written over, and read as a hit."""
    table = pool.admit([], 7)
    pool.publish(table, "abcdefg", 7)
    pool.release(table)                             # free, from the front: 6 5 4 3 2 1 0
    assert pool.lookup("abcdefg") == [0, 1, 2, 3, 4, 5, 6]
    again = pool.admit([5, 6], 5)                   # the very next to be taken
    assert list(again) == [5, 6, 4, 3, 2, 1, 0]
    pool.check()


def test_g12_an_evicted_block_can_get_another_key(pool):
    """An evicted block keeps its key field: its next content is refused or found by the old key."""
    pool = BlockPool(num_blocks=1, block_size=3)
    for key in "abca":
        table = pool.admit([], 1)
        pool.publish(table, key, 1)
        pool.release(table)
        assert (pool.block_of, pool.key_of) == ({key: 0}, {0: key})
    assert pool.num_evicted == 3


def test_g14_a_block_has_one_key_set_once(pool):
    """A block is registered again by a second key: one of the two names wrong content."""
    table = pool.admit([], 1)
    pool.publish(table, "a", 1)
    pool.publish(table, "b", 1)
    assert pool.lookup("a") == [0]
    assert pool.lookup("b") == []
    pool.check()


def test_g15_who_computed_the_same_later_keeps_its_own_copy(pool):
    """Duplicate blocks are freed while a running table still names them: it reads freed memory."""
    first, second = pool.admit([], 2), pool.admit([], 3)
    pool.publish(first, "ab", 2)
    pool.publish(second, "abc", 3)
    assert list(second) == [2, 3, 4]                # the table did not change
    assert pool.lookup("abc") == [0, 1, 4]          # first publisher first, then what only it has
    pool.release(second)
    assert list(pool.free)[:2] == [2, 3]            # duplicates are worth nothing: taken first
    pool.check()


@pytest.mark.parametrize(("hits", "num_new"), [([1, 1], 0), ([0], -1)])
def test_a_table_of_twins_or_of_less_than_nothing_is_refused(pool, hits, num_new):
    before = snapshot(pool)
    with pytest.raises(ValueError, match=r"must name no block twice"):
        pool.admit(hits, num_new)
    assert snapshot(pool) == before


def test_g25_keys_are_forgotten_all_at_once_and_only_when_idle(pool):
    """Weights are replaced and old notes are still found, or published again by who still runs."""
    table = pool.admit([], 3)
    pool.publish(table, "abc", 2)
    with pytest.raises(ValueError, match=r"tables still held: 1\. Release them"):
        pool.forget()
    assert pool.lookup("abc") == [0, 1]
    pool.release(table)
    pool.forget()
    assert pool.lookup("abc") == []
    assert pool.stats()["cached"] == 0
    pool.check()


# --- check finds each kind of damage ------------------------------------------------------------

DAMAGE = {
    "a reference too many": lambda pool, table: pool.references.__setitem__(0, 2),
    "held and free": lambda pool, table: pool.free.__setitem__(0, None),
    "neither held nor free": lambda pool, table: pool.free.pop(6),
    "a table forgotten": lambda pool, table: pool.tables.remove(table),
    "a block twice": lambda pool, table: (table.append(0), pool.references.__setitem__(0, 2)),
    "a key that leads nowhere": lambda pool, table: pool.key_of.pop(0),
    "a block without its key": lambda pool, table: pool.block_of.pop("a"),
    "two keys of one block": lambda pool, table: pool.block_of.update(z=0),
    "two blocks of one key": lambda pool, table: pool.key_of.update({2: "a"}),
    "an older second key": lambda pool, table: setattr(pool, "block_of", {"z": 0, "a": 0, "b": 1}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_check_finds_the_damage(pool, damage):
    table = pool.admit([], 2)
    pool.publish(table, "ab", 2)
    pool.check()
    damage(pool, table)
    with pytest.raises(AssertionError):
        pool.check()


# --- random lives -------------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from("ab"), min_size=1, max_size=8)     # few letters: many hits


class Lives(RuleBasedStateMachine):
    """Tables come, hit, write, fork, publish and go. Each must read what it wrote, always."""

    def __init__(self):
        super().__init__()
        self.pool, self.memory = BlockPool(num_blocks=6, block_size=2), Memory()
        self.texts = {}                             # of a table: its tokens

    def a_table(self, number):
        return list(self.texts)[number % len(self.texts)]

    @rule(word=WORDS)
    def admit(self, word):
        size = self.pool.block_size
        hits = self.pool.lookup(keys(word, size)[:(len(word) - 1) // size])
        needed = self.pool.blocks_for(len(word)) - len(hits)
        room = sum(block not in hits for block in self.pool.free)
        before = snapshot(self.pool)
        table = self.pool.admit(hits, needed)
        assert (table is None) == (needed > room)
        if table is None:
            assert snapshot(self.pool) == before
            return
        computed = len(hits) * size
        assert self.memory.read(self.pool, table, computed) == word[:computed]
        self.memory.write(self.pool, table, computed, word[computed:])
        self.texts[table] = list(word)

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9), token=st.sampled_from("abc"))
    def write(self, number, token):
        table = self.a_table(number)
        place = len(self.texts[table]) // self.pool.block_size
        has_block = place < len(table) or self.pool.grow(table)
        can_write = has_block and self.pool.writable(table, place, self.memory.copy)
        assert can_write or not self.pool.free
        if can_write:
            self.memory.write(self.pool, table, len(self.texts[table]), [token])
            self.texts[table].append(token)

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def publish(self, number):
        table = self.a_table(number)
        chain = keys(self.texts[table], self.pool.block_size)
        self.pool.publish(table, chain, len(chain))
        assert len(self.pool.lookup(chain)) == len(chain)

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        table = self.a_table(number)
        self.texts[self.pool.fork(table)] = list(self.texts[table])

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def release(self, number):
        table = self.a_table(number)
        del self.texts[table]
        self.pool.release(table)

    @precondition(lambda self: not self.texts)
    @rule()
    def forget(self):
        self.pool.forget()

    @invariant()
    def everything_is_accounted_for(self):
        self.pool.check()
        assert self.pool.tables == set(self.texts)

    @invariant()
    def every_table_reads_what_it_wrote(self):
        for table, text in self.texts.items():
            assert self.memory.read(self.pool, table, len(text)) == text

    @invariant()
    def every_key_leads_to_its_content(self):
        size = self.pool.block_size
        for key, block in self.pool.block_of.items():
            assert tuple(self.memory[block, slot] for slot in range(size)) == key[-size:]


def keys(text, size):
    """Of each full block: all tokens up to its end, as a chain of hashes would tell them apart."""
    return [tuple(text[:end]) for end in range(size, len(text) + 1, size)]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
