"""What the processes of the same-output matrix do: ranks that share the experts of any model."""

import hashlib
import os
import pickle
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fetching import fetcher
from listening import listening

from minimodel.cache.paged import PagedCache
from minimodel.cache.store import DiskStore
from minimodel.cluster.balance import place_experts
from minimodel.cluster.experts import serve_together, shard
from minimodel.cluster.mailbox import Mailbox
from minimodel.engine import engine as engine_module
from minimodel.engine.engine import Engine, choose, fingerprint_of
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits

BLOCK = 7


def make_engine(model, **options):
    cache = PagedCache(model.config, 150, BLOCK, model.norm.weight.dtype)
    return Engine(model, cache, Limits(max_tokens_per_step=24), **options)


# --- a group that serves one job after another ----------------------------------------------------


def serve_jobs(world):
    """Files with a model, prompts and a number of tokens; each rank serves its share of them."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False)
    jobs, answers = (Mailbox(store, f"{name}/{world.rank}") for name in ("jobs", "answers"))
    while True:
        for path in jobs.take():
            if path is None:
                return
            answers.put(serve(world, *pickle.loads(Path(path).read_bytes())))
        time.sleep(0.005)


def serve(world, model, prompts, count):
    """This rank's answers: of each prompt's number, tokens and the logits they came from."""
    engine = make_engine(model)                 # of the whole model: its fingerprint says so
    num_layers, num_experts = len(model.moe_layers()), model.config.num_experts
    loads = [[1 + (expert * layer) % 3 for expert in range(num_experts)]
             for layer in range(1, num_layers + 1)]
    copies = -num_experts % world.size + world.size
    shard(model, [place_experts(load, world.size, copies) for load in loads])
    requests = {number: engine.submit(prompts[number], Sampling(count, stop_ids=()))
                for number in range(world.rank, len(prompts), world.size)}
    with listening() as seen:
        serve_together(engine)
    engine.check()
    return {number: (request.output, torch.stack(seen[request.id]))
            for number, request in requests.items()}


# --- a member of a group whose other members die --------------------------------------------------


def make_member(path, folder):
    """Serves the model in a file; every token's logits are left in a folder, whoever dies."""
    model, whole = (pickle.loads(Path(path).read_bytes())[0] for _ in range(2))

    def listen(logits, requests):
        for row, request in zip(logits, requests, strict=True):
            file = Path(folder) / logits_name(request.prompt, len(request.output))
            file.with_suffix(f".{os.getpid()}").write_bytes(pickle.dumps(row))
            file.with_suffix(f".{os.getpid()}").replace(file)
        return choose(logits, requests)
    engine_module.choose = listen
    store = DiskStore(Path(folder) / "store", fingerprint_of(model, BLOCK), min_free_bytes=0)
    return make_engine(model, store=store), fetcher(whole)


def logits_name(prompt, num_written):
    return f"{hashlib.sha256(repr((tuple(prompt), num_written)).encode()).hexdigest()}.logits"
