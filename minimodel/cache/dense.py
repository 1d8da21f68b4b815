"""The dense KV cache: one stretch of memory per sequence, as long as it may ever get.

The life of a cache:
1. it is made with room for `capacity` tokens of each sequence, all of it set aside at once;
2. `batch(new)` says what the next step adds: so many new tokens to each sequence;
3. the model writes the new tokens' entries layer by layer and reads back all there are;
4. `commit(batch)` counts them as noted, and the next step may build on them.

A step that fails before `commit` leaves the cache as it was: its rows are written over. A step
planned before another one was committed is refused, so noted entries are never written over.
Simple and fast, and wasteful: chapter 08 measures how much of the memory stays empty.
"""

from collections.abc import Sequence

import torch

from ..config import ModelConfig
from ..model.batch import Batch, Part


class DenseCache:
    """Entries of `num_sequences` sequences: [layers, sequences, capacity, entry_width]."""

    def __init__(self, config: ModelConfig, capacity: int, num_sequences: int = 1,
                 dtype: torch.dtype = torch.float32):
        if capacity < 1 or num_sequences < 1:
            raise ValueError(f"a cache for {num_sequences} sequences of {capacity} tokens holds "
                             "nothing: both must be at least 1")
        if capacity > config.context:
            raise ValueError(f"capacity={capacity} is beyond the model's context of "
                             f"{config.context} tokens: ask for at most that many")
        self.capacity = capacity
        self.lengths = [0] * num_sequences
        self.entries = torch.zeros(len(config.cache_layers), num_sequences, capacity,
                                   config.entry_width, dtype=dtype)

    def batch(self, new: Sequence[int]) -> Batch:
        """A step that adds `new` tokens to each sequence; one with 0 is left out of it.

        Raises ValueError where a sequence is full.
        """
        if len(new) != len(self.lengths):
            raise ValueError(f"new={tuple(new)} must name all {len(self.lengths)} sequences of the "
                             "cache")
        going_on = [sequence for sequence, count in enumerate(new) if count]
        batch = Batch(new=[new[sequence] for sequence in going_on], sequences=going_on,
                      past=[self.lengths[sequence] for sequence in going_on])
        self._require_room(batch)
        return batch

    def _require_room(self, batch: Batch) -> None:
        for sequence, length, count in zip(batch.sequences, batch.past, batch.new, strict=True):
            if length + count > self.capacity:
                raise ValueError(
                    f"sequence {sequence} has {length} tokens noted and {count} new ones, over the "
                    f"cache's capacity of {self.capacity}: make a larger cache")

    def write(self, layer: int, entries: torch.Tensor, batch: Batch) -> None:
        """Put a step's entries [rows, entry_width] behind the noted ones of their sequences.

        Raises ValueError for a batch that `commit` would refuse, and for another number type.
        """
        self._expect(batch)
        if entries.dtype != self.entries.dtype:
            raise ValueError(f"the model's entries are {entries.dtype} and the cache's "
                             f"{self.entries.dtype}: make the cache with the model's dtype")
        entries = entries.detach()              # notes are numbers, without their gradients
        for part in batch.parts:
            held = self.entries[layer, part.sequences]
            if part.pasts:                      # one row each, every one at its own place
                held[torch.arange(part.count), torch.tensor(part.pasts)] = entries[part.rows]
            else:
                held[:, part.past:part.length] = (
                    entries[part.rows].unflatten(0, (part.count, part.new)))

    def read(self, layer: int, part: Part) -> torch.Tensor:
        """[count, length, entry_width]: a view of the cache's own memory, not to be kept."""
        return self.entries[layer, part.sequences, :part.length]

    def commit(self, batch: Batch) -> None:
        """Count a step's tokens as noted. Raises ValueError for a batch made at another length."""
        self._expect(batch)
        for sequence, new in zip(batch.sequences, batch.new, strict=True):
            self.lengths[sequence] += new

    def _expect(self, batch: Batch) -> None:
        if not all(0 <= sequence < len(self.lengths) for sequence in batch.sequences):
            raise ValueError(f"sequences={batch.sequences} must name some of the cache's "
                             f"{len(self.lengths)}, from 0 on: plan the step with batch()")
        noted = [self.lengths[sequence] for sequence in batch.sequences]
        if list(batch.past) != noted:
            raise ValueError(f"this step was planned when {list(batch.past)} tokens were noted, "
                             f"but the cache holds {noted}: plan it again with batch()")
        self._require_room(batch)

    def check(self) -> None:
        """Raise AssertionError if a length leaves the memory that was set aside."""
        assert all(0 <= length <= self.capacity for length in self.lengths), (
            f"lengths {self.lengths} must stay within the capacity of {self.capacity}")

    def stats(self) -> dict[str, int]:
        """Bytes set aside and bytes that hold entries of noted tokens."""
        layers, sequences, capacity, width = self.entries.shape
        one_token = layers * width * self.entries.element_size()
        return {"reserved_bytes": sequences * capacity * one_token,
                "used_bytes": sum(self.lengths) * one_token}
