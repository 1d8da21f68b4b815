"""Processes that share a store, for the tests beside this file: killed at any call, or many.

    python store_processes.py kills FOLDER NUMBER      fork, kill, look; print what was killed where
    python store_processes.py writers FOLDER NUMBER    so many writers at once, watched
    python store_processes.py deaths FOLDER NUMBER     the same, and so many of them are killed

It loads no torch, so that a fork costs a millisecond. Every block's content follows from its key:
whoever reads can tell a wrong byte.
"""

import fcntl
import gc
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

from minimodel.cache import record
from minimodel.cache.keys import chain, root_key
from minimodel.cache.record import NO_KEY
from minimodel.cache.store import DAY_S, DiskStore

MODEL = "a7" * 32
PAYLOAD_BYTES = 211
RECORD_BYTES = record.HEAD_BYTES + PAYLOAD_BYTES
TEXTS = {"town": [3, 1, 4, 1, 5, 9, 2], "tower": [3, 1, 4, 8], "tool": [3, 7, 7, 7, 7],
         "tea": [3, 5], "sea": [6, 6, 6, 6, 6, 6]}                  # shared beginnings
CHAINS = {name: chain(root_key(MODEL), tokens, 1) for name, tokens in TEXTS.items()}
KEYS = sorted({key for keys in CHAINS.values() for key in keys})
# Which call of the system a process dies at: of each kind, one of so many. Writes are most often.
CALLS = {"open": 40, "close": 40, "write": 12, "pwrite": 8, "utime": 5, "replace": 6,
         "unlink": 10, "mkdir": 5, "flock": 8}


@cache
def payload(key: bytes) -> bytes:
    return hashlib.shake_256(key).digest(PAYLOAD_BYTES)


def save(store: DiskStore, keys, first: int = 0, retention: str = "chat") -> int:
    """Save a chain of which the blocks from `first` on are at hand."""
    return store.save_chain(keys, [payload(key) for key in keys[first:]], retention)


def read(store: DiskStore, keys) -> int:
    """How many of a chain's first blocks can be read. Each is right, or it is not there."""
    for place, key in enumerate(keys):
        into = bytearray(PAYLOAD_BYTES)
        if not store.read(key, memoryview(into)):
            return place
        assert into == payload(key), f"wrong bytes of block {place}"
    return len(keys)


def all_files(root: Path) -> list[Path]:
    """Records and what is on its way to become one."""
    return [path for path in root.glob("??/*") if path.suffix in (".kv", ".tmp")]


def num_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in all_files(root))


# --- killed at any call -------------------------------------------------------------------------

def fork(child) -> int:
    """Run a function in a process of its own; its number."""
    if (process := os.fork()) == 0:
        status = 1
        try:
            child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return process


