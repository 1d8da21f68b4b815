"""Links: how messages get from one worker to another. Here: within one process.

A link sends bytes and never waits; it may lose them. So whoever sends must be ready to send
again, and whoever receives, to hear a thing twice. `wire.py` has the same between processes.

`Network` is a network in one process with a clock that is passed in: messages take time, and a
*fault* may lose, delay, double or damage any of them. Tests and chapters break it as they like.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

Name = Hashable


class Link(Protocol):
    """One worker's end."""

    def send(self, to: Name, data: bytes) -> None: ...

    def receive(self) -> list[tuple[Name, bytes]]:
        """All that has come since, with its senders. Does not wait."""

    def is_lost(self, name: Name) -> bool:
        """Whether this worker is known to be gone. One that hangs is not."""


@dataclass(frozen=True)
class Sent:
    """A message on its way: the `number`-th of its network, from 0."""

    number: int
    sender: Name
    receiver: Name
    data: bytes


# What becomes of a message: how much later than others each copy comes, and with which bytes.
Fault = Callable[[Sent], Iterable[tuple[float, bytes]]]


def no_fault(sent: Sent) -> list[tuple[float, bytes]]:
    return [(0.0, sent.data)]


def lost(sent: Sent) -> list[tuple[float, bytes]]:
    return []


def late(by_s: float) -> Fault:
    return lambda sent: [(by_s, sent.data)]


def doubled(sent: Sent) -> list[tuple[float, bytes]]:
    return [(0.0, sent.data), (0.0, sent.data)]


def corrupted(sent: Sent) -> list[tuple[float, bytes]]:
    """One bit of the last byte is turned: of a block, it is in the notes."""
    return [(0.0, sent.data[:-1] + bytes([sent.data[-1] ^ 1]))]


def only(number: int, fault: Fault) -> Fault:
    """The fault befalls one message, and no other."""
    return lambda sent: fault(sent) if sent.number == number else no_fault(sent)


class Network:
    """All links of a process. A message takes `delay_s`, and its bytes their time on the wire,
    one message after the other for each pair of workers."""

    def __init__(self, clock: Callable[[], float], *, delay_s: float = 0.0,
                 bytes_per_s: float = math.inf, fault: Fault = no_fault):
        self.clock, self.delay_s, self.bytes_per_s, self.fault = clock, delay_s, bytes_per_s, fault
        self.boxes: dict[Name, list] = {}           # by receiver: a heap, the earliest first
        self.busy_until: dict[tuple[Name, Name], float] = {}
        self.dead: set[Name] = set()
        self.tells = True                           # of the dead; else they seem to hang
        self.log: list[Sent] = []

    def link(self, name: Name) -> "LocalLink":
        """A worker's end of it; whatever was underway to an earlier worker of that name is gone."""
        self.boxes[name] = []
        self.dead.discard(name)
        return LocalLink(self, name)

    def kill(self, name: Name, *, tells: bool = True) -> None:
        """From now on nothing comes from this worker and nothing reaches it."""
        self.dead.add(name)
        self.tells = tells

    def send(self, sender: Name, receiver: Name, data: bytes) -> None:
        sent = Sent(len(self.log), sender, receiver, bytes(data))
        self.log.append(sent)
        if sender in self.dead or receiver in self.dead or receiver not in self.boxes:
            return
        begins = max(self.clock(), self.busy_until.get((sender, receiver), 0.0))
        ends = self.busy_until[sender, receiver] = begins + len(data) / self.bytes_per_s
        for copy, (later_s, found) in enumerate(self.fault(sent)):
            heappush(self.boxes[receiver],
                     (ends + self.delay_s + later_s, sent.number, copy, sender, found))

    def receive(self, name: Name) -> list[tuple[Name, bytes]]:
        box, come = self.boxes[name], []
        while box and box[0][0] <= self.clock():
            *_, sender, data = heappop(box)
            come.append((sender, data))
        return [] if name in self.dead else come

    @property
    def num_bytes(self) -> int:
        """Sent so far."""
        return sum(len(sent.data) for sent in self.log)


@dataclass(frozen=True)
class LocalLink:
    network: Network
    name: Name

    def send(self, to: Name, data: bytes) -> None:
        self.network.send(self.name, to, data)

    def receive(self) -> list[tuple[Name, bytes]]:
        return self.network.receive(self.name)

    def is_lost(self, name: Name) -> bool:
        return self.network.tells and name in self.network.dead
