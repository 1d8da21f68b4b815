"""What the checks of several chapters share: a small odd model, made-up inputs, answers' shapes.

Sizes are odd: no two axes of `ODD` share a number, so a transposed answer cannot pass.
"""

import torch

from minimodel.config import ModelConfig
from minimodel.lesson.exercises.engine import NotAnAnswer, number_in
from minimodel.model.train import initialize
from minimodel.model.transformer import Transformer

ODD = ModelConfig(
    hidden_size=36,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    dense_size=28,
    num_experts=5,
    experts_per_token=2,
    expert_size=22,
)


# --- made-up inputs ------------------------------------------------------------------------


def odd_model(seed: int, config: ModelConfig = ODD, contrast: float = 1) -> Transformer:
    """A small model with random weights, in float64: near ties cannot flip a token.

    contrast  multiplies the logits: at 1 the model hardly prefers one byte to another,
              at 30 it is as sure of itself as a trained one
    """
    torch.manual_seed(seed)
    model = Transformer(config)
    initialize(model)       # weights as before training: large enough for attention to matter
    with torch.no_grad():
        model.lm_head.weight.mul_(contrast)
    return model.double().eval()


def random_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Normally distributed numbers of a shape, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_tokens(count: int, seed: int) -> list[int]:
    """So many bytes."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class CountingModel:
    """A model that counts its forwards and the rows it computes in them."""

    def __init__(self, model: Transformer):
        self.model, self.config = model, model.config
        self.forwards = self.rows = 0

    def __call__(self, tokens, batch, kv=None, positions=None):
        self.forwards += 1
        self.rows += len(tokens)
        return self.model(tokens, batch, kv, positions)


# --- what was handed in ----------------------------------------------------------------------


def tensor_in(found: object, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """A tensor of the shape asked for; anything else is told so. `what` begins the sentence."""
    if not isinstance(found, torch.Tensor):
        raise NotAnAnswer(f"{what} should be a tensor; this is a {type(found).__name__}.")
    if tuple(found.shape) != tuple(shape):
        raise NotAnAnswer(f"{what} should have the shape {list(shape)}; this one has "
                          f"{list(found.shape)}.")
    return found


def pair_in(answer: object) -> tuple[float, float]:
    """Two numbers, as in `(100, 10)`; anything else is told so."""
    try:
        first, second = answer
    except (TypeError, ValueError):
        raise NotAnAnswer("Two numbers are asked for here, as in (100, 10).") from None
    if first is ... or second is ...:
        raise NotAnAnswer("There is nothing to check yet: put two numbers where the dots are.")
    return number_in(first), number_in(second)


def first_difference(found: list, expected: list) -> int | None:
    """The place of the first token that differs, or is missing or one too many; None if none is."""
    if found == expected:
        return None
    pairs = zip(found, expected, strict=False)
    shorter = min(len(found), len(expected))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
