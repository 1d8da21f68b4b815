"""The ledger: how many bytes a store's directory holds, kept by all of its processes together.

Four engines that each keep to their own 100 GB fill a disk of 130 GB (Mooncake PR 2419). So the
count lies in a file beside the records, and whoever writes or removes a record holds a lock on
that file: one writer at a time, and readers never wait. Who is killed, interrupted or stopped by
an error leaves the count marked as open: the next one to take the lock counts the directory anew.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

COUNT = struct.Struct("<q?")            # bytes of all records; whether the count is closed
PATIENCE_S = 0.5


class Ledger:
    """`recount()` gives the bytes that lie in the directory; it is called under the lock."""

    def __init__(self, path: Path, recount: Callable[[], int], patience_s: float = PATIENCE_S):
        self.path, self.recount, self.patience_s = path, recount, patience_s
        self.num_bytes = 0              # as it was when the lock was last held
        self.is_held = False

    @contextmanager
    def held(self) -> Iterator["Ledger"]:
        """With the lock: `num_bytes` is right, and what is made of it will be kept.

        Who has it already keeps it. Raises TimeoutError (an OSError) if another process holds
        it too long.
        """
        if self.is_held:
            yield self
            return
        with self._take() as file:
            self.is_held = True
            try:
                self._open_count(file)
                yield self
                self._note(file, closed=True)       # not reached after an error
            finally:
                self.is_held = False
                fcntl.flock(file, fcntl.LOCK_UN)    # closing would do, but for forked children

    def _take(self) -> FileIO:
        give_up = time.monotonic() + self.patience_s
        while (file := self._try_to_take()) is None:
            if time.monotonic() > give_up:
                raise TimeoutError(f"another process has held {self.path} for more than "
                                   f"{self.patience_s} s")
            time.sleep(0.001)
        return file

    def _try_to_take(self) -> FileIO | None:
        """The locked file. None if another has it, or if it is no longer the one that lies there
        (somebody removed the directory): who locks an old file shuts nobody out."""
        file, taken = self._open(), False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if not taken:
                file.close()
        return file if taken else None

    def _open(self) -> FileIO:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(self.path, flags, 0o600)
        except FileNotFoundError:       # somebody removed the whole directory
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, flags, 0o600)
        return FileIO(file, "r+")

    def _open_count(self, file: FileIO) -> None:
        found = os.pread(file.fileno(), COUNT.size, 0)
        count, closed = COUNT.unpack(found) if len(found) == COUNT.size else (0, False)
        self.num_bytes = count if closed else self.recount()
        self._note(file, closed=False)

    def _note(self, file: FileIO, closed: bool) -> None:
        os.pwrite(file.fileno(), COUNT.pack(self.num_bytes, closed), 0)
