"""The small run as chapter 04 shows it: the model asked again at several ages; and its log.

    python benchmarks/small_run.py FOLDER [--threads 2]

Trains recipe SMALL, as `python -m minimodel train --small` does, and writes two files into
FOLDER: small_log.jsonl, a line every 50 steps, and small_ages.jsonl, a line an age. A few minutes.
"""

import argparse
import json
import os
import random
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from minimodel.lesson.ages import look_at, recalls
from minimodel.model.corpus import town_notebook
from minimodel.model.train import SMALL, Recipe, Stage, Trainer, averages, draw_rows, weighted_loss
from minimodel.model.transformer import Transformer

AGES = (0, 50, 100, 150, 200, 250, 300, 350, 400, 450, 500, 600, 700, 800, 1000, 1200)
ECHO = Recipe(SMALL.config, (Stage(64, 1, 4096, mix={"echo": 1.0}),), seed=4)


@torch.no_grad()
def copied(model: Transformer) -> float:
    """The share of repeated bytes that are predicted, in 64 rows of strings that repeat."""
    rows = draw_rows(ECHO, step=0)
    _, logits = weighted_loss(model, rows, bfloat16=False)
    right = logits.argmax(-1) == rows.targets
    return right[rows.weights == 1.0].float().mean().item()


def recalled(model: Transformer, count: int = 200) -> float:
    """The share of values recalled from notebooks of four facts, up to 200 bytes long."""
    right = 0
    for number in range(count):
        notebook = town_notebook(random.Random(f"small run/{number}"), 200, num_facts=4)
        right += recalls(model, notebook, notebook.facts[number % 4])
    return right / count


def age_of(model: Transformer, step: int) -> dict:
    return {"step": step, "copied": round(copied(model), 3),
            "recalled": round(recalled(model), 3), **look_at(model)}


def write(folder: Path, name: str, lines: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    trainer = Trainer(SMALL)
    lines, recent, ages = [], [], [age_of(trainer.model, 0)]
    for step in tqdm(range(1, SMALL.num_steps + 1)):
        recent.append(trainer.step())
        if step % 50 == 0:
            lines.append({**averages(recent), "tokens": SMALL.tokens_before(step)})
            recent = []
        if step in AGES:
            ages.append(age_of(trainer.model, step))
    write(options.folder, "small_log", lines)
    write(options.folder, "small_ages", ages)


if __name__ == "__main__":
    main()
