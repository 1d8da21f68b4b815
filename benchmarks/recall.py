"""What the toy recalls from its prompt: the three numbers of the model card.

    python benchmarks/recall.py [--model DIR] [--count 200] [--seed 2026] [--json]

Each question is asked of a fresh notebook. Training draws its texts from seeds "0/STEP"; these
come from seeds "recall/SEED/KIND/NUMBER", which training never uses. A value counts when the answer
contains it whole. The interval is Wilson's, at 95 %.

    story    eight facts with distinct keys among story lines, 600 to 1,500 bytes
    dense    a list of facts only, 512 bytes
    zeroed   as `story`, asking digit facts, with the entries of the value's own bytes set to
             zero in every layer of the cache before the question is read: must be near none
"""

import argparse
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from minimodel.cache.dense import DenseCache  # noqa: E402
from minimodel.engine.generate import tokens_with_cache, until_stop  # noqa: E402
from minimodel.model import checkpoint  # noqa: E402
from minimodel.model.corpus import Fact, Notebook, town_notebook  # noqa: E402
from minimodel.model.transformer import Transformer  # noqa: E402
from minimodel.tokenizer import STOP_IDS, decode, encode  # noqa: E402


def questions(kind: str, count: int, seed: int) -> Iterator[tuple[Notebook, Fact]]:
    """Fresh notebooks, each with the fact to ask for; early, middle and late facts in turn."""
    for number in range(count):
        rng = random.Random(f"recall/{seed}/{kind}/{number}")
        if kind == "dense":
            notebook = town_notebook(rng, 512)
        else:
            notebook = town_notebook(rng, rng.randrange(600, 1501), num_facts=8)
        facts = [f for f in notebook.facts if kind != "zeroed" or f.kind in ("code", "phone")]
        if facts:
            yield notebook, facts[number % len(facts)]


def ask(model: Transformer, notebook: Notebook, fact: Fact, zeroed: bool = False) -> str:
    """The model's answer, after reading the notebook first and the question second."""
    document, question = encode(notebook.text), encode(fact.question, start=False)
    cache = DenseCache(model.config, capacity=len(document) + len(question) + 64)
    with torch.inference_mode():
        batch = cache.batch([len(document)])
        model(torch.tensor(document), batch, cache)
        cache.commit(batch)
    if zeroed:
        span = notebook.value_span(fact)
        cache.entries[:, :, span.start:span.stop] = 0
    return decode(until_stop(tokens_with_cache(model, question, cache), 60, STOP_IDS))


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (E. B. Wilson, 1927)."""
    share, square = right / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return middle - half, middle + half


def measure(model: Transformer, kind: str, count: int, seed: int, quiet: bool = True) -> dict:
    """Share of answers that hold the whole value, with its interval and a few misses."""
    right, asked, misses = 0, 0, []
    for notebook, fact in tqdm(questions(kind, count, seed), total=count, desc=kind, disable=quiet):
        answer = ask(model, notebook, fact, zeroed=kind == "zeroed")
        asked += 1
        if f" {fact.value}." in answer:
            right += 1
        elif len(misses) < 5:
            misses.append({"wanted": fact.answer, "got": answer})
    low, high = wilson(right, asked)
    return {"kind": kind, "asked": asked, "right": right, "share": round(right / asked, 4),
            "interval": [round(low, 4), round(high, 4)], "misses": misses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=checkpoint.TOY)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--kinds", default="story,dense,zeroed")
    parser.add_argument("--json", action="store_true", help="one JSON line only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = checkpoint.load(options.model)
    results = [measure(model, kind, options.count, options.seed, quiet=options.json)
               for kind in options.kinds.split(",")]
    if options.json:
        print(json.dumps({"benchmark": "recall", "seed": options.seed, "results": results}))
        return
    for result in results:
        low, high = result["interval"]
        print(f"{result['kind']:7} {result['right']:4} of {result['asked']}   "
              f"{result['share']:.1%}   95 % interval {low:.1%} to {high:.1%}")
        for miss in result["misses"] if result["kind"] != "zeroed" else []:
            print(f"        wanted {miss['wanted']!r}, got {miss['got']!r}")


if __name__ == "__main__":
    main()
