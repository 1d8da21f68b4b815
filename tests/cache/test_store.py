"""The disk store when nothing fails: what is found, read, kept, evicted, and shared by processes.

Every block's content follows from its key (see store_processes.py), so a wrong byte shows. Blocks
of 211 bytes, records of 331.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from minimodel.cache import record
from minimodel.cache.keys import chain, root_key
from minimodel.cache.ledger import Ledger
from minimodel.cache.store import (
    DAY_S,
    NO_KEY,
    RETENTION_S,
    TOUCH_S,
    DiskStore,
    Entry,
    StoreError,
    retention_of,
)

SCRIPT = Path(__file__).with_name("store_processes.py")
shared = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
MODEL, CHAINS, SIZE, save, read = (shared.MODEL, shared.CHAINS, shared.RECORD_BYTES, shared.save,
                                   shared.read)
TOWN, TOWER, TOOL, TEA, SEA = CHAINS.values()       # 7, 4 (3 shared), 5 (1), 2 (1), 6 blocks


@pytest.fixture
def impatient(monkeypatch):
    """Stores that do not wait for each other."""
    monkeypatch.setattr(Ledger.__init__, "__defaults__", (0.01,))


def path_of(store, key):
    return store.root / key.hex()[:2] / f"{key.hex()}.kv"


def records_in(store):
    return {bytes.fromhex(path.stem) for path in store.root.glob("*/*.kv")}


# --- saved and read -----------------------------------------------------------------------------

def test_what_is_saved_is_found_and_read(store):
    assert save(store, TOWN) == 7
    assert store.longest_prefix(TOWN) == read(store, TOWN) == 7
    assert store.longest_prefix(TOWER) == read(store, TOWER) == 3
    assert store.longest_prefix(SEA) == read(store, SEA) == 0
    assert store.check() == 7
    assert store.stats() == {"records": 7, "bytes": 7 * SIZE, "capacity": 1 << 30, "loaded": 10,
                             "bad": 0, "saved": 7, "failed": 0, "evicted": 0, "expired": 0}


def test_g35_what_is_reopened_is_what_was_written(store, open_store):
    """The same store, a new process: every output is corrupt."""
    for keys in CHAINS.values():
        save(store, keys)
    again = open_store()
    for keys in CHAINS.values():
        assert read(again, keys) == len(keys)
    assert (again.counts["bad"], again.check()) == (0, 19)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 129], ids=len)
def test_g35_blocks_of_any_size_come_back(open_store, payload):
    open_store().save_chain(TEA, [payload, payload[::-1]])
    for key, expected in zip(TEA, (payload, payload[::-1]), strict=True):
        into = bytearray(len(payload))
        assert open_store().read(key, memoryview(into))
        assert into == expected


def test_g31_a_restart_forgets_nothing_and_leaves_no_orphan(store, open_store, clock):
    """The index was in memory only: no hits after a restart, and files that nobody removes."""
    for keys in (SEA, TOWN, TEA):
        save(store, keys)
        clock.now_s += TOUCH_S + 1
    store.touch(TOWER[:3])
    again = open_store()
    assert again.index.entries == store.index.entries           # sizes, times, parents,
    assert list(again.index.entries) == list(store.index.entries)       # and the order
    assert again.index.entries[TOWN[1]] == Entry(TOWN[0], SIZE, 7 * DAY_S, clock.now_s)
    assert again.index.entries[TOWN[0]].parent == NO_KEY
    assert again.index.num_bytes == again.ledger.num_bytes == 14 * SIZE


def test_saving_again_writes_nothing(store):
    save(store, TOWN)
    before = {path: path.stat().st_ino for path in shared.all_files(store.root)}
    assert save(store, TOWN) == 7
    assert save(store, TOWN, first=5) == 7
    assert store.save_chain([], []) == 0
    assert {path: path.stat().st_ino for path in shared.all_files(store.root)} == before
    assert store.counts["saved"] == 7


def test_a_chain_is_saved_by_and_by_and_only_its_new_blocks_are_given(store):
    assert save(store, TOWN[:3]) == 3
    assert save(store, TOWN[:4], first=3) == 4
    assert save(store, TOWN, first=2) == 7          # one more than needed: it is there
    assert store.counts["saved"] == 7
    assert read(store, TOWN) == 7


@pytest.mark.usefixtures("impatient")
def test_g29_a_record_is_seen_when_it_is_whole(store, open_store, monkeypatch):
    """The same text is asked for while its file is being written: half of it is read."""
    other, real, seen = open_store(), os.write, []

    def look(file, data):
        for part in (data[:50], data[50:]):
            real(file, part)
            seen.append((other.longest_prefix(TEA), read(other, TEA), open_store().index.num_bytes))
        return len(data)
    monkeypatch.setattr(os, "write", look)
    save(store, TEA)
    assert seen == [(0, 0, 0)] * 4 + [(1, 1, SIZE)] * 4
    assert read(other, TEA) == 2


@pytest.mark.usefixtures("impatient")
def test_g46_each_write_has_a_file_of_its_own(store, open_store, monkeypatch):
    """A late end of one write completes another's: unwritten data can be read."""
    names, other = [], open_store()

    def write_late(path, *rest):
        names.append(path)
        assert save(other, TEA) == len(names) - 1   # the second has to wait, and gives up
        real(path, *rest)
    real = record.write
    monkeypatch.setattr(record, "write", write_late)
    assert save(store, TEA) == 2
    store.clear()
    monkeypatch.setattr(record, "write", lambda path, *rest: (names.append(path),
                                                              real(path, *rest)))
    save(open_store(), TEA)
    assert len(names) == len(set(names)) == 4
    assert not any(path.exists() for path in names)
    assert read(store, TEA) == 2


