"""Traces: who sent what, when, and whose prompts begin alike. Read from files, or made up.

A trace is a list of requests in the order of their arrival. A cache needs no words of them, only
which blocks are the same; so a request names its blocks by *keys*, and equal keys mean an equal
prompt up to the end of that block. Three sources:

1. `load_mooncake`: files that say which blocks are the same (Mooncake's release, FAST'25);
2. `load_azure`: files of arrivals and lengths only (Azure's of 2023; Splitwise, ISCA 2024);
3. `synthesise`: weeks of made-up traffic. These public traces end after an hour or less, and how
   long notes are worth keeping is a question of days. Every number in it is our assumption.

`return_times` says how long each block waited until it was wanted again.
"""

import csv
import json
import math
import os
import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, count
from pathlib import Path

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
MOONCAKE_BLOCK_SIZE = 512                       # claim P-MC07
FOLDER_VARIABLE = "MINIMODEL_TRACES"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival_s       seconds since the trace began
    prompt_tokens   what is read, at least 1
    output_tokens   what is written
    keys            of its full blocks, first to last: the prompt's and, where the trace knows
                    them, the answer's after it
    block_size      tokens in each of these blocks
    retention       the class that says how long a store keeps its notes: "agent" or "chat"
    session         whose turn it is, where the trace knows
    tail_key        of the prompt's last block, which is not full, where the trace names it
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[Hashable, ...] = ()
    block_size: int = 16
    retention: str = "chat"
    session: Hashable = None
    tail_key: Hashable = None

    @property
    def matchable(self) -> tuple[Hashable, ...]:
        """The keys a lookup may use: full blocks of the prompt, never its last token."""
        return self.keys[:(self.prompt_tokens - 1) // self.block_size]

    @property
    def prompt_blocks(self) -> int:
        """Blocks that the prompt fills or begins."""
        return -(-self.prompt_tokens // self.block_size)

    @property
    def noted_tokens(self) -> int:
        """Tokens that have notes in the end: all but the last one written, which nobody read."""
        return self.prompt_tokens + max(0, self.output_tokens - 1)


# --- from files ----------------------------------------------------------------------------


def full_trace(name: str) -> Path:
    """Where a whole published trace lies: in the folder that MINIMODEL_TRACES names.

    Raises FileNotFoundError, with the remedy, if it is unset or lacks the file.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise FileNotFoundError(f"{FOLDER_VARIABLE} is not set: let it name the folder that holds "
                                f"{name}, which is published but not shipped with the book")
    if not (path := Path(folder) / name).is_file():
        raise FileNotFoundError(f"{FOLDER_VARIABLE}={folder} has no file {name}: put the published "
                                "trace there")
    return path


def load_mooncake(path: str | Path) -> list[TraceRequest]:
    """Read a trace in Mooncake's form: one JSON object a line, with ids of 512-token blocks.

    The ids are those of a chain, and there is one for the last block even if it is not full.
    That one becomes `tail_key`: a block that is not full has no key here, and is never found.

    Raises ValueError that names file, line and value, and what belongs there.
    """
    lines = _lines(path)
    return _in_order(path, ((number, line) for number, line in lines if line.strip()),
                     _mooncake_request)


def load_azure(path: str | Path) -> list[TraceRequest]:
    """Read a trace in the form of Azure's of 2023: TIMESTAMP, ContextTokens, GeneratedTokens.

    It says nothing about beginnings, so requests have no keys. Raises as `load_mooncake` does.
    """
    rows = csv.DictReader(line for _, line in _lines(path))
    requests = _in_order(path, ((rows.line_num, row) for row in rows), _azure_request)
    return [replace(request, arrival_s=request.arrival_s - requests[0].arrival_s)
            for request in requests]


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    with Path(path).open(encoding="utf-8-sig", errors="replace", newline="") as file:
        yield from enumerate(file, start=1)


def _in_order(path: str | Path, rows: Iterable[tuple[int, object]],
              parse: Callable[[object, str], TraceRequest]) -> list[TraceRequest]:
    """Parse numbered rows into requests whose times never run backwards."""
    requests: list[TraceRequest] = []
    for number, row in rows:
        where = f"{path}, line {number}"
        request = parse(row, where)
        if requests and request.arrival_s < requests[-1].arrival_s:
            raise ValueError(f"{where}: the time runs backwards by "
                             f"{requests[-1].arrival_s - request.arrival_s:g} s: "
                             "sort the lines by their times")
        requests.append(request)
    if not requests:
        raise ValueError(f"{path}: no request in it: a trace has at least one")
    return requests


def _mooncake_request(line: str, where: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}): {line.strip()[:60]!r}; every line is one "
                         "whole object") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {row!r:.60} is not an object in braces")
    prompt = _whole(row, "input_length", 1, where)
    ids = _field(row, "hash_ids", where)
    wanted = -(-prompt // MOONCAKE_BLOCK_SIZE)
    if not (isinstance(ids, list) and all(type(i) in (int, str) for i in ids)
            and len(ids) == wanted):
        raise ValueError(f"{where}: hash_ids={ids!r:.60} must be a list of {wanted} ids, one for "
                         f"each {MOONCAKE_BLOCK_SIZE} tokens of input_length={prompt}")
    num_full = prompt // MOONCAKE_BLOCK_SIZE
    return TraceRequest(_whole(row, "timestamp", 0, where) / 1000, prompt,
                        _whole(row, "output_length", 0, where), tuple(ids[:num_full]),
                        MOONCAKE_BLOCK_SIZE, tail_key=ids[-1] if len(ids) > num_full else None)


def _azure_request(row: dict, where: str) -> TraceRequest:
    text = _field(row, "TIMESTAMP", where)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{where}: TIMESTAMP={text!r} is no time: write it as "
                         "2023-11-16 18:15:46.6805900") from None
    return TraceRequest((time - datetime(1970, 1, 1, tzinfo=time.tzinfo)).total_seconds(),
                        _whole(row, "ContextTokens", 1, where),
                        _whole(row, "GeneratedTokens", 0, where))


def _field(row: dict, name: str, where: str):
    if row.get(name) is None:
        raise ValueError(f"{where}: no {name} in it: every request needs one (a table's first line "
                         "names its columns)")
    return row[name]


def _whole(row: dict, name: str, least: int, where: str) -> int:
    """A whole number that is written as one: neither true nor 3.5 nor nothing."""
    value = _field(row, name, where)
    if not str(value).strip().removeprefix("-").isdecimal() or int(value) < least:
        raise ValueError(f"{where}: {name}={value!r:.60} must be a whole number, at least {least}")
    return int(value)


# --- made up -------------------------------------------------------------------------------


def check_above_zero(**values: float) -> None:
    """Raise ValueError for the first that is not a number above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be above 0 and finite: check it and its unit")


@dataclass(frozen=True)
class Kind:
    """How sessions of one kind behave. Means are means of exponential distributions.

    sessions_per_day    that begin, on average
    retention           their class in the store
    num_openings        system prompts or tool lists to choose from; 0: each begins afresh
    opening_tokens      in one of them: from half to one and a half times this
    mean_turns          of a session, geometric: after each turn it ends with chance 1/mean_turns
    input_tokens        mean of what each turn adds before the answer
    output_tokens       mean of the answer, which the next turn's prompt contains
    pauses              how long until the next turn: (share, mean in seconds) of each case
    """

    name: str
    sessions_per_day: float
    retention: str
    num_openings: int
    opening_tokens: int
    mean_turns: float
    input_tokens: float
    output_tokens: float
    pauses: tuple[tuple[float, float], ...] = ((1.0, MINUTE_S),)

    def __post_init__(self):
        check_above_zero(sessions_per_day=self.sessions_per_day, input_tokens=self.input_tokens,
                         output_tokens=self.output_tokens,
                         mean_pause=min(mean for _, mean in self.pauses))
        if self.mean_turns < 1 or min(self.num_openings, self.opening_tokens) < 0:
            raise ValueError(f"{self.name}: mean_turns={self.mean_turns} must be at least 1, "
                             f"num_openings={self.num_openings} and opening_tokens="
                             f"{self.opening_tokens} at least 0")
        if not math.isclose(total := sum(share for share, _ in self.pauses), 1):
            raise ValueError(f"{self.name}: the shares of its pauses sum to {total:g}: let them "
                             "sum to 1")

    def share_of_pauses_over(self, seconds: float) -> float:
        """The chance that a turn waits longer than this: what `retention` would lose."""
        return sum(share * math.exp(-seconds / mean) for share, mean in self.pauses)


CHAT = Kind("chat", sessions_per_day=40, retention="chat", num_openings=40, opening_tokens=1_500,
            mean_turns=6, input_tokens=350, output_tokens=500,
            pauses=((0.80, 3 * MINUTE_S), (0.12, 4 * HOUR_S), (0.08, 2 * DAY_S)))
AGENT = Kind("agent", sessions_per_day=8, retention="agent", num_openings=12,
             opening_tokens=12_000, mean_turns=20, input_tokens=1_200, output_tokens=300,
             pauses=((0.96, 20.0), (0.03, 1 * HOUR_S), (0.01, 1 * DAY_S)))
ONE_OFF = Kind("one-off", sessions_per_day=40, retention="chat", num_openings=0, opening_tokens=0,
               mean_turns=1, input_tokens=4_000, output_tokens=400)


@dataclass(frozen=True)
class Traffic:
    """What `synthesise` makes up. No number here is measured: all are this book's assumptions.

    days            that the trace lasts; nothing was sent before them
    kinds           of sessions
    block_size      tokens a block: as coarse as the published traces', so that weeks replay fast
    zipf_exponent   the opening of rank r is chosen in proportion to r ** -zipf_exponent
    day_rhythm      from 0, even, to 1: no session begins at two at night, twice as many at two
                    in the afternoon. It shapes beginnings only: a pause ends when it ends.
    context         tokens at which a session has to end
    """

    days: float = 28
    kinds: tuple[Kind, ...] = (CHAT, AGENT, ONE_OFF)
    block_size: int = 512
    zipf_exponent: float = 1.0
    day_rhythm: float = 0.6
    context: int = 131_072

    def __post_init__(self):
        check_above_zero(days=self.days, block_size=self.block_size, context=self.context)
        if not 0 <= self.day_rhythm <= 1:
            raise ValueError(f"day_rhythm={self.day_rhythm} must lie between 0, even, and 1")

    def times(self, factor: float) -> "Traffic":
        """The same habits, with so many times as many sessions."""
        return replace(self, kinds=tuple(
            replace(kind, sessions_per_day=kind.sessions_per_day * factor) for kind in self.kinds))


def synthesise(traffic: Traffic, seed: int) -> list[TraceRequest]:
    """Weeks of requests, made up as `traffic` says, in order of arrival.

    Keys are counters: each new block gets the next one, a block of a shared opening the same one
    each time. Every turn's prompt is the whole history of its session, so its keys begin with
    those of the turn before.
    """
    rng, new_key, requests = random.Random(seed), count().__next__, []
    for kind in traffic.kinds:
        openings = [_opening(kind, traffic, rng, new_key) for _ in range(kind.num_openings)]
        weights = [rank ** -traffic.zipf_exponent for rank in range(1, kind.num_openings + 1)]
        summed = list(accumulate(weights))
        for number, start_s in enumerate(_session_starts(kind, traffic, rng)):
            opening = rng.choices(openings, cum_weights=summed)[0] if openings else (0, [])
            requests += _session(kind, traffic, f"{kind.name} {number}", start_s, opening, rng,
                                 new_key)
    return sorted(requests, key=lambda request: request.arrival_s)


def _opening(kind, traffic, rng, new_key) -> tuple[int, list[int]]:
    """A shared beginning: how many tokens, and the keys of its full blocks."""
    tokens = round(kind.opening_tokens * rng.uniform(0.5, 1.5))
    return tokens, [new_key() for _ in range(tokens // traffic.block_size)]


def _session_starts(kind, traffic, rng) -> Iterator[float]:
    """Times at which sessions begin: a Poisson process, thinned to the rhythm of a day."""
    rhythm, now_s = traffic.day_rhythm, 0.0
    densest_per_s = kind.sessions_per_day * (1 + rhythm) / DAY_S
    while (now_s := now_s + rng.expovariate(densest_per_s)) < traffic.days * DAY_S:
        wave = math.cos(2 * math.pi * (now_s / DAY_S - 14 / 24))
        if rng.random() * (1 + rhythm) < 1 + rhythm * wave:
            yield now_s


def _session(kind, traffic, name, now_s, opening, rng, new_key) -> Iterator[TraceRequest]:
    """The turns of one session until it ends, its context is full, or the trace is over."""
    tokens, keys = opening[0], list(opening[1])
    while now_s < traffic.days * DAY_S:
        prompt = tokens + _about(kind.input_tokens, rng)
        output = _about(kind.output_tokens, rng)
        tokens = prompt + output
        if tokens > traffic.context:
            return
        num_full = (tokens - 1) // traffic.block_size       # the last token has no notes yet
        keys += [new_key() for _ in range(num_full - len(keys))]
        yield TraceRequest(now_s, prompt, output, tuple(keys), traffic.block_size,
                           kind.retention, name)
        if rng.random() * kind.mean_turns < 1:
            return
        shares, means = zip(*kind.pauses, strict=True)
        now_s += rng.expovariate(1 / rng.choices(means, shares)[0])


def _about(mean: float, rng: random.Random) -> int:
    """A whole number from 1 on, exponentially distributed about a mean."""
    return 1 + int(rng.expovariate(1 / mean))


# --- what a trace says ---------------------------------------------------------------------


def return_times(requests: Iterable[TraceRequest]) -> Iterator[float]:
    """For each block that a lookup asks for: seconds since it was last used, inf if it never was.

    The share of these that is at most T is the hit rate of a store that keeps what was used
    within T and is never full. A request uses all its blocks at the moment of its arrival.
    """
    used_s: dict[Hashable, float] = {}
    for request in requests:
        for key in request.matchable:
            yield request.arrival_s - used_s.get(key, -math.inf)
        used_s.update(dict.fromkeys(request.keys, request.arrival_s))


def tokens_per_day(requests: list[TraceRequest]) -> float:
    """Tokens read and written per day of the trace: to scale it to a service of another size."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if not span_s > 0:
        raise ValueError(f"{len(requests)} request(s) within {span_s:g} s make no day: take a "
                         "trace that lasts")
    return sum(r.prompt_tokens + r.output_tokens for r in requests) * DAY_S / span_s
