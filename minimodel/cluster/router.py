"""The router: which copy of the model should serve a request?

A replica that remembers the prompt's beginning need not read it again. A replica with little to
do answers sooner. The two seldom agree. A *policy* gives each replica a score from what the
router knows of it, and the lowest score wins; among equals, the next in turn:

    round_robin      all are equal
    least_loaded     tokens that its requests keep or will need
    longest_prefix   the most of the prompt remembered, then the fewest requests
    ByOpening        one replica for each opening, whatever its load (rendezvous hashing)
    Cost             seconds until the first token, as far as the router can tell

Loads are counted in tokens: three long requests fill a memory that thirty short ones do not
(smg PR 1621). Only requests change them, on their way in and out.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .index import PrefixIndex


@dataclass(frozen=True)
class Ask:
    """What a router sees of a request: how long it is, and the keys of its prompt's full blocks
    that may be found (all but one that would leave nothing to compute)."""

    keys: Sequence[Hashable]
    prompt_tokens: int
    max_tokens: int
    block_size: int = 16


@dataclass(eq=False)
class Flight:
    """A request that a replica serves: what is left to read, and what it keeps or will need."""

    to_read: int
    to_keep: int

    def has_begun(self) -> None:
        """Its first token came: nothing is left to read."""
        self.to_read = 0


@dataclass(eq=False)
class Replica:
    """One life of a replica, as the router sees it. A restarted one is another."""

    name: str
    flights: set[Flight] = field(default_factory=set)

    @property
    def to_read(self) -> int:
        return sum(flight.to_read for flight in self.flights)

    @property
    def to_keep(self) -> int:
        return sum(flight.to_keep for flight in self.flights)


@dataclass(frozen=True)
class Choice:
    """Where a request goes, and how many of its prompt's tokens should be remembered there."""

    replica: str
    expected_hit: int
    flight: Flight


Score = float | tuple[float, ...]
Policy = Callable[[Replica, Ask, int], Score]       # given how many tokens are remembered there


def round_robin(replica: Replica, ask: Ask, hit: int) -> Score:
    return 0


def least_loaded(replica: Replica, ask: Ask, hit: int) -> Score:
    return replica.to_keep, len(replica.flights)


def longest_prefix(replica: Replica, ask: Ask, hit: int) -> Score:
    return -hit, len(replica.flights)


@dataclass(frozen=True)
class ByOpening:
    """The same opening always goes to the same replica; if that one is lost, only its openings
    move. An opening is a prompt's first `num_blocks` blocks, or all if it has fewer."""

    num_blocks: int = 4

    def __call__(self, replica: Replica, ask: Ask, hit: int) -> Score:
        opening = tuple(ask.keys[:self.num_blocks])
        digest = hashlib.sha256(f"{replica.name}/{opening!r}".encode()).digest()
        return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class Cost:
    """Seconds until the first token: what waits there to be read, then what this prompt lacks.

    `read_s` is the time to read one token, `affinity` how much a remembered token counts (1: all
    of the time that it saves; 0: load alone). Beyond half of `memory_tokens`, a replica's
    crowded memory costs up to `crowded_s`.
    """

    read_s: float
    affinity: float = 1.0
    memory_tokens: float = float("inf")
    crowded_s: float = 0.0

    def __post_init__(self):
        if not (self.read_s > 0 and 0 <= self.affinity <= 1 and self.memory_tokens > 0
                and self.crowded_s >= 0):
            raise ValueError(f"{self}: read_s and memory_tokens must be above 0, affinity a share "
                             "from 0 to 1, crowded_s at least 0")

    def __call__(self, replica: Replica, ask: Ask, hit: int) -> Score:
        lacking = ask.prompt_tokens - self.affinity * hit
        crowded = max(0.0, (replica.to_keep + ask.prompt_tokens) / self.memory_tokens - 0.5)
        return self.read_s * (replica.to_read + lacking) + self.crowded_s * 2 * crowded


class Router:
    """Chooses, and keeps count. `index` says who remembers what; with `learns` the router itself
    notes there what it sends where, for want of events."""

    def __init__(self, names: Sequence[str], policy: Policy, index: PrefixIndex | None = None, *,
                 learns: bool = True):
        self.policy, self.learns = policy, learns
        self.index = PrefixIndex() if index is None else index
        self.replicas: dict[str, Replica] = {}
        self.turn = 0
        for name in names:
            self.joined(name)

    def joined(self, name: str) -> None:
        """A replica begins a life: nothing is in flight there, and nothing remembered."""
        if name in self.replicas:
            self.lost(name)
        self.replicas[name] = Replica(name)

    def lost(self, name: str) -> None:
        """A replica is gone. Its requests end as they may: they count for its old life."""
        if name not in self.replicas:
            raise ValueError(f"there is no replica {name!r} among {', '.join(self.replicas)}")
        del self.replicas[name]
        self.index.drop(name)

    def route(self, ask: Ask) -> Choice:
        """The best replica, without counting the request. Raises ValueError if there is none."""
        if not self.replicas:
            raise ValueError("no replica is left to serve the request: let one join")
        found = self.index.match(ask.keys)
        hit_of = {name: found.get(name, 0) * ask.block_size for name in self.replicas}
        order = list(self.replicas.values())
        order = order[self.turn % len(order):] + order[:self.turn % len(order)]
        best = min(order, key=lambda replica: self.policy(replica, ask, hit_of[replica.name]))
        flight = Flight(ask.prompt_tokens - hit_of[best.name], ask.prompt_tokens + ask.max_tokens)
        return Choice(best.name, hit_of[best.name], flight)

    @contextmanager
    def serving(self, ask: Ask) -> Iterator[Choice]:
        """Route a request and count it for as long as it is served, however that ends."""
        choice = self.route(ask)
        replica = self.replicas[choice.replica]         # this life, even if it ends meanwhile
        self.turn += 1
        replica.flights.add(choice.flight)
        if self.learns:
            self.index.stored(choice.replica, ask.keys)
        try:
            yield choice
        finally:
            replica.flights.discard(choice.flight)
