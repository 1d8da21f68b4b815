"""How fast a prompt is read: time to the first token of 2,048 tokens, against `transformers`.

    python benchmarks/prefill.py [--model DIR] [--length 2048] [--rounds 7] [--threads 1] [--json]

Every round reads a fresh prompt with each engine, in turn; the ratios are those of the medians,
by the wall's clock and by the time that the process computed.
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
from engines import Ours, Transformers, random_prompts, timed

from minimodel.model import checkpoint


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        servers = [Ours(options.model, max_tokens=options.length + 16),
                   Transformers(options.model)]
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rng, times, tokens = random.Random("prefill"), {s.name: [] for s in servers}, {}
    for turn in range(options.rounds + 1):                  # the first warms up
        prompts = random_prompts(rng, 1, options.length)
        for server in servers if turn % 2 else reversed(servers):
            seconds, tokens[server.name] = timed(server, prompts, 1)
            if turn:
                times[server.name].append(seconds)
    report(times, tokens, options)
    return 0


def report(times: dict, tokens: dict, options: argparse.Namespace) -> None:
    (ours, ours_cpu), (theirs, theirs_cpu) = (
        map(statistics.median, zip(*times[name], strict=True)) for name in ("ours", "transformers"))
    same = tokens["ours"] == tokens["transformers"]
    if options.json:
        print(json.dumps({"benchmark": "prefill", "model": options.model.name,
                          "threads": options.threads, "torch": torch.__version__,
                          "length": options.length, "ours_s": ours, "transformers_s": theirs,
                          "ratio": round(theirs / ours, 2),
                          "cpu_ratio": round(theirs_cpu / ours_cpu, 2), "same_token": same,
                          "wall_and_cpu_s": times}))
        return
    print(f"{options.length} tokens: ours {ours * 1e3:.0f} ms, {theirs / ours:.2f} times as fast "
          f"as transformers ({theirs_cpu / ours_cpu:.2f} by CPU time); "
          f"{'the same' if same else 'another'} first token")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--model", type=Path, default=checkpoint.TOY, metavar="DIR")
    top.add_argument("--length", type=int, default=2048)
    top.add_argument("--rounds", type=int, default=7)
    top.add_argument("--threads", type=int, default=1)
    top.add_argument("--json", action="store_true")
    return top


if __name__ == "__main__":
    sys.exit(main())
