"""What config.json says in each format: whose names a model's sizes go by, and what must hold.

    format        attention notes         names and class of        read by
    GLM_4_MOE     keys and values         Glm4MoeForCausalLM        transformers, vLLM
    DEEPSEEK_V3   latents                 DeepseekV3ForCausalLM     transformers
    OWN           either, and layers      ModelConfig itself        this package alone
                  that share it

`format_of` chooses by a model's sizes, `format_in` by the model_type of a file. A public
format allows more than this package builds. `fixed` has the one value of each such key that
can be run: it is written into a file, and a file with another is refused by name.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path

from ..config import ConfigError, ModelConfig


class CheckpointError(ValueError):
    """A folder that is no checkpoint this package can run; the message says what to do."""


@dataclass(frozen=True)
class Format:
    """The keys of a config.json that describe a model.

    sizes       our name of a size: the format's name
    fixed       what the format allows and this package does not build: the only value it runs
    rotary      what rope_parameters says beside rope_theta; None: rope_theta stands alone
    repeated    a key that says a size again: our name of that size. Written, not read
    left_out    what it means when a file leaves a key out; sizes not named here must be there
    """

    architecture: str
    model_type: str
    sizes: dict[str, str]
    fixed: dict[str, object] = field(default_factory=dict)
    rotary: dict[str, object] | None = None
    repeated: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, object] = field(default_factory=dict)

    def describe(self, config: ModelConfig) -> dict:
        """A model's sizes as keys and values of this format."""
        theta = {} if self.rotary is None else {
            "rope_parameters": {**self.rotary, "rope_theta": config.rope_theta}}
        sizes = {theirs: getattr(config, ours) for ours, theirs in self.sizes.items()}
        again = {theirs: getattr(config, ours) for theirs, ours in self.repeated.items()}
        return {**theta, **sizes, **again, **self.fixed}

    def config(self, content: dict, path: Path) -> ModelConfig:
        """The sizes in a file. Raises CheckpointError for a model that cannot be run here."""
        content = self._filled(content, path)
        for key, value in {**NOT_BUILT, **self.fixed}.items():
            if content[key] != value:
                raise CheckpointError(f"{path} has {key}={content[key]!r}; "
                                      f"this package runs {value!r} only")
        names = {**self.sizes, "rope_theta": "rope_theta"}
        missing = [theirs for theirs in names.values() if theirs not in content]
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}: fetch the checkpoint again")
        sources = content.get("kv_source_layers", [])
        if not isinstance(sources, list):
            raise CheckpointError(f"{path} has kv_source_layers={sources!r}; "
                                  "it must be a list with one layer for each")
        try:
            return ModelConfig(**{ours: content[theirs] for ours, theirs in names.items()})
        except ConfigError as error:
            raise CheckpointError(f"{path} describes an impossible model: {error}") from error

    def _filled(self, content: dict, path: Path) -> dict:
        """A file's keys, those of its rope_parameters among them, and what it leaves out."""
        rotary = content.get("rope_parameters") or {}
        if not isinstance(rotary, dict):
            raise CheckpointError(f"{path} has rope_parameters={rotary!r}; it must name rope_theta")
        older_name = {"rope_type": rotary["type"]} if "type" in rotary else {}
        return {**NOT_BUILT, **self.fixed, **self.left_out, **content, **older_name, **rotary}


# --- the formats -----------------------------------------------------------------------

# The only values of these keys in any format. They are what a key means that is left out.
NOT_BUILT = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_scaling": None,
             "quantization_config": None}

EXPERT_SIZES = {
    "num_dense_layers": "first_k_dense_replace", "dense_size": "intermediate_size",
    "num_experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size", "num_shared_experts": "n_shared_experts",
    "expert_scale": "routed_scaling_factor", "norm_eps": "rms_norm_eps",
    "context": "max_position_embeddings"}

MODEL_SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}

FIXED = {
    "attention_bias": False, "hidden_act": "silu", "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "num_nextn_predict_layers": 0, "tie_word_embeddings": False}

GLM_4_MOE = Format(
    architecture="Glm4MoeForCausalLM", model_type="glm4_moe",
    sizes={**MODEL_SIZES, "head_dim": "head_dim", **EXPERT_SIZES},
    fixed=FIXED | {"use_qk_norm": False},
    rotary={"rope_type": "default", "partial_rotary_factor": 1.0},
    left_out={"num_nextn_predict_layers": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
              "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5})

DEEPSEEK_V3 = Format(
    architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3",
    sizes={**MODEL_SIZES, "head_dim": "v_head_dim", "latent_size": "kv_lora_rank",
           "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim", **EXPERT_SIZES},
    fixed=FIXED | {"q_lora_rank": None, "rope_interleave": True, "scoring_func": "sigmoid",
                   "topk_method": "noaux_tc", "moe_layer_freq": 1},
    rotary={"rope_type": "default"},
    repeated={"head_dim": "rope_dim"},          # of the numbers that positions turn
    left_out={"q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1,
              "n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
              "rms_norm_eps": 1e-6})

OWN = Format(
    architecture="SecondSendForCausalLM", model_type="second_send",
    sizes={size.name: size.name for size in fields(ModelConfig)})

FORMATS = (GLM_4_MOE, DEEPSEEK_V3, OWN)


def format_of(config: ModelConfig) -> Format:
    """The format to save a model in: a public one where one has room for it."""
    if config.kv_source_layers:
        return OWN
    return DEEPSEEK_V3 if config.latent_size else GLM_4_MOE


def format_in(content: object, path: Path) -> Format:
    """The format that a file names. Raises CheckpointError for any other."""
    named = content.get("model_type") if isinstance(content, dict) else type(content).__name__
    for known in FORMATS:
        if isinstance(content, dict) and named == known.model_type:
            return known
    types = ", ".join(repr(known.model_type) for known in FORMATS)
    raise CheckpointError(f"{path} describes a model of type {named!r}; only {types} can be run")
