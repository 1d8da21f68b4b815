"""Who is in this step: a flat, ragged batch, and the protocol by which attention meets the notes.

A step computes new tokens of several sequences in one call. Their rows lie one after
another in one flat tensor, with no padding:

    rows      0 1 2 3 4 | 5 | 6 | 7 8 9
    sequence  0         | 1 | 2 | 3          new  = 5, 1, 1, 3
                                             past = 0, 7, 7, 4  (tokens already noted)

Attention is the only part of the model that looks across rows, and it needs rectangles.
`parts` cuts the batch into as few as it can: neighbours with equal `new` and `past` share
one (sequences 1 and 2 above), and so do neighbours that bring one row each, if none of them
is more than twice as long as another: a mask hides what the shorter ones do not have.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Part:
    """A rectangle of the batch: `count` sequences, each with `new` rows after `past` entries."""

    first_row: int
    first_sequence: int         # of the KV cache
    count: int
    new: int
    past: int                    # of the longest sequence
    pasts: tuple[int, ...] = ()  # of each, where they differ; then `new` is 1

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.count * self.new)

    @property
    def sequences(self) -> slice:
        return slice(self.first_sequence, self.first_sequence + self.count)

    @property
    def length(self) -> int:
        """Entries the longest sequence has once this step's are written."""
        return self.past + self.new

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Entries each sequence has once this step's are written."""
        return tuple(past + self.new for past in self.pasts) or (self.length,) * self.count

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """Which entries a row may read (true), for attention; None: all of them.

        Row i of a chunk reads the past and rows 0 to i of its chunk: [new, length].

            past = 3, new = 2:   1 1 1 1 .
                                 1 1 1 1 1

        Sequences of different lengths read no further than their own: [count, 1, 1, length].

            pasts = 3, 1:   1 1 1 1
                            1 1 . .
        """
        if self.pasts:
            own = torch.arange(self.length) < torch.tensor(self.lengths)[:, None]
            return own[:, None, None]
        if self.new == 1:
            return None
        return torch.ones(self.new, self.length, dtype=torch.bool).tril(self.past)


