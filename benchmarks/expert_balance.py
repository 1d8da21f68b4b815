"""How evenly a model's experts are used while it learns, with the balancing bias and without.

    python benchmarks/expert_balance.py > minimodel/data/expert_balance.jsonl

Trains the small model of `minimodel/model/train.py` on the opening of its recipe, twice: once as it
is, once with a bias that never moves. One JSON line each, which chapter 03 draws as recorded:
about a minute a run on two quiet cores. Every report sums up 25 steps:

    loss        mean weighted loss (its meaning changes with the stage)
    batch       fullest expert over the mean, per layer, mean over the steps' batches
    window      the choices of all these steps together: each expert's load over the mean, per layer
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from datetime import date

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from minimodel.model.train import SMALL, Recipe, Trainer

EVERY = 25              # steps a report
STEPS = (200, 100)      # of the recipe's first two stages


def recipe(seed: int, bias: bool) -> Recipe:
    stages = [replace(stage, steps=steps)
              for stage, steps in zip(SMALL.stages, STEPS, strict=False)]
    if not bias:
        stages = [replace(stage, bias_rate=0.0) for stage in stages]
    return replace(SMALL, seed=seed, stages=tuple(stages))


def run(seed: int, bias: bool) -> dict:
    """One training run: its recipe in short, and a report for every 25 steps."""
    trainer = Trainer(recipe(seed, bias))
    reports = []
    while trainer.num_done < trainer.recipe.num_steps:
        reports.append(report(trainer))
        print(reports[-1], file=sys.stderr, flush=True)
    return {"recipe": "SMALL", "steps": STEPS, "seed": seed, "bias": bias, "every": EVERY,
            "date": date.today().isoformat(), "torch": torch.__version__, "reports": reports}


def report(trainer: Trainer) -> dict:
    """Train on for 25 steps, or to the end, and sum up what the gates did."""
    losses, counts = [], []                             # counts: [steps][layers, experts]
    for _ in range(min(EVERY, trainer.recipe.num_steps - trainer.num_done)):
        losses.append(trainer.step()["loss"])
        counts.append(torch.stack(trainer.loads.counts))
    steps = torch.stack(counts)
    batch = (steps.amax(-1) / steps.mean(-1)).mean(0)
    total = steps.sum(0)
    window = total / total.mean(-1, keepdim=True)
    return {"step": trainer.num_done, "length": trainer.recipe.at(trainer.num_done - 1)[0].length,
            "loss": round(sum(losses) / len(losses), 4), "batch": rounded(batch),
            "window": [rounded(layer) for layer in window]}


def rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for bias in (True, False):
            print(json.dumps(run(seed, bias)), flush=True)


if __name__ == "__main__":
    main()