def test_g47_parents_are_written_before_children(store, monkeypatch):
    """A child under a parent that was not saved: a crash, or notes that nobody can reach."""
    written, real = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (written.append(to), real(path, to)))
    save(store, TOWN)
    assert written == [path_of(store, key) for key in TOWN]
    assert {entry.parent for entry in store.index.entries.values()} == {NO_KEY, *TOWN[:-1]}


def test_g47_no_tail_is_saved_whose_beginning_is_gone(store, open_store):
    save(store, TOWN[:5])
    open_store().evict(2 * SIZE)                    # by another process: this one cannot know
    assert save(store, TOWN, first=5) == 3
    assert records_in(store) == set(TOWN[:3])
    store.clear()
    assert save(store, TOWN, first=3) == 0
    assert records_in(store) == set()
    assert save(store, TOWN[:2]) == 2
    assert save(store, TOWN, first=3) == 2          # how far it is here, so that more is given
    assert save(store, TOWN, first=2) == 7


# --- models and tenants -------------------------------------------------------------------------

def test_g36_models_share_a_folder_and_no_notes(store, open_store):
    """Other weights under the same name, in the same folder: foreign notes are loaded."""
    other_model = "b8" * 32
    other = open_store(other_model)
    theirs = chain(root_key(other_model), shared.TEXTS["tea"], 1)
    save(store, TEA)
    assert other.longest_prefix(theirs) == 0
    save(other, theirs)
    assert store.check() == other.check() == 4
    into = memoryview(bytearray(shared.PAYLOAD_BYTES))
    assert not other.read(TEA[0], into)             # even if it asked for this very record
    assert read(store, TEA) == 0
    assert read(other, theirs) == 2


def test_g36_models_share_the_capacity(store, open_store, clock):
    save(store, TOWN)
    clock.now_s += 10
    other = open_store("b8" * 32, capacity_bytes=9 * SIZE)
    save(other, chain(root_key("b8" * 32), [1, 2, 3, 4], 1))
    assert other.check() == 9
    assert store.longest_prefix(TOWN) == 7 > read(store, TOWN) == 5


