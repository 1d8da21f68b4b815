"""Latent attention: both forms give what the obvious loop gives, and the cheaper one runs."""

import pytest
import torch

from minimodel.model.attention import rotary_angles
from minimodel.model.batch import Batch, NoCache
from minimodel.model.latent import rotate_neighbours

LATENT = {"num_kv_heads": 6, "latent_size": 26, "nope_dim": 10, "rope_dim": 8}


@pytest.fixture
def layer(make_model):
    return make_model(**LATENT).layers[0].self_attn


def by_hand(layer, x, positions):
    """Row by row and head by head, keys and values written out: [rows, hidden]."""
    config = layer.config
    cos, sin = rotary_angles(positions, config, x.dtype)

    def turn(vector, row):
        pairs = vector.unflatten(-1, (-1, 2))
        first, second = pairs[..., 0], pairs[..., 1]
        return torch.cat((first * cos[row] - second * sin[row],
                          second * cos[row] + first * sin[row]))
    queries = layer.q_proj(x).unflatten(-1, (config.num_heads, -1))
    latents, keys = layer.kv_a_proj_with_mqa(x).split((config.latent_size, config.rope_dim), -1)
    made = layer.kv_b_proj(layer.kv_a_layernorm(latents)).unflatten(-1, (config.num_heads, -1))
    out = []
    for row in range(len(x)):
        heads = []
        for head in range(config.num_heads):
            plain, turned = queries[row, head].split((config.nope_dim, config.rope_dim))
            scores = torch.stack([
                plain @ made[i, head, :config.nope_dim] + turn(turned, row) @ turn(keys[i], i)
                for i in range(row + 1)]) / (config.nope_dim + config.rope_dim) ** 0.5
            values = made[:row + 1, head, config.nope_dim:]
            heads.append(scores.softmax(0) @ values)
        out.append(torch.cat(heads))
    return layer.o_proj(torch.stack(out))


@pytest.mark.parametrize("form", ["absorbed", "unfolded"])
def test_each_form_equals_the_loop(layer, form, monkeypatch):
    monkeypatch.setattr(type(layer.config), "absorbs", lambda _, new: form == "absorbed")
    x = torch.randn(9, layer.config.hidden_size, dtype=torch.float64,
                    generator=torch.Generator().manual_seed(4))
    batch, kv = Batch(new=[9]), NoCache()
    angles = rotary_angles(batch.positions(), layer.config, x.dtype)
    with torch.inference_mode():
        layer.note(x, angles, 0, kv, batch)
        ours = layer.look(x, angles, 0, kv, batch)
        torch.testing.assert_close(ours, by_hand(layer, x, batch.positions()), rtol=0, atol=1e-12)


def test_an_entry_is_the_normalised_latent_and_one_turned_key(layer):
    x = torch.randn(5, layer.config.hidden_size, dtype=torch.float64)
    batch, kv = Batch(new=[5]), NoCache()
    angles = rotary_angles(batch.positions() + 3, layer.config, x.dtype)
    layer.note(x, angles, 0, kv, batch)
    entries = kv.read(0, batch.parts[0])[0]
    assert entries.shape == (5, 26 + 8)
    latent, key = layer.kv_a_proj_with_mqa(x).split((26, 8), -1)
    assert torch.equal(entries[:, :26], layer.kv_a_layernorm(latent))
    assert torch.equal(entries[:, 26:], rotate_neighbours(key[:, None], *angles)[:, 0])


def test_the_form_is_chosen_by_counted_work(make_config):
    config = make_config(**LATENT)
    heads, latent = config.num_heads, config.latent_size

    def operations(new, past, absorbed):
        """Of one layer: looking, and for the unfolded form making the noted keys and values."""
        looks = new * past + new * (new + 1) // 2
        query, value = config.nope_dim + config.rope_dim, config.head_dim
        if absorbed:
            return looks * 2 * heads * (latent + config.rope_dim + latent)
        return looks * 2 * heads * (query + value) + past * 2 * latent * heads * (
            config.nope_dim + value)
    past = 10_000                       # long enough for the terms that grow with it to decide
    for new in range(1, 60):
        cheaper = operations(new, past, True) < operations(new, past, False)
        assert config.absorbs(new) == cheaper, new
    assert not make_config().absorbs(1)


@pytest.mark.parametrize(("changes", "message"), [
    ({"latent_size": -1}, "latent_size=-1 must not be negative"),
    ({"nope_dim": 4}, "nope_dim=4 needs a latent_size"),
    ({**LATENT, "rope_dim": 7}, "rope_dim=7 must be even"),
    ({**LATENT, "rope_dim": 0}, "rope_dim=0 must be at least 1 with a latent_size"),
    ({**LATENT, "num_kv_heads": 2}, "num_kv_heads=2 must equal num_heads=6 with a latent_size"),
])
def test_impossible_latent_sizes_are_refused(make_config, changes, message):
    with pytest.raises(ValueError, match=message):
        make_config(**changes)
