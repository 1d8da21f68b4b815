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
    """Sizes of a Mixture-of-Experts transformer.

    The defaults are the toy that the book ships, with grouped-query attention. With a
    `latent_size` attention notes a latent and one rotary key instead of keys and values;
    with `kv_source_layers` some layers read the notes of an earlier one. The expert layer
    is DeepSeek's (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): sigmoid scores, a bias
    that takes part in the selection only, and shared experts that see every token.
    """

    vocab_size: int = 264
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32              # latent attention: of the values only
    latent_size: int = 0            # numbers in a token's latent; 0: keys and values are noted
    nope_dim: int = 0               # latent attention: the part of a head without a position,
    rope_dim: int = 0               # and the part with one, whose key all heads share
    kv_source_layers: tuple[int, ...] = ()      # whose notes each layer reads; (): its own
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
        self._require(isinstance(self.kv_source_layers, list | tuple), "kv_source_layers",
                      "must be a list of layers, empty if each layer reads its own notes")
        object.__setattr__(self, "kv_source_layers", tuple(self.kv_source_layers))
        for field in fields(self):
            if field.name == "kv_source_layers":
                continue
            kinds = (int, float) if field.type is float else int
            value = getattr(self, field.name)
            self._require(isinstance(value, kinds) and not isinstance(value, bool), field.name,
                          f"must be a number of type {field.type.__name__}")
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "context"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in ("num_dense_layers", "num_shared_experts"):
            self._require(getattr(self, name) >= 0, name, "must not be negative")
        for name in ("latent_size", "nope_dim", "rope_dim"):
            self._require(getattr(self, name) >= 0, name, "must not be negative")
        turned = "rope_dim" if self.latent_size else "head_dim"
        self._require(getattr(self, turned) % 2 == 0, turned,
                      "must be even: rotary positions turn pairs of numbers")
        self._require(self.num_heads % self.num_kv_heads == 0, "num_heads",
                      f"must be a multiple of num_kv_heads={self.num_kv_heads}")
        self._require_latent()
        self._require_sources()
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

    def _require_latent(self) -> None:
        if not self.latent_size:
            for name in ("nope_dim", "rope_dim"):
                self._require(getattr(self, name) == 0, name, "needs a latent_size")
            return
        for name in ("nope_dim", "rope_dim"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1 with a latent_size")
        self._require(self.num_kv_heads == self.num_heads, "num_kv_heads",
                      f"must equal num_heads={self.num_heads} with a latent_size: every head "
                      "makes its own keys and values from the latent")

    def _require_sources(self) -> None:
        sources = self.kv_source_layers
        name = "kv_source_layers"
        if not sources:
            return
        self._require(len(sources) == self.num_layers, name,
                      f"must name one layer for each of num_layers={self.num_layers}")
        for layer, source in enumerate(sources):
            self._require(type(source) is int and 0 <= source <= layer, name,
                          f"must hold whole numbers: layer {layer} reads layer 0 to {layer}")
            self._require(sources[source] == source, name,
                          f"must point to owners: layer {layer} reads layer {source}, "
                          f"which itself reads layer {sources[source]}")

    # --- whose notes ------------------------------------------------------------------

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """The layers that own notes, in order: those that the KV cache has room for."""
        return tuple(sorted(set(self.kv_source_layers or range(self.num_layers))))

    def cache_layer(self, layer: int) -> int:
        """Which of the cache's layers a layer of the model reads."""
        source = self.kv_source_layers[layer] if self.kv_source_layers else layer
        return self.cache_layers.index(source)

    @property
    def last_source(self) -> int:
        """The last layer that owns notes. After it, only rows with wanted logits go on."""
        return self.cache_layers[-1]

    # --- what follows from the sizes -------------------------------------------------

    @property
    def rotary_size(self) -> int:
        """Numbers of a query or key that positions turn."""
        return self.rope_dim if self.latent_size else self.head_dim

    @property
    def entry_width(self) -> int:
        """Numbers that attention notes for one token in one layer.

        Keys, then values; or the latent, then the rotary key.
        """
        if self.latent_size:
            return self.latent_size + self.rope_dim
        return 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_number: int = 4) -> int:
        """Bytes of notes (KV cache) one token leaves behind, all layers (equation E1)."""
        return len(self.cache_layers) * self.entry_width * bytes_per_number

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    # --- parameters -------------------------------------------------------------------

    def num_parameters(self) -> int:
        """All parameters. The selection bias is a buffer, not a parameter: not counted."""
        layers = sum(self._layer(i, self.num_experts) for i in range(self.num_layers))
        return 2 * self._embedding + layers + self.hidden_size          # and the last norm

    def num_active_parameters(self) -> int:
        """Parameters that one token is multiplied with (the embedding is looked up: counted)."""
        layers = sum(self._layer(i, self.experts_per_token) for i in range(self.num_layers))
        return 2 * self._embedding + layers + self.hidden_size

    def num_reading_parameters(self) -> int:
        """Those of them that a token of a prompt needs whose logits nobody wants.

        It goes through the layers before the last source and leaves its entry there.
        """
        layers = sum(self._layer(i, self.experts_per_token) for i in range(self.last_source))
        return self._embedding + layers + self.hidden_size + self._noting

    @property
    def _embedding(self) -> int:
        return self.vocab_size * self.hidden_size                       # the head has as many

    def _layer(self, layer: int, experts: int) -> int:
        one_expert = 3 * self.hidden_size * self.expert_size
        thinking = (3 * self.hidden_size * self.dense_size if layer < self.num_dense_layers
                    else (experts + self.num_shared_experts) * one_expert
                    + self.num_experts * self.hidden_size)              # and the gate
        noting = self._noting if layer in self.cache_layers else 0
        return 2 * self.hidden_size + self._looking + noting + thinking     # two norms a layer

    @property
    def _noting(self) -> int:
        """Parameters of one layer that make an entry."""
        norm = self.latent_size                         # a latent is normalised, keys are not
        return self.hidden_size * self.entry_width + norm

    @property
    def _looking(self) -> int:
        """Parameters of one layer that make queries, look at entries and mix the heads."""
        query = self.nope_dim + self.rope_dim if self.latent_size else self.head_dim
        return self.num_heads * self.hidden_size * (query + self.head_dim) + self._unfolding

    @property
    def _unfolding(self) -> int:
        """Parameters of one layer that make keys and values from a latent."""
        return self.latent_size * self.num_heads * (self.nope_dim + self.head_dim)

    # --- floating-point operations ----------------------------------------------------

    @property
    def flops_per_entry(self) -> int:
        """Operations for one new row to look at one entry, all layers.

        Two per number of the query to compare it with the key, two to add up the value.
        """
        return self.num_layers * self._flops_per_look(new=1)

    def absorbs(self, new: int) -> bool:
        """Whether `new` rows of a sequence look at the latents as they are (see `latent.py`).

        The other way makes keys and values of every latent first: worth it for many rows.
        """
        unfold = self.latent_size * (self.nope_dim + self.head_dim)     # once for an entry
        wider = 2 * self.latent_size - self.nope_dim - self.head_dim    # for every row
        return bool(self.latent_size) and new * wider < unfold

    def _flops_per_look(self, new: int) -> int:
        """Of one row at one entry in one layer."""
        if self.absorbs(new):
            return 2 * self.num_heads * (2 * self.latent_size + self.rope_dim)
        query = self.nope_dim + self.rope_dim if self.latent_size else self.head_dim
        return 2 * self.num_heads * (query + self.head_dim)

    def _attention_flops(self, new: int, past: int) -> int:
        """Of one layer: row i looks at past + i + 1 entries."""
        looks = new * past + new * (new + 1) // 2
        again = 0 if self.absorbs(new) else 2 * past * self._unfolding
        return looks * self._flops_per_look(new) + again

    def flops(self, num_new: int, num_past: int = 0, num_logits: int | None = None) -> int:
        """Floating-point operations to compute `num_new` tokens after `num_past` noted ones.

        Two per active parameter and token (equation E2), less the embedding, which is
        looked up, and the attention term. Logits are wanted for the last `num_logits` rows,
        for all if left out: only those rows go beyond the last layer that owns notes.
        """
        wanted = num_new if num_logits is None else num_logits
        reading = self.num_reading_parameters()
        matrices = (num_new * (reading - self._embedding)
                    + wanted * (self.num_active_parameters() - reading))
        before = self.last_source * self._attention_flops(num_new, num_past)
        after = (self.num_layers - self.last_source) * (
            self._attention_flops(wanted, num_past + num_new - wanted) if wanted else 0)
        return 2 * matrices + before + after
