"""Notes shared between layers: who owns, who reads, and that rows nobody asks for may stop."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minimodel.model.batch import Batch, NoCache
from minimodel.model.transformer import Transformer

SOURCES = [(0, 0, 2, 2), (0, 1, 2, 2), (0, 0, 0, 0), (0, 1, 0, 1)]
LATENT = {"num_kv_heads": 6, "latent_size": 26, "nope_dim": 10, "rope_dim": 8}


class Recorder(NoCache):
    """Remembers who wrote and who read which of the cache's layers, and how many rows came."""

    def __init__(self):
        super().__init__()
        self.written, self.looks = [], []

    def write(self, layer, entries, batch):
        self.written.append((layer, len(entries)))
        super().write(layer, entries, batch)

    def read(self, layer, part):
        self.looks.append((layer, part.count * part.new, part.length))
        return super().read(layer, part)


@pytest.mark.parametrize("sources", SOURCES, ids=str)
@pytest.mark.parametrize("latent", [{}, LATENT], ids=["keys and values", "latent"])
def test_dropping_rows_changes_no_wanted_logit(make_model, sources, latent):
    model = make_model(kv_source_layers=sources, **latent)
    tokens = torch.arange(23) * 7 % 256
    with torch.inference_mode():
        everything = model(tokens, Batch(new=[11, 3, 9], wanted=range(23)))
        for wanted in ((10, 13, 22), (22,), (11,), (4, 20), (12, 1), ()):
            some = model(tokens, Batch(new=[11, 3, 9], wanted=wanted))
            torch.testing.assert_close(some, everything[list(wanted)], rtol=0, atol=1e-11)


def test_only_owners_write_and_every_layer_reads_its_source(make_model):
    model, kv = make_model(kv_source_layers=(0, 0, 2, 2)), Recorder()
    with torch.inference_mode():
        model(torch.arange(9), Batch(new=[9]), kv)
    assert kv.written == [(0, 9), (1, 9)]
    assert kv.looks == [(0, 9, 9), (0, 9, 9), (1, 1, 9), (1, 1, 9)]


def test_a_reader_has_no_weights_to_make_notes(make_config):
    names = Transformer(make_config(kv_source_layers=(0, 0, 2, 2))).state_dict()
    assert [layer for layer in range(4) if f"layers.{layer}.self_attn.k_proj.weight" in names] == [
        0, 2]


def test_layers_of_one_source_see_the_same_notes(make_model):
    """What a layer reads is its source's entry: change that one number and both layers change."""
    model = make_model(kv_source_layers=(0, 0, 0, 3))
    seen = []

    class Damaged(NoCache):
        def read(self, layer, part):
            entries = super().read(layer, part).clone()
            if layer == 0:
                entries[:, 2] = 0
            seen.append((layer, entries[0, 2].abs().sum().item() == 0))
            return entries
    with torch.inference_mode():
        model(torch.arange(5), Batch(new=[5], wanted=range(5)), Damaged())
    assert seen == [(0, True), (0, True), (0, True), (1, False)]


@pytest.mark.parametrize("latent", [{}, LATENT], ids=["keys and values", "latent"])
@pytest.mark.parametrize("sources", [(), *SOURCES], ids=str)
def test_operations_are_counted_as_torch_counts_them(make_model, make_config, sources, latent):
    """The matrices of a prompt of which only the last row is wanted."""
    config, num_new = make_config(kv_source_layers=sources, **latent), 47
    assert not config.absorbs(num_new)
    model = make_model(dtype=torch.float32, kv_source_layers=sources, **latent)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.arange(num_new), Batch(new=[num_new]))
    counted = sum(flops for operation, flops in counter.get_flop_counts()["Global"].items()
                  if "attention" not in str(operation))
    last, layers = config.last_source, config.num_layers
    # Parameters outside matrices: norms. All rows meet those before the last notes are written.
    vectors = num_new * ((2 * last + 1) * config.hidden_size
                         + len(config.cache_layers) * config.latent_size)
    vectors += 2 * (layers - last) * config.hidden_size         # the model's last norm among them
    looking = config.flops(num_new, num_logits=1) - counted - 2 * vectors
    looks = num_new * (num_new + 1) // 2
    query = config.nope_dim + config.rope_dim if latent else config.head_dim
    expected = last * looks * 2 * config.num_heads * (query + config.head_dim)
    one_row = 2 * config.latent_size + config.rope_dim if latent else query + config.head_dim
    expected += (layers - last) * num_new * 2 * config.num_heads * one_row
    assert looking == expected


@pytest.mark.parametrize(("sources", "message"), [
    ((0, 1), "must name one layer for each of num_layers=4"),
    ((0, 2, 2, 2), "layer 1 reads layer 0 to 1"),
    ((0, 0, 1, 3), "layer 2 reads layer 1, which itself reads layer 0"),
    ((0, -1, 2, 2), "layer 1 reads layer 0 to 1"),
    ((0, True, 2, 2), "must hold whole numbers"),
    (3, "kv_source_layers=3 must be a list of layers"),
    (None, "kv_source_layers=None must be a list of layers"),
])
def test_impossible_sources_are_refused(make_config, sources, message):
    with pytest.raises(ValueError, match=message):
        make_config(kv_source_layers=sources)


def test_bytes_follow_the_owners(make_config):
    plain, half = make_config(), make_config(kv_source_layers=[0, 0, 2, 2])
    assert half.kv_bytes_per_token() * 2 == plain.kv_bytes_per_token()
    assert half.kv_source_layers == (0, 0, 2, 2)
    assert half.cache_layers == (0, 2)
    assert [half.cache_layer(layer) for layer in range(4)] == [0, 0, 1, 1]
    assert make_config(**LATENT).kv_bytes_per_token(2) == 4 * (26 + 8) * 2
