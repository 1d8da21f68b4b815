"""Where requests go, by policy: on three real engines and in a modelled half hour.

    python benchmarks/routing.py [--visitors 48] [--sessions 30] [--threads 1] [--json]
    python benchmarks/routing.py --table minimodel/data/routing_runs.json

Three engines in one process share the toy's weights and serve the same visitors, once for each
policy: tokens of prompts found, waits in turns (a turn is a step of each engine), tokens read by
the busiest engine over the mean, the router's expectations that failed. Then the same router,
scheduler and block pool serve half an hour of made-up traffic in virtual time, quiet and with a
viral prompt. The exit code is 1 if a policy changed any token of an answer. About half a minute.

With --table, the runs that the explorable of chapter 15 looks up are computed anew: a minute more.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from minimodel.cluster.router import ByOpening, Cost, least_loaded, longest_prefix, round_robin
from minimodel.lesson import chapter_15
from minimodel.model import checkpoint

POLICIES = {"round robin": round_robin, "least load": least_loaded,
            "longest prefix": longest_prefix, "by opening": ByOpening(4),
            "one cost": Cost(chapter_15.READ_S)}


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.table:
        options.table.write_text(as_lines(table()), encoding="ascii")
        return 0
    torch.set_num_threads(options.threads)
    outputs = []
    for name, policy in POLICIES.items():
        row, tokens = on_engines(policy, options.visitors)
        outputs.append(tokens)
        report({"benchmark": "routing", "where": "engines", "policy": name, **row}, options)
    for viral in (False, True):
        for name, policy in POLICIES.items():
            report({"benchmark": "routing", "where": "modelled", "viral": viral, "policy": name,
                    **in_virtual_time(policy, options.sessions, viral)}, options)
    return 0 if all(tokens == outputs[0] for tokens in outputs) else 1


def on_engines(policy, count: int) -> tuple[dict, list]:
    """What three engines did, and all tokens they wrote."""
    fleet = chapter_15.Fleet(checkpoint.load(), policy)
    fleet.serve(chapter_15.visitors(count))
    used, computed = fleet.usage, fleet.computed
    row = {"hit_tokens": used.hit_tokens, "prompt_tokens": used.input_tokens,
           "p50_turns": fleet.wait(50), "p99_turns": round(fleet.wait(99), 2),
           "busiest_over_mean": round(max(computed.values()) * len(computed)
                                      / sum(computed.values()), 3),
           "expected_in_vain": fleet.missing}
    return row, [answered.request.output for answered in fleet.answered]


def in_virtual_time(policy, sessions: float, viral: bool) -> dict:
    outcome = chapter_15.model_run(chapter_15.half_hour(sessions, viral=viral), policy)
    return {"requests": len(outcome.served), "hit_share": round(outcome.hit_share, 4),
            "p50_s": round(outcome.first_token_s(50), 3),
            "p99_s": round(outcome.first_token_s(99), 3),
            "busiest_over_mean": round(outcome.spread, 3)}


def table() -> dict[str, list[list[dict]]]:
    """All runs that the explorable knows, as `chapter_15.lean_runs` reads them."""
    return {name: [[chapter_15.lean_row(weight, sessions, name == "viral")
                    for weight in chapter_15.WEIGHTS] for sessions in chapter_15.LOADS]
            for name in ("quiet", "viral")}


def as_lines(runs: dict[str, list[list[dict]]]) -> str:
    """JSON with one run a line."""
    blocks = []
    for name, by_load in runs.items():
        loads = ["[\n" + ",\n".join(map(json.dumps, by_weight)) + "\n]" for by_weight in by_load]
        blocks.append(f'"{name}": [{", ".join(loads)}]')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def report(row: dict, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({**row, "torch": torch.__version__}), flush=True)
    else:
        print(", ".join(f"{name} {value}" for name, value in row.items() if name != "benchmark"),
              flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--visitors", type=at_least_one, default=48,
                     help="of the real engines (default 48)")
    top.add_argument("--sessions", type=at_least_one, default=30,
                     help="that begin in a minute of the modelled half hour (default 30)")
    top.add_argument("--threads", type=at_least_one, default=1)
    top.add_argument("--json", action="store_true", help="one JSON line a policy and a place")
    top.add_argument("--table", type=Path, metavar="FILE",
                     help="write the runs of chapter 15's explorable and do nothing else")
    return top


def at_least_one(text: str) -> int:
    found = int(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{found} is too few: give at least 1")
    return found


if __name__ == "__main__":
    sys.exit(main())
