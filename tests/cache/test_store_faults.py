"""The disk store when things fail: killed, damaged, read-only, full, interrupted, deleted.

Whatever happens, a block that is read is right or missing, what is found is the beginning of a
chain, the ledger is right again, no temporary file survives, and no request fails.
"""

import errno
import itertools
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from minimodel.cache import record
from minimodel.cache.keys import chain, root_key
from minimodel.cache.record import NO_KEY
from minimodel.cache.store import DAY_S, DiskStore

SCRIPT = Path(__file__).with_name("store_processes.py")
shared = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
MODEL, CHAINS, SIZE, save, read = (shared.MODEL, shared.CHAINS, shared.RECORD_BYTES, shared.save,
                                   shared.read)
TOWN, TOWER, TOOL, TEA, SEA = CHAINS.values()       # 7, 4 (3 shared), 5 (1), 2 (1), 6 blocks


def path_of(store, key):
    return store.root / key.hex()[:2] / f"{key.hex()}.kv"


def records_in(store):
    return {bytes.fromhex(path.stem) for path in store.root.glob("*/*.kv")}


@contextmanager
def damaged(path):
    """Open to be damaged. The time of its last use stays: the tests' clock is not the machine's."""
    used = path.stat()
    with path.open("r+b") as file:
        yield file
    os.utime(path, ns=(used.st_atime_ns, used.st_mtime_ns))


def change(path, place, data):
    with damaged(path) as file:
        file.seek(place)
        file.write(data)


def cut(path, size):
    with damaged(path) as file:
        file.truncate(size)


def num_open_files():
    return len(list(Path("/dev/fd").iterdir()))


def look(store, open_store):
    """What must hold after any fault, for who was there and for who comes now."""
    for each in (store, open_store()):
        for keys in CHAINS.values():
            assert read(each, keys) == each.longest_prefix(keys)
        assert each.check() == len(shared.all_files(each.root))
    for entry in each.index.entries.values():
        assert entry.parent == NO_KEY or entry.parent in each.index.entries


# --- killed -------------------------------------------------------------------------------------

def test_a_thousand_kills_at_any_point_leave_no_wrong_byte():
    """Each process is killed before, in or after some call of the system; then all is looked at."""
    quick = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=quick) as folder:
        done = subprocess.run([sys.executable, SCRIPT, "kills", folder, "1000"],
                              capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout)["killed"]
    assert sum(killed.values()) == 1000
    for name in shared.CALLS:
        for where in ("before", "after"):
            assert killed.get(f"{where} {name}", 0) >= 5 or name == "close"
    assert killed["in write"] >= 50


