"""Chapter 15: real engines behind a router, crowds for them, modelled half hours, the drawings."""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from ..cache import keys
from ..cache.paged import PagedCache
from ..cluster.index import EventLog, Listener, PrefixIndex
from ..cluster.router import Ask, Choice, Policy, Replica, Router
from ..engine.engine import Engine, usage
from ..engine.metrics import percentile
from ..engine.request import Request, Sampling
from ..engine.scheduler import Limits
from ..model.corpus import Fact, Notebook, town_notebook
from ..model.transformer import Transformer
from ..pricing import Usage
from ..simulate.cluster import Cluster, Served, StepCost, equal_replicas
from ..simulate.traces import TraceRequest, Traffic, synthesise
from ..tokenizer import encode
from . import draw
from .draw import WIDTH
from .explorable import Axis, Bar, Bars, Checkbox, Explorable, Line, Lines, Numbers, Slider
from .figures import Figure, direct_label, figure, finding, key, measured_bars, modelled

# --- who comes -------------------------------------------------------------------------------


ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Visitor:
    """Somebody who will ask about a town: in which turn, about which one, what."""

    at: int
    town: int
    prompt: Sequence[int]


def towns(count: int = 9) -> list[Notebook]:
    """The neighbours' notebooks: each a little under 30 blocks of 16 tokens, with three facts."""
    return [town_notebook(random.Random(number), 480, 3) for number in range(count)]


def prompt_for(book: Notebook, fact: Fact) -> list[int]:
    """Notebook, question, and the answer up to the value: what is written next is the value."""
    return encode(f"{book.ask(fact)}A: {fact.opening}")


def visitors(count: int = 48, seed: int = 15, turns_apart: float = 3.0) -> list[Visitor]:
    """A crowd that asks about nine towns; the first ones are asked about most."""
    rng, books, at, found = random.Random(seed), towns(), 0.0, []
    weights = [rank ** -0.8 for rank in range(1, len(books) + 1)]
    for _ in range(count):
        town = rng.choices(range(len(books)), weights)[0]
        fact = rng.choice(books[town].facts)
        found.append(Visitor(int(at), town, prompt_for(books[town], fact)))
        at += rng.expovariate(1 / turns_apart)
    return found


