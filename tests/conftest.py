"""What many tests need: small random models of odd sizes, and quiet threads."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from minimodel.config import ModelConfig

settings.register_profile("quiet", deadline=None)       # a busy machine is no failure
settings.load_profile("quiet")

# No two axes share a number, so that a swapped pair cannot go unnoticed.
ODD_SIZES = {"vocab_size": 271, "hidden_size": 46, "num_layers": 4, "num_heads": 6,
             "num_kv_heads": 2, "head_dim": 14, "num_dense_layers": 1, "dense_size": 38,
             "num_experts": 7, "experts_per_token": 3, "expert_size": 22, "num_shared_experts": 1,
             "expert_scale": 1.7, "rope_theta": 9_000.0, "norm_eps": 1e-3, "context": 97}


@pytest.fixture(scope="session")
def make_config():
    """A configuration of odd sizes, some of them changed."""
    return lambda **changes: ModelConfig(**{**ODD_SIZES, **changes})


@pytest.fixture(scope="session")
def make_model(make_config):
    """A model with random weights everywhere: norms off one, selection biases off zero."""
    import torch

    from minimodel.model.transformer import Transformer

    def make(seed=1, dtype=torch.float64, **changes):
        model = Transformer(make_config(**changes)).to(dtype).eval()
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                noise = torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
                if tensor.dim() == 1:
                    tensor.add_(0.2 * noise)
                else:
                    tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)
        return model
    return make