def test_writers_that_are_killed_at_work_harm_no_other(tmp_path):
    """Three at a time, a hundred deaths; those who live on read right bytes, and keep to the
    capacity."""
    done = subprocess.run([sys.executable, SCRIPT, "deaths", tmp_path, "100"],
                          capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 8 * SIZE <= found["most"] <= shared.CAPACITY
    assert found["bad"] == 0


def test_what_a_killed_process_left_is_removed_and_counted(store, open_store):
    """Its temporary file, and the count that it left open."""
    save(store, TEA)
    left = path_of(store, TEA[0]).with_name(f"123-{'0f' * 16}.tmp")
    left.write_bytes(bytes(100))
    os.truncate(store.ledger.path, 0)
    assert save(store, SEA) == 6
    assert not left.exists()
    assert store.ledger.num_bytes == 8 * SIZE
    left.write_bytes(bytes(100))
    assert open_store().check() == 8
    assert not left.exists()


# --- damaged ------------------------------------------------------------------------------------

FIELDS = {"magic": (0, 4), "checksum": (4, 8), "created": (8, 16), "retention": (16, 20),
          "length": (20, 24), "key": (24, 56), "parent": (56, 88), "model": (88, 120),
          "payload": (120, SIZE)}


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(("first", "last"), FIELDS.values(), ids=FIELDS)
def test_g43_damage_in_any_field_is_a_miss_and_the_record_is_gone(store, open_store, first, last,
                                                                  reopened):
    rng = random.Random(first)
    save(store, TOWN)
    for _ in range(6):
        victim = rng.randrange(7)
        path, place = path_of(store, TOWN[victim]), rng.randrange(first, last)
        change(path, place, bytes([path.read_bytes()[place] ^ 1 << rng.randrange(8)]))
        if reopened:
            store = open_store()
        assert read(store, TOWN) == victim
        assert store.longest_prefix(TOWN) == victim
        assert not path.exists()
        assert store.check() == 6
        assert save(store, TOWN, first=victim) == 7     # computed again, and saved again
        look(store, open_store)
    assert store.counts["bad"] == (1 if reopened else 6)


CUTS = [0, 1, 3, 4, 7, 8, 60, 119, 120, 121, 240, SIZE - 1]


@pytest.mark.parametrize("size", CUTS)
def test_g43_a_record_that_is_cut_is_a_miss_and_the_count_is_right(store, open_store, size):
    """Unchecked, the end of the buffer is what lay in memory before."""
    save(store, TOWN)
    cut(path_of(store, TOWN[3]), size)
    assert read(store, TOWN) == store.longest_prefix(TOWN) == 3
    assert store.check() == 6
    cut(path_of(store, TOWN[5]), size)
    assert open_store().check() == 5                    # found when the folder is opened
    assert store.longest_prefix(TOWN[4:]) == 3          # but this one does not know,
    assert store.evict(1) == SIZE                       # and evicts what is still there
    assert store.check() == 4
    assert save(store, TOWN) == 7
    look(store, open_store)


@pytest.mark.parametrize("kept", [0, 8, 120, 200])
def test_a_record_full_of_zeros_is_a_miss(store, open_store, kept):
    """After a power cut: the name and the length are there, the content is not."""
    save(store, TOWN)
    for key in TOWN[2:]:
        change(path_of(store, key), kept, bytes(SIZE - kept))
    store = open_store()
    assert read(store, TOWN) == 2
    for _ in range(5):                                  # each is found when it is read
        save(store, TOWN, first=2)
        read(store, TOWN)
    assert read(store, TOWN) == 7


def test_g34_a_record_under_another_s_name_is_a_miss(store, open_store):
    """A long session comes back with another user's content, and nothing in any log."""
    save(store, TOWN)
    save(store, SEA)
    one, other, spare = (path_of(store, TOWN[2]), path_of(store, SEA[2]), store.root / "spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    assert (read(store, TOWN), read(store, SEA)) == (2, 2)
    assert "is another block's record" in store.last_error
    assert store.check() == 11
    shutil.copyfile(path_of(store, SEA[4]), one)
    assert open_store().longest_prefix(TOWN) == 2
    assert not one.exists()


def test_notes_of_another_number_type_are_a_miss(store):
    save(store, TEA)
    assert not store.read(TEA[0], memoryview(bytearray(2 * shared.PAYLOAD_BYTES)))
    assert store.longest_prefix(TEA) == 0


def test_a_record_that_follows_itself_does_not_stop_the_opening(store, open_store):
    save(store, TEA)
    for key, parent in (TEA, TEA[::-1]):
        header = record.Header(0, 99, 5, key, parent, bytes.fromhex(MODEL))
        path_of(store, key).unlink()
        record.write(path_of(store, key), header, b"55555", store.clock())
    assert open_store().check() == 2


def test_a_bad_record_that_cannot_be_removed_is_not_asked_for_again(store, open_store,
                                                                    monkeypatch):
    """Else the engine would try for ever. It may still be written anew."""
    save(store, TOWN)
    change(path_of(store, TOWN[2]), 150, b"??")
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refusing(errno.EPERM))
        assert read(store, TOWN) == store.longest_prefix(TOWN) == 2
        store.scan()
        assert store.longest_prefix(TOWN) == 2
        assert store.counts["bad"] == 1
    assert save(store, TOWN, first=2) == 7
    assert read(store, TOWN) == store.check() == 7      # and counted once
    look(store, open_store)


def test_what_another_process_wrote_anew_is_found_again(store, open_store):
    save(store, TOWN)
    change(path_of(store, TOWN[2]), 150, b"??")
    assert read(store, TOWN) == 2
    assert save(open_store(), TOWN) == 7
    assert store.longest_prefix(TOWN) == read(store, TOWN) == 7


# --- read-only ----------------------------------------------------------------------------------

def refusing(number):
    def refuse(*args, **options):
        raise OSError(number, os.strerror(number))
    return refuse


@contextmanager
def read_only_by_patches(root):
    """A stand-in: whatever changes the disk fails."""
    real = os.open
    with pytest.MonkeyPatch.context() as patched:
        for name in ("mkdir", "replace", "unlink", "utime", "write", "pwrite"):
            patched.setattr(os, name, refusing(errno.EROFS))
        patched.setattr(os, "open", lambda path, flags, *rest, **options: (
            refusing(errno.EROFS)() if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT)
            else real(path, flags, *rest, **options)))
        yield


