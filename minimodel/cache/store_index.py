"""The store's index: which records there are, how large, and when each was last used.

What is found, what has expired, what is evicted is decided here, with numbers only: the files are
the business of `store.py`. The simulator uses the index alone.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

DAY_S = 86_400
# From the last use on. Both numbers are said by DeepSeek in one video only (claims S36, S37).
RETENTION_S = {"agent": 3 * DAY_S, "chat": 7 * DAY_S}
AHEAD_S = 60                    # a time further in the future than this is a clock's mistake


@dataclass(slots=True)
class Entry:
    """A record, as the index knows it."""

    parent: bytes
    num_bytes: int
    ttl_s: int
    last_used_s: float


class StoreIndex:
    """The records of a store of `capacity_bytes`, from the one used longest ago to the latest.

    A chain is touched from its last block to its first. So a block was always used later than
    those that follow it, and the one used longest ago is a leaf: a chain is evicted from its end.
    """

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.time):
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes={capacity_bytes} must be at least 0")
        self.capacity_bytes, self.clock = capacity_bytes, clock
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and not self._has_expired(entry, self.clock())

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of a chain's first blocks are here. An expired one is not."""
        now = self.clock()
        for count, key in enumerate(keys):
            entry = self.entries.get(key)
            if entry is None or self._has_expired(entry, now):
                return count
        return len(keys)

    def touch(self, keys: Sequence[bytes], used_s: float | None = None) -> None:
        """These blocks of one chain, from its first on, are used now (or were, at a time)."""
        now = self.clock()
        for key in reversed(keys):
            if (entry := self.entries.get(key)) is not None:
                entry.last_used_s = now if used_s is None else max(used_s, entry.last_used_s)
                self.entries.move_to_end(key)

    def path(self, key: bytes, known: Container[bytes] = ()) -> list[bytes]:
        """The chain that ends with a block, from its first block on that is here and not known."""
        path: dict[bytes, None] = {}
        while key in self.entries and key not in known and key not in path:     # no endless ring
            path[key] = None
            key = self.entries[key].parent
        return list(path)[::-1]

    def add(self, key: bytes, parent: bytes, num_bytes: int, ttl_s: int,
            last_used_s: float | None = None) -> None:
        """A record is here, last used at a time (now, if none is given)."""
        self.remove(key)
        last_used_s = self.clock() if last_used_s is None else last_used_s
        self.entries[key] = Entry(parent, num_bytes, ttl_s, last_used_s)
        self.num_bytes += num_bytes

    def remove(self, key: bytes) -> Entry | None:
        """A record is gone. None if it was not here."""
        if (entry := self.entries.pop(key, None)) is not None:
            self.num_bytes -= entry.num_bytes
        return entry

    def expire(self) -> list[bytes]:
        """Remove all that nobody used for as long as it was to be kept; their keys.

        A time in the future is a clock's mistake, and would make its record immortal: it
        becomes now.
        """
        now = self.clock()
        for entry in self.entries.values():
            if entry.last_used_s > now + AHEAD_S:
                entry.last_used_s = now
        gone = [key for key, entry in self.entries.items() if self._has_expired(entry, now)]
        for key in gone:
            self.remove(key)
        return gone

    def room_for(self, num_bytes: int) -> list[bytes]:
        """Remove what must go so that so many bytes fit: the keys, the one used longest ago first.

        Raises ValueError, and removes nothing, if they would not fit into an empty store.
        """
        if num_bytes > self.capacity_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit into a store of {self.capacity_bytes}: "
                             "give it more capacity")
        gone = []
        while self.num_bytes + num_bytes > self.capacity_bytes:
            gone.append(self.oldest())
            self.remove(gone[-1])
        return gone

    def oldest(self, kept: Container[bytes] = ()) -> bytes | None:
        """The key of the record used longest ago, but for those that are `kept`."""
        return next((key for key in self.entries if key not in kept), None)

    def sort(self) -> None:
        """Bring records that were added in any order into the order of their use.

        Who uses a block uses all before it: none goes before those that follow it.
        """
        newest_first: dict[bytes, Entry] = {}
        for last in sorted(self.entries, key=lambda key: -self.entries[key].last_used_s):
            for key in self.path(last, known=newest_first):
                newest_first[key] = self.entries[key]
        self.entries = OrderedDict(reversed(newest_first.items()))

    @staticmethod
    def _has_expired(entry: Entry, now: float) -> bool:
        return now - entry.last_used_s > entry.ttl_s


def retention_of(name: str) -> int:
    """Seconds for which a class of records is kept after its last use."""
    if name not in RETENTION_S:
        raise ValueError(f"retention={name!r} is none of {', '.join(RETENTION_S)}")
    return RETENTION_S[name]
