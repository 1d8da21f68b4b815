"""Replicas in virtual time: the engine's scheduler, pool and router, with a price for each step.

Nothing is computed here but time. A request has a length and the keys of its blocks; the very
`Scheduler` and `BlockPool` of the engine decide who is in a step, what is found, who is sent
away; `StepCost` says how long such a step takes; the clock jumps from event to event. So a long
trace passes in seconds, and what comes out is *modelled*: as true as the cost and the trace.

Tokens are counted in units of `unit` of them, so that an answer of 320 tokens is written in 20
steps of 16 tokens each. Times are right to within one such step.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

from ..cache.blocks import BlockPool
from ..cache.store_index import RETENTION_S, StoreIndex
from ..cluster.router import Ask, Choice, Router
from ..engine.request import Request, Sampling
from ..engine.scheduler import Limits, Scheduler, StepPlan
from ..engine.steps import StepRecord, shares_of
from .traces import TraceRequest


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: a fixed part, and a part for each token read, written, or loaded."""

    fixed_s: float
    read_s: float
    write_s: float
    load_s: float = 0.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be 0 or more seconds, and finite")
        if not self.read_s > 0:
            raise ValueError("read_s=0 makes reading free: give the seconds for one token")

    def seconds(self, plan: StepPlan, unit: int, block_size: int) -> float:
        """How long a plan takes; whoever decodes writes `unit` tokens, one after another."""
        read = sum(work.num_tokens for work in plan.work if work.kind == "prefill")
        writing = sum(work.kind == "decode" for work in plan.work)
        loaded = block_size * sum(len(load.keys) for load in plan.loads)
        return (self.fixed_s * (unit if writing else 1) + self.write_s * unit * writing
                + self.read_s * unit * read + self.load_s * unit * loaded)


