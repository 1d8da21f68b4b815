"""The service: copies of one model, a router before them, one thread that steps them all.

The life of a job, which is one client's request:

1. `submit`, called by the handler of the HTTP request: refused if too many wait; else on its way
   over the bridge.
2. The engines' thread routes it to a replica and submits it to that replica's engine.
3. After each step of the engine (`advance`) the job's handler is told its new tokens, as text;
   only then are the step's blocks written to disk (`save`).
4. Told the reason to end and the usage, the handler closes the job. It closes it as well when
   its client has left: then the engine aborts the request and frees its blocks.

An engine whose step raises is lost, and so are its jobs: each is told so at once. The others go
on. The replicas share the model's weights and one store, and each has its own cache.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from threading import Thread

from ..cache.keys import chain, most_hits, root_key
from ..cluster.index import PrefixIndex
from ..cluster.router import Ask, Cost, Policy, Router
from ..engine.engine import Engine, usage
from ..engine.request import State
from .bridge import Bridge
from .errors import ApiError, bad_request, engine_failed, queue_full, unavailable
from .job import Job, News
from .metrics import Counts, prometheus

log = logging.getLogger(__name__)
READ_S = 1e-4                   # what the toy takes to read a token, about; for the router
CROWDED_S = 0.1                 # what a full memory costs, in its eyes


@dataclass(eq=False)
class Replica:
    """An engine and the jobs that it serves."""

    name: str
    engine: Engine
    jobs: list[Job] = field(default_factory=list)


class Service:
    """Serves jobs with some engines of one model. Used as a context: within, its thread runs."""

    def __init__(self, engines: Sequence[Engine], policy: Policy | None = None,
                 max_waiting: int = 64):
        if not engines or max_waiting < 1:
            raise ValueError(f"{len(engines)} replicas and max_waiting={max_waiting} serve "
                             "nobody: both must be at least 1")
        self.replicas = {str(i): Replica(str(i), engine) for i, engine in enumerate(engines)}
        pool = engines[0].pool
        policy = policy or Cost(READ_S, memory_tokens=pool.num_blocks * pool.block_size,
                                crowded_s=CROWDED_S)
        self.router = Router(list(self.replicas), policy, PrefixIndex(pool.num_blocks))
        self.fingerprint = engines[0].fingerprint
        self.context = engines[0].scheduler.limits.context
        self.max_waiting = max_waiting
        self.lost: dict[str, str] = {}          # replicas that failed, and how
        self.ended: ApiError | None = None      # why nobody is served any more
        # The handlers' side:
        self.jobs: set[Job] = set()             # of handlers that still listen
        self.refused: Counter[str] = Counter()  # requests, by the error's code
        # The engines' side:
        self.counts = Counts()
        self.bridge = Bridge()
        self.thread = Thread(target=self._run, name="engines", daemon=True)

    def __enter__(self) -> "Service":
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self.thread.join()

    # --- called by handlers ---------------------------------------------------------------

    def submit(self, job: Job) -> Job:
        """Let a job be served. Raises ApiError where that cannot be."""
        num_waiting = sum(not other.has_begun for other in self.jobs)
        if num_waiting >= self.max_waiting:
            raise queue_full(num_waiting, self.max_waiting)
        self.bridge.call(self._admit, job)
        self.jobs.add(job)
        return job

    def close(self, job: Job) -> None:
        """The handler listens no more: a job that is still being served is aborted."""
        self.jobs.discard(job)
        with suppress(ApiError):                # if the other side has ended, nothing is served
            self.bridge.call(self._abort, job)

    def stop(self) -> None:
        """Serve nobody any more; who is being served is told so."""
        with suppress(ApiError):
            self.bridge.call(self._end, unavailable("the server is shutting down"))

    def health(self) -> tuple[bool, dict]:
        """Whether anybody can be served, and how the replicas are."""
        if self.ended is not None or not self.thread.is_alive():
            return False, {"status": "stopped", "reason": str(self.ended or "not started")}
        states = dict.fromkeys(self.replicas, "ok") | self.lost
        status = "ok" if not self.lost else "degraded" if self.replicas else "failed"
        return bool(self.replicas), {"status": status, "replicas": states}

    # --- the engines' thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.ended is None:
                self.bridge.run_calls(wait=not self._busy())
                for replica in self._busy():
                    self._step(replica)
        except Exception as error:
            log.exception("the engines' thread failed")
            self._end(engine_failed(error))
        finally:
            self.bridge.close()

    def _busy(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.jobs]

    def _end(self, why: ApiError) -> None:
        self.ended = self.ended or why
        for replica in self.replicas.values():
            self._tell_all(replica, why)

    def _step(self, replica: Replica) -> None:
        try:
            if replica.engine.advance() is None:
                raise RuntimeError("the engine has requests and nothing to do")
            for job in list(replica.jobs):
                self._report(replica, job)
            replica.engine.save()
        except Exception as error:
            log.exception("replica %s failed", replica.name)
            self._lose(replica, error)

    def _lose(self, replica: Replica, error: Exception) -> None:
        self.lost[replica.name] = f"failed: {type(error).__name__}"
        del self.replicas[replica.name]
        self.router.lost(replica.name)
        self._tell_all(replica, engine_failed(error))

    def _tell_all(self, replica: Replica, error: ApiError) -> None:
        """Let a replica's jobs know that nothing more comes."""
        for job in list(replica.jobs):
            job.inbox.put(error)
            self._land(replica, job, ["failed"])

    # --- a job's way ------------------------------------------------------------------------

    def _admit(self, job: Job) -> None:
        try:
            if self.ended is not None:
                raise self.ended
            if not self.replicas:
                raise unavailable("no replica is left to serve this request")
            self._begin(job)
        except ApiError as error:
            job.inbox.put(error)
        except Exception as error:              # one request's, and no reason to stop the others
            log.exception("a request could not be submitted")
            job.inbox.put(engine_failed(error))

    def _begin(self, job: Job) -> None:
        size = next(iter(self.replicas.values())).engine.pool.block_size
        keys = chain(root_key(self.fingerprint, job.tenant.salt), job.prompt, size)
        ask = Ask(keys[:most_hits(len(job.prompt), size)], len(job.prompt),
                  job.sampling.max_tokens * job.num_answers, size)
        with ExitStack() as seat:
            choice = seat.enter_context(self.router.serving(ask))
            replica = self.replicas[choice.replica]
            job.request = replica.engine.submit(
                job.prompt, job.sampling, num_answers=job.num_answers, salt=job.tenant.salt,
                retention=job.tenant.retention)
            if job.request.state is State.FINISHED:
                raise bad_request(job.request.reason.removeprefix("rejected: "), code="rejected")
            job.replica, job.flight, job.seat = replica.name, choice.flight, seat.pop_all()
        replica.jobs.append(job)

    def _report(self, replica: Replica, job: Job) -> None:
        """Tell a job's handler what the step has added to its answers, if anything."""
        if not (pieces := job.pieces()):
            return
        job.has_begun = True
        job.flight.has_begun()
        for piece in pieces:
            if piece.reason is not None:                # cut at a stop string, it still runs
                replica.engine.scheduler.abort(job.request.answers[piece.index])
        job.inbox.put(News(pieces, usage(job.request) if job.is_done else None))
        if job.is_done:
            self._land(replica, job, [answer.reason for answer in job.answers])

    def _abort(self, job: Job) -> None:
        replica = self.replicas.get(job.replica)
        if replica is not None and job in replica.jobs:
            self._land(replica, job, ["aborted"])

    def _land(self, replica: Replica, job: Job, reasons: Iterable[str]) -> None:
        """The one way out: counted, off the replica, and off its engine."""
        replica.jobs.remove(job)
        job.seat.close()
        self.counts.landed(job.request, reasons)
        if replica.name not in self.lost:
            replica.engine.abort(job.request.id)

    # --- looking ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError where engines, jobs and the router's counts do not agree."""
        for replica in self.replicas.values():
            replica.engine.check()
            served = {job.request.id for job in replica.jobs}
            assert served == replica.engine.requests.keys(), "a request without a job, or none"
            flights = {job.flight for job in replica.jobs}
            assert flights == self.router.replicas[replica.name].flights, "the router miscounts"
            assert all(job.has_begun == (job.flight.to_read == 0) for job in replica.jobs)

    def metrics(self, refused: Mapping[str, int]) -> str:
        """The page of metrics; like `check`, to be asked for over the bridge."""
        is_up = dict.fromkeys(self.replicas, True) | dict.fromkeys(self.lost, False)
        stats = {replica.name: replica.engine.stats() for replica in self.replicas.values()}
        return prometheus(self.counts, refused, is_up, stats)
