"""What the processes of test_split.py do: rank 0 writes answers, the others read prompts.

Each function runs on all ranks; rank 0 compares its tokens with those of the slowest way.
"""

import os
import signal
import time

import torch

from minimodel.cluster import split
from minimodel.cluster.messages import Ack, Block, Granted, Prefill, Read, unpack
from minimodel.config import ModelConfig
from minimodel.engine.generate import generate_without_cache
from minimodel.engine.request import Sampling
from minimodel.model.transformer import Transformer

SIZES = {"vocab_size": 271, "hidden_size": 46, "num_layers": 4, "num_heads": 6,
         "num_kv_heads": 2, "head_dim": 14, "num_dense_layers": 1, "dense_size": 38,
         "num_experts": 7, "experts_per_token": 3, "expert_size": 22, "num_shared_experts": 1,
         "expert_scale": 1.7, "rope_theta": 9_000.0, "norm_eps": 1e-3, "context": 97}
SIZE = 5
SIX = Sampling(max_tokens=6, stop_ids=())
PROMPT = [200, *range(3, 29)]                   # five blocks and two tokens
PROMPTS = [[100 + size, *PROMPT[1:size]] for size in (2, 4, 5, 6, 9, 10, 11, 15, 27)]


def make_engine(seed=11):
    """The same random model in every process that asks with the same seed."""
    rng = torch.Generator().manual_seed(seed)
    model = Transformer(ModelConfig(**SIZES)).double().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
                         * (1.5 * tensor.shape[-1] ** -0.5))
    return split.make_engine(model, 60, SIZE)


def report(front, calls):
    """What rank 0 found, to be sent home."""
    front.decode.check()
    return {"same": [call.output == generate_without_cache(
                front.decode.engine.model, call.prompt, 6, stop_ids=()) for call in calls],
            "pulled": front.decode.counts["parts"], "failed": front.decode.counts["failed"],
            "held": front.decode.engine.pool.stats()["held"], **front.counts}


def answer_all(world, by_layer):
    """Prompts of all lengths around the borders of blocks, two of them twice."""
    engine = make_engine()
    side = split.connect(world, engine, **({} if world.rank else {"by_layer": by_layer}))
    if world.rank:
        split.read_prompts(side)
        side.check()
        return {**side.counts, "held": side.engine.pool.stats()["held"]}
    calls = [side.submit(prompt, SIX) for prompt in [*PROMPTS, *PROMPTS[-2:]]]
    split.write_answers(side)
    split.hang_up(side)
    return report(side, calls)


def strike(side, kind, number, how):
    """Let something befall this rank when it has sent so many messages of a kind."""
    send, left = side.link.send, [number]

    def watched(to, data):
        send(to, data)
        left[0] -= isinstance(unpack(data), kind)
        if left[0] == 0:
            time.sleep(0.05)                    # what was sent is on its way
            how()
    side.link.send = watched


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def prefill_workers_die(world):
    """Each at another moment: with a prompt in hand, with a ticket out, in a transfer."""
    side = split.connect(world, make_engine(),
                         **({} if world.rank else {"window": 2, "retry_s": 0.2}))
    if world.rank == 1:
        side.hears[Prefill] = lambda sender, message: die()
    elif world.rank == 2:
        strike(side, Granted, 1, die)
    elif world.rank == 3:
        strike(side, Block, 3, die)
    if world.rank:
        return split.read_prompts(side)
    calls = [side.submit([i, *PROMPT], SIX) for i in range(3)]
    split.write_answers(side)
    side.decode.link.close(0.1)
    return report(side, calls)


def prefill_worker_hangs(world):
    """For three seconds, in a transfer. Rank 0 waits for one, and computes the rest."""
    side = split.connect(world, make_engine(),
                         **({} if world.rank else {"window": 2, "patience_s": 1.0}))
    if world.rank:
        strike(side, Block, 2, lambda: time.sleep(3))
        split.read_prompts(side)
        return {**side.counts, "held": side.engine.pool.stats()["held"]}
    calls = [side.submit(PROMPT, SIX)]
    split.write_answers(side)
    split.hang_up(side)
    return report(side, calls)


def decode_worker_dies(world, kind):
    """In a transfer, or before it says that it is done. The other's lease ends a second later."""
    kinds = {"Read": Read, "Ack": Ack}
    side = split.connect(world, make_engine(), **({"lease_s": 1.0} if world.rank else {}))
    if world.rank == 0:
        send, wanted = side.decode.link.send, kinds[kind]
        side.decode.link.send = lambda to, data: (
            die() if isinstance(unpack(data), wanted) else send(to, data))
        side.submit(PROMPT, SIX)
        return split.write_answers(side)
    split.read_prompts(side)
    held = side.engine.pool.stats()["held"]
    while side.leases:
        side.step()
    side.check()
    return {"held_when_lost": held, "held": side.engine.pool.stats()["held"], **side.counts}


def two_models(world):
    """The ranks have different weights: nobody serves anything."""
    split.connect(world, make_engine(seed=world.rank))
