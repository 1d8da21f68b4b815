"""A job: one client's request, on its way from a handler to an engine, and what comes back.

The handler makes it, with an inbox for the news, and waits. The engines' thread fills in the
rest: the replica, the engine's request, and, after each step, the news.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..cluster.router import Flight
from ..engine.request import Request, Sampling, State
from ..pricing import Usage
from ..tokenizer import decode_bytes
from .bridge import Inbox
from .tenants import Tenant
from .text import TextWriter


@dataclass(frozen=True)
class Piece:
    """New text of one of a job's answers; with the last one, why it ended."""

    index: int
    text: str
    reason: str | None = None


@dataclass(frozen=True)
class News:
    """What a step brought to a job. With the usage, it was the last."""

    pieces: list[Piece]
    usage: Usage | None = None


@dataclass(eq=False)
class Answer:
    """One answer of a job: its text so far, and how many tokens of it were told."""

    writer: TextWriter
    num_told: int = 0
    reason: str | None = None

    def more(self, request: Request) -> str:
        """The text of the tokens that were not told yet. Cut at a stop string, it has ended."""
        new, self.num_told = request.output[self.num_told:], len(request.output)
        text = "".join(self.writer.add(decode_bytes([token])) for token in new)
        if self.writer.has_stopped:
            self.reason = "stop"
        elif request.state is State.FINISHED:
            self.reason = request.reason
        return text if self.reason is None else text + self.writer.finish()


@dataclass(eq=False)
class Job:
    """Above the line, the handler's; below it, the engines' thread's.

    The handlers look at two things below, and never change them: `has_begun`, to count who
    waits, where it may be a moment late, and `replica`, which stands once there is news.
    """

    prompt: Sequence[int]
    sampling: Sampling
    stops: Sequence[bytes] = ()
    num_answers: int = 1
    tenant: Tenant = field(default_factory=Tenant)
    inbox: Inbox = field(default_factory=Inbox)
    # ------------------------------------------------------------------------------------------
    replica: str | None = None
    has_begun: bool = False
    request: Request | None = None
    flight: Flight | None = None
    seat: ExitStack = field(default_factory=ExitStack)      # its place in the router's count

    def __post_init__(self):
        self.answers = [Answer(TextWriter(self.stops)) for _ in range(self.num_answers)]

    @property
    def is_done(self) -> bool:
        return all(answer.reason is not None for answer in self.answers)

    def pieces(self) -> list[Piece]:
        """What its answers have written since the last time."""
        pieces = []
        for index, request in enumerate(self.request.answers):
            answer = self.answers[index]
            if answer.num_told < len(request.output):
                text = answer.more(request)
                pieces.append(Piece(index, text, answer.reason))
        return pieces
