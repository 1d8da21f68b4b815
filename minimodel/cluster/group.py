"""A group of ranks that goes on when one of them dies.

Ranks that share their experts meet in every layer of every step: one that dies, or hangs, stops
all others. A *supervisor*, which is not in the group, mends it:

    1. notice       a meeting fails for the others: at once if a process was killed, after
                    `patience_s` if it hangs. They stop and say so
    2. decide       who says so lives. Who has said nothing after another patience is killed,
                    so that it cannot come back in the middle of something
    3. new epoch    a number, the survivors, and a new place for each expert; or
                    GroupTooSmallError, if they have no room for all
    4. join         survivors leave the old group, meet in the new one, and fetch the experts
                    they lack from the checkpoint. Their own requests go on: their notes are
                    where they were, and a step that failed was never counted
    5. requeue      requests of the dead start again on survivors, with all they had written.
                    Their notes come from the store, or are computed again

No request is lost, and none gets another token than it would have got. The supervisor keeps each
call's prompt and output: the only copy that must not die. What members do is in `member.py`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..engine.request import Sampling
from ..pricing import Usage
from .balance import Placement, place_experts
from .epochs import Abort, Epoch, Joined, Lost, Progress, Ready, Serve, Stop, Written
from .launch import WorkerError, Workers, reference
from .mailbox import PAUSE_S, Mailbox
from .worker import require_one_model

MOST_MOVES = 2              # a request whose ranks die again and again is not tried on all


class GroupTooSmallError(RuntimeError):
    """The ranks that are left have no room for all experts."""


@dataclass(eq=False)
class Call:
    """A client's prompt and its answer so far."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    how: dict
    member: int | None = None                   # who serves it
    output: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)    # when they were heard of
    reason: str | None = None
    found: Written | None = None                # what its first member found: that is billed
    moved: int = 0                              # times that its member died
    computed_again: int = 0                     # tokens that a dead member had computed
    had: int = 0                                # of which this many, when it moved last

    @property
    def usage(self) -> Usage:
        """A member's death is not on the bill."""
        if self.found is None:
            return Usage(0, 0, 0)
        found = min(self.found.found, len(self.prompt) - 1)     # or it reaches into the answer
        return Usage(found, len(self.prompt) - found, len(self.output),
                     disk_hit_tokens=min(self.found.loaded, found))

    @property
    def due(self) -> int:
        """Tokens it may still cost."""
        return len(self.prompt) + self.sampling.max_tokens - len(self.output)


@dataclass(eq=False)
class Change:
    """The beginning of an epoch, and why."""

    epoch: Epoch
    dead: tuple[int, ...] = ()
    why: str = ""                               # started, rebalanced, or what members said
    noticed_s: float = 0.0                      # somebody said so, or a process had ended
    decided_s: float = 0.0                      # who lives
    rebuilt_s: float = 0.0                      # all have joined
    moved: tuple[int, ...] = ()                 # calls
    joined: dict[int, int] = field(default_factory=dict)    # of each member: experts fetched


