"""Grouped-query attention with rotary positions: how a token reads the notes before it.

For each token, in each layer:
1. project it to a query per head, and to a key and a value per KV head;
2. turn query and key by an angle that grows with the position (rotary positions), so
   that their product depends on the distance between two tokens alone;
3. note the turned key and the value: that pair is the layer's *entry* for this token;
4. score the query against every key up to its own position, and mix the values.

Several query heads share a KV head, so fewer numbers are noted (GQA, arXiv 2305.13245).
The names of the weights are those of `transformers`' Glm4Moe files.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..config import ModelConfig
from .batch import KV, Batch, Part


def rotary_angles(positions: torch.Tensor, config: ModelConfig, dtype: torch.dtype):
    """Cosine and sine of every pair's angle at every position: two of [rows, rotary_size / 2].

    Pair i of a head turns by position / theta^(2 i / rotary_size): the first pairs fast, the
    last hardly at all (RoPE, arXiv 2104.09864). Angles need float32 or better.
    """
    precise = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, config.rotary_size, 2, dtype=precise) / config.rotary_size
    angles = positions[:, None].to(precise) * (1.0 / config.rope_theta ** pairs)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [rows, heads, head_dim] by its row's angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Two verbs: `note` writes what this layer remembers of each row, `look` reads it all.

    A layer that does not own notes (`owns=False`) looks into those of an earlier layer.
    """

    def __init__(self, config: ModelConfig, owns: bool = True):
        super().__init__()
        self.config = config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        if owns:
            self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
            self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, angles, layer: int, kv: KV, batch: Batch) -> torch.Tensor:
        """x [rows, hidden] to the same shape, writing this layer's entries into `kv` on the way."""
        self.note(x, angles, layer, kv, batch)
        return self.look(x, angles, layer, kv, batch)

    def note(self, x: torch.Tensor, angles, layer: int, kv: KV, batch: Batch) -> None:
        """Write the rows' entries, turned keys then values, into the cache's `layer`."""
        k = rotate(self.k_proj(x).unflatten(-1, (-1, self.config.head_dim)), *angles)
        kv.write(layer, torch.cat((k.flatten(1), self.v_proj(x)), dim=-1), batch)

    def look(self, x: torch.Tensor, angles, layer: int, kv: KV, batch: Batch) -> torch.Tensor:
        """x [rows, hidden] to what the rows read from the cache's `layer`, in the same shape."""
        q = rotate(self.q_proj(x).unflatten(-1, (-1, self.config.head_dim)), *angles)
        return self.o_proj(attend_parts(self.attend, q, layer, kv, batch))

    def attend(self, q: torch.Tensor, entries: torch.Tensor, part: Part) -> torch.Tensor:
        """One rectangle: q [count * new, heads, head_dim], entries [count, length, entry_width].

        Returns the mixed values, [count * new, heads * head_dim].
        """
        # k and v [count, kv_heads, length, head_dim]
        k, v = entries.unflatten(-1, (2, self.config.num_kv_heads, -1)).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if part.new == 1:               # the heads that share a KV head stand as rows before it
            q = q.unflatten(1, (self.config.num_kv_heads, -1))
            return F.scaled_dot_product_attention(q, k, v, part.mask).flatten(1)
        q = q.unflatten(0, (part.count, part.new)).transpose(1, 2)  # [count, heads, new, head_dim]
        mixed = F.scaled_dot_product_attention(q, k, v, part.mask if part.past else None,
                                               is_causal=not part.past, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def attend_parts(attend, q: torch.Tensor, layer: int, kv: KV, batch: Batch) -> torch.Tensor:
    """Run `attend` on each rectangle of the batch; q [rows, ...] to [rows, heads * head_dim]."""
    mixed = [attend(q[part.rows], kv.read(layer, part), part) for part in batch.parts]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)