class Traced(Request):
    """A request that knows its keys instead of its tokens."""

    def extend_keys(self, block_size: int) -> list:
        """What the trace does not name is nobody else's."""
        for place in range(len(self.keys), self.total // block_size):
            self.keys.append((self.id, place))
        return self.keys


@dataclass(eq=False)
class Replica:
    """An engine without a model. With a `store`, what it noted is found after it was evicted."""

    name: str
    num_blocks: int
    block_size: int                 # in units
    cost: StepCost
    limits: Limits
    unit: int = 16
    store: StoreIndex | None = None
    bytes_per_block: int = 1
    records: list[StepRecord] = field(default_factory=list)
    plan: StepPlan | None = None    # of the step that is under way

    def __post_init__(self):
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(self.pool, self.limits, store=self.store)

    def request_for(self, asked: TraceRequest, name: str, now_s: float) -> Traced:
        """A trace's request in units: what does not fill a unit of the prompt is left out."""
        most = Sampling(max_tokens=max(1, -(-asked.output_tokens // self.unit)), stop_ids=())
        return Traced(name, range(max(1, asked.prompt_tokens // self.unit)), most, arrived_s=now_s,
                      root=b"", retention=asked.retention, keys=list(asked.keys))

    def begin(self, now_s: float) -> float | None:
        """Plan a step; when it will end. None if there is nothing to do."""
        plan = self.scheduler.plan()
        if not plan.work and not plan.loads:
            return None
        self.plan, self.began_s = plan, now_s
        return now_s + self.cost.seconds(plan, self.unit, self.block_size)

    def end(self, now_s: float) -> list[Request]:
        """Count the step that was under way: who finished."""
        plan, self.plan = self.plan, None
        loaded = {load.request.id: len(load.keys) for load in plan.loads}
        sampled = {work.request.id: [0] for work in plan.work if work.ends}
        shares = shares_of(plan, loaded, self.block_size)
        finished = self.scheduler.commit(plan, sampled, now_s, loaded)
        for work in plan.work:
            self._save(work.request)
        self.records.append(StepRecord(
            len(self.records), self.began_s, now_s, shares,
            tuple(request.id for request in plan.preempted),
            tuple(request.id for request in finished), len(self.scheduler.waiting),
            self.pool.num_blocks - len(self.pool.free)))
        return finished

    def _save(self, request: Request) -> None:
        num_full = request.computed // self.block_size
        if self.store is None or num_full == request.num_saved:
            return
        keys = request.keys[:num_full]
        for place in range(self.store.longest_prefix(keys), num_full):
            if self.bytes_per_block > self.store.capacity_bytes:
                return
            self.store.room_for(self.bytes_per_block)
            self.store.add(keys[place], keys[place - 1] if place else b"", self.bytes_per_block,
                           RETENTION_S[request.retention])
        self.store.touch(keys)
        request.num_saved = num_full


@dataclass(frozen=True)
class Served:
    """How one request of a trace fared. Times in seconds, hits in tokens."""

    request: TraceRequest
    replica: str
    hit_tokens: int
    first_token_s: float            # from its arrival
    finished_s: float               # on the trace's clock


def equal_replicas(names: Iterable[str], cost: StepCost, *, memory_tokens: int,
                   block_size: int = 512, tokens_per_step: int = 2_048, max_running: int = 256,
                   unit: int = 16) -> dict[str, Replica]:
    """Replicas with notes of so many tokens in memory, for a trace with blocks of this size."""
    if block_size % unit or memory_tokens < block_size:
        raise ValueError(f"unit={unit} must divide block_size={block_size}, and memory_tokens="
                         f"{memory_tokens} must hold at least one block")
    limits = Limits(max_tokens_per_step=max(1, tokens_per_step // unit), max_running=max_running,
                    context=1 << 40)
    return {name: Replica(name, memory_tokens // block_size, block_size // unit, cost, limits,
                          unit) for name in names}


class Cluster:
    """Replicas behind a router, and the events that are to come: arrivals and ends of steps.

    `now_s` is the time of the event that is happening; the cluster itself is the clock that a
    `StoreIndex` of its replicas may be given.
    """

    def __init__(self, replicas: Mapping[str, Replica], router: Router):
        self.replicas, self.router = dict(replicas), router
        self.now_s, self.order = 0.0, count()
        self.events: list[tuple] = []                   # (time, order, request or replica)
        self.flights: dict[str, tuple[TraceRequest, Traced, Choice, ExitStack]] = {}
        self.served: list[Served] = []

    def __call__(self) -> float:
        return self.now_s

    def serve(self, trace: Iterable[TraceRequest]) -> list[Served]:
        """Serve a trace to its end, in the order of finishing.

        Raises ValueError for a request that no replica could ever serve.
        """
        for asked in trace:
            self._expect(asked.arrival_s, asked)
        while self.events:
            self.now_s, _, event = heapq.heappop(self.events)
            if isinstance(event, Replica):
                self._end_step(event)
            else:
                self._arrive(event)
        return self.served

    def _expect(self, time_s: float, event: TraceRequest | Replica) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), event))

    def _arrive(self, asked: TraceRequest) -> None:
        ask = Ask(asked.matchable, asked.prompt_tokens, asked.output_tokens, asked.block_size)
        flight = ExitStack()
        choice = flight.enter_context(self.router.serving(ask))
        replica = self.replicas[choice.replica]
        request = replica.request_for(asked, str(next(self.order)), self.now_s)
        replica.scheduler.add(request)
        if request.reason is not None:
            raise ValueError(f"the request at {asked.arrival_s} s was {request.reason}")
        self.flights[request.id] = asked, request, choice, flight
        if replica.plan is None:
            self._begin_step(replica)

    def _begin_step(self, replica: Replica) -> None:
        if (end_s := replica.begin(self.now_s)) is not None:
            self._expect(end_s, replica)

    def _end_step(self, replica: Replica) -> None:
        for work in replica.plan.work:
            if work.ends:                               # here is its next token, so also its first
                self.flights[work.request.id][2].flight.has_begun()
        for request in replica.end(self.now_s):
            self._land(request)
        self._begin_step(replica)

    def _land(self, request: Traced) -> None:
        asked, _, choice, flight = self.flights.pop(request.id)
        flight.close()
        self.served.append(Served(
            asked, choice.replica, request.num_found * self.replicas[choice.replica].unit,
            request.token_times_s[0] - request.arrived_s, self.now_s))
