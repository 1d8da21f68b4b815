"""How fast answers are written: tokens a second at batch 1, 8 and 32, against `transformers`.

    python benchmarks/decode.py [--model DIR] [--batch 1 8 32] [--rounds 5] [--threads 1] [--json]

Prompts of 128 tokens, 128 new ones, greedy. The rate leaves the prompt's prefill out: batch x
127 / (time of 128 new tokens - time of 1). Both engines serve the same fresh prompts in every
round, taking turns to be first; the ratios are those of the medians, by the wall's clock and by
the time that the process computed. About three minutes.
"""

import argparse
import json
import os
import random
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from engines import Ours, Seconds, Server, Transformers, random_prompts, timed

from minimodel.model import checkpoint

PROMPT, NEW = 128, 128


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    most = max(options.batch) * (PROMPT + NEW)
    try:
        servers = [Ours(options.model, max_tokens=most), Transformers(options.model)]
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for batch in options.batch:
        report(compare(servers, batch, options.rounds), options)
    return 0


def compare(servers: list[Server], batch: int, rounds: int) -> dict:
    """Rates of both engines at one batch size, and how many of the tokens agree."""
    rng, rates, tokens = random.Random(f"decode/{batch}"), {s.name: [] for s in servers}, {}
    for turn in range(rounds + 1):                          # the first warms up
        prompts = random_prompts(rng, batch, PROMPT)
        for server in servers if turn % 2 else reversed(servers):
            rate, tokens[server.name] = measure(server, prompts)
            if turn:
                rates[server.name].append(rate)
    ours, theirs = (median(rates[name]) for name in ("ours", "transformers"))
    same = [a == b for ours, theirs in zip(*tokens.values(), strict=True)
            for a, b in zip(ours, theirs, strict=True)]
    return {"batch": batch, "ratio": round(ours.wall / theirs.wall, 2),
            "cpu_ratio": round(ours.cpu / theirs.cpu, 2),
            "ours_tokens_per_s": round(ours.wall), "transformers_tokens_per_s": round(theirs.wall),
            "same_tokens": sum(same) / len(same),
            "rates": {name: [round(rate.wall) for rate in values]
                      for name, values in rates.items()},
            "cpu_rates": {name: [round(rate.cpu) for rate in values]
                          for name, values in rates.items()}}


def median(rates: list[Seconds]) -> Seconds:
    return Seconds(*map(statistics.median, zip(*rates, strict=True)))


def measure(server: Server, prompts: list[list[int]]) -> tuple[Seconds, list[list[int]]]:
    """Tokens for each second of writing alone, by both clocks, and the tokens."""
    first, _ = timed(server, prompts, 1)
    whole, tokens = timed(server, prompts, NEW)
    written = len(prompts) * (NEW - 1)
    return Seconds(*(written / max(seconds, 1e-9) for seconds in whole - first)), tokens


def report(result: dict, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"benchmark": "decode", "model": options.model.name,
                          "threads": options.threads, "torch": torch.__version__, **result}))
        return
    print(f"batch {result['batch']:2}: ours {result['ours_tokens_per_s']:6,} tokens/s, "
          f"{result['ratio']:.2f} times transformers ({result['cpu_ratio']:.2f} by CPU time); "
          f"{result['same_tokens']:.1%} of tokens equal")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--model", type=Path, default=checkpoint.TOY, metavar="DIR")
    top.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    top.add_argument("--rounds", type=int, default=5)
    top.add_argument("--threads", type=int, default=1)
    top.add_argument("--json", action="store_true")
    return top


if __name__ == "__main__":
    sys.exit(main())
