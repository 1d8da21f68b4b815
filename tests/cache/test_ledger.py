"""The ledger: one count for all processes, right again after whatever happened to one of them."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest

from minimodel.cache.ledger import Ledger

# Forked: they must inherit what is open. None of them touches a tensor.
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def lies_there():
    """What the directory is said to hold, and how often it was counted."""
    return {"bytes": 0, "counted": 0}


@pytest.fixture
def make_ledger(tmp_path, lies_there):
    def recount():
        lies_there["counted"] += 1
        return lies_there["bytes"]
    return lambda patience_s=0.05: Ledger(tmp_path / "notes" / "ledger", recount, patience_s)


def on_disk(ledger):
    return struct.unpack("<q?", ledger.path.read_bytes())


def num_open_files():
    return len(list(Path("/dev/fd").iterdir()))


# --- the count ----------------------------------------------------------------------------------

def test_who_takes_it_first_counts_the_directory(make_ledger, lies_there):
    lies_there["bytes"] = 1234
    with make_ledger().held() as ledger:
        assert ledger.num_bytes == 1234
        assert on_disk(ledger) == (1234, False)         # open: whoever dies now is noticed
    assert on_disk(ledger) == (1234, True)


def test_what_is_made_of_the_count_is_kept_for_others(make_ledger, lies_there):
    first, second = make_ledger(), make_ledger()
    with first.held():
        first.num_bytes += 700
    with second.held():
        assert second.num_bytes == 700
        second.num_bytes -= 77
    with first.held():
        assert first.num_bytes == 623
    assert lies_there["counted"] == 1


def test_who_has_it_already_keeps_it(make_ledger):
    ledger = make_ledger()
    with ledger.held():
        ledger.num_bytes = 5
        with ledger.held() as again:
            assert again is ledger
            again.num_bytes += 3
        assert ledger.is_held                           # the inner one gives nothing back
        with pytest.raises(TimeoutError), make_ledger().held():
            pass
    assert not ledger.is_held
    assert on_disk(ledger) == (8, True)


@pytest.mark.parametrize("found", [b"", b"\1", bytes(8)])
def test_a_count_that_was_cut_is_made_anew(make_ledger, lies_there, found):
    ledger = make_ledger()
    ledger.path.parent.mkdir()
    ledger.path.write_bytes(found)
    lies_there["bytes"] = 91
    with ledger.held():
        assert ledger.num_bytes == 91


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ZeroDivisionError])
def test_after_an_error_or_an_interrupt_the_next_one_counts_anew(make_ledger, lies_there, error):
    """An interrupt between the rename and the count: the count would be closed, and wrong."""
    ledger = make_ledger()
    with ledger.held():
        ledger.num_bytes = 10
    lies_there["bytes"] = 17                            # renamed, not yet counted
    with pytest.raises(error), ledger.held():
        raise error
    with make_ledger().held() as other:
        assert other.num_bytes == 17
    assert not ledger.is_held


def test_a_count_that_fails_leaves_nothing_held(make_ledger, lies_there):
    ledger, before = make_ledger(), num_open_files()
    lies_there["bytes"] = "no number"
    with pytest.raises(struct.error), ledger.held():
        pass
    assert (ledger.is_held, num_open_files()) == (False, before)
    lies_there["bytes"] = 8
    with ledger.held():
        assert ledger.num_bytes == 8


@pytest.mark.parametrize("failing", [0, 1], ids=["opening", "closing"])
def test_a_full_disk_in_the_ledger_s_own_write_is_an_error_and_no_wrong_count(
        make_ledger, lies_there, monkeypatch, failing):
    ledger, before, real, calls = make_ledger(), num_open_files(), os.pwrite, []

    def full(file, data, place):
        calls.append(data)
        if len(calls) == failing + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, place)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"), ledger.held():
            ledger.num_bytes = lies_there["bytes"] = 21
    assert (ledger.is_held, num_open_files()) == (False, before)
    with make_ledger().held() as other:
        assert other.num_bytes == lies_there["bytes"]


# --- the lock -----------------------------------------------------------------------------------

def test_one_at_a_time_and_patience_ends(make_ledger, lies_there):
    first, second, before = make_ledger(), make_ledger(), num_open_files()
    with first.held():
        with pytest.raises(TimeoutError, match=r"another process has held .*ledger for more than "
                                               r"0\.05 s"), second.held():
            raise AssertionError("two have it")
        with pytest.raises(OSError):                # so that whoever saves has one kind of error
            second.held().__enter__()
    assert num_open_files() == before
    with second.held():
        pass


def test_who_waits_gets_it_in_time(make_ledger):
    ledger, ready = make_ledger(patience_s=20), FORK.Event()
    ledger.path.parent.mkdir()

    def hold():
        with make_ledger().held() as other:
            ready.set()
            time.sleep(0.2)
            other.num_bytes = 44
    process = FORK.Process(target=hold)
    process.start()
    ready.wait()
    with ledger.held():
        assert ledger.num_bytes == 44
    process.join()


def add_one(ledger, times):
    for _ in range(times):
        with ledger.held():
            count = ledger.num_bytes
            time.sleep(0)
            ledger.num_bytes = count + 1


def test_g39_no_process_s_bytes_are_lost(make_ledger, lies_there):
    """Four processes that each keep their own count: nobody sees that the disk is full."""
    ledger = make_ledger(patience_s=60)
    with ledger.held():
        pass
    processes = [FORK.Process(target=add_one, args=(ledger, 111)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    with ledger.held():
        assert ledger.num_bytes == 444
    assert lies_there["counted"] == 1


def test_who_is_killed_loses_the_lock_and_its_count(make_ledger, lies_there):
    ledger = make_ledger()
    with ledger.held():
        ledger.num_bytes = 10

    def die():
        with make_ledger().held() as other:
            other.num_bytes = 99
            os.kill(os.getpid(), signal.SIGKILL)
    process = FORK.Process(target=die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    lies_there["bytes"] = 12
    with ledger.held():
        assert ledger.num_bytes == 12


def test_a_process_forked_meanwhile_does_not_keep_the_lock(make_ledger):
    """It has a copy of the open file. Closing one's own would leave the lock to it."""
    ledger, done = make_ledger(), FORK.Event()
    with ledger.held():
        process = FORK.Process(target=done.wait)
        process.start()
    try:
        with make_ledger().held():
            pass
    finally:
        done.set()
        process.join()


def test_a_directory_that_was_removed_is_made_again(make_ledger, lies_there):
    ledger = make_ledger()
    with ledger.held():
        ledger.num_bytes = 500
    shutil.rmtree(ledger.path.parent)
    with ledger.held():
        assert ledger.num_bytes == 0
    assert lies_there["counted"] == 2


def test_who_waits_for_a_file_that_is_removed_takes_the_new_one(make_ledger, monkeypatch):
    """A lock on a file that is gone shuts nobody out: two would write at once."""
    ledger, real, seen = make_ledger(patience_s=20), fcntl.flock, []

    def removed_before_it_is_locked(file, how):
        if not seen:
            seen.append(shutil.rmtree(ledger.path.parent))
        return real(file, how)
    monkeypatch.setattr(fcntl, "flock", removed_before_it_is_locked)
    with ledger.held(), pytest.raises(TimeoutError), make_ledger().held():
        raise AssertionError("two have it")
    assert on_disk(ledger) == (0, True)


def test_a_ledger_that_cannot_be_opened_is_an_os_error(make_ledger):
    ledger = make_ledger()
    ledger.path.mkdir(parents=True)
    with pytest.raises(OSError), ledger.held():
        raise AssertionError("a directory cannot be held")
