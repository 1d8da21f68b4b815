"""The handoff: one worker reads a prompt, another writes the answer.

Reading a long prompt takes one long step, and whoever decodes in the same engine waits for it.
So a *prefill worker* reads prompts and a *decode worker* writes answers, and the blocks of notes
go from one to the other. The life of a handoff:

    prefill side                          decode side
    1. RUNNING: reads the prompt, samples
       the first token
    2. HELD: keeps the blocks, on a lease;
       grants a ticket ------------------> 3. accept: the same model? the same keys? The first
                                              token counts. The request waits for blocks
       each beat prolongs the lease <----- 4. beats, for as long as it wants the blocks
       answers, block by block <---------> 5. LOADING: asks for the blocks it does not have
       lets the blocks go <--------------- 6. ack: RUNNING, on its own blocks

Each side frees its own blocks: the prefill side on the ack or when the lease ends, the decode
side when the request ends, as ever. Each has a deadline, so neither waits for a dead one. And
whatever goes wrong, the decode worker computes what it did not get: the same tokens, later.

The order of things is that of vLLM's NixlConnector (pull, leases, beats), much simplified.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cache.store_index import retention_of
from ..engine.engine import StepRecord
from ..engine.request import Request, Sampling, State
from .decode import DecodeWorker, Pull
from .links import Name
from .messages import Ack, Bye, Declined, Granted, Prefill, Ticket
from .prefill import Lease, PrefillWorker
from .worker import HandoffError, require_one_model

__all__ = ["Call", "DecodeWorker", "Front", "HandoffError", "Lease", "PrefillWorker", "Pull",
           "Ticket", "require_one_model"]


@dataclass(eq=False)
class Call:
    """A client's prompt. `worker` reads it (None: it is read here); then it is a `request`."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    how: dict
    asked_at: float
    worker: Name | None = None
    request: Request | None = None

    @property
    def output(self) -> list[int]:
        return self.request.output if self.request else []

    @property
    def is_done(self) -> bool:
        return self.request is not None and self.request.state is State.FINISHED


@dataclass(eq=False)
class Front:
    """Takes prompts where answers are written, and has them read elsewhere.

    `readers` are the names of the prefill workers, who take turns. A prompt for which no ticket
    comes within `patience_s`, or whose worker is lost, is read here.
    """

    decode: DecodeWorker
    readers: Sequence[Name]
    patience_s: float = 60.0
    calls: dict[int, Call] = field(default_factory=dict)            # that wait for their ticket
    num_calls: int = 0
    counts: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.decode.hears |= {Granted: self.granted, Declined: self.declined}

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, *,
               salt: bytes = b"", retention: str = "chat") -> Call:
        decode, how = self.decode, {"salt": salt, "retention": retention}
        decode.engine.require_tokens(prompt)
        retention_of(retention)
        call = Call(self.num_calls, tuple(prompt), sampling or Sampling(), how, decode.clock())
        self.num_calls += 1
        there = [name for name in self.readers if not decode.link.is_lost(name)]
        if not there:
            self._read_here(call)
            return call
        call.worker = there[call.number % len(there)]
        self.calls[call.number] = call
        decode.send(call.worker, Prefill(call.number, call.prompt, call.sampling,
                                         decode.engine.fingerprint, **how))
        return call

    def _read_here(self, call: Call) -> None:
        self.counts["read_here"] += 1
        self.calls.pop(call.number, None)
        call.worker = None
        call.request = self.decode.engine.submit(call.prompt, call.sampling, **call.how)

    def poll(self) -> StepRecord | None:
        """One step of everything; see `DecodeWorker.poll`."""
        record = self.decode.poll()
        for call in list(self.calls.values()):
            if (self.decode.link.is_lost(call.worker)
                    or self.decode.clock() - call.asked_at > self.patience_s):
                self._read_here(call)
        return record

    @property
    def is_idle(self) -> bool:
        return not self.calls and self.decode.is_idle

    def abort(self, call: Call) -> None:
        """The client left. A ticket that comes for it is given back."""
        self.calls.pop(call.number, None)
        if call.request is not None:
            self.decode.abort(call.request.id)

    def granted(self, sender: Name, message: Granted) -> None:
        """A prompt was read: go on with it. If nobody waits for it any more, say so."""
        ticket, call = message.ticket, self.calls.get(message.number)
        if call is None or call.worker != sender:
            self.decode.send(sender, Ack(ticket.request_id, ticket.epoch))
            return
        try:
            call.request = self.decode.accept(ticket, call.prompt, call.sampling, **call.how)
        except HandoffError:
            self._read_here(call)
            return
        del self.calls[message.number]
        self.counts["read_there"] += 1

    def declined(self, sender: Name, message: Declined) -> None:
        if (call := self.calls.get(message.number)) is not None and call.worker == sender:
            self._read_here(call)

    def close(self) -> None:
        """Tell the prefill workers that nothing more will come."""
        for name in self.readers:
            self.decode.send(name, Bye())
