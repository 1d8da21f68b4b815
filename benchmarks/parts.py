"""Where a step's time goes, part by part, and how far it is from what the machine could do.

    python benchmarks/parts.py [--model DIR] [--batch 1 8 32] [--prompt 2048] [--steps 60] [--json]

Prefill of one prompt, then decode steps of so many requests with about 160 tokens of notes each,
on one thread. Three answers:

    parts    each part's own CPU time, as a share; while another part runs inside, its clock stands
    hollow   the same step of a model with the same layers, heads and experts, and hardly a number
             in them: what remains is starting operations, and Python
    limit    the longer of two times: of the bytes that a step must fetch, at the memory's
             bandwidth, and of its operations, at the rate of a large matrix product

The stopwatch itself costs time, mostly where parts are short: the step is timed without it.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from engines import random_prompts
from torch import nn

from minimodel.cache.paged import PagedCache, PagedStep
from minimodel.config import ModelConfig
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.model import attention, checkpoint, latent, moe, norm, transformer
from minimodel.simulate import cost

CONTEXT = 128           # tokens of each prompt that is decoded after
CLOCK = time.thread_time


class Stopwatch:
    """Sums each part's own time: of nested parts, only the innermost one's clock runs."""

    def __init__(self):
        self.spent, self.stack, self.since = Counter(), ["other"], CLOCK()

    def listen(self, owner: object, name: str, part: str) -> None:
        """Count the calls of a method, or of a module's function, as time of `part`."""
        call = getattr(owner, name)

        def timed(*args, **kwargs):
            self._switch()
            self.stack.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self.stack.pop()
        setattr(owner, name, timed)

    def _switch(self) -> None:
        now = CLOCK()
        self.spent[self.stack[-1]] += now - self.since
        self.since = now

    def shares(self) -> dict[str, float]:
        total = sum(self.spent.values())
        return {part: round(seconds / total, 3) for part, seconds in self.spent.most_common()}


def listen_to(watch: Stopwatch, model: transformer.Transformer) -> None:
    """Put the stopwatch on every part. What is nobody's is the model's glue, or the engine's."""
    for owner, name, part in [
            (Engine, "step", "engine"), (transformer.Transformer, "forward", "glue"),
            (PagedCache, "step", "notes"), (PagedStep, "read", "notes"),
            (PagedStep, "write", "notes"), (attention, "rotate", "rotary"),
            (latent, "rotate", "rotary"), (transformer, "rotary_angles", "rotary"),
            (attention.Attention, "attend", "attention"),
            (latent.LatentAttention, "attend", "attention"), (norm.RMSNorm, "forward", "norms"),
            (moe.Gate, "forward", "gate"), (moe.FeedForward, "forward", "feed-forward")]:
        watch.listen(owner, name, part)
    for layer in model.moe_layers():
        watch.listen(layer, "run_experts", "experts")
    for block in model.layers:
        for module in block.self_attn.modules():
            if isinstance(module, nn.Linear):
                watch.listen(module, "forward", "projections")
    watch.listen(model.lm_head, "forward", "logits")


# --- steps to time -----------------------------------------------------------------------------


def prefill(model: transformer.Transformer, length: int) -> Callable[[], None]:
    """A function that reads a fresh prompt in one step."""
    engine, rng = engine_for(model, 1, length), random.Random("parts")

    def step():
        engine.submit(random_prompts(rng, 1, length)[0], Sampling(max_tokens=1, stop_ids=()))
        engine.run()
    return step


def decode(model: transformer.Transformer, batch: int, steps: int) -> Callable[[], None]:
    """A function that lets every request of a batch write one token, some `steps` times."""
    engine = engine_for(model, batch, CONTEXT + 2 * steps)
    for prompt in random_prompts(random.Random("parts"), batch, CONTEXT):
        engine.submit(prompt, Sampling(max_tokens=2 * steps, stop_ids=()))
    engine.step()
    return engine.step