@dataclass(frozen=True)
class Batch:
    """New rows per sequence, what each has noted before, and which rows' logits are wanted.

    new         new tokens of each sequence, in row order
    past        tokens of each whose entries are in the KV cache; none if left out
    wanted      rows to compute logits for; the last of each sequence if left out
    sequences   which of the cache's sequences these are; 0, 1, 2, ... if left out
    """

    new: Sequence[int]
    past: Sequence[int] | None = None
    wanted: Sequence[int] | None = None
    sequences: Sequence[int] | None = None

    def __post_init__(self):
        past = (0,) * len(self.new) if self.past is None else tuple(self.past)
        object.__setattr__(self, "new", tuple(self.new))
        object.__setattr__(self, "past", past)
        sequences = range(len(self.new)) if self.sequences is None else self.sequences
        object.__setattr__(self, "sequences", tuple(sequences))
        if not self.new:
            raise ValueError("a batch needs at least one sequence")
        if min(self.new) < 1:
            raise ValueError(f"new={self.new}: every sequence in a batch computes at least 1 token")
        if len(past) != len(self.new) or min(past) < 0:
            raise ValueError(f"past={past} must hold one count of at least 0 for each of "
                             f"the {len(self.new)} sequences")
        if len(self.sequences) != len(self.new) or len(set(self.sequences)) != len(self.new):
            raise ValueError(f"sequences={self.sequences} must name {len(self.new)} different "
                             "sequences, one for each count of new tokens")
        if self.wanted is not None:
            object.__setattr__(self, "wanted", tuple(self.wanted))
            if not all(0 <= row < self.num_rows for row in self.wanted):
                raise ValueError(f"wanted={self.wanted} must name rows of this batch, "
                                 f"0 to {self.num_rows - 1}")

    @property
    def num_rows(self) -> int:
        return sum(self.new)

    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence: [rows]."""
        starts = accumulate(self.new, initial=0)                # first row of each sequence
        shifts = [past - start for past, start in zip(self.past, starts, strict=False)]
        rows = torch.arange(self.num_rows)
        return rows + torch.tensor(shifts).repeat_interleave(torch.tensor(self.new))

    def wanted_rows(self) -> torch.Tensor:
        """Rows whose logits are wanted: [wanted]."""
        return torch.tensor(self._wanted(), dtype=torch.long)

    def _wanted(self) -> Sequence[int]:
        if self.wanted is not None:
            return self.wanted
        return [end - 1 for end in accumulate(self.new)]

    def rest(self) -> "tuple[torch.Tensor | slice, Batch] | None":
        """What goes on once all notes are written: rows kept, and a batch of them alone.

        Each sequence goes on from its first wanted row; one without any drops out. None if
        no logits are wanted at all.

            new = 4, past = 2, third row wanted:   n n W n   ->   W n    new = 2, past = 4
        """
        starts = list(accumulate(self.new, initial=0))
        wanted = self._wanted()
        first = {}                                      # of a place in the batch: its first row
        for row in sorted(wanted):
            first.setdefault(bisect_right(starts, row) - 1, row)
        if not first:
            return None
        kept = [row for place, row in first.items() for row in range(row, starts[place + 1])]
        if len(kept) == self.num_rows:
            return slice(None), self
        place_of = {row: place for place, row in enumerate(kept)}
        return torch.tensor(kept), Batch(
            new=[starts[place + 1] - row for place, row in first.items()],
            past=[self.past[place] + row - starts[place] for place, row in first.items()],
            wanted=[place_of[row] for row in wanted],
            sequences=[self.sequences[place] for place in first])

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts())

    def _parts(self) -> Iterator[Part]:
        row = first = 0
        while first < len(self.new):
            last = self._end_of_part(first)
            pasts = self.past[first:last]
            differ = min(pasts) < max(pasts)
            yield Part(row, self.sequences[first], last - first, self.new[first], max(pasts),
                       pasts if differ else ())
            row += (last - first) * self.new[first]
            first = last

    def _end_of_part(self, first: int) -> int:
        """One past the last place that can share a part with `first`."""
        shortest = longest = self.past[first]
        for place in range(first + 1, len(self.new)):
            shortest = min(shortest, self.past[place])
            longest = max(longest, self.past[place])
            alike = shortest == longest or (self.new[first] == 1 and longest < 2 * shortest + 2)
            neighbour = self.sequences[place] == self.sequences[first] + place - first
            if self.new[place] != self.new[first] or not alike or not neighbour:
                return place
        return len(self.new)


class KV(Protocol):
    """What attention asks of a KV cache. An entry is what one token leaves in one layer.

    `layer` counts the layers that own notes: in most models all of them.
    """

    def write(self, layer: int, entries: torch.Tensor, batch: Batch) -> None:
        """Note the entries [rows, entry_width] of this step's tokens."""

    def read(self, layer: int, part: Part) -> torch.Tensor:
        """All entries of a part's sequences, this step's included: [count, length, entry_width].

        Where a sequence is shorter than the part, any numbers may follow its entries.
        """


class NoCache:
    """Notes for a single forward: what the step writes it reads, and nothing outlives it.

    Training and `generate_without_cache` use it. Gradients flow through.
    """

    def __init__(self):
        self._entries = {}

    def write(self, layer: int, entries: torch.Tensor, batch: Batch) -> None:
        if any(batch.past):
            raise ValueError(f"past={batch.past}: NoCache keeps nothing between steps; "
                             "use a DenseCache to continue a sequence")
        ends = list(accumulate(batch.new, initial=0))
        self._starts = dict(zip(batch.sequences, ends, strict=False))
        self._entries[layer] = entries

    def read(self, layer: int, part: Part) -> torch.Tensor:
        start = self._starts[part.first_sequence]
        rows = self._entries[layer][start:start + sum(part.lengths)]
        if part.pasts:
            return pad_sequence(rows.split(part.lengths), batch_first=True)
        return rows.unflatten(0, (part.count, part.length))
