"""Layer by layer: the same logits, begun before the last layer is here."""

import pytest
import torch

from minimodel.cache.paged import PagedCache
from minimodel.cluster.handoff import HandoffError, PrefillWorker
from minimodel.cluster.layerwise import ArrivingNotes, LayerPull
from minimodel.cluster.links import Network, corrupted, late, lost, only
from minimodel.engine.engine import Engine
from minimodel.model.batch import Batch

SIZE = 5
PROMPT = [200, *range(3, 29)]                       # 27 tokens: five blocks and two tokens


class World:
    """A prefill worker at the other end of a narrow wire, in virtual time."""

    def __init__(self, model, **network):
        self.now = 0.0
        self.network = Network(lambda: self.now, **network)
        cache = PagedCache(model.config, 40, SIZE, torch.float64)
        self.prefill = PrefillWorker("p", Engine(model, cache, clock=lambda: self.now),
                                     self.network.link("p"))
        self.link = self.network.link("d")
        self.cache = PagedCache(model.config, 9, SIZE, torch.float64)
        self.model = model

    def pause(self):
        self.now += 0.01
        if "p" not in self.network.dead:
            self.prefill.step()

    def logits(self, watch=lambda layer: None):
        """Of the prompt's last token, its first five blocks fetched and the rest computed."""
        ticket, table = self.prefill.run(PROMPT), [7, 2, 8, 0, 3, 5]
        pull = LayerPull(self.link, ticket, self.cache, table[:5], clock=lambda: self.now,
                         pause=self.pause)
        arriving = pull.wait_for

        def wait_for(layer):
            arriving(layer)
            watch(layer)
        pull.wait_for = wait_for
        batch = Batch(new=[2], past=[25])
        notes = ArrivingNotes(self.cache.step([table], batch), pull)
        with torch.inference_mode():
            return self.model(torch.tensor(PROMPT[25:]), batch, notes)[0]


@pytest.fixture(scope="module", params=[{}, {"kv_source_layers": (0, 0, 2, 2)}], ids=str)
def model(request, make_model):
    return make_model(seed=11, **request.param)


@pytest.fixture(scope="module")
def expected(model):
    with torch.inference_mode():
        return model(torch.tensor(PROMPT), Batch(new=[len(PROMPT)]))[0]


def test_each_layer_is_used_when_it_is_here_and_no_later(model, expected):
    """A wire of one block's layer in a tenth of a second: five of them make half a second."""
    layers = len(model.config.cache_layers)
    world = World(model)
    world.network.bytes_per_s = 10 * world.cache.block_bytes / layers
    when = {}
    logits = world.logits(lambda layer: when.setdefault(layer, world.now))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    steps = [later - earlier for earlier, later in
             zip([0, *when.values()], when.values(), strict=False)]
    assert len(when) == layers
    assert all(0.5 < step < 0.8 for step in steps), steps      # heads of messages come on top


@pytest.mark.parametrize("fault", [lost, late(1.0), corrupted], ids=["lost", "late", "corrupted"])
@pytest.mark.parametrize("number", [0, 1, 4, 7])
def test_a_slice_that_fails_is_asked_for_again(model, expected, number, fault):
    world = World(model, fault=only(number, fault))
    torch.testing.assert_close(world.logits(), expected, rtol=0, atol=1e-10)


def test_what_does_not_come_is_said_and_not_waited_for(model):
    world = World(model, fault=lost)
    with pytest.raises(HandoffError, match="layer 0 of 5 blocks did not come"):
        world.logits()
    assert world.now < 6


def test_a_ticket_whose_lease_has_ended_is_refused_here_too(model):
    world, grant = World(model), PrefillWorker.ticket

    def ticket(request):
        granted = grant(world.prefill, request)
        world.prefill.abort(request.id)
        return granted
    world.prefill.ticket = ticket
    with pytest.raises(HandoffError, match="has ended"):
        world.logits()
