"""Experts spread over ranks: every rank runs its own, on the tokens of all.

Each rank holds other requests (their attention, their notes) and some of the experts. At every
expert layer all ranks meet twice:

    dispatch    each token's vector goes to the ranks that hold the experts it chose
    (compute)   each rank runs its experts on what came, whoever sent it
    combine     the results go back, and are added up with the gate's weights

Both are an all-to-all: everybody sends everybody else some rows, or none. A rank without tokens
takes part all the same; if one stays away, all the others wait, and at last raise `GroupLostError`.
Nothing else in the model knows: this is one more way to run experts, passed to the expert layers
(see `model/moe.py`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.distributed as dist

from ..engine.engine import Engine
from ..model.moe import Experts, MoE, sorted_experts
from ..model.transformer import Transformer
from .balance import Placement

# layer, expert -> its two matrices, [2 * inner, hidden] and [hidden, inner]
FetchExpert = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


class GroupLostError(RuntimeError):
    """Somebody in the group died, or did not come in time: nobody can go on."""


@contextmanager
def meeting() -> Iterator[None]:
    """Around whatever all ranks do together: what torch raises there means that one is missing."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLostError(str(error)) from error


@dataclass
class Traffic:
    """What a rank's part of an expert layer has done since this was made."""

    rows_sent: int = 0              # to other ranks, both ways together
    bytes_sent: int = 0
    rows_run: int = 0               # pairs of a token and an expert of this rank
    expert_bytes: int = 0           # of the experts that had rows, each time they had some
    communicating_s: float = 0.0    # waiting for slower ranks included
    chosen: list[int] = field(default_factory=list)     # of each expert, by this rank's own tokens