class Supervisor:
    """Serves calls by a group of `num_ranks` new processes, one of which may die now and then.

    `make(*arguments)` makes each one's engine, and a way to fetch experts: see `member.toy`, the
    default. `patience_s` must be longer than a step, or fetching experts, ever takes. `room` is
    the number of experts of one layer that a rank can hold (None: all), `spare` how many each has
    beyond its share if there is room: further copies of the busiest.
    """

    def __init__(self, num_ranks: int, make: Callable | str = "minimodel.cluster.member:toy",
                 *arguments, patience_s: float = 5.0, room: int | None = None, spare: int = 0):
        for name, value, least in (("num_ranks", num_ranks, 1), ("room", room, 1),
                                   ("spare", spare, 0), ("patience_s", patience_s, 0.1)):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        self.workers = Workers("minimodel.cluster.member:live", num_ranks, reference(make),
                               arguments, patience_s)
        self.patience_s, self.room, self.spare = patience_s, room, spare
        self.clock = time.perf_counter
        self.calls: dict[int, Call] = {}        # that are not finished
        self.num_calls = 0
        self.changes: list[Change] = []
        self.reporting: dict[int, str] = {}     # who has lost the group in this epoch, and why
        self.ready: dict[int, Ready] = {}
        self.loads: list[list[int]] = []        # [layers][experts]: how often tokens chose them

    def __enter__(self) -> "Supervisor":
        self.workers.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.workers.__exit__()

    def _start(self, deadline_s: float = 120.0) -> None:
        ranks = range(self.workers.num_workers)
        self.inboxes = {rank: Mailbox(self.workers.store, f"from/{rank}") for rank in ranks}
        self.outboxes = {rank: Mailbox(self.workers.store, f"to/{rank}") for rank in ranks}
        self._wait(self._all_ready, deadline_s, "the ranks to be ready")
        require_one_model([self.ready[rank].fingerprint for rank in ranks])
        self.loads = [[0] * self.ready[0].num_experts for _ in range(self.ready[0].num_layers)]
        self._begin(tuple(ranks))
        self._wait(self._all_joined, deadline_s, "the ranks to join")

    def _all_ready(self) -> bool:
        self.workers.require_alive()
        for rank, inbox in self.inboxes.items():
            for message in inbox.take():
                self.ready[rank] = message
        return len(self.ready) == len(self.inboxes)

    def _all_joined(self) -> bool:
        self.poll()
        return bool(self.changes[-1].rebuilt_s)

    def _wait(self, is_true: Callable[[], bool], deadline_s: float, what: str) -> None:
        ends_at = self.clock() + deadline_s
        while not is_true():
            if self.clock() > ends_at:
                raise WorkerError(f"waited {deadline_s:g} s for {what}")
            time.sleep(PAUSE_S)

    # --- calls ----------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, *,
               written: Sequence[int] = (), salt: bytes = b"", retention: str = "chat",
               reuse: bool = True) -> Call:
        """Have a prompt answered, by whichever member has least to do.

        `written` is what another group had written of the answer; the rest is as in the engine,
        and what that refuses comes back as rejected. Raises ValueError for a prompt of millions
        of tokens.
        """
        if not isinstance(sampling, Sampling | None):
            raise TypeError(f"sampling={sampling!r} must be a Sampling: it says how many tokens, "
                            "and how they are chosen")
        how = {"salt": salt, "retention": retention, "reuse": reuse}
        call = Call(self.num_calls, tuple(prompt), sampling or Sampling(), how,
                    output=list(written), token_times_s=[self.clock()] * len(written))
        self._assign(call)
        self.num_calls += 1
        self.calls[call.number] = call
        return call

    def abort(self, call: Call) -> None:
        """The client left."""
        if call.reason is None:
            self.outboxes[call.member].put(Abort(call.number))
            self._finish(call, "aborted")

    def _assign(self, call: Call) -> None:
        call.member = min(self.epoch.members, key=lambda member: (self._due(member), member))
        self.outboxes[call.member].put(
            Serve(call.number, call.prompt, call.sampling, tuple(call.output), call.how))

    def _due(self, member: int) -> int:
        return sum(call.due for call in self.calls.values() if call.member == member)

    def _finish(self, call: Call, reason: str) -> None:
        call.reason = reason
        del self.calls[call.number]

    @property
    def is_idle(self) -> bool:
        return not self.calls

    def run(self, deadline_s: float = 120.0) -> None:
        """Until all calls are answered. Raises WorkerError if that takes too long: when all ranks
        hang, for example, and none is left to say so."""
        def done() -> bool:
            self.poll()
            return self.is_idle
        self._wait(done, deadline_s, f"the answers to {len(self.calls)} calls")

    # --- the group ------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        return self.changes[-1].epoch

    def poll(self) -> None:
        """Hear what members say. If one is lost, mend the group.

        Raises GroupTooSmallError if that cannot be done; all calls keep what they have.
        """
        self._listen()
        if self.reporting or self._ended():
            self._mend()

    def rebalance(self, deadline_s: float = 120.0) -> None:
        """Place the experts again, by what tokens have chosen so far: an epoch without a death.

        It waits until all have joined the present one: or some would never hear of that.
        """
        self._wait(self._all_joined, deadline_s, "the ranks to join")
        self._begin(self.epoch.members, why="rebalanced")

    def _ended(self) -> list[int]:
        return [rank for rank in self.epoch.members if not self.workers.is_alive(rank)]

    def _listen(self) -> None:
        """Take in what members say. Who is not one any more has nothing to say."""
        for rank in self.epoch.members:
            for message in self.inboxes[rank].take():
                match message:
                    case Progress():
                        self._progress(rank, message)
                    case Joined(number) if number == self.epoch.number:
                        self._joined(rank, message)
                    case Lost(number, why) if number == self.epoch.number:
                        self.reporting[rank] = why

    def _joined(self, rank: int, message: Joined) -> None:
        change = self.changes[-1]
        change.joined[rank] = message.num_fetched
        if len(change.joined) == len(change.epoch.members):
            change.rebuilt_s = self.clock()

    def _progress(self, rank: int, message: Progress) -> None:
        self.loads = [[before + more for before, more in zip(*layers, strict=True)]
                      for layers in zip(self.loads, message.chosen, strict=True)]
        for written in message.written:
            call = self.calls.get(written.number)       # None: aborted meanwhile
            if call is not None and call.member == rank:
                self._write(call, written)

    def _write(self, call: Call, written: Written) -> None:
        if call.found is None:
            call.found = written
        if call.had:
            call.computed_again += call.had - written.found
            call.had = 0
        call.output += written.tokens
        call.token_times_s += [self.clock()] * len(written.tokens)
        if written.reason:
            self._finish(call, written.reason)

    def _mend(self) -> None:
        noticed_s = self.clock()
        survivors = self._survivors(noticed_s)
        dead = tuple(sorted({*self.epoch.members} - {*survivors}))
        why = "; ".join(f"{rank}: {why}" for rank, why in sorted(self.reporting.items()))
        self._begin(survivors, dead, why, noticed_s=noticed_s, decided_s=self.clock())

    def _survivors(self, noticed_s: float) -> tuple[int, ...]:
        """Those who say that they have lost the group; whoever stays silent is killed.

        Who says so has waited for a patience, and the others may have begun up to a step later.
        But an ended process is noticed before anybody has waited: that takes a patience more.
        """
        while silent := {*self.epoch.members} - {*self.reporting} - {*self._ended()}:
            if self.clock() - noticed_s > self.patience_s * (2 if self._ended() else 1):
                break
            time.sleep(PAUSE_S)
            self._listen()
        for rank in silent:
            self.workers.kill(rank)
        self._listen()                          # what the dead have said before counts, too
        return tuple(sorted({*self.reporting} - {*self._ended()}))

    def _begin(self, members: tuple[int, ...], dead: tuple[int, ...] = (), why: str = "started",
               **times: float) -> None:
        """A new epoch: with whom, and where the experts are. The dead's calls go to members."""
        placements = self._place(len(members))
        number = self.changes[-1].epoch.number + 1 if self.changes else 1
        epoch = Epoch(number, members, placements)
        self.changes.append(Change(epoch, dead, why, **times))
        self.reporting = {}
        for rank in members:
            self.outboxes[rank].put(epoch)
        moving = [call for call in self.calls.values() if call.member in dead]
        self.changes[-1].moved = tuple(call.number for call in moving)
        for call in moving:
            self._move(call)

    def _move(self, call: Call) -> None:
        call.moved += 1
        if call.moved > MOST_MOVES:
            self._finish(call, f"rejected: {call.moved} ranks died while they served it; it is "
                               "not tried on another")
            return
        if call.found:                          # it had begun
            call.had = len(call.prompt) + len(call.output) - 1      # the last is only written
        self._assign(call)

    def _place(self, num_ranks: int) -> tuple[Placement, ...]:
        """Each expert of each layer somewhere, the busiest twice where there is room."""
        if not num_ranks:
            raise GroupTooSmallError("no rank is left: start a new group")
        num_experts = len(self.loads[0])
        room = num_experts if self.room is None else self.room
        if num_ranks * room < num_experts:
            raise GroupTooSmallError(
                f"each rank has room for {room} experts of a layer, and {num_ranks} cannot hold "
                f"all {num_experts}: start a group with more ranks, or with more room in each")
        slots = min(room, -(-num_experts // num_ranks) + self.spare)
        return tuple(place_experts(load, num_ranks, slots * num_ranks - num_experts)
                     for load in self.loads)

    def close(self, deadline_s: float = 30.0) -> list[dict | None]:
        """Let the members go; what each has to say about its life (None: it is dead).

        One that dies now is no error, and one that hangs is killed at the deadline.
        """
        for rank in self.epoch.members:
            self.outboxes[rank].put(Stop())
        ends_at = self.clock() + deadline_s
        while staying := [rank for rank in self.epoch.members if self.workers.is_alive(rank)]:
            if self.clock() > ends_at:
                for rank in staying:
                    self.workers.kill(rank)
            time.sleep(PAUSE_S)
        return self.workers.wait(may_die=range(self.workers.num_workers))
