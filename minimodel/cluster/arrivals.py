"""Arrivals: blocks that another worker sends, as the engine sees them: a store.

The engine asks a store which beginning of a chain it has, and reads blocks from it while a
request is LOADING. This store has what was *promised* by tickets. A promised block may still be
underway: `ready` says how far a request can read without waiting, and the engine serves others
meanwhile. When a promise is taken back, its blocks are not there, and what waits for them is
computed instead.

Only a step of the engine writes into its blocks, by `read`. So what comes late, after its
request has left, can never be written into blocks that are others' by then.
"""

from collections import Counter
from collections.abc import Sequence

from ..cache.store import DiskStore


class Arrivals:
    """`behind` is a store on disk, asked for what nobody has promised."""

    def __init__(self, behind: DiskStore | None = None):
        self.behind = behind
        self.promised: Counter[bytes] = Counter()       # by key: by how many tickets
        self.whole: dict[bytes, bytes] = {}             # come, and not yet let go of
        self.parts: dict[bytes, dict[int, bytes]] = {}  # of blocks that come layer by layer
        self.counts = Counter() if behind is None else behind.counts

    # --- what tickets change --------------------------------------------------------------

    def promise(self, keys: Sequence[bytes]) -> None:
        self.promised.update(keys)

    def take_back(self, keys: Sequence[bytes]) -> None:
        """One promise of these blocks is over. Those that nobody else promises are dropped."""
        self.promised.subtract(keys)
        for key in keys:
            if not self.promised[key]:
                del self.promised[key]
                self.whole.pop(key, None)
                self.parts.pop(key, None)

    def has(self, key: bytes, part: int) -> bool:
        return key in self.whole or part in self.parts.get(key, ())

    def came(self, key: bytes, part: int, parts: int, payload: bytes) -> bool:
        """Part of a block is here. False if nobody wants it, or it is here already."""
        if not self.promised[key] or self.has(key, part):
            return False
        found = self.parts.setdefault(key, {})
        found[part] = payload
        if len(found) == parts:
            del self.parts[key]
            self.whole[key] = b"".join(found[i] for i in range(parts))
        return True

    # --- what the engine asks -------------------------------------------------------------

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of a chain's first blocks are here or promised; else, how many are on disk."""
        count = next((i for i, key in enumerate(keys) if not self.promised[key]), len(keys))
        return count or (self.behind.longest_prefix(keys) if self.behind else 0)

    def ready(self, keys: Sequence[bytes]) -> int:
        """How many of these need no waiting: they are here, or will not come."""
        return next((i for i, key in enumerate(keys)
                     if self.promised[key] and key not in self.whole), len(keys))

    def read(self, key: bytes, into: memoryview) -> bool:
        """Copy a block to where the engine wants it. False if it is not here."""
        payload = self.whole.get(key)
        if payload is None:
            return self.behind.read(key, into) if self.behind else False
        if len(payload) != len(into):
            return False
        into[:] = payload
        return True

    def save_chain(self, keys: Sequence[bytes], payloads: Sequence, retention: str = "chat") -> int:
        """Keep blocks on disk, if there is one. Without, none is ever offered again."""
        return self.behind.save_chain(keys, payloads, retention) if self.behind else len(keys)
