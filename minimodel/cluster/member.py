"""A rank of a group that may lose others: what each process of a `Supervisor` does.

It serves its own requests, one epoch after another. In an epoch all members step together; when
a meeting fails, each leaves the group, says so, and waits for the next epoch. Its engine, with all
requests and notes, lives on.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..cache.paged import PagedCache
from ..cache.store import DiskStore
from ..engine.engine import Engine, fingerprint_of
from ..engine.request import Request, State
from ..model import checkpoint
from .epochs import Abort, Epoch, Joined, Lost, Progress, Ready, Serve, Stop, Written
from .experts import (
    FetchExpert,
    GroupLostError,
    ShardedExperts,
    anyone,
    meeting,
    shard,
    step_together,
)
from .launch import World, backend, resolve
from .mailbox import PAUSE_S, Mailbox


def toy(store: str | None = None, folder: str | None = None,
        num_blocks: int = 512) -> tuple[Engine, FetchExpert]:
    """An engine for a checkpoint (the shipped toy), with a store if there is a folder for it."""
    folder = Path(folder or checkpoint.TOY)
    fetch, model = checkpoint.ExpertFile(folder), checkpoint.load(folder)
    cache = PagedCache(model.config, num_blocks)
    kept = DiskStore(store, fingerprint_of(model)) if store else None
    return Engine(model, cache, store=kept), fetch


def live(world: World, make: tuple[str, str, str], arguments: tuple, patience_s: float) -> dict:
    """A member's whole life, in a process that `launch` has started."""
    dist.destroy_process_group()            # that of all who were started: now there are epochs
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False)
    engine, fetch = resolve(*make)(*arguments)
    return Member(world.rank, engine, fetch, store, patience_s).live()


class Member:
    def __init__(self, number: int, engine: Engine, fetch: FetchExpert, store: dist.TCPStore,
                 patience_s: float):
        self.number, self.engine, self.fetch = number, engine, fetch
        self.store, self.patience_s = store, patience_s
        self.inbox, self.outbox = Mailbox(store, f"to/{number}"), Mailbox(store, f"from/{number}")
        self.requests: dict[int, Request] = {}          # by the supervisor's number
        self.num_said: dict[int, int] = {}              # of each one's tokens
        self.refused: list[Written] = []
        self.next_epoch: Epoch | None = None
        self.is_stopped = False
        self.runs: list[ShardedExperts] = []

    def live(self) -> dict:
        config = self.engine.model.config
        self.outbox.put(Ready(self.engine.fingerprint, config.num_moe_layers, config.num_experts))
        while (epoch := self._await_epoch()) is not None:
            try:
                self._join(epoch)
                self._serve()
            except GroupLostError as error:
                self.outbox.put(Lost(epoch.number, str(error)))
            leave_group()
        return self.engine.stats()

    def _await_epoch(self) -> Epoch | None:
        """The next epoch; None when there will be no more."""
        while self.next_epoch is None and not self.is_stopped:
            self._hear()
            time.sleep(PAUSE_S)
        epoch, self.next_epoch = self.next_epoch, None
        return None if self.is_stopped else epoch

    def _join(self, epoch: Epoch) -> None:
        """Meet the others of an epoch, at a place of its own, and hold the experts it says."""
        with meeting():
            dist.init_process_group(
                backend(), store=dist.PrefixStore(f"epoch/{epoch.number}", self.store),
                rank=epoch.members.index(self.number), world_size=len(epoch.members),
                timeout=timedelta(seconds=self.patience_s))
        fetched = []

        def fetch(layer: int, expert: int):
            fetched.append(expert)
            return self.fetch(layer, expert)
        self.runs = shard(self.engine.model, epoch.placements, fetch=fetch)
        self.outbox.put(Joined(epoch.number, len(fetched)))

    def _serve(self) -> None:
        """Step with all others until one of them has heard that the epoch ends."""
        while True:
            self._hear()
            is_over = self.is_stopped or self.next_epoch is not None
            busy, over = anyone(not self.engine.scheduler.is_idle, is_over)
            if over:
                return
            if busy:
                step_together(self.engine)
            else:
                time.sleep(PAUSE_S)
            self._report()

    def _hear(self) -> None:
        for message in self.inbox.take():
            match message:
                case Serve():
                    self._accept(message)
                case Abort(number) if number in self.requests:
                    del self.num_said[number]
                    self.engine.abort(self.requests.pop(number).id)
                case Epoch():
                    self.next_epoch = message
                case Stop():
                    self.is_stopped = True

    def _accept(self, message: Serve) -> None:
        try:
            request = self.engine.submit(message.prompt, message.sampling, written=message.written,
                                         **message.how)
        except ValueError as error:
            self.refused.append(Written(message.number, [], 0, 0, f"rejected: {error}"))
            return
        self.requests[message.number] = request
        self.num_said[message.number] = len(message.written)

    def _report(self) -> None:
        written, self.refused = self.refused, []
        for number, request in list(self.requests.items()):
            news = request.output[self.num_said[number]:]
            done = request.state is State.FINISHED
            if news or done:
                written.append(Written(number, news, request.num_found or 0, request.num_loaded,
                                       request.reason if done else None))
                self.num_said[number] += len(news)
            if done:
                del self.requests[number], self.num_said[number]
        if written:                             # the counts can wait
            chosen = [run.take_traffic().chosen for run in self.runs]
            self.outbox.put(Progress(written, chosen))


def leave_group() -> None:
    """Alone: who waited here for the others would wait for the dead.

    torch numbers the groups of a process, those that it failed to join, too, and ranks that
    count differently never meet: the next is the first again, for all.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0
