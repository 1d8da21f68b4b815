"""The engine: plan, forward, commit, again and again, until nobody waits.

    plan      the scheduler says who computes how many tokens, and who reads blocks from disk
    forward   the model computes them all in one call and notes their entries in their blocks
    commit    the scheduler counts them and lets go of who is done

Full blocks can be found by later requests: in memory until they are taken for others, and, if
there is a store, on disk, where they are written when the step that filled them is done and its
tokens are out.

Every step leaves a record: who was in it, with how many tokens, and how long it took. The
clock is passed in, so that a test, or a simulator, can do without real time.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import index

import torch

from ..cache.blocks import BlockPool
from ..cache.keys import fingerprint, root_key
from ..cache.paged import PagedCache
from ..cache.store import DiskStore
from ..cache.store_index import retention_of
from ..model import checkpoint
from ..model.batch import Batch
from ..model.transformer import Transformer
from ..pricing import Usage
from .request import Request, Sampling, State
from .sampling import choose
from .scheduler import Limits, Load, Scheduler, StepPlan, Work
from .steps import StepRecord, shares_of


class Engine:
    """Serves requests with one model and one paged cache, several at a time.

    With `reuse`, a prompt that begins like an earlier one does not compute that beginning again,
    and with a `store` not even after a restart.
    """

    def __init__(self, model: Transformer, cache: PagedCache, limits: Limits | None = None,
                 clock: Callable[[], float] = time.perf_counter, keep_records: int = 100_000, *,
                 store: DiskStore | None = None, reuse: bool = True):
        cache.require(model.config, model.embed_tokens.weight.dtype)
        self.model, self.cache, self.clock, self.reuse = model, cache, clock, reuse
        self.store = store
        self._know_the_model()
        limits = limits or Limits(context=model.config.context)
        limits = replace(limits, context=min(limits.context, model.config.context))
        self.pool = BlockPool(len(cache.blocks), cache.block_size)
        self.scheduler = Scheduler(self.pool, limits, cache.copy, store)
        self.requests: dict[str, Request] = {}          # those that are not finished
        self.unsaved: dict[Request, list[int]] = {}     # tables of the last step, until saved
        self.records: deque[StepRecord] = deque(maxlen=keep_records)
        self.last: StepRecord | None = None             # the last of them
        self.num_steps = self.num_submitted = 0

    def _know_the_model(self) -> None:
        self.fingerprint = fingerprint_of(self.model, self.cache.block_size) if self.reuse else ""
        if self.store is not None:
            if not self.reuse:
                raise ValueError("an engine without reuse has no use for a store: leave out either")
            self.store.require(self.fingerprint)

    def weights_changed(self, store: DiskStore | None = None) -> None:
        """The model's weights are others now: what was noted by the old ones is forgotten.

        `store` is opened for the new weights. Raises ValueError while requests are served.
        """
        self.pool.forget()
        self.save()
        self.store = self.scheduler.store = store
        self._know_the_model()

    # --- requests -------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, *,
               num_answers: int = 1, reuse: bool = True, salt: bytes = b"",
               retention: str = "chat", written: Sequence[int] = (),
               hold: bool = False) -> Request:
        """Let a request wait. One that could never be served comes back finished, as rejected.

        Only requests of the same `salt` find each other's blocks; without `reuse` it neither
        finds nor leaves any. `retention` says how long the store keeps them. What another worker
        has `written` counts as this request's. With `hold`, its blocks are kept when it is done,
        until `release`. Raises ValueError for a token that the model does not have, for no answer
        at all, an unknown retention.
        """
        prompt = tuple(map(index, prompt))              # of a tensor, too: plain numbers
        self.require_tokens((*prompt, *written))
        if num_answers < 1:
            raise ValueError(f"num_answers={num_answers} must be at least 1")
        if written and num_answers > 1:
            raise ValueError(f"num_answers={num_answers} of which one has tokens already: submit "
                             "each answer on its own")
        retention_of(retention)
        root = root_key(self.fingerprint, salt) if reuse and self.reuse else None
        request = Request(str(self.num_submitted), prompt, sampling or Sampling(),
                          num_answers, self.clock(), root=root, retention=retention, hold=hold)
        for token in written:
            request.write(token, request.arrived_s)
        self.num_submitted += 1
        self.scheduler.add(request)
        if request.state is not State.FINISHED:
            self.requests[request.id] = request
        return request

    def require_tokens(self, tokens: Sequence[int]) -> None:
        """Raise ValueError for a token that the model does not have."""
        size = self.model.config.vocab_size
        outside = [token for token in tokens if not 0 <= token < size]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {size}: "
                             "make prompts with minimodel.tokenizer.encode")

    def abort(self, request_id: str) -> None:
        """Stop a request and all its answers. One that is not here (any more) is no error."""
        if (request := self.requests.get(request_id)) is not None:
            for answer in request.answers:
                self.scheduler.abort(answer)
            self._forget_finished()

    def release(self, request_id: str) -> None:
        """Let go of the blocks of a request that is HELD."""
        self.scheduler.release(self.requests[request_id])
        self._forget_finished()

    def _forget_finished(self) -> None:
        self.requests = {key: request for key, request in self.requests.items()
                         if any(answer.state is not State.FINISHED for answer in request.answers)}

    # --- steps ----------------------------------------------------------------------------

    def step(self) -> StepRecord | None:
        """One step of all who can take part. None if there is nothing to do."""
        if self.advance() is None:
            return None
        return self.save()

    def advance(self) -> StepRecord | None:
        """A step up to its tokens. What it filled is still to be saved: by `save`, or before the
        next step."""
        self.save()
        started_s = self.clock()
        plan = self.scheduler.plan()
        if not plan.work and not plan.loads:
            return None
        loaded = {load.request.id: self._load(load) for load in plan.loads}
        load_s = self.clock() - started_s if plan.loads else 0.0
        sampled = self._forward(plan) if plan.work else {}
        tables = {work.request: list(work.request.table) for work in plan.work}
        finished = self.scheduler.commit(plan, sampled, self.clock(), loaded)
        self._forget_finished()
        self.last = StepRecord(
            self.num_steps, started_s, self.clock(), shares_of(plan, loaded, self.cache.block_size),
            tuple(request.id for request in plan.preempted),
            tuple(request.id for request in finished),
            len(self.scheduler.waiting), self.pool.num_blocks - len(self.pool.free), load_s)
        self.records.append(self.last)
        self.num_steps += 1
        self.unsaved = tables
        return self.last

    def save(self) -> StepRecord | None:
        """Write the blocks that the last step has filled into the store, if nobody has done so.

        Their requests may have let go of them by now, but until the next plan nobody takes them.
        Returns the step's record, which now tells of it.
        """
        tables, self.unsaved = self.unsaved, {}
        if self.store is not None and tables:
            started_s, before = self.clock(), self.store.counts["saved"]
            for request, table in tables.items():
                self._save(request, table)
            save_s = self.clock() - started_s       # it may have waited for a listener till then
            self.last = replace(self.last, ended_s=self.last.ended_s + save_s, save_s=save_s,
                                num_saved=self.store.counts["saved"] - before)
            if self.records:
                self.records[-1] = self.last
        return self.last

    def _load(self, load: Load) -> int:
        """Read a load's blocks from the store, as far as they are there and right; how many.

        A block that failed is wiped: even notes that nobody reads must be numbers.
        """
        for count, (key, block) in enumerate(zip(load.keys, load.blocks, strict=True)):
            if not self.store.read(key, self.cache.bytes_of(block)):
                self.cache.blocks[block].zero_()
                return count
        return len(load.keys)

    def _save(self, request: Request, table: Sequence[int]) -> None:
        num_full = request.computed // self.cache.block_size
        if request.root is not None and num_full > request.num_saved:
            payloads = [self.cache.bytes_of(block) for block in table[request.num_saved:num_full]]
            request.num_saved = self.store.save_chain(request.keys[:num_full], payloads,
                                                      request.retention)

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> dict[str, list[int]]:
        """Compute a plan's tokens; the next tokens of each request whose work ends."""
        # Rows of one kind side by side, in order of length: the batch has fewer parts.
        works = sorted(plan.work, key=lambda work: (work.num_tokens, work.computed))
        tokens = [token for work in works for token in work.request.tokens(
            work.computed, work.computed + work.num_tokens)]
        batch = self._batch(works)
        notes = self.cache.step([work.request.table for work in works], batch)
        logits = self.model(torch.tensor(tokens), batch, notes)
        ending = [work.request for work in works if work.ends]
        return dict(zip((request.id for request in ending), choose(logits, ending), strict=True))

    def _batch(self, works: Sequence[Work]) -> Batch:
        wanted, row = [], 0
        for work in works:
            row += work.num_tokens
            if work.ends:
                wanted.append(row - 1)
        return Batch(new=[work.num_tokens for work in works],
                     past=[work.computed for work in works], wanted=wanted)

    # --- the simple uses ------------------------------------------------------------------

    def run(self) -> None:
        """Step until nobody waits or runs."""
        while self.step() is not None:
            pass

    def generate(self, prompts: Sequence[Sequence[int]],
                 sampling: Sampling | None = None) -> list[list[int]]:
        """The answers to some prompts, served together. Raises ValueError for a rejected one.

        Whatever goes wrong, none of them stays behind in the engine.
        """
        requests = []
        try:
            for prompt in prompts:
                requests.append(self._accepted(prompt, sampling))
            self.run()
        finally:
            for request in requests:
                self.abort(request.id)
        return [request.output for request in requests]

    def stream(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Iterator[int]:
        """An answer's tokens as they are written; who stops listening aborts the request."""
        yield from self.listen(self._accepted(prompt, sampling))

    def listen(self, request: Request) -> Iterator[int]:
        """The tokens of a submitted request, likewise: each before its step's blocks are saved."""
        seen = 0
        try:
            while seen < len(request.output) or request.state is not State.FINISHED:
                if seen == len(request.output):
                    self.advance()
                else:                                   # others may step while this one waits
                    yield request.output[seen]
                    seen += 1
        finally:
            self.abort(request.id)
            self.save()

    def _accepted(self, prompt: Sequence[int], sampling: Sampling | None) -> Request:
        request = self.submit(prompt, sampling)
        if request.state is State.FINISHED:
            raise ValueError(request.reason)
        return request

    # --- looking --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError where the engine's parts do not agree."""
        self.scheduler.check()
        known = {id(answer) for request in self.requests.values() for answer in request.answers}
        served = [*self.scheduler.waiting, *self.scheduler.loading, *self.scheduler.running,
                  *self.scheduler.held]
        assert all(id(request) in known for request in served), "someone unknown is served"

    def stats(self) -> dict[str, int]:
        return {"steps": self.num_steps, **self.scheduler.stats()}


def usage(request: Request) -> Usage:
    """What a request is billed for, all its answers together."""
    written = sum(len(answer.output) for answer in request.answers)
    if not written or request.num_found is None:        # nothing came of it, or not from here
        return Usage(0, 0, 0)
    found = request.num_found
    return Usage(found, len(request.prompt) - found, written,
                 disk_hit_tokens=min(request.num_loaded, found))


def fingerprint_of(model: Transformer, block_size: int = 16) -> str:
    """The fingerprint of a model as it is now: what a store for it is opened with."""
    dtype = f"{model.embed_tokens.weight.dtype} {sys.byteorder}"
    return fingerprint(model.config, checkpoint.weights_digest(model), block_size, dtype)
