"""Same output: every way to generate gives the tokens and logits of the slowest one.

The oracle reads the whole text again for every token, every row through every layer, and keeps
nothing. `WAYS` is the table of
everything that claims to compute the same: to add a way, write one function from a model and
prompts to answers, and one line in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch

from minimodel.cache.dense import DenseCache
from minimodel.engine.generate import generate_with_cache, generate_without_cache
from minimodel.model import checkpoint
from minimodel.model.batch import Batch
from minimodel.model.corpus import town_notebook
from minimodel.model.transformer import Transformer
from minimodel.tokenizer import START, encode

Prompt = list[int]


@dataclass
class Answer:
    tokens: list[int]
    logits: torch.Tensor        # [tokens, vocabulary], those each token was chosen from


Way = Callable[[Transformer, list[Prompt], int], list[Answer]]


def oracle(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    return [without_cache(model, prompt, count) for prompt in prompts]


def without_cache(model: Transformer, prompt: Prompt, count: int) -> Answer:
    text, seen = list(prompt), []
    for _ in range(count):
        seen.append(model.logits_everywhere(torch.tensor([text]))[0, -1])
        text.append(int(seen[-1].argmax()))
    return Answer(text[len(prompt):], torch.stack(seen))


def only_wanted_rows(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """No cache either, but rows whose logits nobody wants stop where the last notes are written."""
    answers = []
    for prompt in prompts:
        text, seen = list(prompt), []
        for _ in range(count):
            seen.append(model(torch.tensor(text), Batch(new=[len(text)]))[0])
            text.append(int(seen[-1].argmax()))
        answers.append(Answer(text[len(prompt):], torch.stack(seen)))
    return answers


def dense(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    return [dense_in_chunks(model, prompt, count, len(prompt)) for prompt in prompts]


def chunked(size: int) -> Way:
    return lambda model, prompts, count: [
        dense_in_chunks(model, prompt, count, size) for prompt in prompts]


def dense_in_chunks(model: Transformer, prompt: Prompt, count: int, size: int) -> Answer:
    cache = DenseCache(model.config, len(prompt) + count, dtype=model.norm.weight.dtype)
    for first in range(0, len(prompt), size):
        logits = advance(model, cache, [prompt[first:first + size]])
    return decode(model, cache, logits, count)[0]


def ragged(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """All prompts in one cache and one step, then one row each."""
    capacity = max(map(len, prompts)) + count
    cache = DenseCache(model.config, capacity, len(prompts), dtype=model.norm.weight.dtype)
    return decode(model, cache, advance(model, cache, prompts), count)


def staggered(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """All prompts in one cache, cut so that some are still read while others would be done."""
    capacity = max(map(len, prompts)) + count
    cache = DenseCache(model.config, capacity, len(prompts), dtype=model.norm.weight.dtype)
    cuts = [max(1, len(prompt) // (2 + i)) for i, prompt in enumerate(prompts)]
    advance(model, cache, [prompt[:cut] for prompt, cut in zip(prompts, cuts, strict=True)])
    logits = advance(model, cache,
                     [prompt[cut:] for prompt, cut in zip(prompts, cuts, strict=True)])
    return decode(model, cache, logits, count)


def one_by_one(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """All prompts in one cache; each step leaves out all but one sequence, and reads it whole."""
    capacity = max(map(len, prompts)) + count
    cache = DenseCache(model.config, capacity, len(prompts), dtype=model.norm.weight.dtype)
    logits = torch.cat([advance(model, cache, [prompt if i == turn else []
                                               for i, prompt in enumerate(prompts)])
                        for turn in reversed(range(len(prompts)))]).flip(0)
    return decode(model, cache, logits, count)


def unread_logits(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """Chunks of 5 whose logits nobody wants, but for the prompt's last row."""
    answers = []
    for prompt in prompts:
        cache = DenseCache(model.config, len(prompt) + count, dtype=model.norm.weight.dtype)
        for first in range(0, len(prompt), 5):
            chunk = prompt[first:first + 5]
            batch = cache.batch([len(chunk)])
            if first + 5 < len(prompt):
                batch = replace(batch, wanted=())
            logits = model(torch.tensor(chunk), batch, cache)
            cache.commit(batch)
        answers += decode(model, cache, logits, count)
    return answers


