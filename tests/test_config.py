"""Sizes: impossible ones are refused, and what follows from the others is counted after."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minimodel.cache.dense import DenseCache
from minimodel.config import ConfigError, ModelConfig
from minimodel.model.batch import Batch
from minimodel.model.moe import FEW_ROWS
from minimodel.model.transformer import Transformer

SHAPES = [
    {},
    {"num_dense_layers": 0},
    {"num_dense_layers": 4},
    {"num_shared_experts": 0},
    {"num_shared_experts": 3, "experts_per_token": 7},
    {"experts_per_token": 1, "num_kv_heads": 6},
]

IMPOSSIBLE = [
    ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
    ({"hidden_size": -46}, "hidden_size=-46 must be at least 1"),
    ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ({"num_heads": 0}, "num_heads=0 must be at least 1"),
    ({"num_kv_heads": 0}, "num_kv_heads=0 must be at least 1"),
    ({"head_dim": 0}, "head_dim=0 must be at least 1"),
    ({"context": 0}, "context=0 must be at least 1"),
    ({"num_dense_layers": -1}, "num_dense_layers=-1 must not be negative"),
    ({"num_shared_experts": -2}, "num_shared_experts=-2 must not be negative"),
    ({"head_dim": 15}, "head_dim=15 must be even"),
    ({"num_heads": 7}, "num_heads=7 must be a multiple of num_kv_heads=2"),
    ({"num_dense_layers": 5}, "num_dense_layers=5 must be at most num_layers=4"),
    ({"dense_size": 0}, "dense_size=0 must be at least 1"),
    ({"num_experts": 0}, "num_experts=0 must be at least 1"),
    ({"expert_size": 0}, "expert_size=0 must be at least 1"),
    ({"experts_per_token": 0}, "experts_per_token=0 must be between 1 and num_experts=7"),
    ({"experts_per_token": 8}, "experts_per_token=8 must be between 1 and num_experts=7"),
    ({"rope_theta": 0.0}, "rope_theta=0.0 must be positive"),
    ({"rope_theta": float("inf")}, "rope_theta=inf must be positive and finite"),
    ({"norm_eps": float("nan")}, "norm_eps=nan must be positive"),
    ({"expert_scale": -1.0}, "expert_scale=-1.0 must be positive"),
    ({"hidden_size": 46.0}, "hidden_size=46.0 must be a number of type int"),
    ({"num_layers": "4"}, "num_layers='4' must be a number of type int"),
    ({"num_layers": True}, "num_layers=True must be a number of type int"),
    ({"norm_eps": None}, "norm_eps=None must be a number of type float"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE, ids=[m for _, m in IMPOSSIBLE])
def test_an_impossible_size_is_refused_with_its_value_and_the_rule(make_config, changes, message):
    with pytest.raises(ConfigError) as error:
        make_config(**changes)
    assert message in str(error.value)


def test_a_layer_kind_that_is_not_there_needs_no_sizes(make_config):
    assert make_config(num_dense_layers=0, dense_size=0).num_moe_layers == 4
    assert make_config(num_dense_layers=4, num_experts=0, expert_size=0).num_moe_layers == 0


def test_sizes_are_frozen(make_config):
    with pytest.raises(AttributeError):
        make_config().hidden_size = 12


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_parameters_equal_those_of_a_real_model(make_config, changes):
    config = make_config(**changes)
    model = Transformer(config)
    assert config.num_parameters() == sum(weight.numel() for weight in model.parameters())
    idle = config.num_experts - config.experts_per_token
    idle_parameters = sum(idle * (layer.experts.gate_up_proj[0].numel()
                                  + layer.experts.down_proj[0].numel())
                          for layer in model.moe_layers())
    assert config.num_active_parameters() == config.num_parameters() - idle_parameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_kv_bytes_per_token_equal_those_a_cache_uses(make_config, dtype):
    config = make_config()
    cache = DenseCache(config, capacity=5, num_sequences=3, dtype=dtype)
    cache.commit(cache.batch([1, 1, 3]))
    assert cache.stats()["used_bytes"] == 5 * config.kv_bytes_per_token(dtype.itemsize)
    assert cache.stats()["reserved_bytes"] == cache.entries.nbytes


def test_kv_bytes_of_llama_405b():
    """Equation E1's worked example: 126 layers, 8 KV heads of 128, two bytes a number."""
    llama = ModelConfig(vocab_size=128_256, hidden_size=16_384, num_layers=126, num_heads=128,
                        num_kv_heads=8, head_dim=128)
    assert llama.kv_bytes_per_token(bytes_per_number=2) == 516_096


def test_kv_bytes_if_every_head_of_deepseek_v3_were_noted():
    """E1's hypothetical: 61 layers, 128 heads of 128, keys and values, two bytes a number."""
    plain = ModelConfig(num_layers=61, num_heads=128, num_kv_heads=128, head_dim=128,
                        num_dense_layers=3)
    assert plain.kv_bytes_per_token(bytes_per_number=2) == 3_997_696


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_flops_of_the_matrices_equal_those_torch_counts(make_model, make_config, changes):
    """Of the work that was chosen: with fewer rows, experts do idle arithmetic to save time."""
    config, num_new = make_config(**changes), FEW_ROWS + 5
    model = make_model(dtype=torch.float32, **changes)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits_everywhere(torch.arange(num_new)[None])
    counted = sum(flops for operation, flops in counter.get_flop_counts()["Global"].items()
                  if "attention" not in str(operation))
    norms = (2 * config.num_layers + 1) * config.hidden_size     # parameters outside matrices
    reads = 4 * config.num_layers * config.num_heads * config.head_dim * sum(range(1, num_new + 1))
    assert config.flops(num_new) == counted + 2 * num_new * norms + reads


@pytest.mark.parametrize(("num_new", "num_past"), [(1, 0), (1, 9), (5, 0), (5, 13), (0, 4)])
def test_flops_of_attention_count_every_pair_of_tokens(make_config, num_new, num_past):
    config = make_config()
    pairs = sum(1 for new in range(num_past, num_past + num_new) for seen in range(new + 1)
                for _ in range(config.num_layers * config.num_heads))
    matrices = num_new * (config.flops(1) - 4 * config.num_layers * config.num_heads
                          * config.head_dim)
    assert config.flops(num_new, num_past) == matrices + 4 * config.head_dim * pairs


def test_flops_add_up_over_any_cut(make_config):
    config = make_config()
    assert config.flops(17) == config.flops(6) + config.flops(10, 6) + config.flops(1, 16)


def test_a_forward_notes_as_many_numbers_as_the_entry_width_says(make_model, make_config):
    model, written = make_model(), []

    class Listener:
        def write(self, layer, entries, batch):
            written.append(entries)

        def read(self, layer, part):
            return written[-1][None]
    model(torch.arange(5), Batch(new=[5]), Listener())
    assert [list(entries.shape) for entries in written] == [[5, make_config().entry_width]] * 4
