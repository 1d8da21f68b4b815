"""Experts spread over processes: rank 0 answers a prompt, each rank runs its own experts for it.

    python -m minimodel.cluster.spread --workers 4 --prompt-file F      on this machine
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m minimodel.cluster.spread --prompt-file F                     the same on two

Here a rank's death ends all. See `group.py` for a group that goes on.
"""

import sys
from pathlib import Path

from ..engine.request import Sampling
from ..model import checkpoint
from ..tokenizer import encode
from . import command
from .balance import place_experts
from .experts import serve_together, shard
from .launch import World
from .split import make_engine


def answer(world: World, prompt: bytes, folder: Path, max_tokens: int) -> dict | None:
    """What rank 0 prints: the answer, and how many rows of each expert layer went elsewhere."""
    engine = make_engine(checkpoint.load(folder))
    num_experts = engine.model.config.num_experts
    placement = place_experts([1] * num_experts, world.size, redundant=-num_experts % world.size)
    runs = shard(engine.model, [placement] * engine.model.config.num_moe_layers)
    if world.rank:
        serve_together(engine)
        return None
    request = engine.submit(encode(prompt), Sampling(max_tokens=max_tokens))
    num_steps = serve_together(engine)
    return {**command.printable(request), "ranks": world.size, "steps": num_steps,
            "rows_sent": [run.traffic.rows_sent for run in runs]}


def main(arguments: list[str] | None = None) -> int:
    return command.main(answer, "minimodel.cluster.spread", __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
