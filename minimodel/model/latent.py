"""Latent attention: note one short vector per token, and unfold keys and values from it.

For each token, in each layer:
1. project it to a *latent*, far shorter than all heads' keys and values, and to one rotary
   key that all heads share. The latent, normalised, and the turned key are the entry.
2. each head's key is a matrix times the latent, with the rotary key appended; its value is
   another matrix times the latent. Queries have the same two parts.

Nothing has to be unfolded to be looked at. A head's score is q . (K latent) = (K^T q) . latent,
and its mixed value V (sum of weighted latents): with K and V moved over to the side of the
query (*absorbed*), all heads look at the latents as they lie in the cache. That is less work
for a few rows and more for many, since a latent is wider than a head: `config.absorbs` decides.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1). The names of the weights, and the order
of the rotary pairs, are those of `transformers`' DeepseekV3 files.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..config import ModelConfig
from .attention import attend_parts, rotate
from .batch import KV, Batch, Part
from .norm import RMSNorm


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs that lie side by side, (2 i, 2 i + 1): sorted into halves, then as `rotate`.

    The halves stay sorted: a product of query and key does not mind the order of its terms.
    """
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


class LatentAttention(nn.Module):
    """The same two verbs as `Attention`, on entries of latent_size + rope_dim numbers."""

    def __init__(self, config: ModelConfig, owns: bool = True):
        super().__init__()
        self.config = config
        heads, latent, hidden = config.num_heads, config.latent_size, config.hidden_size
        query = config.nope_dim + config.rope_dim
        self.q_proj = nn.Linear(hidden, heads * query, bias=False)
        if owns:
            self.kv_a_proj_with_mqa = nn.Linear(hidden, config.entry_width, bias=False)
            self.kv_a_layernorm = RMSNorm(latent, 1e-6)     # the format fixes this epsilon
        self.kv_b_proj = nn.Linear(latent, heads * (config.nope_dim + config.head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=False)
        self.scale = query ** -0.5

    def note(self, x: torch.Tensor, angles, layer: int, kv: KV, batch: Batch) -> None:
        """Write the rows' entries, latent then turned key, into the cache's `layer`."""
        latent, key = self.kv_a_proj_with_mqa(x).split(
            (self.config.latent_size, self.config.rope_dim), dim=-1)
        key = rotate_neighbours(key[:, None], *angles)[:, 0]
        kv.write(layer, torch.cat((self.kv_a_layernorm(latent), key), dim=-1), batch)

    def look(self, x: torch.Tensor, angles, layer: int, kv: KV, batch: Batch) -> torch.Tensor:
        """x [rows, hidden] to what the rows read from the cache's `layer`, in the same shape."""
        plain, turned = self.q_proj(x).unflatten(-1, (self.config.num_heads, -1)).split(
            (self.config.nope_dim, self.config.rope_dim), dim=-1)
        q = torch.cat((plain, rotate_neighbours(turned, *angles)), dim=-1)   # [rows, heads, query]
        return self.o_proj(attend_parts(self.attend, q, layer, kv, batch))

    def attend(self, q: torch.Tensor, entries: torch.Tensor, part: Part) -> torch.Tensor:
        """One rectangle: q [count * new, heads, query], entries [count, length, entry_width].

        Returns the mixed values, [count * new, heads * head_dim].
        """
        q = q.unflatten(0, (part.count, part.new)).transpose(1, 2)  # [count, heads, new, query]
        form = self.absorbed if self.config.absorbs(part.new) else self.unfolded
        return form(q, entries, part).transpose(1, 2).flatten(0, 1).flatten(1)

    def unfolded(self, q: torch.Tensor, entries: torch.Tensor, part: Part) -> torch.Tensor:
        """Make every head's keys and values of the latents, then attend as ever."""
        config = self.config
        latent, key = entries.split((config.latent_size, config.rope_dim), dim=-1)
        made = self.kv_b_proj(latent).unflatten(-1, (config.num_heads, -1)).transpose(1, 2)
        k, v = made.split((config.nope_dim, config.head_dim), dim=-1)   # [count, heads, length, .]
        key = key[:, None].expand(-1, config.num_heads, -1, -1)
        k = torch.cat((k, key), dim=-1)
        v = F.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))    # equal widths take the fast path
        mask = part.mask if part.past else None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not part.past,
                                               scale=self.scale)
        return mixed[..., :config.head_dim]

    def absorbed(self, q: torch.Tensor, entries: torch.Tensor, part: Part) -> torch.Tensor:
        """Bring the queries to the latents: the heads become rows that share one 'key' each."""
        config = self.config
        plain, turned = q.split((config.nope_dim, config.rope_dim), dim=-1)
        # to_key [heads, nope_dim, latent], to_value [heads, head_dim, latent]
        to_key, to_value = self.kv_b_proj.weight.unflatten(0, (config.num_heads, -1)).split(
            (config.nope_dim, config.head_dim), dim=1)
        q = torch.cat((plain @ to_key, turned), dim=-1)                 # [count, heads, new, .]
        mask = part.mask if part.new == 1 else part.mask.repeat(config.num_heads, 1)
        one_head = entries[:, None]                                     # keys and values at once
        mixed = F.scaled_dot_product_attention(q.flatten(1, 2)[:, None], one_head, one_head, mask,
                                               scale=self.scale)
        mixed = mixed[:, 0, :, :config.latent_size].unflatten(1, (config.num_heads, -1))
        return mixed @ to_value.mT                                      # [count, heads, new, .]
