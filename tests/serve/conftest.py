"""A small random model, sites that serve it, a brake for their engines, and the slow oracle."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import openai
import pytest
import torch

from minimodel.cache.paged import PagedCache
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.serve.api import Site
from minimodel.serve.server import make_service, serving
from minimodel.tokenizer import VOCAB_SIZE, decode, encode

CONTEXT, BLOCKS = 403, 60
DEADLINE_S = 120                # for one wait, on a machine that has other things to do


@pytest.fixture(scope="session")
def model(make_model):
    """In float64, so that no token hangs on rounding."""
    return make_model(seed=7, dtype=torch.float64, vocab_size=VOCAB_SIZE, context=CONTEXT)


@pytest.fixture(scope="session")
def slow(model):
    """What an engine of its own, without any memory, writes after some ids."""
    def answer(tokens, max_tokens=20, **how):
        cache = PagedCache(model.config, BLOCKS, dtype=torch.float64)
        engine = Engine(model, cache, Limits(context=CONTEXT), reuse=False)
        return engine.generate([tokens], Sampling(max_tokens, **how))[0]
    return answer


@pytest.fixture(scope="session")
def slow_text(slow):
    """The same as text, after a text."""
    return lambda prompt, *more, **how: decode(slow(encode(prompt), *more, **how))


class Brake:
    """Lets a service's engines take only as many steps as are left. Its calls are run all the
    same, so it can be looked at between two steps."""

    def __init__(self, service):
        self.left, self.go_on = float("inf"), service._step
        service._step = self.step

    def step(self, replica):
        if self.left > 0:
            self.left -= 1
            self.go_on(replica)
        else:
            time.sleep(0.001)


@pytest.fixture
def make_site(model):
    """A site with a brake; `num_blocks`, `limits` and so on are those of its service."""
    def make(tenants=None, max_body_bytes=5_000, model=model, **how):
        service = make_service(model, **({"num_blocks": BLOCKS} | how))
        more = {} if tenants is None else {"tenants": tenants}
        site = Site(service, "tiny", max_body_bytes=max_body_bytes, **more)
        return site, Brake(service)
    return make


@pytest.fixture
def served(make_site):
    """Serves a site on a port of this machine while a block runs."""
    @contextmanager
    def serve(grace_s=0.0, **how):
        site, brake = make_site(**how)
        with serving(site, grace_s=grace_s) as url:
            yield SimpleNamespace(site=site, service=site.service, brake=brake, url=url,
                                  client=client_of(url))
    return serve


def client_of(url, key="none"):
    """The ordinary client, without its second tries."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)


def until(holds, what):
    """Wait until something holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"in {DEADLINE_S} s it did not come about that {what}"
        time.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture():
    return until


@pytest.fixture(name="client_of")
def client_of_fixture():
    return client_of
