"""From logits to a token: greedy, or drawn by chance that the seed decides.

Chance is one number between 0 and 1 per token, made of the request's seed and the token's
place in the answer alone. So a draw does not depend on who else is in the batch, on chunks or
on preemption: only logits that differ by rounding, right at the border between two tokens,
could tip it.
"""

import random
from collections.abc import Sequence

import torch

from .request import Request, Sampling


def choose(logits: torch.Tensor, requests: Sequence[Request]) -> list[list[int]]:
    """The next tokens of each request, from logits [requests, vocabulary].

    One token each; where several answers start from one prompt, one for each of them.
    """
    best = logits.argmax(-1).tolist()
    return [[best[row]] if request.sampling.temperature == 0 and request.num_answers == 1
            else [sample(logits[row], answer, len(request.output))
                  for answer in samplings(request)]
            for row, request in enumerate(requests)]


def samplings(request: Request) -> list[Sampling]:
    """How each answer that starts now is sampled: seeds count up from the request's own."""
    return [request.sampling.of_answer(i) for i in range(request.num_answers)]


def sample(logits: torch.Tensor, sampling: Sampling, place: int) -> int:
    """The token at `place` of an answer, from logits [vocabulary]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ids, shares = candidates(logits, sampling)
    point = random.Random(f"{sampling.seed}/{place}").random() * float(shares.sum())
    chosen = int(torch.searchsorted(shares.cumsum(0), point, right=True))
    return int(ids[min(chosen, len(ids) - 1)])


def candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that may be drawn, the likeliest first, and their probabilities (float64).

    First the k best, then of those the fewest that reach `top_p`. Equal logits keep the order
    of their ids. The probabilities need not add up to one: they are shares of what is left.
    """
    shares, ids = (logits.double() / sampling.temperature).softmax(-1).sort(
        descending=True, stable=True)
    if sampling.top_k:
        ids, shares = ids[:sampling.top_k], shares[:sampling.top_k]
    if sampling.top_p < 1:
        before = shares.cumsum(0) - shares              # what likelier tokens already reach
        keep = int((before < sampling.top_p * shares.sum()).sum())
        ids, shares = ids[:keep], shares[:keep]
    return ids, shares
