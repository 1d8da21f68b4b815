"""A model asked again at several ages: its answer, its chances, and where its heads look.

`benchmarks/small_run.py` records this while a model trains; chapter 04 shows the record.
"""

from unittest.mock import patch

import torch

from ..engine.generate import generate_with_cache
from ..model.attention import Attention
from ..model.batch import Batch
from ..model.corpus import Fact, Notebook
from ..model.transformer import Transformer
from ..tokenizer import decode, encode
from .town import RED_DOOR, TOWN

ANSWER = "A: " + RED_DOOR.opening + RED_DOOR.value + "."


def few_facts() -> Notebook:
    """The town's first four facts, two of them codes, for models that read no long texts."""
    facts = TOWN.facts[:4]
    return Notebook(tuple(fact.line for fact in facts), facts)


def recalls(model: Transformer, notebook: Notebook, asked: Fact) -> bool:
    """Whether the model writes the fact's value, given the notebook, question and opening.

    One forward: a value is written greedily exactly if each of its bytes is the best one after
    the bytes before it.
    """
    opening = encode(notebook.ask(asked) + "A: " + asked.opening)
    value = encode(asked.value + ".", start=False)
    tokens = torch.tensor(opening + value[:-1])
    places = range(len(opening) - 1, len(tokens))
    with torch.inference_mode():
        logits = model(tokens, Batch(new=[len(tokens)], wanted=places))
    return logits.argmax(-1).tolist() == value


def look_at(model: Transformer) -> dict:
    """What a model of some age makes of the red door: its answer, chances, and where it looks."""
    notebook = few_facts()
    prompt, right = encode(notebook.ask(RED_DOOR)), encode(ANSWER, start=False)
    places = range(len(prompt) - 1, len(prompt) + len(right) - 1)
    tokens = torch.tensor(prompt + right)
    with torch.inference_mode():
        logits = model(tokens, Batch(new=[len(tokens)], wanted=places))
        chances = logits.float().softmax(-1)[torch.arange(len(right)), torch.tensor(right)]
        answer = generate_with_cache(model, prompt, max_tokens=len(right) + 3)
        about_to_write = len(right) - len(RED_DOOR.value) - 1
        looks = looks_at(model, tokens[:len(prompt) + about_to_write],
                         notebook.value_span(RED_DOOR).start)
    return {"answer": decode(answer), "chances": [round(c, 3) for c in chances.tolist()],
            "looks": looks}


def looks_at(model: Transformer, tokens: torch.Tensor, place: int) -> list[list[float]]:
    """How much of the last token's look goes to `place`, in every head: [layers][heads]."""
    shares, config, usual = [], model.config, Attention.attend

    def attend(self, q, entries, part):
        keys = entries[0].unflatten(-1, (2, config.num_kv_heads, -1))[:, 0]
        keys = keys.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
        scores = torch.einsum("hd,nhd->hn", q[-1], keys) / config.head_dim ** 0.5
        shares.append([round(s, 3) for s in scores.softmax(-1)[:, place].tolist()])
        return usual(self, q, entries, part)

    with patch.object(Attention, "attend", attend):
        model(tokens, Batch(new=[len(tokens)]))
    return shares
