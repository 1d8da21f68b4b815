"""Which logits an engine chose its tokens from, for tests that compare them."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from minimodel.engine import engine as engine_module
from minimodel.engine.engine import choose


@contextmanager
def listening() -> Iterator[dict[str, list[torch.Tensor]]]:
    """The logits from which each request's tokens are chosen, meanwhile."""
    seen = defaultdict(list)

    def listen(logits, requests):
        for row, request in zip(logits, requests, strict=True):
            seen[request.id].append(row)
        return choose(logits, requests)
    with mock.patch.object(engine_module, "choose", listen):
        yield seen
