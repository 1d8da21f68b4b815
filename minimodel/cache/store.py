"""The store: blocks on disk, which outlive the process that computed them.

A record a block (see `record.py`), under the block's key. A record appears by one rename, so it
is whole or not there; it is checked when it is read, so a doubtful one is removed and counts as
missing. Which records there are, what has expired, and what is evicted, `store_index.py` decides.

What remembers may cost time, never a token, and never a request: whatever fails here, the
engine computes. Several processes may share a directory, each with a store of its own for each
thread. They agree on its size (`ledger.py`), and find each other's records, because the file
system is asked before a block is called missing.
"""

import errno
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

from . import record
from .keys import KEY_BYTES
from .ledger import Ledger
from .record import NO_KEY, Header, RecordError
from .store_index import AHEAD_S, DAY_S, RETENTION_S, Entry, StoreIndex, retention_of

__all__ = ["DAY_S", "RETENTION_S", "DiskStore", "StoreError", "StoreIndex"]

CAPACITY_BYTES = 1 << 30
MIN_FREE_BYTES = 1 << 28
TOUCH_S = 60                    # a use is noted on disk if the last note is older than this
EXPIRE_S = 60                   # what has expired is removed at most so often
RETRY_S = 5.0                   # after a save that failed, none is tried for so long
FULL = {errno.ENOSPC, errno.EDQUOT}
NAME = re.compile(r"[0-9a-f]{64}\.kv")
TEMPORARY = re.compile(r"\d+-[0-9a-f]{32}\.tmp")
NOT_THERE = (FileNotFoundError, NotADirectoryError)


class StoreError(ValueError):
    """A directory that cannot be a store, or another model's store; the message says what to do."""


