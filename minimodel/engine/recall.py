"""What a model recalls from its prompt: fresh town notebooks, one question each, counted.

    story    eight facts with distinct keys among story lines, 600 to 1,500 bytes
    dense    a list of facts only, 512 bytes
    zeroed   as `story`, asking digit facts, with the entries of the value's own bytes set to
             zero in every layer of the cache before the question is read

Training draws its texts from seeds "0/STEP", these come from seeds "recall/SEED/KIND/NUMBER":
no notebook here was ever trained on. A value counts when the answer holds it whole.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..cache.dense import DenseCache
from ..model.corpus import Fact, Notebook, town_notebook
from ..model.transformer import Transformer
from ..tokenizer import STOP_IDS, decode, encode
from .generate import tokens_with_cache, until_stop

KINDS = ("story", "dense", "zeroed")
ANSWER_TOKENS = 60


@dataclass
class Recall:
    """Answers counted: how many were asked for, how many held the value, and the misses."""

    kind: str
    asked: int = 0
    right: int = 0
    misses: list[tuple[str, str]] = field(default_factory=list)     # (wanted, got)

    @property
    def share(self) -> float:
        return self.right / self.asked

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """Wilson's interval of the share, at 95 % (E. B. Wilson, 1927)."""
        count, square = self.asked, z * z
        middle = (self.share + square / count / 2) / (1 + square / count)
        half = z * math.sqrt(self.share * (1 - self.share) / count + square / (4 * count * count))
        half /= 1 + square / count
        return max(0.0, middle - half), min(1.0, middle + half)


def questions(kind: str, count: int, seed: int) -> Iterator[tuple[Notebook, Fact]]:
    """Fresh notebooks, each with the fact to ask for; early, middle and late facts in turn."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is none of {', '.join(KINDS)}")
    number = asked = 0
    while asked < count:
        rng = random.Random(f"recall/{seed}/{kind}/{number}")
        if kind == "dense":
            notebook = town_notebook(rng, 512)
        else:
            notebook = town_notebook(rng, rng.randrange(600, 1501), num_facts=8)
        facts = [f for f in notebook.facts if kind != "zeroed" or f.kind in ("code", "phone")]
        if facts:
            yield notebook, facts[number % len(facts)]
            asked += 1
        number += 1


def ask(model: Transformer, notebook: Notebook, fact: Fact, zeroed: bool = False) -> str:
    """The model's answer, after reading the notebook first and the question second."""
    document, question = encode(notebook.text), encode(fact.question, start=False)
    capacity = len(document) + len(question) + ANSWER_TOKENS
    cache = DenseCache(model.config, capacity, dtype=model.embed_tokens.weight.dtype)
    with torch.inference_mode():
        batch = cache.batch([len(document)])
        model(torch.tensor(document), batch, cache)
        cache.commit(batch)
    if zeroed:
        span = notebook.value_span(fact)
        cache.entries[:, :, span.start:span.stop] = 0
    answer = tokens_with_cache(model, question, cache)
    return decode(until_stop(answer, ANSWER_TOKENS, STOP_IDS))


def measure(model: Transformer, kind: str, count: int, seed: int,
            progress: Callable[[Iterable], Iterable] = iter) -> Recall:
    """Ask `count` questions of one kind. Raises ValueError for a count below 1."""
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    result = Recall(kind)
    for notebook, fact in progress(questions(kind, count, seed)):
        answer = ask(model, notebook, fact, zeroed=kind == "zeroed")
        result.asked += 1
        if f" {fact.value}." in answer:
            result.right += 1
        else:
            result.misses.append((fact.answer, answer))
    return result