def test_a_store_is_opened_for_the_model_that_uses_it(store):
    store.require(MODEL)
    with pytest.raises(StoreError, match=r"was opened for the model with fingerprint a7a7a7a7a7a7"
                                         r"\.\.\. and this one has b8b8b8b8b8b8\.\.\.: open it "):
        store.require("b8" * 32)


# --- the order of eviction ----------------------------------------------------------------------

def test_g38_a_store_is_bounded_unless_told_otherwise(tmp_path):
    """Eviction is off by default: the disk fills."""
    store = DiskStore(tmp_path, MODEL)
    assert store.stats()["capacity"] == 1 << 30
    assert store.min_free_bytes == 1 << 28


def test_g38_the_capacity_is_never_exceeded(open_store, monkeypatch):
    store, sizes, real = open_store(capacity_bytes=6 * SIZE + 7), [], record.write
    monkeypatch.setattr(record, "write", lambda *args: (real(*args), sizes.append(
        shared.num_bytes(store.root))))             # with the file that is not yet renamed
    for keys in (*CHAINS.values(), *CHAINS.values()):
        save(store, keys)
        store.check()
    assert max(sizes) == 6 * SIZE


def test_what_was_used_longest_ago_goes_first_and_chains_from_their_end(open_store, clock):
    store = open_store(capacity_bytes=13 * SIZE)
    save(store, TOWN)
    save(store, SEA)
    save(store, TOOL[:1])                           # the town's first block, used again
    assert save(store, TOOL) == 5                   # four more than there is room for
    assert (store.longest_prefix(TOWN), store.longest_prefix(SEA)) == (3, 6)
    assert records_in(store) == {*TOWN[:3], *SEA, *TOOL}
    store.touch(TOWER[:3])
    save(store, TEA)
    assert (store.longest_prefix(TOWN), store.longest_prefix(SEA)) == (3, 5)
    assert store.counts["evicted"] == 5


