"""Writing an answer, the two slow and obvious ways that everything else is checked against.

`generate_without_cache` reads the whole text again for every token it writes.
`generate_with_cache` reads the prompt once, keeps its notes, and computes one row a token.
Both are greedy, and both give the same tokens: chapter 05 shows why, the tests that they do.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import torch

from ..cache.dense import DenseCache
from ..config import ModelConfig
from ..model.batch import Batch
from ..model.transformer import Transformer
from ..tokenizer import STOP_IDS


def check_request(config: ModelConfig, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise ValueError, naming value, limit and remedy, for a request that cannot be served."""
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token (the start token counts)")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if len(prompt) + max_tokens > config.context:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and up to {max_tokens} new ones need "
            f"{len(prompt) + max_tokens} positions, over the model's context of {config.context}: "
            "shorten the prompt or lower max_tokens")
    outside = [token for token in prompt if not 0 <= token < config.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}: "
                         "make prompts with minimodel.tokenizer.encode")


def until_stop(tokens: Iterator[int], max_tokens: int, stop_ids: Collection[int]) -> Iterator[int]:
    """At most `max_tokens` of `tokens`; a stop token ends the answer and belongs to it."""
    for token in islice(tokens, max_tokens):
        yield token
        if token in stop_ids:
            return


def tokens_without_cache(model: Transformer, prompt: Sequence[int]) -> Iterator[int]:
    """Greedy tokens, for ever: every one is paid for by computing the whole text again."""
    text = list(prompt)
    while True:
        with torch.inference_mode():
            logits = model(torch.tensor(text), Batch(new=[len(text)]))
        token = int(logits[-1].argmax())
        yield token
        text.append(token)


def tokens_with_cache(model: Transformer, prompt: Sequence[int],
                      cache: DenseCache) -> Iterator[int]:
    """Greedy tokens, until the cache is full: the prompt's rows in one step, then one row a step.

    What the cache holds already is taken as noted: `prompt` is what follows it.
    """
    new = list(prompt)
    while True:
        with torch.inference_mode():
            batch = cache.batch([len(new)])
            logits = model(torch.tensor(new), batch, cache)
            cache.commit(batch)
        token = int(logits[-1].argmax())
        yield token
        new = [token]


def stream_without_cache(model: Transformer, prompt: Sequence[int], max_tokens: int,
                         stop_ids: Collection[int] = STOP_IDS) -> Iterator[int]:
    """The answer's tokens as they are written. Raises ValueError at once if they cannot fit."""
    check_request(model.config, prompt, max_tokens)
    return until_stop(tokens_without_cache(model, prompt), max_tokens, stop_ids)


def stream_with_cache(model: Transformer, prompt: Sequence[int], max_tokens: int,
                      stop_ids: Collection[int] = STOP_IDS) -> Iterator[int]:
    """The same tokens as `stream_without_cache`, by a KV cache made for this request."""
    check_request(model.config, prompt, max_tokens)
    cache = DenseCache(model.config, capacity=len(prompt) + max_tokens,
                       dtype=model.embed_tokens.weight.dtype)
    return until_stop(tokens_with_cache(model, prompt, cache), max_tokens, stop_ids)


def generate_without_cache(model: Transformer, prompt: Sequence[int], max_tokens: int,
                           stop_ids: Collection[int] = STOP_IDS) -> list[int]:
    """The whole answer, at most `max_tokens` tokens, every one from the whole text."""
    return list(stream_without_cache(model, prompt, max_tokens, stop_ids))


def generate_with_cache(model: Transformer, prompt: Sequence[int], max_tokens: int,
                        stop_ids: Collection[int] = STOP_IDS) -> list[int]:
    """The whole answer, at most `max_tokens` tokens, the same by a KV cache."""
    return list(stream_with_cache(model, prompt, max_tokens, stop_ids))
