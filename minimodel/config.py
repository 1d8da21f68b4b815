"""The sizes of a model, checked once and frozen.

`ModelConfig` names every size that the rest of the package needs: how wide a
token's vector is, how many heads read the notes, how many experts a layer has.
From the sizes alone follow the numbers that the book computes on paper before
it measures them: parameters in all, parameters touched per token, bytes of
notes (KV cache) per token, floating-point operations per token.
"""

import math
from dataclasses import dataclass, fields


class ConfigError(ValueError):
    """A configuration that no model can have; the message says which value and why."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Mixture-of-Experts transformer with grouped-query attention.

    The defaults are the toy that the book ships. The expert layer is DeepSeek's
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): sigmoid scores, a bias that
    takes part in the selection only, and shared experts that see every token.
    """

    vocab_size: int = 264
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    num_dense_layers: int = 1       # the first layers have one ordinary feed-forward block
    dense_size: int = 384           # inner width of that block
    num_experts: int = 16
    experts_per_token: int = 2      # top-k
    expert_size: int = 64           # inner width of one expert
    num_shared_experts: int = 1
    expert_scale: float = 1.0       # multiplies the routed experts' weights, after normalisation
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5
    context: int = 8_192            # positions a prompt and its answer may use

    def __post_init__(self):
        for field in fields(self):
            kinds = (int, float) if field.type is float else int
            value = getattr(self, field.name)
            self._require(isinstance(value, kinds) and not isinstance(value, bool), field.name,
                          f"must be a number of type {field.type.__name__}")
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "context"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in ("num_dense_layers", "num_shared_experts"):
            self._require(getattr(self, name) >= 0, name, "must not be negative")
        self._require(self.head_dim % 2 == 0, "head_dim",
                      "must be even: rotary positions turn pairs of numbers")
        self._require(self.num_heads % self.num_kv_heads == 0, "num_heads",
                      f"must be a multiple of num_kv_heads={self.num_kv_heads}")
        self._require(self.num_dense_layers <= self.num_layers, "num_dense_layers",
                      f"must be at most num_layers={self.num_layers}")
        if self.num_dense_layers > 0:
            self._require(self.dense_size >= 1, "dense_size", "must be at least 1")
        if self.num_dense_layers < self.num_layers:
            self._require(self.num_experts >= 1, "num_experts", "must be at least 1")
            self._require(self.expert_size >= 1, "expert_size", "must be at least 1")
            self._require(1 <= self.experts_per_token <= self.num_experts, "experts_per_token",
                          f"must be between 1 and num_experts={self.num_experts}")
        for name in ("rope_theta", "norm_eps", "expert_scale"):
            self._require(0 < getattr(self, name) < math.inf, name, "must be positive and finite")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name}={getattr(self, name)!r} {rule}")

    # --- what follows from the sizes -------------------------------------------------

    @property
    def entry_width(self) -> int:
        """Numbers that attention notes for one token in one layer: keys, then values."""
        return 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_number: int = 4) -> int:
        """Bytes of notes (KV cache) one token leaves behind, all layers (equation E1)."""
        return self.num_layers * self.entry_width * bytes_per_number

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    def num_parameters(self) -> int:
        """All parameters. The selection bias is a buffer, not a parameter: not counted."""
        return self._parameters(self.num_experts)

    def num_active_parameters(self) -> int:
        """Parameters that one token is multiplied with (the embedding is looked up: counted)."""
        return self._parameters(self.experts_per_token)

    def _parameters(self, experts: int) -> int:
        hidden, head = self.hidden_size, self.head_dim
        attention = hidden * head * (2 * self.num_heads + 2 * self.num_kv_heads)
        one_expert = 3 * hidden * self.expert_size
        moe = (experts + self.num_shared_experts) * one_expert + self.num_experts * hidden
        return (2 * self.vocab_size * hidden                          # embedding and head
                + self.num_layers * (attention + 2 * hidden)          # and two norms a layer
                + self.num_dense_layers * 3 * hidden * self.dense_size
                + self.num_moe_layers * moe
                + hidden)                                             # the last norm

    @property
    def flops_per_entry(self) -> int:
        """Operations for one row to look at one entry, all layers.

        Two per number of the query to compare it with the key, two to add up the value.
        """
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def flops(self, num_new: int, num_past: int = 0, num_logits: int | None = None) -> int:
        """Floating-point operations to compute `num_new` tokens after `num_past` noted ones.

        Two per active parameter and token (equation E2), less the embedding, which is
        looked up; the head counts for `num_logits` rows only, for all if left out. Then the
        attention term: token i looks at i + 1 entries.
        """
        num_logits = num_new if num_logits is None else num_logits
        head = self.vocab_size * self.hidden_size
        layers = self.num_active_parameters() - 2 * head
        entries = num_new * num_past + num_new * (num_new + 1) // 2
        return 2 * (num_new * layers + num_logits * head) + self.flops_per_entry * entries
