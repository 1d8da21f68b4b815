"""What a supervisor and the members of its group say to each other (see `group.py`)."""

from dataclasses import dataclass

from ..engine.request import Sampling
from .balance import Placement


@dataclass(frozen=True)
class Epoch:
    """The life of a group between two changes."""

    number: int
    members: tuple[int, ...]                    # sorted: each one's place in it is its rank
    placements: tuple[Placement, ...]           # of the experts, for each expert layer


@dataclass(frozen=True)
class Serve:
    """To a member: a request, and what of its answer has been written already."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    written: tuple[int, ...]
    how: dict                                   # salt, retention, reuse


@dataclass(frozen=True)
class Abort:
    """To a member: nobody waits for this call any more."""

    number: int


@dataclass(frozen=True)
class Stop:
    """To a member: that was all."""


@dataclass(frozen=True)
class Ready:
    """From a member, once: what it serves."""

    fingerprint: str
    num_layers: int                             # expert layers
    num_experts: int                            # in each


@dataclass(frozen=True)
class Joined:
    """From a member: it is in the group, and holds its experts."""

    epoch: int
    num_fetched: int                            # experts it did not have


@dataclass(frozen=True)
class Lost:
    """From a member: a meeting failed."""

    epoch: int
    why: str


@dataclass(frozen=True)
class Written:
    """What is new of one call."""

    number: int
    tokens: list[int]
    found: int                                  # tokens it had not to compute, of those from the
    loaded: int                                 # store, when it first ran on this member
    reason: str | None                          # when it is finished


@dataclass(frozen=True)
class Progress:
    """From a member, after a step."""

    written: list[Written]
    chosen: list[list[int]]                     # [layers][experts]: how often, since it last said
