"""What a step leaves behind: who was in it, with how many tokens, and how long it took.

The engine's steps and the simulator's leave the same records, and the same figures draw them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .scheduler import StepPlan


@dataclass(frozen=True)
class Share:
    """What one request had in a step: `kind` is prefill, decode, or load (from the store)."""

    request_id: str
    kind: str
    computed: int
    num_tokens: int


@dataclass(frozen=True)
class StepRecord:
    number: int
    started_s: float
    ended_s: float
    shares: tuple[Share, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    num_waiting: int
    blocks_held: int
    load_s: float = 0.0             # of its time, spent reading blocks from the store,
    save_s: float = 0.0             # and writing `num_saved` of them, after the tokens were out
    num_saved: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed; what was read from the store is not."""
        return sum(share.num_tokens for share in self.shares if share.kind != "load")


def shares_of(plan: StepPlan, loaded: Mapping[str, int], block_size: int) -> tuple[Share, ...]:
    """Everybody's share of a plan; `loaded` says how many blocks of each load were right."""
    return (*(Share(load.request.id, "load", load.computed, loaded[load.request.id] * block_size)
              for load in plan.loads),
            *(Share(work.request.id, work.kind, work.computed, work.num_tokens)
              for work in plan.work))
