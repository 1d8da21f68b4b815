"""What costs the toy its recall: the number of facts in a notebook, or the way to the fact?

    python benchmarks/recall_sweep.py [--model DIR] [--count 100] [--seed 4]

One JSON line a point. A few minutes. Facts have distinct keys; the facts asked for stand early,
in the middle and late in turn; the opening of the answer is given, the value must be whole.
"""

import argparse
import json
import os
import random
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from minimodel.lesson.ages import recalls
from minimodel.model import checkpoint
from minimodel.model.corpus import town_notebook

POINTS = [(facts, 1000) for facts in (2, 4, 8, 16, 24)] + [
    (8, num_bytes) for num_bytes in (350, 700, 1400, 2800)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=checkpoint.TOY)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=4)
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count {options.count} asks nothing: give at least 1")
    torch.set_num_threads(1)
    model = checkpoint.load(options.model)
    for facts, num_bytes in POINTS:
        right = 0
        for number in tqdm(range(options.count), desc=f"{facts} in {num_bytes}"):
            rng = random.Random(f"sweep/{options.seed}/{facts}/{num_bytes}/{number}")
            notebook = town_notebook(rng, num_bytes, num_facts=facts)
            right += recalls(model, notebook, notebook.facts[number % facts])
        print(json.dumps({"facts": facts, "bytes": num_bytes, "asked": options.count,
                          "right": right}), flush=True)


if __name__ == "__main__":
    main()
