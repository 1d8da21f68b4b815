"""What the toy recalls from its prompt: the three numbers of the model card.

    python benchmarks/recall.py [--model DIR] [--count 200] [--seed 2026] [--json]

`minimodel/engine/recall.py` says what is asked and what counts. About two minutes.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from minimodel.engine.recall import KINDS, measure
from minimodel.model import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=checkpoint.TOY)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", action="store_true", help="one JSON line only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = checkpoint.load(options.model)
    bars = {kind: partial(tqdm, total=options.count, desc=kind, disable=options.json or None)
            for kind in options.kinds}
    results = [measure(model, kind, options.count, options.seed, bars[kind])
               for kind in options.kinds]
    if options.json:
        rows = [{"kind": r.kind, "asked": r.asked, "right": r.right, "share": round(r.share, 4),
                 "interval": [round(end, 4) for end in r.interval()]} for r in results]
        print(json.dumps({"benchmark": "recall", "seed": options.seed, "results": rows}))
        return
    for result in results:
        low, high = result.interval()
        print(f"{result.kind:7} {result.right:4} of {result.asked}   {result.share:.1%}   "
              f"95 % interval {low:.1%} to {high:.1%}")
        for wanted, got in result.misses[:5] if result.kind != "zeroed" else []:
            print(f"        wanted {wanted!r}, got {got!r}")


if __name__ == "__main__":
    main()
