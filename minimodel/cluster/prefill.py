"""The prefill side of a handoff: reads prompts, and keeps their blocks for those who fetch them.

The blocks are this worker's to free: when the other side says it is done (`ack`), or when the
lease ends, because it said nothing for too long. Until then nothing takes them for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..engine.engine import Engine, StepRecord
from ..engine.request import Request, Sampling, State
from .links import Link, Name
from .messages import Ack, Beat, Block, Declined, Granted, Prefill, Read, Refused, Ticket
from .worker import Worker, other_model

PROLONGS = 2 / 3        # of a lease, from a beat on


@dataclass
class Lease:
    """A HELD request's blocks, and until when they are kept. No beat goes beyond `ends_at`."""

    request: Request
    block_of: dict[bytes, int]
    expires_at: float
    ends_at: float


class PrefillWorker(Worker):
    """Reads prompts and keeps their blocks until they were fetched, but no longer than a lease.

    `epoch` numbers this worker's lives: tickets of an earlier one are refused.
    """

    def __init__(self, name: Name, engine: Engine, link: Link, *, epoch: int = 0,
                 lease_s: float = 30.0, longest_s: float = 300.0):
        super().__init__(engine, link)
        if not 0 < lease_s <= longest_s:
            raise ValueError(f"lease_s={lease_s} must be above 0, and at most longest_s={longest_s}"
                             ", beyond which nothing prolongs it")
        self.name, self.epoch, self.lease_s, self.longest_s = name, epoch, lease_s, longest_s
        self.leases: dict[str, Lease] = {}
        self.reading: dict[str, Request] = {}                   # not yet done
        self.askers: dict[str, tuple[Name, int]] = {}           # who waits for a ticket: its number
        self.hears = {Prefill: self.prefill, Read: self.read, Beat: self.beat, Ack: self.ack}

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, *, salt: bytes = b"",
               retention: str = "chat") -> Request:
        """Let a prompt wait to be read. A rejected one comes back finished, as of any engine."""
        one = replace(sampling or Sampling(), max_tokens=1)
        request = self.engine.submit(prompt, one, salt=salt, retention=retention, hold=True)
        if request.state is not State.FINISHED:
            self.reading[request.id] = request
        return request

    def run(self, prompt: Sequence[int], sampling: Sampling | None = None, **how) -> Ticket:
        """Read a prompt now; its ticket. Raises ValueError if it is rejected."""
        request = self.submit(prompt, sampling, **how)
        if request.state is State.FINISHED:
            raise ValueError(request.reason)
        while request.id in self.reading:
            self.step()
        return self.ticket(request)

    def step(self) -> StepRecord | None:
        """Messages, leases, one step of the engine, tickets. None if the engine had nothing to do.

        Whoever asked by message gets the ticket by message.
        """
        self.listen()
        self.reap()
        record = self.engine.step()
        for request in list(self.reading.values()):
            if request.state is State.HELD:
                self._grant(request)
        return record

    def _grant(self, request: Request) -> None:
        del self.reading[request.id]
        size, now = self.engine.cache.block_size, self.clock()
        num_full = len(request.prompt) // size
        blocks = dict(zip(request.keys[:num_full], request.table[:num_full], strict=True))
        self.leases[request.id] = Lease(request, blocks, now + self.lease_s, now + self.longest_s)
        self.counts["granted"] += 1
        if (asker := self.askers.pop(request.id, None)) is not None:
            to, number = asker
            self.send(to, Granted(number, self.ticket(request)))

    def ticket(self, request: Request) -> Ticket:
        """What somebody needs to know to fetch a HELD request's blocks."""
        lease = self.leases[request.id]
        return Ticket(request.id, self.epoch, self.name, self.engine.fingerprint,
                      tuple(lease.block_of), tuple(lease.block_of.values()), len(request.prompt),
                      request.output[0], lease.expires_at, self.lease_s,
                      request.num_found, request.num_loaded)

    def abort(self, request_id: str) -> None:
        """The client left: stop reading, or let the blocks go."""
        self.reading.pop(request_id, None)
        self.askers.pop(request_id, None)
        self.leases.pop(request_id, None)
        self.engine.abort(request_id)

    # --- messages -------------------------------------------------------------------------

    def prefill(self, sender: Name, message: Prefill) -> None:
        """Read a prompt for another worker, if it means the same notes."""
        problem = None
        if message.fingerprint != self.engine.fingerprint:
            problem = other_model(message.fingerprint, self.engine.fingerprint)
        elif (sender, message.number) in self.askers.values():      # asked twice: it is being read
            return
        else:
            problem = self._begin(sender, message)
        if problem is not None:
            self.send(sender, Declined(message.number, problem))

    def _begin(self, sender: Name, message: Prefill) -> str | None:
        """Let another worker's prompt wait to be read; else, why not."""
        try:
            request = self.submit(message.prompt, message.sampling, salt=message.salt,
                                  retention=message.retention)
        except ValueError as error:
            return str(error)
        if request.state is not State.FINISHED:
            self.askers[request.id] = (sender, message.number)
        return request.reason

    def read(self, sender: Name, message: Read) -> None:
        """Send the blocks that were asked for, all of them, or say why not."""
        if (problem := self._problem_of(message)) is not None:
            self.counts["refused"] += 1
            self.send(sender, Refused(problem, message.request_id, message.epoch))
            return
        self._prolong(self.leases[message.request_id])
        for block, key in zip(message.block_ids, message.keys, strict=True):
            entries = self.engine.cache.bytes_of(block)
            size = len(entries) // message.parts
            first = message.part * size
            self.send(sender, Block(message.request_id, message.epoch, key, message.part,
                                    message.parts, bytes(entries[first:first + size])))
            self.counts["sent"] += message.part == 0

    def _problem_of(self, message: Read) -> str | None:
        """Why a read is refused. The fingerprint comes before any byte."""
        if message.fingerprint != self.engine.fingerprint:
            return other_model(message.fingerprint, self.engine.fingerprint)
        if message.epoch != self.epoch:
            return f"the ticket is of epoch {message.epoch}, and this is epoch {self.epoch}"
        lease = self.leases.get(message.request_id)
        if lease is None or lease.expires_at <= self.clock():       # even if nobody has reaped it
            return f"the lease of {message.request_id} has ended"
        if (any(lease.block_of.get(key) != block
                for block, key in zip(message.block_ids, message.keys, strict=True))
                or message.parts not in (1, self.engine.cache.blocks.shape[1])
                or not 0 <= message.part < message.parts):
            return f"the ticket of {message.request_id} has no such blocks"
        return None

    def beat(self, sender: Name, message: Beat) -> None:
        """Somebody still wants the blocks."""
        if message.epoch == self.epoch and (lease := self.leases.get(message.request_id)):
            self._prolong(lease)

    def _prolong(self, lease: Lease) -> None:
        if lease.expires_at > self.clock():
            lease.expires_at = min(lease.ends_at, max(
                lease.expires_at, self.clock() + PROLONGS * self.lease_s))

    def ack(self, sender: Name, message: Ack) -> None:
        """The blocks were fetched, or nobody will fetch them."""
        if message.epoch == self.epoch and message.request_id in self.leases:
            self._let_go(message.request_id, "acked")

    def reap(self) -> None:
        """Let go of the blocks whose lease has ended."""
        now = self.clock()
        for name in [name for name, lease in self.leases.items() if lease.expires_at <= now]:
            self._let_go(name, "expired")

    def _let_go(self, name: str, why: str) -> None:
        del self.leases[name]
        self.engine.release(name)
        self.counts[why] += 1

    # --- looking --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless exactly the leased requests are held."""
        self.engine.check()
        held = {request.id for request in self.engine.scheduler.held}
        assert held == self.leases.keys(), f"held are {held}, leased {set(self.leases)}"

    def stats(self) -> dict[str, int]:
        return {"leases": len(self.leases), **self.counts, **self.engine.stats()}