def engine_for(model: transformer.Transformer, batch: int, length: int) -> Engine:
    blocks = batch * (length // 16 + 2)
    limits = Limits(max_tokens_per_step=batch * length, max_running=batch, spare_blocks=0)
    return Engine(model, PagedCache(model.config, blocks), limits)


def milliseconds(step: Callable[[], None], count: int) -> float:
    times = []
    for _ in range(count):
        started = CLOCK()
        step()
        times.append(CLOCK() - started)
    return 1e3 * statistics.median(times)


def hollow(config: ModelConfig) -> transformer.Transformer:
    """The same layers, heads and experts, and so the same operations, on hardly any numbers."""
    tiny = {"hidden_size": 8, "head_dim": 2, "dense_size": 8, "expert_size": 4}
    if config.latent_size:
        tiny |= {"latent_size": 4, "nope_dim": 2, "rope_dim": 2}
    return transformer.Transformer(replace(config, **tiny)).eval()


# --- limits ------------------------------------------------------------------------------------


def bandwidth() -> float:
    """Bytes a second that one thread reads from memory, no cache large enough to help."""
    numbers = torch.ones(64 << 20)
    return numbers.nbytes / (1e-3 * milliseconds(numbers.sum, 9))


def matmul_rate() -> float:
    """Operations a second of one thread in a large product, float32."""
    one, other = torch.randn(2, 1024, 1024)
    return 2 * 1024 ** 3 / (1e-3 * milliseconds(lambda: one @ other, 9))


def needed(config: ModelConfig, batch: int, new: int, past: int) -> tuple[float, float]:
    """Bytes that a step has to fetch, and its operations: weights once, and everybody's notes.

    Experts are counted as if tokens chose them at random.
    """
    met = cost.expected_distinct_experts(config.num_experts, config.experts_per_token, batch * new)
    one_expert = 3 * config.hidden_size * config.expert_size
    idle = config.num_moe_layers * (config.num_experts - met) * one_expert
    embedding = config.vocab_size * config.hidden_size
    weights = 4 * (config.num_parameters() - embedding - idle)
    notes = batch * past * config.kv_bytes_per_token()
    return weights + notes, batch * config.flops(new, past, num_logits=1)


# --- one line a case ---------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        model = checkpoint.load(options.model)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    empty, rates = hollow(model.config), (bandwidth(), matmul_rate())
    past, cases = CONTEXT + options.steps // 2, []
    for batch in options.batch:
        cases.append((f"decode, batch {batch}", (batch, 1, past), options.steps,
                      lambda model, batch=batch: decode(model, batch, options.steps + 1)))
    cases.append((f"prefill, {options.prompt} tokens", (1, options.prompt, 0), 5,
                  lambda model: prefill(model, options.prompt)))
    plain = [[milliseconds(make(kind), count) for kind in (model, empty)]
             for _, _, count, make in cases]
    watch = Stopwatch()
    listen_to(watch, model)
    for (name, sizes, count, make), (whole, shell) in zip(cases, plain, strict=True):
        step = make(model)
        watch.spent.clear()
        milliseconds(step, count)
        report(name, whole, shell, needed(model.config, *sizes), rates, watch.shares(), options)
    return 0


def report(name: str, whole: float, shell: float, work: tuple[float, float],
           rates: tuple[float, float], shares: dict, options: argparse.Namespace) -> None:
    fetch, compute = (1e3 * amount / rate for amount, rate in zip(work, rates, strict=True))
    result = {"case": name, "step_ms": round(whole, 2), "hollow_ms": round(shell, 2),
              "limit_ms": round(max(fetch, compute), 2), "megabytes": round(work[0] / 1e6, 2),
              "megaflops": round(work[1] / 1e6, 1), "gigabytes_per_s": round(rates[0] / 1e9, 1),
              "gigaflops_per_s": round(rates[1] / 1e9, 1), "shares": shares}
    if options.json:
        print(json.dumps({"benchmark": "parts", "model": options.model.name, "threads": 1,
                          "torch": torch.__version__, **result}), flush=True)
        return
    print(f"{name}: {whole:.2f} ms, hollow {shell:.2f}, limit {max(fetch, compute):.2f} "
          f"({work[0] / 1e6:.1f} MB in {fetch:.2f}, {work[1] / 1e6:.1f} MFLOP in {compute:.2f})")
    print("   ", ", ".join(f"{part} {share:.1%}" for part, share in shares.items()), flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--model", type=Path, default=checkpoint.TOY, metavar="DIR")
    top.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    top.add_argument("--prompt", type=int, default=2048)
    top.add_argument("--steps", type=int, default=60)
    top.add_argument("--json", action="store_true")
    return top


if __name__ == "__main__":
    sys.exit(main())
