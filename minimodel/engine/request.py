"""A request: a prompt, the answer as far as it is written, and where in its life it is.

    NEW ----> WAITING <----> RUNNING ----> FINISHED
                 |  ^        ^  |             ^
                 v  |        |  v             |
               LOADING ------+  HELD ---------+       (and from anywhere to FINISHED, by abort)

1. A request waits until the scheduler admits it and gives it blocks.
2. Running, it has `total` tokens (its prompt and what it has written) and `computed` of them
   have their notes in its blocks. Each step computes some of the rest. When nothing is left,
   the step's logits choose the next token, and `total` grows by one.
3. Preempted, it gives its blocks back, forgets that anything was computed, and waits again.
   What it has written it keeps.
4. It finishes by a stop token, by length, by being aborted, or by being rejected.

Where others computed its beginning before, it begins with `computed` above zero: their blocks
are in memory, or, LOADING, are read from disk or fetched from another worker. That worker's
request is HELD: its answer is written, its notes are kept until they were fetched.
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from ..cache import keys
from ..cache.blocks import BlockTable
from ..tokenizer import STOP_IDS


class State(Enum):
    NEW = "new"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


MAY_FOLLOW = {
    State.NEW: {State.WAITING, State.FINISHED},
    State.WAITING: {State.LOADING, State.RUNNING, State.FINISHED},
    State.LOADING: {State.RUNNING, State.WAITING, State.FINISHED},
    State.RUNNING: {State.WAITING, State.HELD, State.FINISHED},
    State.HELD: {State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy: always the best.

    `top_k` keeps the k best tokens (0: all), `top_p` the fewest that together have that
    probability. The same seed and prompt give the same tokens, whoever else is in the batch.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = STOP_IDS

    def __post_init__(self):
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))
        for name, holds, rule in (
                ("max_tokens", isinstance(self.max_tokens, int) and self.max_tokens >= 1,
                 "must be a whole number of at least 1"),
                ("temperature", self.temperature == 0 or 0.01 <= self.temperature < math.inf,
                 "must be 0 (greedy) or at least 0.01"),
                ("top_k", isinstance(self.top_k, int) and self.top_k >= 0,
                 "must be 0 (all tokens) or a whole number"),
                ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")):
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} {rule}")

    def of_answer(self, number: int) -> "Sampling":
        """The same for answer `number` to one prompt: seeds count up."""
        return replace(self, seed=self.seed + number)


@dataclass(eq=False)
class Request:
    """One answer in the making. Two requests are never equal, whatever they hold."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    num_answers: int = 1                # that are still to start from this prompt's notes
    arrived_s: float = 0.0
    output: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    computed: int = 0
    table: BlockTable | None = None
    state: State = State.NEW
    reason: str | None = None           # stop, length, aborted, or rejected: why
    num_preempted: int = 0
    answers: list["Request"] = field(default_factory=list)      # itself first, then its forks
    # What it may find and leave behind:
    root: bytes | None = None           # where its chain of keys begins; None: it shares nothing
    retention: str = "chat"             # for how long the store keeps its blocks
    keys: list[bytes] = field(default_factory=list)
    num_saved: int = 0                  # of its blocks, from the first on, are in the store
    num_loaded: int = 0                 # tokens whose notes came from the store
    num_found: int | None = None        # tokens it had not to compute when it first ran
    hold: bool = False                  # when it is done, keep its blocks: HELD, not FINISHED

    def __post_init__(self):
        self.answers = [self]

    @property
    def total(self) -> int:
        """Tokens there are: the prompt's and the answer's so far."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens whose notes are still to be computed before the next can be chosen."""
        return self.total - self.computed

    @property
    def longest(self) -> int:
        """Tokens it may ever need notes for: the last one it writes needs none."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """Whether all it needs is the notes of the token it wrote last."""
        return bool(self.output) and self.remaining == 1

    def tokens(self, first: int, last: int) -> list[int]:
        """Token ids at positions first to last - 1."""
        size = len(self.prompt)
        return [*self.prompt[first:last], *self.output[max(0, first - size):max(0, last - size)]]

    def extend_keys(self, block_size: int) -> list[bytes]:
        """The keys of its full blocks; those that have become full since are added."""
        if self.root is not None:
            for first in range(len(self.keys) * block_size, self.total - block_size + 1,
                               block_size):
                previous = self.keys[-1] if self.keys else self.root
                tokens = self.tokens(first, first + block_size)
                self.keys.append(keys.next_key(previous, tokens))
        return self.keys

    def move(self, state: State) -> None:
        """Go over to another state. Raises ValueError where that is not a step of its life."""
        if state not in MAY_FOLLOW[self.state]:
            raise ValueError(f"request {self.id} is {self.state.value} and cannot become "
                             f"{state.value}")
        self.state = state

    def fork(self, number: int) -> "Request":
        """Another answer to the same prompt, which starts where this one is, with its own seed."""
        twin = Request(f"{self.id}/{number}", self.prompt, arrived_s=self.arrived_s,
                       sampling=self.sampling.of_answer(number),
                       computed=self.computed, state=self.state, root=self.root,
                       retention=self.retention, keys=list(self.keys), num_saved=self.num_saved,
                       num_found=self.num_found)
        self.answers.append(twin)
        return twin

    def write(self, token: int, now_s: float) -> None:
        """Add a token to the answer, and the reason to finish where that was its last."""
        self.output.append(token)
        self.token_times_s.append(now_s)
        if token in self.sampling.stop_ids:
            self.reason = "stop"
        elif len(self.output) == self.sampling.max_tokens:
            self.reason = "length"

    def check(self) -> None:
        """Raise AssertionError where its counts contradict each other or its state."""
        assert 0 <= self.computed <= self.total, (
            f"request {self.id} has computed {self.computed} of {self.total} tokens")
        assert (self.table is not None) == (self.state in (State.RUNNING, State.LOADING,
                                                           State.HELD)), (
            f"request {self.id} is {self.state.value} with table {self.table}")
        assert (self.reason is not None) == (self.state in (State.HELD, State.FINISHED)), (
            f"request {self.id} is {self.state.value} with reason {self.reason}")
        assert len(self.token_times_s) == len(self.output)