class DiskStore:
    """The records under `root`: read and written for the model with this `fingerprint`.

    All models' records in the directory share its capacity. Without a fingerprint a store can
    be looked at and tidied, not used.
    """

    def __init__(self, root: Path | str, fingerprint: str = "", *,
                 capacity_bytes: int = CAPACITY_BYTES, min_free_bytes: int = MIN_FREE_BYTES,
                 clock: Callable[[], float] = time.time):
        if not re.fullmatch("([0-9a-f]{64})?", fingerprint):
            raise StoreError(f"fingerprint={fingerprint!r} must be 64 hexadecimal digits, as "
                             "keys.fingerprint makes them")
        if min_free_bytes < 0:
            raise StoreError(f"min_free_bytes={min_free_bytes} must be at least 0")
        self.root, self.fingerprint = Path(root), bytes.fromhex(fingerprint)
        self.min_free_bytes, self.clock = min_free_bytes, clock
        self.index = StoreIndex(capacity_bytes, clock)
        self.ledger = Ledger(self.root / "ledger", self._recount)
        self.noted_s: dict[bytes, float] = {}       # when a record's use was last noted on disk
        self.refused: set[bytes] = set()            # records found bad that may still lie there
        self.retry_at_s = 0.0                       # when the next save may be tried
        self.expired_at_s = 0.0                     # when expired records were last removed
        self.counts = dict.fromkeys(("loaded", "bad", "saved", "failed", "evicted", "expired"), 0)
        self.last_error = ""
        self._open()

    # --- opening --------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make a store in {self.root}: {error.strerror}. Give a "
                             "directory in which you may write") from error
        try:
            self.scan()
            with self.ledger.held() as ledger:
                ledger.num_bytes = self._recount()
                self._remove_expired(ledger)
        except OSError as error:            # read-only, or busy: it can still be read
            self.last_error = str(error)

    def require(self, fingerprint: str) -> None:
        """Raise StoreError if this store was opened for another model."""
        if self.fingerprint.hex() != fingerprint:
            raise StoreError(f"the store in {self.root} was opened for the model with fingerprint "
                             f"{self.fingerprint.hex()[:12]}... and this one has "
                             f"{fingerprint[:12]}...: open it with this model's fingerprint")

    def _require_fingerprint(self) -> None:
        if not self.fingerprint:
            raise StoreError(f"the store in {self.root} was opened without a fingerprint, to be "
                             "looked at: open it with the model's to read and save")

    def scan(self) -> None:
        """Learn anew what lies in the directory, from the records' heads."""
        found = dict.fromkeys(bytes.fromhex(path.stem) for path in self._files())
        for key in self.index.entries.keys() - found:
            self._forget(key)
        for key in found:
            self._learn(key)
        self.index.sort()

    def _files(self) -> Iterator[Path]:
        """All records. Whatever else lies in the directory is not the store's."""
        return (path for path in self.root.glob("??/*.kv")
                if NAME.fullmatch(path.name) and path.name.startswith(path.parent.name))

    def _temporary_files(self) -> Iterator[Path]:
        return (path for path in self.root.glob("??/*.tmp") if TEMPORARY.fullmatch(path.name))

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.root / name[:2] / f"{name}.kv"

    def _learn(self, key: bytes) -> bool:
        """Put what the directory says of a record into the index. False if it is not there, or
        has expired."""
        if key in self.refused:
            return False
        path, known = self._path(key), self.index.entries.get(key)
        try:
            header, used_s = record.read_header(path), path.stat().st_mtime
            if header.key != key:
                raise RecordError("is another block's record")
        except NOT_THERE:
            self._forget(key)
            return False
        except (RecordError, OSError) as error:
            self._discard(key, error)
            return False
        self.noted_s[key] = used_s
        if used_s > (now := self.clock()) + AHEAD_S:    # it would never expire
            used_s = now
            self._note_use(key, now)
        self.index.add(key, header.parent, header.record_bytes, header.ttl_s,
                       max(used_s, known.last_used_s) if known else used_s)
        return key in self.index

    def _recount(self) -> int:
        """Bytes of all records; under the lock, when nobody else can have a temporary file."""
        for path in self._temporary_files():
            path.unlink(missing_ok=True)
        return sum(size_of(path) for path in self._files())

    def _forget(self, key: bytes) -> Entry | None:
        """A record is not there: another process removed it, or this one will not have it."""
        self.noted_s.pop(key, None)
        return self.index.remove(key)

    # --- reading --------------------------------------------------------------------------

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of a chain's first blocks are here, whoever wrote them."""
        count = self.index.longest_prefix(keys)
        learned = False
        while count < len(keys) and self._learn(keys[count]):
            learned, count = True, count + 1
            count += self.index.longest_prefix(keys[count:])
        if learned:                             # not used yet, but in order: parents after children
            self.index.touch(self.index.path(keys[count - 1]), used_s=0)
        return count

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a block's bytes into `into`. False if it is not here, or was not as it should be:
        then `into` holds nothing that may be used."""
        self._require_fingerprint()
        try:
            record.read(self._path(key), key, self.fingerprint, into)
        except NOT_THERE:
            self._forget(key)
            return False
        except (RecordError, OSError) as error:
            self._discard(key, error)
            return False
        self.counts["loaded"] += 1
        return True

    def _discard(self, key: bytes, error: Exception) -> None:
        """Remove a doubtful record. If that cannot be done, it is at least not asked for again."""
        self.last_error = f"record {key.hex()[:12]}... {error}"
        self.counts["bad"] += 1
        try:
            with self.ledger.held() as ledger:
                self._unlink(key, ledger)
        except OSError:
            self.refused.add(key)
            self._forget(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """A chain's blocks, from its first on, are used now: they are kept from now on."""
        self.index.touch(keys)
        now = self.clock()
        for key in keys:
            if key in self.index.entries and abs(now - self.noted_s.get(key, 0)) > TOUCH_S:
                self._note_use(key, now)

    def _note_use(self, key: bytes, now: float) -> None:
        self.noted_s[key] = now
        try:
            os.utime(self._path(key), (now, now))
        except NOT_THERE:
            self._forget(key)
        except OSError as error:            # read-only, say: this process at least knows
            self.last_error = str(error)

    # --- writing --------------------------------------------------------------------------

    def save_chain(self, keys: Sequence[bytes], payloads: Sequence, retention: str = "chat") -> int:
        """Keep a chain's blocks; how many of its first blocks are now here.

        `payloads` are the bytes of the chain's last blocks, as many as there are; those before
        them were saved earlier. Parents are written before children, and the first failure ends
        it: what is here is always the beginning of a chain. No failure is raised.
        """
        self._require_fingerprint()
        ttl_s = retention_of(retention)
        first = len(keys) - len(payloads)
        if first < 0:
            raise ValueError(f"{len(payloads)} payloads for a chain of {len(keys)} keys: give the "
                             "keys from the chain's first block on")
        if wrong := [key for key in keys if len(key) != KEY_BYTES]:
            raise ValueError(f"{wrong[0]!r} is no key of {KEY_BYTES} bytes: make keys with "
                             "keys.chain")
        self.touch(keys[:self.longest_prefix(keys)])    # which forgets those that are gone
        saved = self.index.longest_prefix(keys)
        if first <= saved < len(keys) and time.monotonic() >= self.retry_at_s:
            try:
                with self.ledger.held() as ledger:
                    while saved and not self._learn(keys[saved - 1]):
                        saved -= 1              # others have removed it: no child without parents
                    while first <= saved < len(keys) and self._save(
                            keys, saved, payloads[saved - first], ttl_s, ledger):
                        saved += 1
            except OSError as error:
                self.last_error, self.retry_at_s = str(error), time.monotonic() + RETRY_S
            self.counts["failed"] += saved < len(keys)
            self.touch(keys[:saved])
        return saved

    def _save(self, keys: Sequence[bytes], place: int, payload, ttl_s: int,
              ledger: Ledger) -> bool:
        """Write one record, by a file of its own that is renamed when it is whole."""
        key, parent, now = keys[place], keys[place - 1] if place else NO_KEY, self.clock()
        if self._learn(key):                        # another process has written it meanwhile
            return True
        header = Header(max(0, int(now)), ttl_s, memoryview(payload).nbytes, key, parent,
                        self.fingerprint)
        if not self._make_room(header.record_bytes, ledger, kept=keys):
            self.last_error = "no room: the capacity, or the floor of free disk space, is reached"
            return False
        path = self._path(key)
        before = size_of(path)                      # of a record that was refused, or has expired
        try:
            self._publish(path, header, payload, now)
        except OSError as error:
            if error.errno not in FULL or (oldest := self.index.oldest(keys)) is None:
                raise
            self._evict(oldest, ledger)             # once; then the disk is full of other things
            self._publish(path, header, payload, now)
        ledger.num_bytes += header.record_bytes - before
        self.refused.discard(key)
        self.index.add(key, parent, header.record_bytes, ttl_s)
        self.noted_s[key] = now
        self.counts["saved"] += 1
        return True

    def _publish(self, path: Path, header: Header, payload, now: float) -> None:
        path.parent.mkdir(exist_ok=True)    # not the root: who removed it removed the ledger, too
        temporary = path.with_name(f"{os.getpid()}-{uuid.uuid4().hex}.tmp")
        try:
            record.write(temporary, header, payload, now)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, ledger: Ledger, kept: Container[bytes] = ()) -> bool:
        """Evict until so many bytes may be written. False if that cannot be, without `kept`."""
        if abs(self.clock() - self.expired_at_s) > EXPIRE_S:
            self._remove_expired(ledger)
        if self._lacks(num_bytes, ledger, evictable=ledger.num_bytes):
            return False                            # nothing is thrown away in vain
        scanned = False
        while self._lacks(num_bytes, ledger):
            if (oldest := self.index.oldest(kept)) is not None:
                self._evict(oldest, ledger)
            elif scanned:
                return False
            else:                                   # others may have written what we do not know
                self.scan()
                ledger.num_bytes, scanned = self._recount(), True
        return True

    def _lacks(self, num_bytes: int, ledger: Ledger, evictable: int = 0) -> bool:
        return (ledger.num_bytes - evictable + num_bytes > self.index.capacity_bytes
                or free_bytes(self.root) + evictable - num_bytes < self.min_free_bytes)

    # --- forgetting -----------------------------------------------------------------------

    def expire(self) -> int:
        """Remove what nobody used for as long as it was to be kept; how many records."""
        before = self.counts["expired"]
        try:
            with self.ledger.held() as ledger:
                self._remove_expired(ledger)
        except OSError as error:
            self.last_error = str(error)
        return self.counts["expired"] - before

    def evict(self, num_bytes: int) -> int:
        """Remove the records used longest ago until so many bytes are gone; how many bytes.

        Raises OSError if that cannot be done, as `clear` and `check` do.
        """
        with self.ledger.held() as ledger:
            before = ledger.num_bytes
            while before - ledger.num_bytes < num_bytes and self.index.entries:
                self._evict(self.index.oldest(), ledger)
            return before - ledger.num_bytes

    def clear(self) -> int:
        """Remove all records; how many."""
        with self.ledger.held() as ledger:
            self.scan()
            num_gone = sum(self._unlink(key, ledger) for key in list(self.index.entries))
            ledger.num_bytes = self._recount()
        return num_gone

    def _remove_expired(self, ledger: Ledger) -> None:
        self.expired_at_s = self.clock()
        for key in self.index.expire():
            if not self._is_used_by_others(key):
                self.counts["expired"] += self._unlink(key, ledger)

    def _evict(self, key: bytes, ledger: Ledger) -> None:
        """Remove a record, unless another process used it later than we know: then it waits."""
        if not self._is_used_by_others(key, self.index.entries[key].last_used_s):
            self.counts["evicted"] += self._unlink(key, ledger)

    def _is_used_by_others(self, key: bytes, known_s: float = -math.inf) -> bool:
        """Whether a record was used later than we knew. If so, it has its new place in the order,
        and so have those before it."""
        if not self._learn(key) or (used_s := self.index.entries[key].last_used_s) <= known_s + 1:
            return False
        self.index.touch(self.index.path(key), used_s)
        return True

    def _unlink(self, key: bytes, ledger: Ledger) -> bool:
        """Remove a record. False if another process was first (and has counted it)."""
        path = self._path(key)
        try:
            num_bytes = path.stat().st_size
            path.unlink()
        except NOT_THERE:
            self._forget(key)
            return False
        ledger.num_bytes -= num_bytes
        entry = self._forget(key)
        if entry is not None and entry.num_bytes != num_bytes:      # somebody cut it, and
            ledger.num_bytes = self._recount()                      # who knows what was counted
        return True

    # --- looking --------------------------------------------------------------------------

    def check(self) -> int:
        """Read every record; how many there are. Raises AssertionError for what is not in order:
        a record that cannot be trusted, one too many, a file left behind, a count that is off."""
        with self.ledger.held() as ledger:
            sizes = {bytes.fromhex(path.stem): size_of(path) for path in self._files()}
            counted, total = ledger.num_bytes, sum(sizes.values())
            assert counted == total, f"the ledger says {counted} bytes, the records have {total}"
            assert total <= self.index.capacity_bytes, (
                f"{total} bytes are over the capacity of {self.index.capacity_bytes}")
            left = [path.name for path in self._temporary_files()]
            assert not left, f"files left behind: {left}"
            for key in sizes:
                self._check_record(key)
        return len(sizes)

    def _check_record(self, key: bytes) -> None:
        path = self._path(key)
        try:
            header = record.read_header(path)
            record.read(path, key, header.fingerprint, memoryview(bytearray(header.num_bytes)))
        except (RecordError, OSError) as error:
            raise AssertionError(f"record {path.name} {error}") from None

    def header(self, key: bytes) -> Header:
        """What a record says of itself. Raises RecordError, or OSError if it is gone."""
        return record.read_header(self._path(key))

    def stats(self) -> dict[str, int]:
        """Records and bytes as this process knows them, and what it has done so far."""
        return {"records": len(self.index), "bytes": self.index.num_bytes,
                "capacity": self.index.capacity_bytes, **self.counts}


def size_of(path: Path) -> int:
    """A file's bytes; 0 if it is not there."""
    try:
        return path.stat().st_size
    except NOT_THERE:
        return 0


def free_bytes(path: Path) -> int:
    """Bytes that may still be written to the disk on which a directory lies."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
