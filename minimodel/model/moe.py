"""The expert layer: a gate picks a few small networks per token, and only those run.

1. The gate scores all experts for each token (sigmoid, each on its own scale).
2. The k best are chosen by score *plus a bias*; training moves the bias so that no expert
   idles or drowns. The bias takes part in the choice only: the weights are the bare
   scores of the chosen, made to sum to one.
3. The chosen experts run, a shared expert runs for every token, and the results add up.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). How the experts are run is a function,
passed in. `quick_experts` takes the quicker of two: `sorted_experts` does the work that was
chosen and no more, one expert after another; `batched_experts` runs several experts at once, on
all rows. Both are checked against `dense_experts`: every expert on every row, one by one.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ..config import ModelConfig

# x [rows, hidden], chosen [rows, k], weights [rows, k], experts -> [rows, hidden]
RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Experts"], torch.Tensor]

FEW_ROWS = 32       # so far `batched_experts` is quicker; measured on the toy, one thread


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). The dense layers and the shared expert use it."""

    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Chooses experts and weighs them. Always computes in float32 or better."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) * 0.05)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, hidden] to weights and chosen experts, both [rows, k]."""
        precise = torch.promote_types(x.dtype, torch.float32)
        scores = F.linear(x.to(precise), self.weight.to(precise)).sigmoid()   # [rows, experts]
        biased = scores + self.e_score_correction_bias
        chosen = biased.topk(self.config.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.config.expert_scale, chosen


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked so that one index picks one expert."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, hidden) * hidden ** -0.5)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, inner) * inner ** -0.5)

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert on its rows: SwiGLU, [rows, hidden] to the same shape."""
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


def sorted_experts(x, chosen, weights, experts: Experts) -> torch.Tensor:
    """Sort the (token, expert) pairs by expert, run each expert once on its own rows, add up.

        chosen           sorted by expert       runs
        token 0: 2, 0    expert 0: tokens 0, 1  expert 0 on 2 rows
        token 1: 0, 3    expert 2: token 0      expert 2 on 1 row
                         expert 3: token 1      expert 3 on 1 row
    """
    num_experts, top_k = experts.down_proj.shape[0], chosen.shape[1]
    pairs = chosen.flatten()                            # pair p belongs to token p // k
    order = pairs.argsort(stable=True)
    tokens = order // top_k
    counts = pairs.bincount(minlength=num_experts).tolist()
    groups = x[tokens].split(counts)
    done = torch.cat([experts.run(e, rows) for e, rows in enumerate(groups) if len(rows)]
                     or [x[tokens]])                    # no rows at all
    done = done * weights.flatten()[order, None]
    return done.new_zeros(x.shape).index_add(0, tokens, done)


def batched_experts(x, chosen, weights, experts: Experts) -> torch.Tensor:
    """Run all experts that somebody chose on all rows, in two batched products, and add up.

    Where a row did not choose an expert, its result weighs nothing: idle arithmetic. But it takes
    a dozen operations where sorting takes some for each expert, and with few rows it is the
    starting of operations, and fetching weights, that costs.
    """
    used, places = chosen.unique(return_inverse=True)   # experts; where in `used` each choice is
    gate_up, down = (matrices.index_select(0, used)
                     for matrices in (experts.gate_up_proj, experts.down_proj))
    shares = weights.new_zeros(len(x), len(used)).scatter(1, places, weights).T  # [used, rows]
    gate, up = torch.bmm(x.expand(len(used), -1, -1), gate_up.mT).chunk(2, dim=-1)
    inner = (F.silu(gate) * up * shares[:, :, None]).to(x.dtype)    # [used, rows, inner]
    return torch.bmm(inner, down.mT).sum(0)


def quick_experts(x, chosen, weights, experts: Experts) -> torch.Tensor:
    """The quicker way for so many rows."""
    run_experts = batched_experts if len(x) <= FEW_ROWS else sorted_experts
    return run_experts(x, chosen, weights, experts)


def dense_experts(x, chosen, weights, experts: Experts) -> torch.Tensor:
    """Every expert on every row; those not chosen weigh nothing. Slow and obvious."""
    num_experts = experts.down_proj.shape[0]
    full = weights.new_zeros(len(x), num_experts).scatter(1, chosen, weights)   # [rows, experts]
    return sum(experts.run(e, x) * full[:, e, None] for e in range(num_experts))


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, run_experts: RunExperts = quick_experts):
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config)
        self.shared_experts = (
            FeedForward(config.hidden_size, config.num_shared_experts * config.expert_size)
            if config.num_shared_experts else None)
        self.run_experts = run_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] to the same shape. Rows do not look at each other here."""
        weights, chosen = self.gate(x)
        out = self.run_experts(x, chosen, weights, self.experts).to(x.dtype)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def run_no_rows(self) -> None:
        """For whoever shares these experts: they run, and there is nothing of ours among the rows.

        Where experts are run together with others, all must come, always.
        """
        none = self.experts.down_proj.new_zeros(0, self.gate.config.hidden_size)
        nothing = none.new_zeros(0, self.gate.config.experts_per_token)
        self.run_experts(none, nothing.long(), nothing, self.experts)
