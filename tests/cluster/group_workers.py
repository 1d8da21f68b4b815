"""What the members of test_group.py serve: a small model whose 8 experts do not divide among 3."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from fetching import fetcher

from minimodel.cache.paged import PagedCache
from minimodel.cache.store import DiskStore
from minimodel.cluster.balance import place_experts
from minimodel.cluster.experts import GroupLostError, meeting, shard, take_part
from minimodel.cluster.member import leave_group
from minimodel.config import ModelConfig
from minimodel.engine.engine import Engine, fingerprint_of
from minimodel.engine.scheduler import Limits
from minimodel.model.batch import Batch
from minimodel.model.transformer import Transformer

CONFIG = ModelConfig(vocab_size=271, hidden_size=46, num_layers=3, num_heads=6, num_kv_heads=2,
                     head_dim=14, num_dense_layers=1, dense_size=38, num_experts=8,
                     experts_per_token=3, expert_size=22, context=297)
BLOCK = 5
POISON = 270                    # whoever computes this token dies of it


def make_model():
    torch.manual_seed(14)
    model = Transformer(CONFIG).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


class Mortal(Transformer):
    def forward(self, tokens, batch, kv=None):
        if POISON in tokens.tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens, batch, kv)


def make(store=None, budget=16, num_blocks=150):
    """Prompts are read in chunks, and blocks are small: a death is always in the middle."""
    model = make_model()
    model.__class__ = Mortal
    kept = DiskStore(store, fingerprint_of(model, BLOCK), min_free_bytes=0) if store else None
    cache = PagedCache(CONFIG, num_blocks, BLOCK, dtype=torch.float64)
    limits = Limits(max_tokens_per_step=budget)
    return Engine(model, cache, limits, store=kept), fetcher(make_model())


def fail():
    raise ZeroDivisionError("no model today")


# --- without a supervisor -------------------------------------------------------------------------


@torch.inference_mode()
def move_experts(world):
    """How far logits are from those of an undivided model, as experts move from place to place."""
    alone, model = make_model(), make_model()
    fetched = []

    def fetch(layer, expert):
        fetched.append((layer, expert))
        return fetcher(alone)(layer, expert)
    tokens = torch.arange(17 * world.rank, 17 * world.rank + 11 + world.rank)
    batch, found = Batch(new=[len(tokens)]), []
    for loads in ([1] * 8, [9, 1, 1, 1, 1, 1, 1, 5], range(8), [5, 0, 0, 9, 0, 0, 0, 0]):
        fetched.clear()
        copies = -8 % world.size + world.size
        runs = shard(model, [place_experts(loads, world.size, copies),
                             place_experts(list(loads)[::-1], world.size, copies)], fetch=fetch)
        if world.rank:
            far = (model(tokens, batch) - alone(tokens, batch)).abs().max().item()
        else:
            far = 0.0
            take_part(model)
        found.append({"far": far, "fetched": len(fetched), "experts": [run.experts for run in runs],
                      "chosen": sum(runs[0].traffic.chosen)})
    return found


def meet_without(world, patience_s, how):
    """The last rank leaves the others alone. How long they took to notice, and to meet again."""
    last = world.size - 1
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False)
    leave_group()
    join(store, 1, world.rank, world.size, patience_s)
    if world.rank == last:
        os.kill(os.getpid(), how)
    started = time.perf_counter()
    try:
        with meeting():
            dist.all_reduce(torch.ones(1))
    except GroupLostError:
        noticed_s = time.perf_counter() - started
    leave_group()
    left_s = time.perf_counter() - started - noticed_s
    join(store, 2, world.rank, last, patience_s)
    total = torch.tensor([float(10 + world.rank)])
    dist.all_reduce(total)
    return {"noticed_s": noticed_s, "left_s": left_s, "total": total.item()}


def join(store, epoch, rank, size, patience_s):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(epoch), store), rank=rank,
                            world_size=size, timeout=timedelta(seconds=patience_s))


def meet_after_a_failure_alone(world):
    """The first rank joins an epoch to which nobody comes; then all meet in the next."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False)
    leave_group()
    if world.rank == 0:
        try:
            join(store, 1, 0, world.size, patience_s=0.3)
        except RuntimeError:
            leave_group()
    join(store, 2, world.rank, world.size, patience_s=20.0)
    total = torch.tensor([float(10 + world.rank)])
    dist.all_reduce(total)
    return total.item()


def same_rank(world):
    return world.rank
