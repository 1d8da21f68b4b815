"""Prefill and decode on processes of their own: rank 0 writes answers, the others read prompts.

    python -m minimodel.cluster.split --workers 2 --prompt-file F       on this machine
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m minimodel.cluster.split --prompt-file F                      the same on two

Rank 0 takes the prompts, has each read by one of the others, and prints the answers. If it has
lost the others, it reads the prompts itself.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..cache.paged import PagedCache
from ..engine.engine import Engine
from ..engine.request import Sampling
from ..engine.scheduler import Limits
from ..model import checkpoint
from ..model.transformer import Transformer
from ..tokenizer import encode
from . import command
from .handoff import Call, DecodeWorker, Front, PrefillWorker, require_one_model
from .launch import World
from .messages import Bye
from .wire import TorchLink

PAUSE_S = 0.01                  # with nothing to do, look again after this at the latest


def make_engine(model: Transformer, num_blocks: int = 512, block_size: int = 16,
                limits: Limits | None = None) -> Engine:
    cache = PagedCache(model.config, num_blocks, block_size, model.norm.weight.dtype)
    return Engine(model, cache, limits or Limits(context=model.config.context))


def connect(world: World, engine: Engine, **options) -> Front | PrefillWorker:
    """This rank's side. Raises HandoffError on all ranks unless all have one model.

    `options` are those of DecodeWorker on rank 0, of PrefillWorker on the others.
    """
    fingerprints = [""] * world.size
    dist.all_gather_object(fingerprints, engine.fingerprint)
    require_one_model(fingerprints)
    link = TorchLink()
    if world.rank == 0:
        return Front(DecodeWorker(engine, link, **options), range(1, world.size))
    return PrefillWorker(world.rank, engine, link, **options)


def read_prompts(worker: PrefillWorker) -> None:
    """A prefill worker's whole life: until rank 0 says goodbye, or is gone."""
    said = []
    worker.hears[Bye] = lambda sender, message: said.append(sender)
    while not said and not worker.link.is_lost(0):
        if worker.step() is None:
            worker.link.wait(PAUSE_S)
    worker.listen()                         # to what came just before the end
    worker.link.close()


def write_answers(front: Front) -> None:
    """Rank 0's: until all calls are done."""
    while not front.is_idle:
        if front.poll() is None:
            front.decode.link.wait(PAUSE_S)


def hang_up(front: Front) -> None:
    """Rank 0 has no more to do, and lets the others go, too."""
    front.close()
    front.decode.link.close()


def serve(world: World, engine: Engine, prompts: Sequence[Sequence[int]],
          sampling: Sampling | None = None) -> list[Call] | None:
    """Answer some prompts together; the calls, on rank 0."""
    side = connect(world, engine)
    if world.rank:
        return read_prompts(side)
    calls = [side.submit(prompt, sampling) for prompt in prompts]
    write_answers(side)
    hang_up(side)
    return calls


# --- the command ----------------------------------------------------------------------------------


def answer(world: World, prompt: bytes, folder: Path | None, max_tokens: int) -> dict | None:
    """One prompt by the toy, or another checkpoint: what rank 0 prints."""
    engine = make_engine(checkpoint.load(folder or checkpoint.TOY))
    calls = serve(world, engine, [encode(prompt)], Sampling(max_tokens=max_tokens))
    if calls is None:
        return None
    return {**command.printable(calls[0].request), "read_by": calls[0].worker}


def main(arguments: list[str] | None = None) -> int:
    return command.main(answer, "minimodel.cluster.split", __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