def test_a_chain_longer_than_the_store_keeps_its_beginning(open_store):
    store = open_store(capacity_bytes=5 * SIZE + SIZE // 2)
    save(store, SEA)
    assert save(store, TOWN) == 5
    assert records_in(store) == set(TOWN[:5])
    assert "no room: the capacity, or the floor" in store.last_error
    assert save(store, TOWN, first=5) == 5          # nor does a second try evict it
    assert read(store, TOWN) == 5
    assert store.counts["failed"] == 3              # the sea had six blocks, too


def test_a_hole_in_a_chain_can_be_filled_in_a_full_store(open_store, clock):
    """What follows the hole may be the oldest of all: it is kept, and others make room."""
    store = open_store(capacity_bytes=13 * SIZE)
    save(store, TOWN)
    clock.now_s += 10
    save(store, SEA)
    path_of(store, TOWN[0]).unlink()
    assert read(store, TOWN) == 0
    save(open_store(), [bytes(32)])                 # another process takes the room
    assert store.longest_prefix(TOWN) == 0
    assert save(store, TOWN) == 7
    assert records_in(store) == {*TOWN, *SEA[:5], bytes(32)}


def test_nothing_is_thrown_away_for_what_cannot_fit(open_store):
    store = open_store(capacity_bytes=9 * SIZE)
    save(store, TOWN)
    assert store.save_chain(SEA[:1], [bytes(9 * SIZE)]) == 0
    assert read(store, TOWN) == 7


def test_the_floor_of_free_space_is_kept(open_store, monkeypatch):
    """Whoever else fills the disk: the store gives way."""
    store = open_store(min_free_bytes=1_000)
    others = 0

    def disk_of_10_000_bytes(root):
        free = 10_000 - others - shared.num_bytes(root)
        return SimpleNamespace(f_bavail=free, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", disk_of_10_000_bytes)
    for keys in CHAINS.values():
        assert save(store, keys) == len(keys)
    assert store.check() == 19                      # 6,289 bytes
    others = 3_000
    assert save(store, chain(root_key(MODEL), [9] * 2, 1)) == 2
    assert store.check() == 18                      # 5,958: one more would be 6,289 again
    others = 9_001
    assert save(store, chain(root_key(MODEL), [8] * 2, 1)) == 0
    assert store.check() == 18                      # all of them together would not be enough


def test_as_many_bytes_are_evicted_as_is_asked(store):
    save(store, TOWN)
    save(store, SEA)
    assert store.evict(0) == 0
    assert store.evict(1) == SIZE
    assert store.evict(2 * SIZE) == 2 * SIZE
    assert (store.longest_prefix(TOWN), store.longest_prefix(SEA)) == (4, 6)
    assert store.evict(1 << 40) == 10 * SIZE
    assert store.evict(1) == 0
    assert store.check() == 0
    assert store.counts["evicted"] == 13


def test_all_records_can_be_cleared(store, open_store):
    save(store, TOWN)
    save(open_store("b8" * 32), SEA)                # others' too, known or not
    assert store.clear() == 13
    assert store.check() == store.clear() == 0
    assert save(store, TOWN) == 7


# --- time ---------------------------------------------------------------------------------------

def test_a_record_is_kept_for_its_class_from_its_last_use_on(store, open_store, clock):
    assert RETENTION_S == {"agent": 3 * DAY_S, "chat": 7 * DAY_S}
    save(store, SEA, retention="agent")
    save(store, TOWN, retention="chat")
    for day in range(1, 4):
        clock.now_s += DAY_S
        store.touch(TOWN[:4])
        assert store.longest_prefix(SEA) == 6, day
    clock.now_s += 1
    assert store.longest_prefix(SEA) == read(open_store(), SEA) == 0
    assert store.longest_prefix(TOWN) == open_store().longest_prefix(TOWN) == 7
    clock.now_s += 6 * DAY_S
    assert store.longest_prefix(TOWN) == 4          # the rest was last used nine days ago
    assert (store.expire(), store.expire(), store.check()) == (3, 0, 4)


def test_what_has_expired_is_removed_by_and_by(store, clock):
    save(store, SEA, retention="agent")
    clock.now_s += 3 * DAY_S + 1
    assert store.check() == 6
    save(store, TEA)
    assert store.check() == 2
    assert store.counts["expired"] == 6


def test_what_has_expired_is_written_anew_in_the_class_of_now(store, open_store, clock):
    save(store, SEA, retention="agent")
    clock.now_s += 3 * DAY_S + 1
    assert save(store, SEA, retention="chat") == 6
    clock.now_s += 7 * DAY_S
    assert open_store().longest_prefix(SEA) == 6


def test_a_use_is_noted_on_disk_now_and_then(store, clock):
    save(store, TEA)
    before = path_of(store, TEA[0]).stat().st_mtime
    for _ in range(TOUCH_S // 10):
        clock.now_s += 10
        store.touch(TEA[:1])
    assert path_of(store, TEA[0]).stat().st_mtime == before
    clock.now_s += 1
    store.touch(TEA[:1])
    assert path_of(store, TEA[0]).stat().st_mtime == before + TOUCH_S + 1
    assert path_of(store, TEA[1]).stat().st_mtime == before


def test_who_saves_what_is_here_uses_it(store, open_store, clock):
    """Each time a request finds its notes in memory or on disk, its records live longer."""
    save(store, TEA)
    for _ in range(5):
        clock.now_s += 6 * DAY_S
        assert save(open_store(), TEA) == 2
    assert store.counts["saved"] == 2
    assert read(open_store(), TEA) == 2


def test_a_use_while_the_clock_ran_ahead_makes_no_record_immortal(store, open_store, clock):
    right_s, clock.now_s = clock.now_s, clock.now_s + 400 * DAY_S
    save(store, TEA)
    clock.now_s = right_s
    assert store.expire() == 0
    assert open_store().longest_prefix(TEA) == 2    # noted on disk as used now,
    assert path_of(store, TEA[0]).stat().st_mtime == right_s
    clock.now_s += 7 * DAY_S
    assert open_store().longest_prefix(TEA) == 2    # and not anew by each who opens it
    clock.now_s += 1
    assert open_store().longest_prefix(TEA) == store.longest_prefix(TEA) == 0
    assert store.check() == 0


def test_a_clock_that_goes_back_expires_nothing(store, open_store, clock):
    save(store, TEA)
    clock.now_s -= 400 * DAY_S
    assert store.expire() == 0
    assert store.longest_prefix(TEA) == read(store, TEA) == 2
    assert read(open_store(), TEA) == 2
    assert save(store, SEA) == 6                    # and what is written now is the latest
    assert store.evict(1) == SIZE
    assert (store.longest_prefix(TEA), store.longest_prefix(SEA)) == (1, 6)


# --- several at once ----------------------------------------------------------------------------

def test_two_stores_on_a_folder_find_what_the_other_wrote(store, open_store):
    other = open_store()
    save(store, TOWN)
    assert other.longest_prefix(TOWN) == read(other, TOWN) == 7
    assert save(other, TOWER) == 4
    assert (other.counts["saved"], store.longest_prefix(TOWER)) == (1, 4)
    assert store.check() == other.check() == 8
    assert store.ledger.num_bytes == other.ledger.num_bytes == 8 * SIZE


def test_both_write_the_same_chain_and_each_block_is_written_once(store, open_store):
    """The second looks once more when its turn has come."""
    other = open_store()
    save(store, TOWN)
    other.longest_prefix = lambda keys: 0           # as it was before the first had written
    assert save(other, TOWN) == 7
    assert (store.counts["saved"], other.counts["saved"]) == (7, 0)
    assert other.check() == 7


def test_what_another_uses_is_not_evicted(open_store, clock):
    first, second = open_store(capacity_bytes=13 * SIZE), open_store()
    save(first, TOWN)
    clock.now_s += 100
    save(first, SEA)
    clock.now_s += 100
    second.touch(TOWN[:second.longest_prefix(TOWN)])
    save(first, TEA)                                # one block more than there is room for
    assert read(first, TOWN) == 7
    assert first.longest_prefix(SEA) == 5
    assert first.evict(5 * SIZE) == 5 * SIZE
    assert (read(first, TOWN), first.longest_prefix(SEA)) == (7, 0)
    first.evict(SIZE)                               # then both chains: still from their ends
    assert first.longest_prefix(TOWN) == 6


def test_what_is_known_only_from_looking_it_up_goes_from_its_end(store, open_store):
    other = open_store()
    save(store, TOWN)
    assert other.longest_prefix(TOWN[:3]) == 3
    assert other.longest_prefix(TOWN[3:]) == 4      # as for a beginning that is in memory
    other.evict(2 * SIZE)
    assert records_in(store) == set(TOWN[:5])


def test_a_use_by_another_of_a_chain_s_end_counts_for_its_beginning(store, clock):
    """The other's notes on disk are a minute coarse: the beginning's may be the older."""
    save(store, TOWN)
    clock.now_s += 50
    os.utime(path_of(store, TOWN[6]), (clock.now_s, clock.now_s))
    assert store.evict(SIZE) == SIZE
    assert records_in(store) == set(TOWN[:6])


def test_a_use_that_is_not_yet_noted_is_not_forgotten_by_looking_at_the_folder(store, clock):
    for keys in (SEA, TOWN):
        save(store, keys)
        clock.now_s += 10
    store.touch(SEA)
    store.scan()
    store.evict(SIZE)
    assert records_in(store) == {*SEA, *TOWN[:6]}


def test_what_another_uses_has_not_expired(store, open_store, clock):
    save(store, TOWN)
    second = open_store()
    clock.now_s += 7 * DAY_S
    second.touch(TOWN[:5])
    clock.now_s += 1
    assert store.longest_prefix(TOWN) == 5
    assert store.expire() == 2
    assert store.check() == 5


def test_what_others_wrote_makes_room_too(open_store, clock):
    """Each knows its own; a full folder is looked through before a save is given up."""
    first, second = (open_store(capacity_bytes=9 * SIZE) for _ in range(2))
    save(first, TOWN)
    assert second.index.num_bytes == 0
    clock.now_s += 10
    assert save(second, SEA) == 6
    assert records_in(second) == {*SEA, *TOWN[:3]}
    second.check()


def test_what_another_has_removed_is_forgotten(store, open_store, clock):
    save(store, TOWN)
    open_store().evict(2 * SIZE)
    assert store.longest_prefix(TOWN) == 7          # it cannot know,
    assert read(store, TOWN) == 5                   # until it reads,
    assert store.longest_prefix(TOWN) == 5
    open_store().clear()
    clock.now_s += TOUCH_S + 1
    assert save(store, TOWN[:3], first=2) == 0      # or notes a use,
    assert save(store, TOWN) == 7
    open_store().clear()
    store.scan()                                    # or looks at them all
    assert len(store.index) == store.index.num_bytes == 0


def test_g45_a_record_that_is_replaced_or_evicted_while_it_is_read_is_right(store, open_store,
                                                                            monkeypatch):
    """A read that takes longer than its lease: data are overwritten under the reader."""
    save(store, TEA)
    other, real = open_store(), os.preadv

    def evict_and_write_again(*args):
        other.clear()
        assert save(other, TEA) == 2
        return real(*args)
    monkeypatch.setattr(os, "preadv", evict_and_write_again)
    assert read(store, TEA) == 2
    monkeypatch.setattr(os, "preadv", lambda *args: (other.clear(), real(*args))[1])
    assert read(store, TEA) == 1                    # the open file lives on; the next is gone
    assert store.longest_prefix(TEA) == 1
    assert (store.counts["bad"], store.check()) == (0, 0)


def test_g04_another_process_finds_what_this_one_saved(store):
    """Keys that differ by process: no hits after a restart, while writes pile up."""
    save(store, TOWN)
    code = (f"import runpy; shared = runpy.run_path({str(SCRIPT)!r})\n"
            f"store = shared['DiskStore']({str(store.root)!r}, shared['MODEL'], min_free_bytes=0, "
            f"clock=lambda: {store.clock()})\n"
            "town = shared['CHAINS']['town']\n"
            "print(store.longest_prefix(town), shared['read'](store, town), store.check())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONHASHSEED": "7"}, check=True)
    assert done.stdout.split() == ["7", "7", "7"]


@pytest.mark.parametrize("number", [2, 4])
def test_g39_processes_that_write_at_once_keep_to_one_capacity(tmp_path, number):
    """Each with a quota of its own: nobody evicts, and the disk is full."""
    done = subprocess.run([sys.executable, SCRIPT, "writers", tmp_path, str(number)],
                          capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 8 * SIZE <= found["most"] <= shared.CAPACITY
    assert len(found["counts"]) == number
    for name in ("saved", "evicted", "loaded"):
        assert min(counts[name] for counts in found["counts"]) > 0


def test_a_lock_that_is_held_for_long_costs_its_patience_once(store, open_store):
    other, before = open_store(), time.monotonic()
    store.ledger.patience_s = 0.05
    with other.ledger.held():
        assert save(store, TEA) == 0
        assert "another process has held" in store.last_error
        for _ in range(100):                        # not tried again at once
            assert save(store, TEA) == 0
        assert store.counts["failed"] == 1
        assert store.expire() == 0
        save(other, TEA)                            # the one who has it goes on
        assert read(store, TEA) == store.longest_prefix(TEA) == 2       # and readers never wait
    assert time.monotonic() - before < 60
    store.retry_at_s = 0
    assert save(store, SEA) == 6


@pytest.mark.usefixtures("impatient")
def test_a_store_can_be_opened_while_another_writes(store, open_store):
    save(store, TEA)
    with store.ledger.held():
        other = open_store()
        assert read(other, TEA) == 2
    assert save(other, SEA) == 6
    assert other.check() == 8


# --- bad input ----------------------------------------------------------------------------------

def test_an_unknown_class_is_refused(store):
    with pytest.raises(ValueError, match="retention='forever' is none of agent, chat"):
        save(store, TEA, retention="forever")
    with pytest.raises(ValueError, match="retention='' is none of"):
        retention_of("")
    assert records_in(store) == set()


def test_a_store_without_a_fingerprint_is_only_looked_at(store, open_store):
    save(store, TEA)
    blind = open_store("")
    assert (blind.check(), blind.stats()["records"], blind.header(TEA[1]).parent) == (2, 2, TEA[0])
    with pytest.raises(StoreError, match="without a fingerprint, to be looked at: open it with"):
        save(blind, SEA)
    with pytest.raises(StoreError, match="without a fingerprint, to be looked at: open it with"):
        read(blind, TEA)
    assert store.check() == 2                       # and nothing was taken for damaged
    with pytest.raises(StoreError, match="was opened for the model with fingerprint"):
        blind.require(MODEL)


@pytest.mark.parametrize("fingerprint", ["a7", "a7" * 31, "a7" * 33, "A7" * 32, "x" * 64,
                                         "a7" * 32 + "\n"])
def test_a_fingerprint_that_is_none_is_refused(open_store, fingerprint):
    with pytest.raises(StoreError, match="must be 64 hexadecimal digits, as keys"):
        open_store(fingerprint)


def test_more_payloads_than_keys_are_refused(store):
    with pytest.raises(ValueError, match="3 payloads for a chain of 2 keys: give the keys from"):
        store.save_chain(TEA, [b"a", b"b", b"c"])
    assert records_in(store) == set()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("kept")
    for root in (tmp_path / "file", tmp_path / "file" / "notes"):
        with pytest.raises(StoreError, match=r"cannot make a store in .*Give a directory in"):
            DiskStore(root, MODEL)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_capacity_below_nothing_is_refused(open_store):
    with pytest.raises(ValueError, match="capacity_bytes=-1 must be at least 0"):
        open_store(capacity_bytes=-1)


# --- check finds each kind of damage ------------------------------------------------------------

def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


DAMAGE = {
    "a byte": ("is damaged: its checksum", lambda store, path: rewrite(
        path, lambda data: data[:200] + bytes([data[200] ^ 8]) + data[201:])),
    "the model": ("is damaged: its checksum", lambda store, path: rewrite(
        path, lambda data: data[:90] + b"?" + data[91:])),
    "cut": ("the ledger says", lambda store, path: os.truncate(path, 300)),
    "emptied": ("the ledger says", lambda store, path: os.truncate(path, 0)),
    "another's": ("another block's record", lambda store, path: rewrite(
        path, lambda data: path_of(store, TEA[1]).read_bytes())),
    "one too few": ("the ledger says", lambda store, path: path.unlink()),
    "a temporary file": ("files left behind", lambda store, path: path.with_name(
        f"77-{'ab' * 16}.tmp").write_text("half a rec")),
    "over the capacity": ("over the capacity", lambda store, path: setattr(
        store.index, "capacity_bytes", 5)),
    "a count that is off": ("the ledger says", lambda store, path: store.ledger.path.write_bytes(
        b"\x01" + bytes(7) + b"\x01"))}


@pytest.mark.parametrize(("message", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_check_finds_the_damage(store, message, damage):
    save(store, TEA)
    assert store.check() == 2
    damage(store, path_of(store, TEA[0]))
    with pytest.raises(AssertionError, match=message):
        store.check()


def test_a_key_of_another_length_is_refused(tmp_path):
    store = DiskStore(tmp_path, "ab" * 32, min_free_bytes=0)
    with pytest.raises(ValueError, match=r"b'k' is no key of 32 bytes: make keys with"):
        store.save_chain([b"k"], [b"xx"])
    assert store.check() == 0


def test_a_floor_below_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="min_free_bytes=-1 must be at least 0"):
        DiskStore(tmp_path, min_free_bytes=-1)