def advance(model: Transformer, cache: DenseCache, new: list[Prompt]) -> torch.Tensor:
    """One step that adds `new` to the cache's sequences; last logits [sequences, vocabulary]."""
    batch = cache.batch([len(tokens) for tokens in new])
    logits = model(torch.tensor([token for tokens in new for token in tokens]), batch, cache)
    cache.commit(batch)
    return logits


def decode(model: Transformer, cache: DenseCache, logits: torch.Tensor, count: int) -> list[Answer]:
    seen = [logits]
    while len(seen) < count:
        seen.append(advance(model, cache, seen[-1].argmax(-1)[:, None].tolist()))
    by_sequence = torch.stack(seen, dim=1)                  # [sequences, tokens, vocabulary]
    return [Answer(logits.argmax(-1).tolist(), logits) for logits in by_sequence]


WAYS: dict[str, Way] = {
    "only the wanted rows": only_wanted_rows,
    "dense": dense,
    "dense, chunks of 1": chunked(1),
    "dense, chunks of 3": chunked(3),
    "dense, chunks of 7": chunked(7),
    "dense, ragged": ragged,
    "dense, ragged and staggered": staggered,
    "dense, one at a time": one_by_one,
    "dense, logits of the last row only": unread_logits,
}

SHARED = {"kv_source_layers": (0, 0, 2, 2)}
LATENT = {"num_kv_heads": 6, "latent_size": 26, "nope_dim": 10, "rope_dim": 8}

# Lengths around the chunk sizes; two prompts of one length lie side by side, so that they share
# a part of the batch; two differ in their last token only.
PROMPTS = [[START, *Random(f"same/{i}").choices(range(256), k=size)]
           for i, size in enumerate([2, 13, 13, 20, 6])]
PROMPTS.append([*PROMPTS[3][:-1], 65])
COUNT = 9


@pytest.fixture(params=[{}, {"num_kv_heads": 6, "num_dense_layers": 0, "experts_per_token": 1},
                        {"num_kv_heads": 1, "num_heads": 5, "num_shared_experts": 0},
                        SHARED, LATENT, LATENT | SHARED], ids=str)
def model(request, make_model):
    with torch.inference_mode():
        yield make_model(**request.param)


@pytest.mark.parametrize("way", WAYS, ids=WAYS)
def test_same_tokens_and_logits_as_the_oracle(model, way):
    expected = oracle(model, PROMPTS, COUNT)
    assert len({tuple(answer.tokens) for answer in expected}) == len(PROMPTS), "answers too alike"
    for ours, theirs in zip(WAYS[way](model, PROMPTS, COUNT), expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("generate", [generate_without_cache, generate_with_cache])
def test_the_package_writes_the_oracle_s_tokens(model, generate):
    expected = oracle(model, PROMPTS, COUNT)
    assert [generate(model, prompt, COUNT, stop_ids=()) for prompt in PROMPTS] == [
        answer.tokens for answer in expected]


# --- the shipped toy, in the number type that readers run it in --------------------------------

needs_toy = pytest.mark.skipif(not (checkpoint.TOY / "config.json").exists(),
                               reason="the trained toy is not in minimodel/data/toy")
MARGIN = 1e-2       # a greedy choice by less than this may tip with the order of additions


@pytest.fixture(scope="module")
def toy_and_answers():
    model = checkpoint.load()
    notebooks = [town_notebook(Random(f"same/toy/{i}"), 110 + 40 * i, 2) for i in range(2)]
    prompts = [encode(notebook.ask(notebook.facts[i])) for i, notebook in enumerate(notebooks)]
    with torch.inference_mode():
        yield model, prompts, oracle(model, prompts, 12)


@needs_toy
@pytest.mark.parametrize("way", WAYS, ids=WAYS)
def test_the_toy_gives_the_same_in_float32(toy_and_answers, way):
    model, prompts, expected = toy_and_answers
    for ours, theirs in zip(WAYS[way](model, prompts, 12), expected, strict=True):
        best = theirs.logits.topk(2).values
        clear = int((best[:, 0] - best[:, 1] > MARGIN).int().cumprod(0).sum())   # until a near tie
        assert clear >= 3, "near ties everywhere: choose other prompts"
        assert ours.tokens[:clear] == theirs.tokens[:clear]
        torch.testing.assert_close(ours.logits[:clear], theirs.logits[:clear], rtol=0, atol=1e-3)
