"""The model: token ids in, logits out. One forward for every mixture of work.

    tokens -> embedding -> [ norm, attention, add;  norm, feed-forward or experts, add ] x layers
           -> norm -> head -> logits

A row is one new token of one sequence. Rows of any number of sequences lie flat behind one
another (see `batch.py`); a prompt being read and an answer being written differ only in how
many rows they bring. Once the last layer that owns notes has written them, only the rows
whose logits are wanted go on: of a prompt, the last.

Notes go to and come from `kv`: no cache at all, a dense one, a paged one, or one that another
process sent.
"""

from dataclasses import replace

import torch
from torch import nn

from ..config import ModelConfig
from .attention import Attention, rotary_angles
from .batch import KV, Batch, NoCache
from .latent import LatentAttention
from .moe import FeedForward, MoE, RunExperts, quick_experts
from .norm import RMSNorm


class Block(nn.Module):
    """One layer: look across tokens (attention), then think about each alone (experts)."""

    def __init__(self, config: ModelConfig, layer: int, run_experts: RunExperts):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.owns_notes = layer in config.cache_layers
        attention = LatentAttention if config.latent_size else Attention
        self.self_attn = attention(config, self.owns_notes)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = (FeedForward(config.hidden_size, config.dense_size)
                    if layer < config.num_dense_layers else MoE(config, run_experts))
        self.cache_layer = config.cache_layer(layer)

    def forward(self, x: torch.Tensor, angles, kv: KV, batch: Batch) -> torch.Tensor:
        """x [rows, hidden] to the same shape."""
        return self.go_on(x, self.note(x, angles, kv, batch), angles, kv, batch)

    def note(self, x: torch.Tensor, angles, kv: KV, batch: Batch) -> torch.Tensor:
        """The rows, normed; their entries are written if this layer owns notes."""
        normed = self.input_layernorm(x)
        if self.owns_notes:
            self.self_attn.note(normed, angles, self.cache_layer, kv, batch)
        return normed

    def go_on(self, x: torch.Tensor, normed: torch.Tensor, angles, kv: KV,
              batch: Batch) -> torch.Tensor:
        """Look across tokens, then think about each alone."""
        x = x + self.self_attn.look(normed, angles, self.cache_layer, kv, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """A Mixture-of-Experts transformer, sized by `config`, with random weights until loaded."""

    def __init__(self, config: ModelConfig, run_experts: RunExperts = quick_experts):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i, run_experts) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, batch: Batch, kv: KV | None = None,
                positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [wanted rows, vocabulary] after computing the rows `tokens` [rows].

        `positions` [rows] are counted from the batch unless given. Without `kv` nothing is
        kept. Raises ValueError where tokens or positions and batch disagree.
        """
        if tokens.shape != (batch.num_rows,):
            raise ValueError(f"tokens of shape {list(tokens.shape)} do not fit a batch of "
                             f"{batch.num_rows} rows: lay all sequences' new tokens in one row")
        kv = NoCache() if kv is None else kv
        positions = batch.positions() if positions is None else positions
        if positions.shape != tokens.shape:
            raise ValueError(f"positions of shape {list(positions.shape)} do not fit a batch of "
                             f"{batch.num_rows} rows: give one position a row")
        x = self.embed_tokens(tokens)
        angles = rotary_angles(positions, self.config, x.dtype)
        for layer, block in enumerate(self.layers):
            normed = block.note(x, angles, kv, batch)
            if layer == self.config.last_source:        # the other rows have left their notes
                if (rest := batch.rest()) is None:
                    self.run_no_rows(layer)
                    return x.new_zeros(0, self.config.vocab_size)
                rows, batch = rest
                x, normed, angles = x[rows], normed[rows], [angle[rows] for angle in angles]
            x = block.go_on(x, normed, angles, kv, batch)
        return self.lm_head(self.norm(x[batch.wanted_rows()]))

    def logits_everywhere(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after every token of equally long sequences: [count, length] to + [vocabulary]."""
        count, length = tokens.shape
        batch = Batch(new=[length] * count)
        batch = replace(batch, wanted=range(batch.num_rows))
        return self(tokens.flatten(), batch).unflatten(0, (count, length))

    def run_no_rows(self, first_layer: int = 0) -> None:
        """Be there in all expert layers from one on, without rows: somebody may wait for that."""
        for block in self.layers[first_layer:]:
            if isinstance(block.mlp, MoE):
                block.mlp.run_no_rows()

    def moe_layers(self) -> list[MoE]:
        return [block.mlp for block in self.layers if isinstance(block.mlp, MoE)]
