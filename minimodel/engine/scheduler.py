"""The scheduler: who computes how many tokens in the next step. No tensors, no clock of its own.

A step has a budget of tokens. `plan` hands it out:

1. to running requests first, in the order in which they were admitted: each gets what
   remains to be computed, as far as the budget goes. One that decodes takes one token; one
   that still reads its prompt takes a chunk of it. There is no other difference.
2. A request whose blocks are full takes another. If none is free, the request that was
   admitted last gives all of its blocks back and waits (it is *preempted*), until there is
   room, or until it is the one that was asking.
3. What is left of the budget goes to waiting requests, first come first served. One is
   admitted if all it has to compute now fits in free blocks, with a few to spare for those
   that run: so it is not sent away again at once.
4. Who is admitted looks first whether the beginning of its text was computed before. Blocks
   found in memory are shared. If more are in the store, the request is LOADING: some steps
   read them, a few at a time, while others run. What cannot be read after all is computed;
   what is still on its way from another worker is waited for.

Then the model runs, and `commit` counts the tokens as computed, adds those that were sampled,
and lets finished requests go. Nothing is counted before: a step that fails in between can
simply be planned again. After vLLM's scheduler, which has no prefill phase either.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..cache.blocks import BlockPool
from ..cache.keys import most_hits
from .request import Request, State


@dataclass(frozen=True)
class Limits:
    """What a step may hold. `spare_blocks` stay free when a request is admitted beside others."""

    max_tokens_per_step: int = 512
    max_loads_per_step: int = 256       # blocks read from the store
    max_running: int = 64
    spare_blocks: int = 2
    context: int = 8_192

    def __post_init__(self):
        for name, least in (("max_tokens_per_step", 1), ("max_loads_per_step", 1),
                            ("max_running", 1), ("spare_blocks", 0), ("context", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True)
class Work:
    """One request's share of a step: `num_tokens` tokens from `computed` on.

    `kind` is prefill or decode, a name for readers: the scheduler treats both alike. `ends` says
    that nothing remains after it, so that a token can be sampled.
    """

    request: Request
    computed: int
    num_tokens: int
    kind: str
    ends: bool

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> "Work":
        return cls(request, request.computed, num_tokens,
                   kind="decode" if request.is_decoding else "prefill",
                   ends=num_tokens == request.remaining)


@dataclass(frozen=True)
class Load:
    """Blocks of one request that a step reads from the store: the keys, and where they go."""

    request: Request
    computed: int
    keys: list[bytes]
    blocks: list[int]


@dataclass
class StepPlan:
    work: list[Work] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)


class Index(Protocol):
    """What the scheduler asks a store: `StoreIndex` answers, and so does `DiskStore`."""

    def longest_prefix(self, keys: Sequence[bytes]) -> int: ...


class Scheduler:
    """`copy(source, target)` copies a block's notes, when an answer must own what it writes to.
    `store` knows which blocks can be read instead of computed."""

    def __init__(self, pool: BlockPool, limits: Limits | None = None,
                 copy: Callable[[int, int], None] = lambda source, target: None,
                 store: Index | None = None):
        self.pool, self.limits, self.copy, self.store = pool, limits or Limits(), copy, store
        self.waiting: deque[Request] = deque()
        self.loading: dict[Request, int] = {}           # tokens each will have when all is read
        self.running: list[Request] = []
        self.held: list[Request] = []                   # done; their blocks are kept for others
        self.ready: Callable[[Sequence[bytes]], int] = len  # blocks of a load that need no waiting
        self.num_preempted = 0

    # --- coming and going -----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a new request wait, or finish it as rejected if it could never be served."""
        if (problem := self._never_fits(request)) is not None:
            self._finish(request, f"rejected: {problem}")
            return
        if request.state is State.NEW and request.reason is not None:   # its last token came along
            self._finish(request, request.reason)
            return
        request.move(State.WAITING)
        self.waiting.append(request)

    def _never_fits(self, request: Request) -> str | None:
        room = self.pool.num_blocks * self.pool.block_size
        if not request.prompt:
            return "the prompt is empty; give at least one token"
        if len(request.prompt) + request.sampling.max_tokens > self.limits.context:
            return (f"{len(request.prompt)} tokens of prompt and {request.sampling.max_tokens} of "
                    f"answer go beyond the context of {self.limits.context}; shorten either")
        if request.longest > room:
            return (f"it may need notes for {request.longest} tokens and all {self.pool.num_blocks}"
                    f" blocks together hold {room}; shorten it or give the cache more blocks")
        if request.num_answers > self.limits.max_running:
            return (f"{request.num_answers} answers at a time are over the limit of "
                    f"{self.limits.max_running} running requests; ask for fewer")
        return None

    def abort(self, request: Request) -> None:
        """Finish a request now, in whatever state it is. A finished one stays as it is."""
        if request.state is not State.FINISHED:
            self._finish(request, "aborted")

    def release(self, request: Request) -> None:
        """Let go of a HELD request's blocks: somebody has fetched them, or will not."""
        if request.state is not State.HELD:
            raise ValueError(f"request {request.id} is {request.state.value}, not held: there is "
                             "nothing to let go of")
        self._finish(request, request.reason)

    def _finish(self, request: Request, reason: str) -> None:
        """The one way out: off every list, blocks given back."""
        request.move(State.FINISHED)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        if request in self.held:
            self.held.remove(request)
        self.loading.pop(request, None)
        self._give_back(request)
        request.reason = reason

    def _give_back(self, request: Request) -> None:
        if request.table is not None:
            self.pool.release(request.table)
            request.table = None

    # --- planning -------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step's work. Blocks are taken for it; no token counts as computed yet."""
        plan = StepPlan()
        self._plan_running(plan)
        if not plan.preempted:              # who has just sent one away does not invite another
            self._plan_waiting(plan)
        self._plan_loading(plan)
        return plan

    def _plan_running(self, plan: StepPlan) -> None:
        budget = self.limits.max_tokens_per_step
        for request in list(self.running):
            num_tokens = min(request.remaining, budget)
            if num_tokens == 0:                 # of the budget: something always remains
                return
            while request.state is State.RUNNING and not self._make_room(request, num_tokens):
                self._preempt(self.running[-1], plan)
            if request.state is State.RUNNING:
                plan.work.append(Work.of(request, num_tokens))
                budget -= num_tokens

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for its next tokens, its own to write to, if there are any."""
        end = request.computed + num_tokens
        while len(request.table) < self.pool.blocks_for(end):
            if not self.pool.grow(request.table):
                return False
        first = request.computed // self.pool.block_size
        return all(self.pool.writable(request.table, place, self.copy)
                   for place in range(first, self.pool.blocks_for(end)))

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take a running request's blocks; it goes to the front of those who wait."""
        self.running.remove(request)
        request.num_preempted += 1
        self.num_preempted += 1
        self._send_back(request)
        plan.preempted.append(request)

    def _send_back(self, request: Request) -> None:
        """Let a request wait, first in line, without blocks: nothing of it counts as computed."""
        self._give_back(request)
        request.computed = 0
        request.move(State.WAITING)
        self.waiting.appendleft(request)

    def _plan_waiting(self, plan: StepPlan) -> None:
        while self.waiting:
            request, budget = self.waiting[0], self.limits.max_tokens_per_step - plan.num_tokens
            slots = sum(other.num_answers for other in (*self.running, *self.loading, request))
            if budget == 0 or slots > self.limits.max_running or not self._admit(request):
                return
            self.waiting.popleft()
            plan.admitted.append(request)
            if request.state is State.RUNNING:
                plan.work.append(Work.of(request, min(request.remaining, budget)))

    def _admit(self, request: Request) -> bool:
        """Give a waiting request blocks for all it has to compute now, or none at all.

        It is looked up and held in one go: what was found a step ago may be gone (vLLM PR 17305).
        """
        size, total = self.pool.block_size, request.total
        chain = request.extend_keys(size)[:most_hits(total, size)]
        hits = self.pool.lookup(chain)
        spare = self.limits.spare_blocks if self.running or self.loading else 0
        table = self.pool.admit(hits, self.pool.blocks_for(total) - len(hits), spare)
        if table is None:
            return False
        request.table, request.computed = table, len(hits) * size
        num_stored = self.store.longest_prefix(chain[len(hits):]) if self.store else 0
        if num_stored:
            request.move(State.LOADING)
            self.loading[request] = request.computed + num_stored * size
        else:
            self._start(request)
        return True

    def _start(self, request: Request) -> None:
        request.move(State.RUNNING)
        self.running.append(request)
        if request.num_found is None:           # what it finds after a preemption is its own
            request.num_found = request.computed

    def _plan_loading(self, plan: StepPlan) -> None:
        """The next blocks that are read from the store, in the order of admission."""
        size, budget = self.pool.block_size, self.limits.max_loads_per_step
        for request, end in self.loading.items():
            first = request.computed // size
            last = min(end // size, first + budget)
            last = first + self.ready(request.keys[first:last])
            if first < last:
                plan.loads.append(Load(request, request.computed, request.keys[first:last],
                                       request.table[first:last]))
                budget -= last - first

    # --- counting -------------------------------------------------------------------------

    def commit(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]], now_s: float,
               loaded: Mapping[str, int] | None = None) -> list[Request]:
        """Count a step's work. `sampled` holds the tokens of each request whose work ends, and
        `loaded` how many blocks of each load were read and are right.

        Returns who finished. A request that was aborted meanwhile is passed over.
        """
        for load in plan.loads:
            if load.request.state is State.LOADING:
                self._count_load(load, loaded[load.request.id])
        finished = []
        for work in plan.work:
            request = work.request
            if request.state is not State.RUNNING:
                continue
            if work.computed != request.computed:
                raise ValueError(f"request {request.id} was planned at {work.computed} tokens and "
                                 f"has computed {request.computed}: commit each plan once")
            request.computed += work.num_tokens
            self._publish(request)
            if work.ends:
                finished += self._write(request, sampled[request.id], now_s)
        return finished

    def _count_load(self, load: Load, num_blocks: int) -> None:
        """What was read can be found in memory from now on, even if the rest was not there."""
        request = load.request
        if load.computed != request.computed:
            raise ValueError(f"a load of {request.id} was planned at {load.computed} tokens, "
                             f"and it has {request.computed}: commit each plan once")
        request.computed += num_blocks * self.pool.block_size
        request.num_loaded += num_blocks * self.pool.block_size
        self._publish(request)
        if num_blocks < len(load.keys):
            del self.loading[request]
            self._send_back(request)
        elif request.computed == self.loading[request]:
            del self.loading[request]
            self._start(request)

    def _publish(self, request: Request) -> None:
        if request.root is not None:
            num_full = request.computed // self.pool.block_size
            self.pool.publish(request.table, request.extend_keys(self.pool.block_size), num_full)

    def _write(self, request: Request, tokens: Sequence[int], now_s: float) -> list[Request]:
        """Add one token to each answer; further answers to the same prompt begin here."""
        answers = [request, *(self._fork(request, i) for i in range(1, request.num_answers))]
        request.num_answers = 1
        finished = []
        for answer, token in zip(answers, tokens, strict=True):
            answer.write(token, now_s)
            if answer.reason is not None:
                self._end(answer)
                finished.append(answer)
        return finished

    def _end(self, answer: Request) -> None:
        if not answer.hold:
            self._finish(answer, answer.reason)
            return
        self.running.remove(answer)
        answer.move(State.HELD)
        self.held.append(answer)

    def _fork(self, request: Request, number: int) -> Request:
        twin = request.fork(number)
        twin.table = self.pool.fork(request.table)
        self.running.append(twin)
        return twin

    # --- looking --------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.loading and not self.running

    def check(self) -> None:
        """Raise AssertionError where lists, states, tables and the pool do not agree."""
        self.pool.check()
        for requests, state in ((self.waiting, State.WAITING), (self.loading, State.LOADING),
                                (self.running, State.RUNNING), (self.held, State.HELD)):
            for request in requests:
                request.check()
                assert request.state is state, f"{request.id} is {request.state} among {state}"
        holders = [*self.loading, *self.running, *self.held]
        everyone = [*self.waiting, *holders]
        assert len({id(request) for request in everyone}) == len(everyone), "someone is here twice"
        assert len(holders) - len(self.held) <= self.limits.max_running, "more run than may"
        tables = {id(request.table) for request in holders}
        assert tables == {id(table) for table in self.pool.tables}, (
            "the pool lends tables to others than those who run, load or are held")
        for request in holders:
            room = len(request.table) * self.pool.block_size
            assert request.computed <= room, f"{request.id} computed more than its blocks hold"

    def stats(self) -> dict[str, int]:
        return {"waiting": len(self.waiting), "loading": len(self.loading),
                "running": len(self.running), "being_held": len(self.held),
                "preempted": self.num_preempted, **self.pool.stats()}