class ShardedExperts:
    """Runs experts by a placement: called with a layer's local experts, as `RunExperts` is."""

    def __init__(self, placement: Placement, group: dist.ProcessGroup | None = None):
        self.group, self.placement = group, placement
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        if len(placement.experts_of) != self.num_ranks:
            raise ValueError(f"a placement for {len(placement.experts_of)} ranks in a group of "
                             f"{self.num_ranks}: place the experts for this group")
        self.experts = placement.experts_of[self.rank]      # that lie here, slot by slot
        self.num_copies, self.copies = copy_tables(placement)
        self.traffic = Traffic(chosen=[0] * len(self.num_copies))

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor,
                 experts: Experts) -> torch.Tensor:
        """x [rows, hidden] of this rank to the weighted sum of its experts' results, likewise."""
        tokens = torch.arange(len(x)).repeat_interleave(chosen.shape[1])    # of each pair
        ranks, slots = self.homes(chosen.flatten(), tokens + self.rank)
        self._count(chosen)
        order = ranks.argsort(stable=True)
        counts = ranks.bincount(minlength=self.num_ranks)
        arriving = self._all_to_all(counts, [1] * self.num_ranks, [1] * self.num_ranks)
        sent, got = counts.tolist(), arriving.tolist()
        sent_rows = x[tokens[order]]
        rows = self._all_to_all(sent_rows, sent, got)                       # dispatch
        its_slots = self._all_to_all(slots[order], sent, got)
        done = self._run(rows, its_slots, experts)
        back = self._all_to_all(done, got, sent)                            # combine
        self.traffic.rows_sent += len(sent_rows) - sent[self.rank] + len(done) - got[self.rank]
        weighted = back * weights.flatten()[order, None].to(back.dtype)
        return torch.zeros_like(x).index_add(0, tokens[order], weighted)

    def homes(self, experts: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The (rank, slot) of the copy that each pair of a token and an expert uses.

        Tokens are counted from this rank's number on: if each rank has one, and all want the same
        expert, they use different copies.
        """
        return self.copies[experts, tokens % self.num_copies[experts]].unbind(-1)

    def _count(self, chosen: torch.Tensor) -> None:
        counts = chosen.flatten().bincount(minlength=len(self.num_copies)).tolist()
        self.traffic.chosen = [before + more for before, more in
                               zip(self.traffic.chosen, counts, strict=True)]

    def take_traffic(self) -> Traffic:
        """What has been done since this was last asked."""
        taken, self.traffic = self.traffic, Traffic(chosen=[0] * len(self.num_copies))
        return taken

    def _run(self, rows: torch.Tensor, slots: torch.Tensor, experts: Experts) -> torch.Tensor:
        self.traffic.rows_run += len(rows)
        one = experts.gate_up_proj[0].nbytes + experts.down_proj[0].nbytes
        self.traffic.expert_bytes += one * len(slots.unique())
        return sorted_experts(rows, slots[:, None], rows.new_ones(len(rows), 1), experts)

    def _all_to_all(self, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        """Send everybody their share of the rows, in order of ranks; what everybody sent us."""
        started = time.perf_counter()
        received = rows.new_empty(sum(got), *rows.shape[1:])
        with meeting():
            dist.all_to_all_single(received, rows.contiguous(), got, sent, group=self.group)
        self.traffic.communicating_s += time.perf_counter() - started
        others = len(rows) - sent[self.rank]
        self.traffic.bytes_sent += others * rows.element_size() * rows[:1].numel()
        return received


@torch.inference_mode()
def take_part(model: Transformer) -> None:
    """A step of a rank that has no tokens of its own: it runs its experts for the others."""
    model.run_no_rows()


def copy_tables(placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
    """How many copies each expert has, and where: [experts] and [experts, most copies, 2]."""
    num_experts = len(placement.copies_of)
    counts = torch.tensor([len(placement.copies_of[expert]) for expert in range(num_experts)])
    copies = torch.zeros(num_experts, int(counts.max()), 2, dtype=torch.long)
    for expert, places in placement.copies_of.items():
        copies[expert, :len(places)] = torch.tensor(places)
    return counts, copies


def shard(model: Transformer, placements: Sequence[Placement],
          group: dist.ProcessGroup | None = None,
          fetch: FetchExpert | None = None) -> list[ShardedExperts]:
    """Leave a model only this rank's experts, one placement for each expert layer, first to last.

    Returns the layers' ways to run them, whose `traffic` can be read. A model that was sharded
    before keeps what it holds and needs again; the rest is fetched.
    """
    layers, num_experts = model.moe_layers(), model.config.num_experts
    if [len(placement.copies_of) for placement in placements] != [num_experts] * len(layers):
        raise ValueError(f"the model has {len(layers)} expert layers of {num_experts} experts: "
                         "give one placement for each layer, of all its experts")
    runs = [ShardedExperts(placement, group) for placement in placements]
    for number, (layer, run) in enumerate(zip(layers, runs, strict=True)):
        pairs = [weights_of(layer, number, expert, fetch) for expert in run.experts]
        gate_up, down = (torch.stack(matrices) for matrices in zip(*pairs, strict=True))
        layer.experts.gate_up_proj = torch.nn.Parameter(gate_up)
        layer.experts.down_proj = torch.nn.Parameter(down)
        layer.run_experts = run
    return runs


def weights_of(layer: MoE, number: int, expert: int,
               fetch: FetchExpert | None) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's matrices: from where they lie in this layer, if they do, else fetched."""
    held = getattr(layer.run_experts, "experts", range(layer.gate.config.num_experts))
    if expert in held:
        slot = held.index(expert)
        return layer.experts.gate_up_proj.data[slot], layer.experts.down_proj.data[slot]
    if fetch is None:
        raise ValueError(f"expert {expert} of expert layer {number} is not on this rank: say where "
                         "to fetch it")
    return fetch(number, expert)


def serve_together(engine: Engine, group: dist.ProcessGroup | None = None) -> int:
    """Step this rank's engine, in step with all others, until nobody has anything to do.

    How many steps that took. Whoever has nothing to compute in a step runs experts for the rest.
    """
    for num_steps in count():
        if not anyone(not engine.scheduler.is_idle, group=group)[0]:
            return num_steps
        step_together(engine)


def anyone(*says: bool, group: dist.ProcessGroup | None = None) -> list[bool]:
    """Whether any rank says so: the same answers on all."""
    flags = torch.tensor(says, dtype=torch.int32)
    with meeting():
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags]


def step_together(engine: Engine) -> None:
    """One step, which all ranks take at the same time; one with nothing to compute takes part."""
    record = engine.step()
    if record is None or not record.num_tokens:
        take_part(engine.model)