def die_at(name: str, number: int, rng: random.Random, tell: int) -> None:
    """From now on, this process is killed before, in or after its `number`-th call of a kind.

    A write that is killed has written a part of its bytes. Where it was is written to `tell`.
    """
    module, os_write = fcntl if name == "flock" else os, os.write
    real, left = getattr(module, name), [number]
    where = rng.choice(("before", "in", "after") if name == "write" else ("before", "after"))

    def call(*args, **options):
        left[0] -= 1
        if left[0] != 0:
            return real(*args, **options)
        try:
            if where == "in":
                real(args[0], args[1][:rng.randrange(1, len(args[1]))])
            elif where == "after":
                real(*args, **options)
        finally:                        # even if the call failed, as it does where nothing is
            os_write(tell, f"{where} {name}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
    setattr(module, name, call)


def live(root: Path, rng: random.Random) -> None:
    """Open the store; save, read and use some chains. There is room for 9 records of 20."""
    store = DiskStore(root, MODEL, capacity_bytes=9 * RECORD_BYTES + 5, min_free_bytes=0)
    for _ in range(rng.randint(1, 4)):
        keys = rng.choice(list(CHAINS.values()))
        keys = keys[:rng.randint(1, len(keys))]
        found = store.longest_prefix(keys)
        save(store, keys, first=rng.randint(0, found))
        read(store, keys)


def prepare(root: Path, rng: random.Random) -> str:
    """What a process may find: records as they are, long unused, or one of them damaged."""
    paths = sorted(root.glob("??/*.kv"))
    state = rng.choice(["as it was"] * 3 + ["unused", "old", "damaged"])
    if state in ("unused", "old"):
        used_s = time.time() - (600 if state == "unused" else 8 * DAY_S)
        for path in paths:
            os.utime(path, (used_s, used_s))
    elif state == "damaged" and paths:
        path = rng.choice(paths)
        with path.open("r+b") as file:
            file.seek(rng.randrange(RECORD_BYTES))
            file.write(b"?!")
    return state


def look(root: Path, state: str, watcher: DiskStore) -> None:
    """After a kill: what is there is whole, right, the beginning of a chain, and counted."""
    if state != "damaged":
        watcher.check()                 # one that was open before: its count is right again
    store = DiskStore(root, MODEL, capacity_bytes=9 * RECORD_BYTES + 5, min_free_bytes=0)
    files = all_files(root)
    assert all(path.suffix == ".kv" for path in files), "a temporary file survived"
    assert len(files) == len(store.index) == num_bytes(root) // RECORD_BYTES
    assert store.ledger.num_bytes == num_bytes(root)
    for key in KEYS:
        assert read(store, [key]) <= (key in store.index)
    if state == "damaged":
        store.check()                   # what was damaged has been found, and is gone
        store.clear()                   # else a hole could not be told from a fault
        return
    assert store.counts["bad"] == 0, store.last_error
    for key, entry in store.index.entries.items():
        assert entry.parent == NO_KEY or entry.parent in store.index.entries, key.hex()


def kills(root: Path, number: int) -> dict[str, int]:
    """Kill so many processes, one after the other, in one folder that lives on."""
    killed, tries = Counter(), 0
    gc.freeze()                         # a fork copies less
    watcher = DiskStore(root, MODEL, capacity_bytes=9 * RECORD_BYTES + 5, min_free_bytes=0)
    while killed.total() < number:
        tries += 1
        assert tries < 3 * number, "most processes end before their call comes"
        rng = random.Random(tries)
        state = prepare(root, rng)
        hear, tell = os.pipe()
        name = rng.choice([*CALLS, "write", "write"])

        def child(rng=rng, tell=tell, name=name):
            die_at(name, 1 + int(CALLS[name] * rng.random() ** 2), rng, tell)
            live(root, rng)
        status = os.waitpid(fork(child), 0)[1]
        os.close(tell)
        where = os.read(hear, 100).decode()
        os.close(hear)
        assert status == (signal.SIGKILL if where else 0), f"try {tries} ended with {status}"
        if where:
            killed[where] += 1
        look(root, state, watcher)
    return {"killed": dict(killed), "tries": tries}


# --- many at once -------------------------------------------------------------------------------

CAPACITY = 13 * RECORD_BYTES + 100


def write(root: Path, seed: int) -> None:
    """Save and read chains, some shared with the other writers."""
    rng = random.Random(seed)
    own = chain(root_key(MODEL), [3, 1, 4, 100 + seed, 5, 9], 1)
    store = open_watcher(root)
    real = record.write

    def watched(*args):                 # the record is written and not yet renamed: the most there
        real(*args)                     # ever is
        assert num_bytes(root) <= CAPACITY, "over the capacity"
    record.write = watched
    counts = Counter(misses=0)
    for _ in range(150):
        keys = rng.choice([own, *CHAINS.values()])
        found = store.longest_prefix(keys)
        done = read(store, keys[:found])
        counts["misses"] += done < found
        counts["found"] += found
        save(store, keys, first=done)
        store.retry_at_s = 0            # after the lock was not to be had
        if rng.random() < 0.02:
            store.evict(3 * RECORD_BYTES)
        if rng.random() < 0.02:
            time.sleep(0.01)
    assert store.counts["bad"] == 0, store.last_error
    (root / f"writer-{seed}.json").write_text(json.dumps({**store.stats(), **counts}))


def open_watcher(root: Path) -> DiskStore:
    watcher = DiskStore(root, MODEL, capacity_bytes=CAPACITY, min_free_bytes=0)
    watcher.ledger.patience_s = 60
    return watcher


def size_now(watcher: DiskStore) -> int:
    """The bytes in the folder while nobody writes: as counted, and not over the capacity."""
    with watcher.ledger.held() as ledger:
        size = num_bytes(watcher.root)
        assert size == ledger.num_bytes <= CAPACITY
    return size


def writers(root: Path, number: int) -> dict:
    """So many at once, in one folder; its size is watched."""
    watcher = open_watcher(root)
    processes, sizes = [fork(lambda seed=seed: write(root, seed)) for seed in range(number)], []
    while processes:
        sizes.append(size_now(watcher))
        time.sleep(0.003)
        for process in list(processes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                assert status == 0, f"a writer ended with {status}"
                processes.remove(process)
    sizes.append(size_now(watcher))
    watcher.check()
    return {"most": max(sizes), "looks": len(sizes), "counts": [
        json.loads((root / f"writer-{seed}.json").read_text()) for seed in range(number)]}


def deaths(root: Path, number: int) -> dict:
    """Three write at once; every few milliseconds one of them is killed, and another comes."""
    rng, seeds, sizes, watcher = random.Random(number), itertools.count(), [], open_watcher(root)

    def come():
        seed = next(seeds)
        return fork(lambda: write(root, seed))
    processes = [come() for _ in range(3)]
    for _ in range(number):
        time.sleep(rng.uniform(0.002, 0.03))
        process = processes.pop(rng.randrange(3))
        os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        assert status in (0, signal.SIGKILL), f"a writer ended with {status}"
        processes.append(come())
        sizes.append(size_now(watcher))
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return {"most": max(sizes), "records": watcher.check(),
            "bad": open_watcher(root).counts["bad"]}


if __name__ == "__main__":
    task, folder, count = sys.argv[1:]
    tasks = {"kills": kills, "writers": writers, "deaths": deaths}
    print(json.dumps(tasks[task](Path(folder), int(count))))
