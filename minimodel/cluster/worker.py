"""What prefill and decode workers have in common: an engine, a link, ears for messages."""

from collections import Counter
from collections.abc import Callable, Iterable

from ..engine.engine import Engine
from .links import Link, Name
from .messages import Message, MessageError, pack, unpack


class HandoffError(ValueError):
    """A handoff that must not be: the two sides do not mean the same notes."""


class Worker:
    """What both sides have: an engine, a link, and a method for each kind of message."""

    def __init__(self, engine: Engine, link: Link):
        if not engine.reuse:
            raise HandoffError("an engine without reuse has no keys to name blocks by: leave out "
                               "reuse=False")
        self.engine, self.link, self.clock = engine, link, engine.clock
        self.counts: Counter[str] = Counter()
        self.hears: dict[type, Callable[[Name, Message], None]] = {}

    def send(self, to: Name, message: Message) -> None:
        self.link.send(to, pack(message))

    def listen(self) -> None:
        """Take in all messages that have come. Damaged ones count as lost, unexpected as late."""
        for sender, data in self.link.receive():
            try:
                message = unpack(data)
            except MessageError:
                self.counts["damaged"] += 1
                continue
            if (hear := self.hears.get(type(message))) is not None:
                hear(sender, message)


def require_one_model(fingerprints: Iterable[str]) -> None:
    """Raise HandoffError unless all workers have notes of one kind: asked when they connect."""
    first, *others = fingerprints
    for other in others:
        if other != first:
            raise HandoffError(other_model(other, first))


def other_model(theirs: str, ours: str) -> str:
    return (f"the notes are of fingerprint {theirs[:12]}... and this worker's are {ours[:12]}...: "
            "start both with one checkpoint, one number type and one block size")
