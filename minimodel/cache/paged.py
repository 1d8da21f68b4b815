"""The paged KV cache: notes in blocks that may lie anywhere.

Storage is one tensor, [blocks, cache layers, block_size, entry_width]: a block is one piece of
memory with its tokens' entries in all layers, so it can be copied, sent and written to disk as
it is. Which blocks are whose, the pool knows (see `blocks.py`); here are only numbers.

    tokens of a request    0 .. 15 | 16 .. 31 | 32 .. 36
    its block table              7          2         11       (block_size 16)
    token 35 lies in             block 11, slot 3

For a step, `step(tables, batch)` works out once where each row's entry goes and which blocks
each sequence reads; all layers then use the same answer. Positions live inside the entries
(keys are turned before they are noted), so attention does not mind where a block lies.
"""

from collections.abc import Sequence

import torch

from ..config import ModelConfig
from ..model.batch import Batch, Part


class PagedCache:
    """Room for `num_blocks` blocks of `block_size` tokens' entries."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int = 16,
                 dtype: torch.dtype = torch.float32):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens holds "
                             "nothing: both must be at least 1")
        self.block_size = block_size
        self.blocks = torch.zeros(num_blocks, len(config.cache_layers), block_size,
                                  config.entry_width, dtype=dtype)
        self.bytes = self.blocks.view(num_blocks, -1).view(torch.uint8).numpy()   # the same memory

    @property
    def block_bytes(self) -> int:
        return self.blocks[0].nbytes

    def step(self, tables: Sequence[Sequence[int]], batch: Batch) -> "PagedStep":
        """What the model writes to and reads from in one step; sequence i has `tables[i]`.

        Raises ValueError for a table that is too short for the step's tokens.
        """
        for past, new, sequence in zip(batch.past, batch.new, batch.sequences, strict=True):
            room = len(tables[sequence]) * self.block_size
            if past + new > room:
                raise ValueError(f"sequence {sequence} needs room for {past + new} tokens, and its "
                                 f"table of {len(tables[sequence])} blocks has room for {room}: "
                                 "grow the table first")
        return PagedStep(self, tables, batch)

    def require(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Raise ValueError if this cache was made for another kind of entries."""
        layers, width = len(config.cache_layers), config.entry_width
        if (self.blocks.shape[1], self.blocks.shape[3]) != (layers, width):
            raise ValueError(f"the model notes {layers} layers of {width} numbers, the cache holds "
                             f"{self.blocks.shape[1]} of {self.blocks.shape[3]}: make it with the "
                             "model's config")
        if self.blocks.dtype != dtype:
            raise ValueError(f"the model computes in {dtype} and the cache holds "
                             f"{self.blocks.dtype}: make the cache with the model's dtype")

    def bytes_of(self, block: int) -> memoryview:
        """A block's entries as bytes, to be read or written where they lie."""
        return memoryview(self.bytes[block])

    def copy(self, source: int, target: int) -> None:
        """Copy one block's entries, all layers."""
        self.blocks[target] = self.blocks[source]


class PagedStep:
    """The notes of one step's sequences: satisfies the KV protocol of `model.batch`."""

    def __init__(self, cache: PagedCache, tables: Sequence[Sequence[int]], batch: Batch):
        self.cache, self.tables = cache, tables
        num_blocks, self.layers, self.block_size, width = cache.blocks.shape
        # Two views of the same memory: a line an entry, and a line a block and layer.
        self.entries = cache.blocks.view(-1, width)
        self.pages = cache.blocks.view(num_blocks * self.layers, -1)
        self.slots = self._slots(batch)                 # [rows], of layer 0
        self.tables_of = {}                             # of a part: [count * blocks], of layer 0

    def _slots(self, batch: Batch) -> torch.Tensor:
        """The line of `entries` that each row's entry of layer 0 goes to.

            line = (block * layers + layer) * block_size + slot
        """
        lines = []
        for past, new, sequence in zip(batch.past, batch.new, batch.sequences, strict=True):
            table = self.tables[sequence]
            for position in range(past, past + new):
                block = table[position // self.block_size]
                lines.append(block * self.layers * self.block_size + position % self.block_size)
        return torch.tensor(lines)

    def write(self, layer: int, entries: torch.Tensor, batch: Batch) -> None:
        """Put the rows' entries [rows, entry_width] into the slots found when the step began."""
        if entries.dtype != self.entries.dtype:
            raise ValueError(f"the model's entries are {entries.dtype} and the cache's "
                             f"{self.entries.dtype}: make the cache with the model's dtype")
        self.entries.index_copy_(0, self.slots + layer * self.block_size, entries.detach())

    def read(self, layer: int, part: Part) -> torch.Tensor:
        """The part's entries gathered block by block: a copy, [count, length, entry_width]."""
        pages = self._pages_of(part)
        gathered = self.pages.index_select(0, pages + layer)
        return gathered.view(part.count, -1, self.entries.shape[-1])[:, :part.length]

    def _pages_of(self, part: Part) -> torch.Tensor:
        """The lines of `pages`, layer 0, of the part's blocks; short tables repeat their last."""
        if part not in self.tables_of:
            most = -(-part.length // self.block_size)
            lines = []
            for table in self.tables[part.sequences]:
                row = list(table[:most])
                lines += row + row[-1:] * (most - len(row))
            self.tables_of[part] = torch.tensor(lines) * self.layers
        return self.tables_of[part]
