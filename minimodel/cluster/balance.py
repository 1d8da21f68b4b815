"""Where experts live: copies of the busy ones, spread so that all ranks are about equally busy.

In a group of ranks the fullest one sets the pace: all others wait for it at every layer. So what
counts is the *imbalance*, the fullest rank's load over the mean (the book's equation E8). Three
steps, each greedy, after DeepSeek's EPLB:

1. `replicate`: give one more copy to whichever expert has the most load per copy, until all
   slots are given out;
2. `pack`: by load, the largest first, into the rank that has the least so far and a free slot;
3. with nodes: whole groups of experts are packed onto nodes first, since tokens reach other
   nodes more slowly; then copies are made and packed inside each node.

Loads are numbers of tokens seen in some window. No tensors here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The expert in each slot of each rank: [ranks][slots]. Every expert is somewhere."""

    experts_of: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        here = {expert for experts in self.experts_of for expert in experts}
        if (nowhere := {*range(max(here, default=0) + 1)} - here) or min(here) < 0:
            raise ValueError(f"expert {min(nowhere, default=0)} has no slot: experts count from 0, "
                             "and each needs one")

    @cached_property
    def copies_of(self) -> dict[int, list[tuple[int, int]]]:
        """Where each expert's copies are: (rank, slot), in the order of ranks."""
        found: dict[int, list[tuple[int, int]]] = {}
        for rank, experts in enumerate(self.experts_of):
            for slot, expert in enumerate(experts):
                found.setdefault(expert, []).append((rank, slot))
        return found

    def home(self, expert: int, token: int) -> tuple[int, int]:
        """Which copy a token uses: all ranks come to the same answer without asking each other."""
        copies = self.copies_of[expert]
        return copies[token % len(copies)]

    def loads(self, load: Sequence[float]) -> list[float]:
        """Each rank's load, if copies share their expert's evenly."""
        if len(load) != len(self.copies_of):
            raise ValueError(f"{len(load)} loads for {len(self.copies_of)} experts: give one each")
        return [sum(load[expert] / len(self.copies_of[expert]) for expert in experts)
                for experts in self.experts_of]

    def imbalance(self, load: Sequence[float]) -> float:
        """The fullest rank's load over the mean (E8); 1 where there is no load."""
        loads = self.loads(load)
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def in_order(num_experts: int, ranks: int) -> Placement:
    """Neighbours together, one copy each: how experts lie before anybody counts."""
    if ranks < 1 or num_experts % ranks:
        raise ValueError(f"{num_experts} experts do not divide among {ranks} ranks: choose another "
                         "number of ranks, or add copies with place_experts")
    each = num_experts // ranks
    return Placement(tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)))


def place_experts(load: Sequence[float], ranks: int, redundant: int = 0, nodes: int = 1,
                  groups: int = 1) -> Placement:
    """Place all experts and `redundant` further copies on ranks, by the load of each expert.

    `groups` of neighbouring experts stay on one node if they can be dealt out evenly; otherwise
    all ranks count as one node. Raises ValueError where slots cannot be filled evenly.
    """
    _require(load, ranks, redundant, nodes, groups)
    if groups % nodes:
        nodes = groups = 1
    size = len(load) // groups
    group_loads = [sum(load[group * size:(group + 1) * size]) for group in range(groups)]
    slots, placed = (len(load) + redundant) // ranks, []
    for its_groups in pack(group_loads, nodes, groups // nodes):
        experts = [group * size + i for group in its_groups for i in range(size)]
        copies = replicate([load[expert] for expert in experts], slots * ranks // nodes)
        shares = [load[experts[i]] / copies.count(i) for i in copies]
        for places in pack(shares, ranks // nodes, slots):
            placed.append(tuple(experts[copies[place]] for place in places))
    return Placement(tuple(placed))


def replicate(load: Sequence[float], num_copies: int) -> list[int]:
    """The expert of each of `num_copies` copies: each once, then the fullest again and again."""
    counts = [1] * len(load)
    copies = list(range(len(load)))
    while len(copies) < num_copies:
        fullest = max(range(len(load)), key=lambda expert: load[expert] / counts[expert])
        counts[fullest] += 1
        copies.append(fullest)
    return copies


def pack(loads: Sequence[float], num_bins: int, slots: int) -> list[list[int]]:
    """Which items go into each of some bins with so many slots: about the same load in each."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    totals = [0.0] * num_bins
    for item in sorted(range(len(loads)), key=loads.__getitem__, reverse=True):
        lightest = min((i for i in range(num_bins) if len(bins[i]) < slots), key=totals.__getitem__)
        bins[lightest].append(item)
        totals[lightest] += loads[item]
    return bins


def _require(load: Sequence[float], ranks: int, redundant: int, nodes: int, groups: int) -> None:
    for name, value, least in (("experts", len(load), 1), ("ranks", ranks, 1), ("nodes", nodes, 1),
                               ("groups", groups, 1), ("redundant", redundant, 0)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    wrong = [value for value in load if not 0 <= value < math.inf]
    if wrong:
        raise ValueError(f"a load of {wrong[0]} is no number of tokens: loads are 0 or more")
    for what, whole, parts, name in (
            (f"{len(load)} experts and {redundant} more copies", len(load) + redundant, ranks,
             "ranks"), (f"{ranks} ranks", ranks, nodes, "nodes"),
            (f"{len(load)} experts", len(load), groups, "groups")):
        if whole % parts:
            raise ValueError(f"{what} do not divide among {parts} {name}: change either number")