@contextmanager
def read_only_by_mount(root):
    """The folder itself, seen through a mount that cannot be written."""
    mount("--bind", root, root)
    try:
        mount("-o", "remount,bind,ro", root)
        yield
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


def mount(*options):
    done = subprocess.run(["mount", *options], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


@pytest.mark.parametrize("read_only", [read_only_by_patches, read_only_by_mount])
def test_a_folder_that_cannot_be_written_can_be_read(store, open_store, clock, read_only):
    """Opening and reading work; saving reports what was there, and raises nothing."""
    save(store, TOWN)
    change(path_of(store, TOWN[5]), 200, b"??")
    clock.now_s += 6 * DAY_S
    with read_only(store.root):
        for each in (store, open_store()):
            assert each.longest_prefix(TOWN[:5]) == read(each, TOWN) == 5
            assert each.longest_prefix(TOWN) == 5       # the damaged one is not asked for again
            each.touch(TOWN[:5])
            assert save(each, TOWN, first=5) == 5
            assert save(each, SEA) == 0
            assert "Read-only file system" in each.last_error
            assert each.expire() == 0
            assert each.counts["saved"] in (0, 7)
        clock.now_s += DAY_S + 1
        assert each.longest_prefix(TOWN) == 5           # used meanwhile; none can note it
        assert open_store().longest_prefix(TOWN) == 0
    each.retry_at_s = 0
    assert save(each, SEA) == 6
    assert save(each, TOWN) == 7
    look(each, open_store)


# --- full ---------------------------------------------------------------------------------------

@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 pages; a record takes one."""
    root = tmp_path / "notes"
    root.mkdir()
    mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", root)
    yield root
    subprocess.run(["umount", "--lazy", root], check=True)


def test_a_disk_that_is_full_holds_the_latest(small_disk, open_store, clock):
    store = open_store()
    for number in range(30):
        clock.now_s += 10
        keys = chain(root_key(MODEL), [number] * 3, 1)
        assert save(store, keys) == 3
        assert open_store().longest_prefix(keys) == read(store, keys) == 3
    assert store.check() == 15                          # and the ledger has a page
    assert store.counts["evicted"] == 75
    assert not list(small_disk.glob("*/*.tmp"))


def test_a_disk_that_others_fill_loses_no_request(small_disk, open_store):
    store = open_store()
    assert save(store, TOWN) == 7
    (small_disk / "others").write_bytes(bytes(8 * 4096))
    long = chain(root_key(MODEL), [5] * 30, 1)
    saved = save(store, long)
    assert 0 < saved < 30
    assert "No space left" in store.last_error or "no room" in store.last_error
    assert read(store, long) == store.longest_prefix(long) == saved
    look(store, open_store)
    (small_disk / "others").unlink()
    store.retry_at_s = 0
    assert save(store, long, first=saved) == 15
    look(store, open_store)


def test_a_disk_that_is_full_from_the_first_byte(small_disk, open_store):
    filler = small_disk / "others"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(65 * 1024))
    store = open_store()
    assert (save(store, TOWN), store.longest_prefix(TOWN), read(store, TOWN)) == (0, 0, 0)
    filler.unlink()
    store.retry_at_s = 0
    assert save(store, TOWN) == 7
    look(store, open_store)


@contextmanager
def full_after(num_bytes, monkeypatch):
    """A stand-in: so many bytes more can be written, in the middle of whatever it is."""
    real, left = os.write, [num_bytes]

    def write(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, data[:left[0]])
        left[0] -= written
        return written
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        yield


@pytest.mark.parametrize("num_bytes", [0, 1, 120, 200, SIZE, SIZE + 5, 2 * SIZE + 130])
def test_g32_g42_what_could_not_be_written_is_not_visible_and_saved_later(store, open_store,
                                                                          monkeypatch, num_bytes):
    """A failed write stays visible: nonsense on a hit. Or the tail is silently never saved."""
    whole = num_bytes // SIZE
    with full_after(num_bytes, monkeypatch):
        assert save(store, TOWN) == whole               # how far it came
        assert store.longest_prefix(TOWN) == read(store, TOWN) == whole
        assert open_store().check() == whole
    assert "No space left" in store.last_error
    assert save(store, TOWN, first=whole) == whole      # not tried again at once
    assert store.counts["failed"] == 1
    store.retry_at_s = time.monotonic()
    assert save(store, TOWN, first=whole) == 7
    look(store, open_store)


def test_when_the_disk_is_full_one_record_makes_room_and_not_all(store, monkeypatch, clock):
    save(store, SEA)
    clock.now_s += 10
    with full_after(0, monkeypatch):
        assert save(store, TOWN) == 0
    assert store.counts["evicted"] == 1
    assert store.longest_prefix(SEA) == 5
    assert store.check() == 5


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("name", ["open", "write", "replace", "mkdir", "utime", "pwrite", "statvfs",
                                  "scandir"])
def test_no_error_of_the_system_reaches_a_request(store, open_store, monkeypatch, name, number):
    with monkeypatch.context() as patched:
        patched.setattr(os, name, refusing(number))
        assert save(store, TOWN) in (0, 7)              # 7 where the call is not needed
        assert read(store, TOWN) in (0, 7)
        store.longest_prefix(SEA)
        store.touch(TOWN)
        store.expire()
    store.retry_at_s = 0
    assert save(store, TOWN) == 7
    look(store, open_store)


# --- interrupted, or failing at any one call ----------------------------------------------------

CHANGES = ("open", "write", "pwrite", "utime", "replace", "unlink", "mkdir", "stat", "statvfs",
           "preadv", "read", "fstat")


@contextmanager
def failing_at(number, error, monkeypatch):
    """The `number`-th call of the system fails. Yields a list, in which it then lies."""
    calls, failed = itertools.count(1), []

    def wrap(name):
        real = getattr(os, name)

        def call(*args, **options):
            if next(calls) == number:
                failed.append(name)
                raise error
            return real(*args, **options)
        return call
    with monkeypatch.context() as patched:
        for name in CHANGES:
            patched.setattr(os, name, wrap(name))
        yield failed


def busy(store):
    """Saves that evict, reads of a damaged record, uses that are noted."""
    store.clock.now_s += 100
    save(store, TOWN)
    read(store, SEA)
    save(store, TOWER, first=3)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()],
                         ids=["error", "interrupt"])
def test_a_failure_at_any_one_call_leaves_all_in_order(tmp_path, clock, monkeypatch, error):
    """No operation raises an error. An interrupt comes through, and nothing is half-done."""
    failed_at, before = set(), num_open_files()
    for number in itertools.count(1):
        def open_store(root=tmp_path / str(number)):
            return DiskStore(root, MODEL, capacity_bytes=9 * SIZE, min_free_bytes=0, clock=clock)
        store = open_store()
        save(store, SEA)
        change(path_of(store, SEA[3]), 222, b"??")
        with failing_at(number, error, monkeypatch) as failed:
            try:
                busy(store)
            except KeyboardInterrupt:
                assert isinstance(error, KeyboardInterrupt)
        if not failed:
            break
        failed_at.update(failed)
        assert not store.ledger.is_held
        for keys in CHAINS.values():
            assert read(store, keys) == store.longest_prefix(keys)
        assert all(path.suffix == ".kv" for path in shared.all_files(store.root)) or failed == [
            "unlink"]                                   # which was to remove a temporary one
        store.retry_at_s = 0
        assert save(store, TOWN) == 7
        store.check()
        open_store().check()
        assert num_open_files() == before
    assert number > 100
    assert failed_at == set(CHANGES)


# --- vanished -----------------------------------------------------------------------------------

def test_what_vanishes_between_lookup_and_read_is_a_miss(store, open_store, clock):
    save(store, TOWN)
    assert store.longest_prefix(TOWN) == 7
    path_of(store, TOWN[4]).unlink()
    assert read(store, TOWN) == 4
    assert store.longest_prefix(TOWN) == 4
    store.evict(2 * SIZE)
    assert read(store, TOWN) == 4
    store.longest_prefix(TOWN)
    clock.now_s += 8 * DAY_S                            # it expires, and is still whole,
    assert read(store, TOWN[:2]) == 2
    assert store.expire() == 4                          # or is gone
    assert read(store, TOWN) == 0
    assert store.counts["bad"] == 0


def test_a_folder_deleted_under_an_open_store_is_made_again(store, open_store):
    save(store, TOWN)
    shutil.rmtree(store.root)
    assert read(store, TOWN) == store.longest_prefix(TOWN) == 0
    store.touch(TOWN)
    assert store.expire() == 0
    assert save(store, SEA) == 6
    assert save(store, TOWN) == 7
    look(store, open_store)
    shutil.rmtree(store.root)
    assert save(store, TOOL) == 5
    assert store.clear() == 5


@pytest.mark.parametrize("after", range(8))
def test_a_folder_deleted_while_a_chain_is_saved(store, open_store, monkeypatch, after):
    """What was written after that would be counted by nobody."""
    names, real = [], record.write

    def deleted(path, *rest):
        if len(names) == after:
            shutil.rmtree(store.root)
        names.append(path)
        real(path, *rest)
    with monkeypatch.context() as patched:
        patched.setattr(record, "write", deleted)
        assert save(store, TOWN) == min(after, 7)
    store.retry_at_s = 0
    read(store, TOWN)
    assert save(store, TOWN) == 7
    look(store, open_store)


def test_files_of_others_stay_as_they_are(store, open_store, clock):
    """A store tidies its own. What has another name, or lies in another place, is not its own."""
    save(store, TOWN)
    name = path_of(store, TOWN[0]).name
    others = [store.root / place for place in (
        "README", "notes.kv", f"zz/{name}", f"{name[:2]}/{name}.bak", f"{name[:2]}/note.tmp",
        f"{name[:2]}/short.kv", f"{name[:2]}/{'zz' * 32}.kv", f"deeper/{name[:2]}/{name}",
        f"{name[:2]}/77.tmp", "ab.tmp")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    (store.root / f"{SEA[0].hex()[:2]}").write_text("kept") if not (
        store.root / f"{SEA[0].hex()[:2]}").exists() else None
    store = open_store()
    assert store.check() == 7
    assert save(store, SEA) == 0                        # a file lies where its folder should
    assert store.longest_prefix(SEA) == read(store, SEA) == 0
    clock.now_s += 8 * DAY_S
    assert store.expire() == 7
    store.clear()
    assert all(path.read_text() == "kept" for path in others)
    assert store.check() == store.ledger.num_bytes == 0


# --- random lives -------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(12))
def test_random_lives_of_two_stores_on_one_folder(tmp_path, clock, monkeypatch, seed):
    """Saves, reads, uses, waits, damage, lost files and failing calls, in any order.

    A block is right or missing, always. After each fault-free step, the bytes are within the
    capacity and counted; and in the end, all can be saved again.
    """
    rng = random.Random(seed)
    capacity = rng.choice([3, 8, 13, 99]) * SIZE + 7

    def open_one():
        return DiskStore(tmp_path, MODEL, capacity_bytes=capacity, min_free_bytes=0, clock=clock)
    stores = [open_one(), open_one()]

    def step(store):
        keys = rng.choice(list(CHAINS.values()))
        keys = keys[:rng.randint(1, len(keys))]
        found = store.longest_prefix(keys)
        done = read(store, keys[:found])
        store.retry_at_s = 0
        saved = save(store, keys, rng.randint(0, done), rng.choice(["agent", "chat"]))
        assert saved <= len(keys)
        store.touch(keys)

    for _ in range(150):
        number, roll = rng.randrange(2), rng.random()
        clock.now_s += rng.choice([0, 1, 59, 61, DAY_S / 2]) * (rng.random() < 0.5)
        paths = sorted(tmp_path.glob("??/*.kv"))
        if roll < 0.1 and paths:
            change(rng.choice(paths), rng.randrange(SIZE), rng.randbytes(3))
        elif roll < 0.15 and paths:
            rng.choice(paths).unlink()
        elif roll < 0.2 and paths:
            cut(rng.choice(paths), rng.randrange(SIZE))
        elif roll < 0.25:
            stores[number] = open_one()
        elif roll < 0.35:
            with failing_at(rng.randint(1, 60), OSError(errno.EIO, "?"), monkeypatch):
                step(stores[number])
        elif roll < 0.4:
            stores[number].evict(rng.randrange(4 * SIZE))
        elif roll < 0.45:
            stores[number].expire()
        else:
            step(stores[number])
        assert shared.num_bytes(tmp_path) <= capacity
    store = open_one()
    for key in {key for keys in CHAINS.values() for key in keys}:
        read(store, [key])                              # what was damaged is found, and removed
    store.check()
    assert save(store, TEA) == 2
    assert read(open_one(), TEA) == 2
