"""What each replica remembers, as far as the router has heard.

Two ways to fill the index. *Approximately*: the router notes what it sends where, and forgets
the oldest, as the replicas will. *By events*: each replica says which blocks it has published and
which it has given up. Events are numbered, so that a gap is noticed, and carry the epoch of the
replica's present life, so that what an earlier life said counts no more.

An index may be wrong: it then costs a prompt that is read again, never a token.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


class PrefixIndex:
    """Blocks by replica. With `capacity`, the blocks of each that were used longest ago go."""

    def __init__(self, capacity: int | None = None):
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity={capacity} blocks hold nothing: give at least 1, or None")
        self.capacity = capacity
        self.blocks_of: dict[str, OrderedDict[Hashable, None]] = {}
        self.holders_of: dict[Hashable, set[str]] = {}
        self.listeners: dict[str, Listener] = {}

    def match(self, keys: Sequence[Hashable]) -> dict[str, int]:
        """How many of a chain's first blocks each replica has; those with none are left out."""
        found: dict[str, int] = {}
        holders = None
        for count, key in enumerate(keys, start=1):
            here = self.holders_of.get(key, set())
            holders = here if holders is None else holders & here
            if not holders:
                break
            found.update(dict.fromkeys(holders, count))
        return found

    def stored(self, replica: str, keys: Sequence[Hashable]) -> None:
        """A replica has these blocks of one chain; its first ones are given up last."""
        blocks = self.blocks_of.setdefault(replica, OrderedDict())
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
            self.holders_of.setdefault(key, set()).add(replica)
        while self.capacity is not None and len(blocks) > self.capacity:
            self.removed(replica, [next(iter(blocks))])

    def removed(self, replica: str, keys: Sequence[Hashable]) -> None:
        """A replica has given these blocks up. Some may never have been heard of."""
        for key in keys:
            self.blocks_of.get(replica, {}).pop(key, None)
            if (holders := self.holders_of.get(key)) is not None:
                holders.discard(replica)
                if not holders:
                    del self.holders_of[key]

    def drop(self, replica: str) -> None:
        """Forget all of a replica. Who listens to it will have to catch up."""
        self.removed(replica, list(self.blocks_of.get(replica, ())))
        self.blocks_of.pop(replica, None)
        if (listener := self.listeners.get(replica)) is not None:
            listener.epoch = -1

    def check(self) -> None:
        """Raise AssertionError unless both sides say the same."""
        one = {(key, name) for name, blocks in self.blocks_of.items() for key in blocks}
        other = {(key, name) for key, names in self.holders_of.items() for name in names}
        assert one == other, "blocks and holders do not point at each other"
        assert all(self.holders_of.values()), "a block without a holder was kept"


@dataclass(frozen=True)
class Event:
    """One change of a replica's memory; `number` counts the changes of an epoch from 0."""

    epoch: int
    number: int
    key: Hashable
    is_stored: bool


class EventLog:
    """A replica's side: what its block pool publishes and gives up; the last `keep` are kept.

    Its methods `stored` and `removed` are what a pool calls (see `BlockPool.listener`).
    """

    def __init__(self, epoch: int, keep: int = 1_000):
        self.epoch, self.num_events = epoch, 0
        self.events: deque[Event] = deque(maxlen=keep)
        self.keys: dict[Hashable, None] = {}            # all that are here now, oldest first

    def stored(self, key: Hashable) -> None:
        self.keys[key] = None
        self._note(key, True)

    def removed(self, key: Hashable) -> None:
        self.keys.pop(key, None)
        self._note(key, False)

    def _note(self, key: Hashable, is_stored: bool) -> None:
        self.events.append(Event(self.epoch, self.num_events, key, is_stored))
        self.num_events += 1

    def since(self, number: int) -> list[Event] | None:
        """The events from a number on. None if some of them are no longer kept."""
        if number < self.num_events - len(self.events):
            return None
        return [event for event in self.events if event.number >= number]


class Listener:
    """The router's side of one replica's events: keeps an index true to what the replica has."""

    def __init__(self, index: PrefixIndex, replica: str):
        self.index, self.replica = index, replica
        self.epoch, self.next_number = -1, 0            # -1: nothing was heard yet
        index.listeners[replica] = self

    def hear(self, event: Event, log: EventLog) -> None:
        """Take in an event. `log` is asked where some were missed.

        An event of an earlier life, or one heard before, says nothing new.
        """
        if event.epoch < self.epoch or (event.epoch == self.epoch
                                        and event.number < self.next_number):
            return
        if (event.epoch, event.number) == (self.epoch, self.next_number):
            self._apply(event)
        else:
            self.catch_up(log)

    def catch_up(self, log: EventLog) -> None:
        """Hear what was missed; if it is no longer to be had, begin anew with what is there now."""
        if log.epoch != self.epoch:
            self.index.drop(self.replica)
            self.epoch, self.next_number = log.epoch, 0
        missed = log.since(self.next_number)
        if missed is None:
            self.index.drop(self.replica)
            self.index.stored(self.replica, list(reversed(log.keys)))
            self.epoch, self.next_number = log.epoch, log.num_events
        else:
            for event in missed:
                self._apply(event)

    def _apply(self, event: Event) -> None:
        change = self.index.stored if event.is_stored else self.index.removed
        change(self.replica, [event.key])
        self.next_number = event.number + 1
