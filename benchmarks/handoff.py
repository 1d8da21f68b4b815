"""Who waits for whom: answers beside long prompts, in one engine and on workers of their own.

    python benchmarks/handoff.py [--model DIR] [--chats 8] [--chat-tokens 400] [--long 12]
                                 [--long-tokens 2049] [--every-s 0.08] [--json]

Two processes of one thread each serve the same mixed load three times: chats, which write long
answers to short prompts, and, from time to time, a long prompt with a short answer.

    together    both processes serve half of all, whole prompts in one step
    chunked     the same, with at most 256 tokens a step
    split       one process reads all prompts, 512 tokens a step (between two it sends blocks), the
                other writes all answers

Shown are the gaps between the tokens of the chats, the most tokens that any step computed beside
a chat's next one (a count: the same on any machine, but for who arrives when), what a handoff of
a long prompt carried and how long it took, from the ticket to a request that runs on its own
blocks, and how many answers were the same everywhere (in float32 a near tie may fall the other
way in a step of another shape). A chat's first gap in `split` is its own handoff: it is in the
longest. On two busy cores the gaps are those of the machine: then only the ratios say something.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist

from minimodel.cluster import split
from minimodel.cluster.launch import World, launch
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.model import checkpoint

WAYS = {"together": 1 << 14, "chunked": 256, "split": 512}          # tokens in a step, at most
BLOCKS = 1_500


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    ranks = launch(f"{__file__}:serve_all_ways", 2, vars(options), deadline_s=options.deadline_s)
    report(summary(ranks), options)
    return 0


# --- the load -------------------------------------------------------------------------------------


def arrivals(options: dict) -> list[tuple[float, str, list[int], Sampling]]:
    """When what arrives: (seconds, its name, prompt, sampling). All processes know the same."""
    rng = random.Random("handoff")

    def prompt(first: int, length: int) -> list[int]:
        return [first, *(rng.randrange(256) for _ in range(length - 1))]

    def tokens(count: int) -> Sampling:
        return Sampling(max_tokens=count, stop_ids=frozenset())
    chats = [(0.05 * i, f"chat {i}", prompt(i, 33), tokens(options["chat_tokens"]))
             for i in range(options["chats"])]
    long = [(options["every_s"] * (i + 1), f"long {i}",
             prompt(128 + i, options["long_tokens"]), tokens(4)) for i in range(options["long"])]
    return sorted(chats + long, key=lambda arrival: arrival[0])


def drive(load: list, submit: Callable, step: Callable, is_idle: Callable) -> dict:
    """Serve a load as it arrives; what `submit` returned, by name."""
    begun, left, served = time.perf_counter(), list(load), {}
    while left or not is_idle():
        while left and left[0][0] <= time.perf_counter() - begun:
            _, name, prompt, sampling = left.pop(0)
            served[name] = submit(prompt, sampling)
        if step() is None:
            time.sleep(0.0005)
    return served


# --- in the two processes -------------------------------------------------------------------------


def serve_all_ways(world: World, options: dict) -> dict[str, dict]:
    """One after the other; each rank's part of what came of it."""
    model, load, found = checkpoint.load(Path(options["model"])), arrivals(options), {}
    for way, most in WAYS.items():
        engine = split.make_engine(model, BLOCKS, limits=Limits(max_tokens_per_step=most))
        engine.generate([[255] * 65], Sampling(max_tokens=5))           # warm
        dist.barrier()
        serve = split_up if way == "split" else together
        found[way] = serve(world, engine, load)
        dist.barrier()
    return found


def together(world: World, engine: Engine, load: list) -> dict:
    served = drive(load[world.rank::2], engine.submit, engine.step,
                   lambda: engine.scheduler.is_idle)
    return seen(engine, served)


def split_up(world: World, engine: Engine, load: list) -> dict:
    side = split.connect(world, engine)
    if world.rank:
        split.read_prompts(side)
        return seen(engine, {})
    calls = drive(load, side.submit, side.poll, lambda: side.is_idle)
    split.hang_up(side)
    return {**seen(engine, {name: call.request for name, call in calls.items()}),
            "read_here": side.counts["read_here"],
            "pulls": [{"tokens": pull.ticket.num_tokens, "bytes": pull.num_bytes,
                       "ms": 1e3 * (pull.ended_at - pull.accepted_at)}
                      for pull in side.decode.ended]}