def herd(count: int = 36, a_turn: int = 2) -> list[Visitor]:
    """Everybody asks about the same town, some in every turn: a prompt goes viral."""
    book = towns(1)[0]
    return [Visitor(i // a_turn, 0, prompt_for(book, book.facts[i % len(book.facts)]))
            for i in range(count)]


# --- real engines, in turns ------------------------------------------------------------------


class TurnClock:
    """A clock that counts turns: in each, every engine takes one step."""

    def __init__(self):
        self.now = 0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Answered:
    """What became of one visitor: the request, and what the router had chosen and hoped for."""

    visitor: Visitor
    request: Request
    choice: Choice

    @property
    def found(self) -> int:
        """Tokens that the replica did remember."""
        return usage(self.request).hit_tokens

    @property
    def wait(self) -> float:
        """Turns until the first token."""
        return self.request.token_times_s[0] - self.request.arrived_s


class Fleet:
    """Real engines that share one model's weights, and a router before them.

    A turn is a step of each engine, of at most 64 tokens: they would run on machines of their
    own. `capacity` bounds what the router's index holds of each replica, in blocks. With `hears`
    the index is fed by the replicas' events, once a turn, instead of the router's own choices.
    """

    def __init__(self, model: Transformer, policy: Policy, names: str = "ABC", *,
                 num_blocks: int = 110, capacity: int | None = None, hears: bool = False):
        self.model, self.num_blocks, self.clock = model, num_blocks, TurnClock()
        self.router = Router(names, policy, PrefixIndex(capacity), learns=not hears)
        self.listeners = {name: Listener(self.router.index, name) for name in names if hears}
        self.engines: dict[str, Engine] = {}
        self.answered: list[Answered] = []
        self.flights: dict[Request, tuple[Choice, ExitStack]] = {}
        for name in names:
            self.restart(name)

    def restart(self, name: str) -> None:
        """A replica begins a life, remembering nothing. Nobody tells the router."""
        epoch = self.engines[name].pool.listener.epoch + 1 if name in self.engines else 0
        self.engines[name] = Engine(
            self.model, PagedCache(self.model.config, self.num_blocks),
            Limits(max_tokens_per_step=64, max_running=8), self.clock)
        self.engines[name].pool.listener = EventLog(epoch)

    def ask(self, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Ask:
        """A prompt as the router sees it: its length and the keys of its blocks."""
        root = keys.root_key(next(iter(self.engines.values())).fingerprint)
        chain = keys.chain(root, prompt, 16)[:keys.most_hits(len(prompt), 16)]
        return Ask(chain, len(prompt), max_tokens)

    def serve(self, crowd: Sequence[Visitor]) -> list[Answered]:
        """Let a crowd in, turn by turn, until all have their answers of 4 tokens."""
        start, pending = self.clock.now, list(crowd)
        first = len(self.answered)
        while pending or self.flights:
            while pending and start + pending[0].at <= self.clock.now:
                self._let_in(pending.pop(0))
            self._turn()
        return self.answered[first:]

    def _let_in(self, visitor: Visitor) -> None:
        flight = ExitStack()
        choice = flight.enter_context(self.router.serving(self.ask(visitor.prompt)))
        request = self.engines[choice.replica].submit(
            visitor.prompt, Sampling(ANSWER_TOKENS, stop_ids=frozenset()))
        if request.reason is not None:
            flight.close()
            raise ValueError(f"the visitor at {visitor.at} is {request.reason}")
        self.flights[request] = choice, flight
        self.answered.append(Answered(visitor, request, choice))

    def _turn(self) -> None:
        self.clock.now += 1
        for engine in self.engines.values():
            engine.step()
        for name, listener in self.listeners.items():
            listener.catch_up(self.engines[name].pool.listener)
        for request, (choice, flight) in list(self.flights.items()):
            if request.output:
                choice.flight.has_begun()
            if request.reason is not None:
                flight.close()
                del self.flights[request]

    # --- what came out ------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """What all visitors together are billed for."""
        used = [usage(answered.request) for answered in self.answered]
        return Usage(sum(one.hit_tokens for one in used), sum(one.miss_tokens for one in used),
                     sum(one.output_tokens for one in used))

    @property
    def hit_share(self) -> float:
        return self.usage.hit_tokens / self.usage.input_tokens

    @property
    def computed(self) -> dict[str, int]:
        """Tokens of prompts that each replica has read."""
        found = dict.fromkeys(self.engines, 0)
        for answered in self.answered:
            found[answered.choice.replica] += len(answered.visitor.prompt) - answered.found
        return found

    @property
    def missing(self) -> int:
        """Tokens that the router expected to be remembered where they were not."""
        return sum(max(0, each.choice.expected_hit - each.found) for each in self.answered)

    @property
    def unforeseen(self) -> int:
        """Tokens that were remembered where the router did not expect them."""
        return sum(max(0, each.found - each.choice.expected_hit) for each in self.answered)

    def wait(self, percent: float) -> float:
        """A percentile of the turns until the first token."""
        return percentile((answered.wait for answered in self.answered), percent)


# --- a half hour of traffic, modelled ---------------------------------------------------------

READ_S = 250e-6                 # to read a token: 4,000 in a second
COST = StepCost(fixed_s=0.01, read_s=READ_S, write_s=100e-6)
MEMORY = 400_000                # tokens' notes in each replica
REPLICAS = "ABCD"
OPENING_BLOCKS = 24             # of the viral prompt: 12,288 tokens


def half_hour(sessions_a_minute: float, *, viral: bool = False, seed: int = 15
              ) -> list[TraceRequest]:
    """Made-up traffic of 29 minutes: chats, agents and single questions, all from an empty start.

    viral   8 strangers a second send one and the same document, with questions of their own, from
            the tenth minute to the fifteenth
    """
    traffic = Traffic(days=0.02, day_rhythm=0.0, context=32_768)
    a_day = sum(kind.sessions_per_day for kind in traffic.kinds)
    trace = synthesise(traffic.times(sessions_a_minute * 1_440 / a_day), seed)
    if viral:
        trace = sorted([*trace, *_strangers(8.0, 600.0, 900.0, random.Random(seed))],
                       key=lambda request: request.arrival_s)
    return trace


def _strangers(a_second: float, start_s: float, end_s: float, rng: random.Random
               ) -> Iterator[TraceRequest]:
    opening, now_s, number = tuple(("viral", i) for i in range(OPENING_BLOCKS)), start_s, 0
    while (now_s := now_s + rng.expovariate(a_second)) < end_s:
        prompt = OPENING_BLOCKS * 512 + 1 + int(rng.expovariate(1 / 200))
        output = 1 + int(rng.expovariate(1 / 150))
        own = range(OPENING_BLOCKS, (prompt + output - 1) // 512)
        yield TraceRequest(now_s, prompt, output, opening + tuple((number, i) for i in own), 512,
                           session=f"viral {number}")
        number += 1


@dataclass(frozen=True)
class Outcome:
    """What became of a modelled half hour."""

    served: Sequence[Served]
    read: Mapping[str, int]             # tokens that each replica has read

    @cached_property
    def hit_share(self) -> float:
        prompts = sum(each.request.prompt_tokens for each in self.served)
        return sum(each.hit_tokens for each in self.served) / prompts

    def first_token_s(self, percent: float) -> float:
        return percentile((each.first_token_s for each in self.served), percent)

    @property
    def spread(self) -> float:
        """What the busiest replica has read, as a multiple of the mean."""
        return max(self.read.values()) * len(self.read) / sum(self.read.values())

    def by_minute(self, percent: float) -> dict[int, float]:
        """A percentile of the times to first token of those who arrive in each minute."""
        minutes = defaultdict(list)
        for each in self.served:
            minutes[int(each.request.arrival_s // 60)].append(each.first_token_s)
        return {minute: percentile(minutes[minute], percent) for minute in sorted(minutes)}


def model_run(trace: Sequence[TraceRequest], policy: Policy, names: str = REPLICAS) -> Outcome:
    """A trace served by equal replicas in virtual time, with the router's own history as index."""
    replicas = equal_replicas(names, COST, memory_tokens=MEMORY, tokens_per_step=512)
    cluster = Cluster(replicas, Router(names, policy, PrefixIndex(MEMORY // 512)))
    served = cluster.serve(trace)
    read = Counter(dict.fromkeys(names, 0))
    for each in served:
        read[each.replica] += each.request.prompt_tokens - each.hit_tokens
    return Outcome(served, dict(read))


def session_of(served: Served) -> str:
    """Whose turn it was: the strangers of a viral prompt are called viral."""
    return str(served.request.session).split()[0]


@dataclass(frozen=True)
class Lean:
    """Between load and affinity: `weight` 0 looks at who waits, 1 at what is remembered.

    At a half both count alike, in tokens to be read: the cost of the chapter.
    """

    weight: float

    def __post_init__(self):
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight={self.weight} must lie between 0 (load) and 1 (affinity)")

    def __call__(self, replica: Replica, ask: Ask, hit: int) -> tuple[float, int]:
        lacking = ask.prompt_tokens - hit
        return (1 - self.weight) * replica.to_read + self.weight * lacking, len(replica.flights)


# --- drawings --------------------------------------------------------------------------------


def copies_drawing() -> draw.Drawing:
    """One question, three copies: what the router knows of each."""
    rows = (("A", 14, 9, "remembers the prompt, long queue"),
            ("B", 5, 0, "remembers its beginning, idle"),
            ("C", 0, 3, "remembers nothing, short queue"))
    pieces = [draw.rect(0, 84, 74, 34, "ink", filled=False),
              draw.text(37, 101, "router", anchor="middle", bold=True)]
    for i, (name, known, queue, words) in enumerate(rows):
        y = 34 + i * 62
        pieces += [draw.arrow(78, 101, 118, y + 8, "muted"),
                   draw.text(124, y + 8, name, bold=True),
                   draw.slots(142, y, known, 14, "hit", per_row=14, size=13),
                   draw.text(142, y + 28, words, "muted", size=12),
                   _queue(384, y, queue)]
    return draw.svg(
        WIDTH, 226,
        "A router and three copies of a model. A remembers all 14 blocks of the prompt, and nine "
        "others wait there; B remembers five blocks and is idle; C remembers none, and three wait.",
        draw.text(0, 10, "Where would you send it?", bold=True), *pieces,
        draw.legend(214, (("hit", "blocks remembered"), ("prefill", "others waiting")), step=160))


def _queue(x: float, y: float, count: int) -> str:
    """Those who wait, as small boxes in rows of three."""
    return "".join(draw.rect(x + i % 3 * 12, y + i // 3 * 12, 9, 9, "prefill", radius=1)
                   for i in range(count))


def lots_drawing(numbers: Mapping[str, Mapping[str, float]], lost: str) -> draw.Drawing:
    """Rendezvous hashing: each opening's number for each copy; the smallest wins.

    numbers  {opening: {copy: number from 0 to 1}}
    lost     a copy that goes: the second smallest takes over its openings, and no other moves
    """
    names = list(next(iter(numbers.values())))
    moved = sum(min(lots, key=lots.get) == lost for lots in numbers.values())
    bottom = 50 + len(numbers) * 27
    heads = [draw.text(156 + i * 66, 38, name, "failure" if name == lost else "ink",
                       anchor="middle", bold=True) for i, name in enumerate(names)]
    return draw.svg(
        WIDTH, bottom + 36,
        f"Rendezvous hashing of {len(numbers)} openings over {len(names)} copies: the smallest "
        f"number of a row wins. When {lost} is lost, {moved} openings move to the next one, "
        "and no other moves.",
        draw.text(0, 10, f"{lost} is lost: only its {moved} openings move", bold=True), *heads,
        *(_lots(50 + row * 27, opening, lots, lost)
          for row, (opening, lots) in enumerate(numbers.items())),
        draw.text(0, bottom + 10, "bold: the home of the opening; framed: its home without "
                  f"{lost}", "muted", size=12))


def _lots(y: float, opening: str, lots: Mapping[str, float], lost: str) -> str:
    """One opening's numbers, the smaller the darker."""
    home = min(lots, key=lots.get)
    heir = min((name for name in lots if name != lost), key=lots.get)
    pieces = [draw.text(0, y + 10, opening)]
    for i, (name, number) in enumerate(lots.items()):
        x, meaning = 126 + i * 66, "waste" if name == lost else "notes"
        pieces.append(draw.shade(x, y, 60, 21, meaning, 0.75 * (1 - number) ** 2))
        if name == heir:
            pieces.append(draw.rect(x, y, 60, 21, "ink", filled=False, radius=2))
        pieces.append(draw.text(x + 30, y + 10.5, f"{number:.2f}", anchor="middle", size=12,
                                bold=name == home))
    return "".join(pieces)


# --- figures ---------------------------------------------------------------------------------


def policies_figure(fleets: Mapping[str, Fleet]) -> Figure:
    """Hits and waits of the same visitors by policy, on real engines."""
    fig, (upper, lower) = figure(5, 4.8, rows=2)
    shares = [100 * fleet.hit_share for fleet in fleets.values()]
    waits = [fleet.wait(99) for fleet in fleets.values()]
    for ax, values, meaning, label in ((upper, shares, "hit", "tokens of prompts found (%)"),
                                       (lower, waits, "prefill", "p99 wait (turns)")):
        measured_bars(ax, [*fleets], values, meaning, label)
        for y, value in enumerate(values):
            direct_label(ax, value, y, f"{value:.0f}", "ink", dx=6)
        ax.set(xlabel=label, xlim=(0, 1.15 * max(*values, 1)))
    finding(upper, "Looking at prefixes finds more; the cost waits no longer for it")
    count = len(next(iter(fleets.values())).answered)
    return Figure(fig, f"Measured on three engines, the same {count} visitors. " + "; ".join(
        f"{name}: {share:.0f} % found, p99 wait {wait:.0f} turns"
        for name, share, wait in zip(fleets, shares, waits, strict=True)) + ".")


def promises_figure(fleets: Mapping[str, Fleet]) -> Figure:
    """How far each kind of index was wrong, in tokens, either way."""
    fig, (upper, lower) = figure(5, 3.9, rows=2)
    missing = [fleet.missing for fleet in fleets.values()]
    unforeseen = [fleet.unforeseen for fleet in fleets.values()]
    for ax, values, meaning, label in (
            (upper, missing, "miss", "expected, and not there (tokens)"),
            (lower, unforeseen, "notes", "there, and not expected (tokens)")):
        measured_bars(ax, [*fleets], values, meaning, label)
        for y, value in enumerate(values):
            direct_label(ax, value, y, f"{value:,}", "ink", dx=6)
        ax.set(xlabel=label, xlim=(0, 1.2 * max(*missing, *unforeseen, 1)))
    finding(upper, "Each kind of index errs in its own way")
    return Figure(fig, "Measured on three engines with small pools. " + "; ".join(
        f"{name}: {gone:,} tokens expected in vain, {more:,} found unexpectedly"
        for name, gone, more in zip(fleets, missing, unforeseen, strict=True)) + ".")


MEANINGS = {"round robin": "waste", "least load": "prefill", "longest prefix": "hit",
            "by opening": "disk", "one cost": "decode"}


def trace_figure(outcomes: Mapping[str, Outcome], title: str) -> Figure:
    """Hit rate against p99 time to first token, a mark for each policy: right and low is best."""
    fig, ax = figure(5, 3.6)
    places = {"round robin": (0, 13), "least load": (0, -13), "longest prefix": (0, 13),
              "by opening": (0, 13), "one cost": (0, -13)}
    for name, outcome in outcomes.items():
        x, y = 100 * outcome.hit_share, outcome.first_token_s(99)
        modelled(ax, [x], [y], MEANINGS[name], name)
        dx, dy = places[name]
        direct_label(ax, x, y, name, MEANINGS[name], dx=dx, dy=dy)
    tallest = max(outcome.first_token_s(99) for outcome in outcomes.values())
    ax.set(xlabel="tokens of prompts found (%)", ylabel="p99 time to first token (s)",
           xlim=(45, 90), ylim=(0, 1.25 * tallest))
    finding(ax, title)
    key(ax, "modelled", loc="lower left")
    return Figure(fig, "Modelled, four replicas, half an hour. " + "; ".join(
        f"{name}: {outcome.hit_share:.0%} found, p99 {outcome.first_token_s(99):.1f} s, busiest "
        f"replica {outcome.spread:.2f} of the mean" for name, outcome in outcomes.items()) + ".")


def viral_figure(outcomes: Mapping[str, Outcome]) -> Figure:
    """What nine of ten who arrive in a minute wait at most, before, in and after the herd."""
    fig, ax = figure(5, 3.8)
    ax.axvspan(10, 15, color=ax.xaxis.label.get_color(), alpha=0.08, linewidth=0)
    places = {"longest prefix": (11, 10, -24), "by opening": (14, 10, 10), "least load": (7, 0, 28),
              "one cost": (12, 0, -15)}
    for name, outcome in outcomes.items():
        minutes = {m: s for m, s in outcome.by_minute(90).items() if 5 <= m < 25}
        modelled(ax, [m + 0.5 for m in minutes], [*minutes.values()], MEANINGS[name], name)
        minute, dx, dy = places[name]
        direct_label(ax, minute + 0.5, minutes[minute], name, MEANINGS[name], dx=dx, dy=dy)
    worst = max(max(outcome.by_minute(90).values()) for outcome in outcomes.values())
    ax.set_yscale("log")
    ax.set_yticks([1, 10, 100], ["1", "10", "100"])
    ax.minorticks_off()
    ax.set(xlabel="minute of arrival (shaded: the herd)", xticks=[5, 10, 15, 20, 25],
           ylabel="p90 time to first token (s)", ylim=(0.3, 6 * worst), xlim=(5, 25))
    finding(ax, "A viral prompt queues at the one copy that knows it, unless waiting counts")
    key(ax, "modelled", loc="upper left")
    return Figure(fig, "Modelled: p90 of the time to first token by minute of arrival; the herd "
                  "comes from minute 10 to 15. "
                  + "; ".join(f"{name}: {_course(outcome.by_minute(90))}"
                              for name, outcome in outcomes.items()) + ".")


def _course(minutes: Mapping[int, float], limit_s: float = 10.0) -> str:
    """A line of the figure in words: how high it goes, and when it is above a limit."""
    words = f"up to {max(minutes.values()):.1f} s"
    above = [minute for minute, wait_s in minutes.items() if wait_s > limit_s]
    return words + (f", above {limit_s:.0f} s from minute {above[0]} to {above[-1] + 1}"
                    if above else "")


# --- the explorable --------------------------------------------------------------------------

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
LOADS = (10, 20, 30, 40)                # sessions that begin in a minute


def lean_row(weight: float, sessions: int, viral: bool) -> dict:
    """One modelled half hour, as the explorable shows it."""
    outcome = model_run(half_hour(sessions, viral=viral), Lean(weight))
    total = sum(outcome.read.values())
    return {"hit": round(100 * outcome.hit_share, 2),
            "p50": round(outcome.first_token_s(50), 3), "p99": round(outcome.first_token_s(99), 3),
            "work": [round(100 * read / total, 2) for read in outcome.read.values()]}


def lean_runs() -> dict[str, list[list[dict]]]:
    """The recorded runs: {quiet or viral: [by load: [by weight: row]]}."""
    text = files("minimodel").joinpath("data", "routing_runs.json").read_text(encoding="ascii")
    return json.loads(text)


def lean_lookup(weight: float, sessions: int, viral: bool) -> dict:
    """The twin: what the explorable says of a weight, a load, and a viral prompt."""
    runs = lean_runs()["viral" if viral else "quiet"][LOADS.index(sessions)]
    row = runs[WEIGHTS.index(weight)]
    return {"hit": row["hit"], "p50": row["p50"], "p99": row["p99"],
            **dict(zip("abcd", row["work"], strict=True)),
            "spread": max(row["work"]) / 25,
            "weights": list(WEIGHTS), "tails": [run["p99"] for run in runs]}


def lean_explorable() -> Explorable:
    """Four replicas; drag the weight between load and affinity."""
    name = "share of all reading"
    return Explorable(
        alt="Load alone forgets, affinity alone queues when a prompt goes viral; weights of a "
            "quarter and a half do little of either",
        twin=lean_lookup, compute=Path(__file__).with_name("chapter_15_lean.js"),
        data={"weights": list(WEIGHTS), "loads": list(LOADS), "runs": lean_runs()},
        controls=[
            Slider("weight", "weight: 0 load alone, 1 affinity alone", list(WEIGHTS), start=0.5),
            Slider("sessions", "sessions that begin in a minute", list(LOADS), start=30),
            Checkbox("viral", "a prompt goes viral", start=False)],
        says="{hit} % of prompts found, p99 time to first token {p99} s, the busiest replica reads "
             "{spread} times the mean.",
        picture=[
            Numbers([("{hit} %", "found"), ("{p50} s", "p50"), ("{p99} s", "p99"),
                     ("{spread}", "busiest / mean")]),
            Bars(f"Four replicas: {name}", [Bar(letter, f"replica {letter.upper()}", "prefill")
                                            for letter in "abcd"], unit=" %", high=50),
            Lines("p99 time to first token, by weight", x=Axis("weight", 0, 1),
                  y=Axis("p99 (s)", 1, 1000, log=True),
                  lines=[Line("weights", "tails", "all weights", "muted"),
                         Line("weight", "p99", "yours", "decode", dy=-28)])])
