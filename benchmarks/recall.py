"""What a model recalls from its prompt: the three numbers of a model card.

    python benchmarks/recall.py [--model DIR] [--count 200] [--seed 2026] [--json]

DIR is any checkpoint folder, the shipped toy by default; the notes that each token leaves are
counted beside. `minimodel/engine/recall.py` says what is asked and what counts. About two minutes.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from minimodel.engine.recall import KINDS, Recall, measure
from minimodel.model import checkpoint
from minimodel.model.transformer import Transformer


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    bars = {kind: partial(tqdm, total=options.count, desc=kind, disable=options.json or None)
            for kind in options.kinds}
    try:
        model = checkpoint.load(options.model)
        results = [measure(model, kind, options.count, options.seed, bars[kind])
                   for kind in options.kinds]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_line(options, model, results)
    else:
        print_table(model, results)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--model", type=Path, default=checkpoint.TOY, metavar="DIR")
    top.add_argument("--count", type=int, default=200)
    top.add_argument("--seed", type=int, default=2026)
    top.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    top.add_argument("--json", action="store_true", help="one JSON line only")
    return top


def print_line(options: argparse.Namespace, model: Transformer, results: list[Recall]) -> None:
    rows = [{"kind": r.kind, "asked": r.asked, "right": r.right, "share": round(r.share, 4),
             "interval": [round(end, 4) for end in r.interval()]} for r in results]
    print(json.dumps({"benchmark": "recall", "model": options.model.resolve().name,
                      "note_bytes_per_token": model.config.kv_bytes_per_token(),
                      "seed": options.seed, "results": rows}))


def print_table(model: Transformer, results: list[Recall]) -> None:
    print(f"{model.config.kv_bytes_per_token():,} bytes of notes a token")
    for result in results:
        low, high = result.interval()
        print(f"{result.kind:7} {result.right:4} of {result.asked}   {result.share:.1%}   "
              f"95 % interval {low:.1%} to {high:.1%}")
        for wanted, got in result.misses[:5] if result.kind != "zeroed" else []:
            print(f"        wanted {wanted!r}, got {got!r}")


if __name__ == "__main__":
    sys.exit(main())