def seen(engine: Engine, served: dict) -> dict:
    beside = [record.num_tokens for record in engine.records
              if any(share.kind == "decode" for share in record.shares)]
    return {"answers": {name: request.output for name, request in served.items()},
            "times": {name: request.token_times_s for name, request in served.items()},
            "most_tokens": max(beside, default=0)}


# --- what came of it ------------------------------------------------------------------------------


def merged(ranks: list[dict], way: str, what: str) -> dict:
    return {name: found for rank in ranks for name, found in rank[way][what].items()}


def gaps_ms(ranks: list[dict], way: str) -> list[float]:
    """Of the chats, all that lie between two tokens."""
    return sorted(1e3 * (after - before)
                  for name, times in merged(ranks, way, "times").items() if name.startswith("chat")
                  for before, after in pairwise(times))


def summary(ranks: list[dict]) -> dict:
    result = {}
    for way in WAYS:
        gaps = gaps_ms(ranks, way)
        result |= {f"{way}_p50_ms": round(statistics.median(gaps), 2),
                   f"{way}_p99_ms": round(gaps[int(0.99 * len(gaps))], 2),
                   f"{way}_most_ms": round(gaps[-1], 2),
                   f"{way}_most_tokens": max(rank[way]["most_tokens"] for rank in ranks)}
    long = max(pull["tokens"] for pull in ranks[0]["split"]["pulls"])
    pulls = [pull for pull in ranks[0]["split"]["pulls"] if pull["tokens"] == long]
    answers = [merged(ranks, way, "answers") for way in WAYS]
    return {**result, "p99_ratio": round(result["together_p99_ms"] / result["split_p99_ms"], 1),
            "handoff_tokens": long, "handoff_bytes": pulls[0]["bytes"],
            "handoff_ms": round(statistics.median(pull["ms"] for pull in pulls), 2),
            "handoff_least_ms": round(min(pull["ms"] for pull in pulls), 2),
            "read_here": ranks[0]["split"]["read_here"], "answers": len(answers[0]),
            "same_answers": sum(len({tuple(found[name]) for found in answers}) == 1
                                for name in answers[0])}


def report(result: dict, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"benchmark": "handoff", "model": Path(options.model).name,
                          "chats": options.chats, "long": options.long, **result}))
        return
    for way in WAYS:
        print(f"{way:9} gaps between tokens of the chats: median {result[f'{way}_p50_ms']:.1f} ms, "
              f"p99 {result[f'{way}_p99_ms']:.1f} ms, longest {result[f'{way}_most_ms']:.1f} ms; "
              f"at most {result[f'{way}_most_tokens']:,} tokens in a step")
    print(f"p99 split is {result['p99_ratio']} times shorter than together; a handoff of "
          f"{result['handoff_tokens']} tokens: {result['handoff_bytes']:,} bytes in "
          f"{result['handoff_ms']:.1f} ms (at least {result['handoff_least_ms']:.1f}; a prefill "
          f"worker answers between two of its steps); {result['same_answers']} of "
          f"{result['answers']} answers are the same in all three")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--model", default=str(checkpoint.TOY), metavar="DIR")
    top.add_argument("--chats", type=int, default=8, help="answers that are written (default 8)")
    top.add_argument("--chat-tokens", type=int, default=400, help="of each (default 400)")
    top.add_argument("--long", type=int, default=12, help="long prompts (default 12)")
    top.add_argument("--long-tokens", type=int, default=2_049, help="of each (default 2049)")
    top.add_argument("--every-s", type=float, default=0.08, help="between two (default 0.08)")
    top.add_argument("--deadline-s", type=float, default=300.0)
    top.add_argument("--json", action="store_true", help="one JSON line")
    return top


if __name__ == "__main__":
    sys.exit(main())
