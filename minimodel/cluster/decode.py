"""The decode side of a handoff: fetches the notes of prompts that were read elsewhere, and writes.

Only what is not here is fetched, block by block, while others are served. It goes through the
engine's own door for blocks that come from elsewhere: the request is LOADING, and `Arrivals` is
its store. What does not come is computed.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cache.keys import chain, root_key
from ..engine.engine import Engine, StepRecord
from ..engine.request import Request, Sampling, State
from .arrivals import Arrivals
from .links import Link, Name
from .messages import Ack, Beat, Block, Read, Refused, Ticket
from .worker import HandoffError, Worker, other_model

BEATS = 6               # in the time of a lease: five may be lost


@dataclass(eq=False)
class Pull:
    """An accepted ticket whose blocks may still be wanted."""

    ticket: Ticket
    request: Request
    accepted_at: float
    beat_at: float                      # when the last beat was sent
    heard_at: float = 0.0               # when the last block came, or was first asked for
    ended_at: float | None = None
    num_bytes: int = 0                  # of notes, that have come
    asked: dict[tuple[int, bytes], float] = field(default_factory=dict)     # (part, key): when

    def __post_init__(self):
        self.block_of = dict(zip(self.ticket.keys, self.ticket.block_ids, strict=True))


class DecodeWorker(Worker):
    """Writes answers whose prompts were read elsewhere.

    A block that does not come is asked for again after `retry_s`; after `patience_s` without any
    of a ticket's blocks, the rest is computed. At most `window` blocks are underway at a time;
    `by_layer`, all blocks' first layer is asked for before the second.
    """

    def __init__(self, engine: Engine, link: Link, *, patience_s: float = 5.0,
                 retry_s: float = 0.5, window: int = 128, by_layer: bool = False):
        super().__init__(engine, link)
        if not 0 < retry_s <= patience_s or window < 1:
            raise ValueError(f"retry_s={retry_s} must be above 0 and at most patience_s="
                             f"{patience_s}, and window={window} at least 1")
        self.patience_s, self.retry_s, self.window = patience_s, retry_s, window
        self.parts = engine.cache.blocks.shape[1] if by_layer else 1
        self.arrivals = Arrivals(engine.store)
        engine.store = engine.scheduler.store = self.arrivals
        engine.scheduler.ready = self.arrivals.ready
        self.pulls: list[Pull] = []
        self.ended: deque[Pull] = deque(maxlen=1_000)       # the last ones, to look at
        self.hears = {Block: self.block, Refused: self.refused}

    def accept(self, ticket: Ticket, prompt: Sequence[int], sampling: Sampling | None = None, *,
               salt: bytes = b"", retention: str = "chat") -> Request:
        """Go on with a prompt that another worker has read. Its first token is written at once.

        Raises HandoffError, before any byte is fetched, if the ticket is not for this model,
        prompt and salt. Lets the other worker's blocks go at once if none are needed.
        """
        try:
            self._require(ticket, prompt, salt)
            request = self.engine.submit(prompt, sampling, salt=salt, retention=retention,
                                         written=(ticket.first_token,))
        except ValueError:
            self._ack(ticket)
            raise
        request.num_found = ticket.num_found            # for the bill: what was read, and where
        if request.state is State.FINISHED:
            self._ack(ticket)
        else:
            self.arrivals.promise(ticket.keys)
            self.pulls.append(Pull(ticket, request, self.clock(), self.clock()))
        return request

    def _require(self, ticket: Ticket, prompt: Sequence[int], salt: bytes) -> None:
        ours = self.engine.fingerprint
        if ticket.fingerprint != ours:
            raise HandoffError(other_model(ticket.fingerprint, ours))
        keys = chain(root_key(ours, salt), prompt, self.engine.cache.block_size)
        if ticket.num_tokens != len(prompt) or list(ticket.keys) != keys:
            raise HandoffError(f"the ticket {ticket.request_id} of worker {ticket.worker} is for "
                               f"another prompt or salt: it names {len(ticket.keys)} blocks of "
                               f"{ticket.num_tokens} tokens, and the prompt has {len(prompt)}")

    def poll(self) -> StepRecord | None:
        """Messages, one step of the engine, and whatever the handoffs need next. Never waits.

        None if the engine had nothing to do; something may be underway then: see `is_idle`.
        """
        self.listen()
        record = self.engine.step()
        for pull in list(self.pulls):
            self._tend(pull)
        self._ask()
        return record

    @property
    def is_idle(self) -> bool:
        return self.engine.scheduler.is_idle and not self.pulls

    def abort(self, request_id: str) -> None:
        """The client left. What still comes for it is dropped."""
        self.engine.abort(request_id)
        for pull in list(self.pulls):
            self._tend(pull)

    # --- one ticket -----------------------------------------------------------------------

    def _tend(self, pull: Pull) -> None:
        """End a pull that is over, one way or another; else keep its lease alive."""
        now = self.clock()
        silent = bool(pull.asked) and now - pull.heard_at > self.patience_s
        if pull.request.state not in (State.WAITING, State.LOADING):
            self._close(pull, "done")               # it runs, or its client left: nothing is needed
        elif self.link.is_lost(pull.ticket.worker) or silent:
            self._close(pull, "failed")
        elif now - pull.beat_at >= pull.ticket.lease_s / BEATS:
            pull.beat_at = now
            self.send(pull.ticket.worker, Beat(pull.ticket.request_id, pull.ticket.epoch))

    def _close(self, pull: Pull, how: str) -> None:
        """From now on, what this ticket promised and has not come is computed."""
        self.pulls.remove(pull)
        pull.ended_at = self.clock()
        self.ended.append(pull)
        self.arrivals.take_back(pull.ticket.keys)
        self.counts[how] += 1
        pull.request.num_loaded = pull.ticket.num_loaded            # for the bill, too
        self._ack(pull.ticket)

    def _ack(self, ticket: Ticket) -> None:
        self.send(ticket.worker, Ack(ticket.request_id, ticket.epoch))

    # --- asking for blocks ----------------------------------------------------------------

    def _ask(self) -> None:
        """Ask for what LOADING requests wait for, each block by one ticket that promises it."""
        wanted = self._wanted()
        for part in range(self.parts):
            for pull in self.pulls:
                keys = [key for key in wanted if wanted[key] is pull
                        and not self.arrivals.has(key, part)]
                self._ask_for(pull, part, keys)

    def _wanted(self) -> dict[bytes, Pull]:
        """The blocks that are to be fetched, in order, and by which ticket."""
        size, promised = self.engine.cache.block_size, {}
        for pull in self.pulls:
            for key in pull.ticket.keys:
                promised.setdefault(key, pull)
        return {key: promised[key] for request, end in self.engine.scheduler.loading.items()
                for key in request.keys[request.computed // size:end // size] if key in promised}

    def _ask_for(self, pull: Pull, part: int, keys: list[bytes]) -> None:
        now, ticket = self.clock(), pull.ticket
        underway = {unit for unit, asked_at in pull.asked.items()
                    if now - asked_at < self.retry_s}
        room = self.window - len(underway)
        new = [key for key in keys if (part, key) not in underway][:room]
        if not new:
            return
        if not pull.asked:
            pull.heard_at = now
        self.counts["asked_again"] += sum((part, key) in pull.asked for key in new)
        pull.asked.update(((part, key), now) for key in new)
        self.send(ticket.worker, Read(ticket.request_id, ticket.epoch, ticket.fingerprint,
                                      tuple(new), tuple(pull.block_of[key] for key in new),
                                      part, self.parts))

    # --- messages -------------------------------------------------------------------------

    def _pull_of(self, sender: Name, message: Block | Refused) -> Pull | None:
        name = (sender, message.request_id, message.epoch)
        return next((pull for pull in self.pulls if name == (
            pull.ticket.worker, pull.ticket.request_id, pull.ticket.epoch)), None)

    def block(self, sender: Name, message: Block) -> None:
        """A block, or a layer of one. What nobody waits for any more is dropped."""
        pull = self._pull_of(sender, message)
        unit = (message.part, message.key)
        if pull is None or unit not in pull.asked or message.parts != self.parts:
            self.counts["late"] += 1
            return
        del pull.asked[unit]
        if self.arrivals.came(message.key, message.part, self.parts, message.payload):
            pull.heard_at = self.clock()
            pull.num_bytes += len(message.payload)
            self.counts["parts"] += 1
            self.counts["bytes"] += len(message.payload)

    def refused(self, sender: Name, message: Refused) -> None:
        """The other worker does not have the blocks (any more)."""
        if (pull := self._pull_of(sender, message)) is not None:
            self._close(pull, "failed")

    # --- looking --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless what is kept is what open tickets promise."""
        self.engine.check()
        promised = Counter(key for pull in self.pulls for key in pull.ticket.keys)
        assert promised == self.arrivals.promised, "promises and tickets do not agree"
        kept = self.arrivals.whole.keys() | self.arrivals.parts.keys()
        assert kept <= promised.keys(), "blocks are kept that nobody promises"

    def stats(self) -> dict[str, int]:
        return {"pulls": len(self.pulls), **self.counts, **self.engine.stats()}
