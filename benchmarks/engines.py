"""Engines to compare, behind one small face: prompts in, exactly so many greedy tokens out.

All serve one checkpoint folder, in float32, on as many threads as torch was told to use. A call
is timed by two clocks: on the wall, and by the time that this process computed. On a machine
that others use, too, the second is the one to trust, with one thread.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from minimodel.cache.paged import PagedCache
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.model import checkpoint


class Server(Protocol):
    name: str

    def generate(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens after each prompt, all prompts at once, stop tokens ignored."""


class Ours:
    """This package's engine: paged cache, one step for all who write.

    Without `reuse`, since some benchmarks send a prompt twice and want it computed twice.
    """

    name = "ours"

    def __init__(self, folder: Path, *, max_tokens: int, reuse: bool = False):
        model = checkpoint.load(folder)
        limits = Limits(max_tokens_per_step=max_tokens, max_running=64, spare_blocks=0,
                        context=model.config.context)
        self.engine = Engine(model, PagedCache(model.config, -(-2 * max_tokens // 16)), limits,
                             reuse=reuse)

    def generate(self, prompts, count):
        sampling = Sampling(max_tokens=count, stop_ids=frozenset())
        self.engine.records.clear()
        return self.engine.generate(prompts, sampling)


class Transformers:
    """`transformers`' own `generate`, as its documents say: what readers know."""

    name = "transformers"

    def __init__(self, folder: Path, **_):
        from transformers import AutoModelForCausalLM
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts, count):
        ids = torch.tensor(prompts)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                  max_new_tokens=count, min_new_tokens=count)
        return out[:, ids.shape[1]:].tolist()


class Seconds(NamedTuple):
    wall: float
    cpu: float

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def timed(server: Server, prompts: Sequence[list[int]],
          count: int) -> tuple[Seconds, list[list[int]]]:
    """What a call took, and the tokens."""
    started = Seconds(time.perf_counter(), time.process_time())
    tokens = server.generate(prompts, count)
    return Seconds(time.perf_counter(), time.process_time()) - started, tokens


def random_prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Prompts of random printable bytes: no two alike, so that nothing is remembered."""
    return [rng.choices(range(32, 127), k=length) for _ in range(count)]
