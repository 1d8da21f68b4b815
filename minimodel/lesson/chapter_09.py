"""Chapter 09: visitors and clocks to measure with, its drawings, and a run to scrub through."""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..cache.paged import PagedCache
from ..config import ModelConfig
from ..engine.engine import Engine
from ..engine.metrics import RequestTimes, percentile
from ..engine.request import Request, Sampling
from ..engine.scheduler import Limits, Scheduler
from ..engine.steps import StepRecord
from ..model.batch import Batch
from ..model.corpus import Fact
from ..model.transformer import Transformer
from ..simulate import cost, hardware
from ..tokenizer import encode
from . import draw
from .draw import WIDTH
from .figures import Figure, direct_label, figure, finding, key, measured_bars, modelled
from .stepper import Stepper
from .town import TOWN

# --- two clocks to serve by ------------------------------------------------------------------


class TickClock:
    """A clock that moves only when a model computes.

    A step of n rows takes max(1, n / ridge) ticks. One tick is what a step takes at least (the
    weights are fetched); from `ridge` rows on the arithmetic takes longer than that. It is the
    roofline of chapter 06, as a clock.
    """

    def __init__(self, model: Transformer, ridge: int = 64):
        self.now, self.ridge = 0.0, ridge
        model.register_forward_pre_hook(lambda _, inputs: self._tick(len(inputs[0])))

    def _tick(self, num_rows: int) -> None:
        self.now += max(1.0, num_rows / self.ridge)

    def __call__(self) -> float:
        return self.now

    def skip_to(self, now: float) -> None:
        """Let time pass in which nobody computes."""
        self.now = max(self.now, now)


def step_s(model: Transformer, repeat: int = 15) -> float:
    """Seconds of this process that a step of one row takes here, the median of a few."""
    cache, batch = PagedCache(model.config, 2), Batch(new=[1], past=[16])
    found = []
    for _ in range(repeat):
        started = time.process_time()
        model(torch.tensor([65]), batch, cache.step([[0, 1]], batch))
        found.append(time.process_time() - started)
    return percentile(found, 50)


class ProcessClock:
    """Time that this process computes, in units of `unit_s` seconds, idle time skipped over."""

    def __init__(self, unit_s: float):
        self.unit_s, self.skipped = unit_s, 0.0
        self.started = time.process_time()

    def __call__(self) -> float:
        return (time.process_time() - self.started) / self.unit_s + self.skipped

    def skip_to(self, now: float) -> None:
        self.skipped += max(0.0, now - self())


# --- who comes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visitor:
    """Somebody who will ask: when, what, and for how many tokens (never fewer, never more)."""

    at: float
    prompt: Sequence[int]
    max_tokens: int


def ask(num_lines: int, fact: Fact = TOWN.facts[0]) -> list[int]:
    """A prompt of the town notebook's first lines, and a question."""
    return encode(replace(TOWN, lines=TOWN.lines[:num_lines]).ask(fact))


def visitors(count: int = 32, seed: int = 9) -> list[Visitor]:
    """Short prompts and short or long answers; every eighth brings the whole notebook."""
    rng, at, found = random.Random(seed), 0.0, []
    for i in range(count):
        lines = len(TOWN.lines) if i % 8 == 5 else rng.randint(1, 4)
        found.append(Visitor(at, ask(lines, rng.choice(TOWN.facts)), rng.randint(4, 60)))
        at += rng.expovariate(1 / 3)
    return found


def six() -> list[Visitor]:
    """A small crowd for a run that a reader can follow step by step."""
    sizes = ((0, 2, 30), (0, 1, 28), (1, 3, 30), (2, 1, 26), (6, 4, 8), (12, 1, 10))
    return [Visitor(float(at), ask(lines), most) for at, lines, most in sizes]


# --- serving them ----------------------------------------------------------------------------


def hollow(config: ModelConfig) -> Transformer:
    """A model of the same vocabulary and hardly any numbers: steps of the same shape, at once."""
    return Transformer(replace(config, hidden_size=8, num_layers=1, head_dim=2, dense_size=8,
                               expert_size=4)).eval()


def make_engine(model: Transformer, clock: Callable[[], float], num_blocks: int = 700,
                scheduler: type[Scheduler] = Scheduler, **limits) -> Engine:
    """An engine with its own paged cache, by another scheduler if one is given."""
    engine = Engine(model, PagedCache(model.config, num_blocks), Limits(**limits), clock,
                    reuse=False)
    engine.scheduler = scheduler(engine.pool, engine.scheduler.limits, engine.cache.copy)
    return engine


@dataclass(frozen=True)
class Run:
    """What became of some visitors: their requests, and the record of every step."""

    requests: Sequence[Request]
    records: Sequence[StepRecord]

    @property
    def num_rows(self) -> int:
        return sum(record.num_tokens for record in self.records)

    @property
    def throughput(self) -> float:
        """Tokens written in a unit of the clock, from the first arrival to the last token."""
        written = sum(len(request.output) for request in self.requests)
        return written / (self.records[-1].ended_s - min(r.arrived_s for r in self.requests))

    def gap(self, percent: float) -> float:
        """A percentile of the gaps between tokens, of all requests together."""
        return percentile((gap for times in self._times for gap in times.gaps_s), percent)

    def ttft(self, percent: float) -> float:
        """A percentile of the times to first token."""
        return percentile((times.ttft_s for times in self._times), percent)

    @property
    def _times(self) -> list[RequestTimes]:
        return [RequestTimes(r.arrived_s, r.token_times_s) for r in self.requests]


def serve(engine: Engine, clock: TickClock | ProcessClock, visitors: Sequence[Visitor],
          batch: int | None = None) -> Run:
    """Let visitors in as they arrive, and step until all are served.

    batch   static batching: so many at a time, and nobody else until the last of them is done

    Raises ValueError for visitors who are out of order or can never be served, and RuntimeError
    where the scheduler serves nobody of those who wait: it never would.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch} serves nobody: take 1 or more, or None for no batches")
    if any(later.at < earlier.at for earlier, later in pairwise(visitors)):
        raise ValueError("visitors are not in the order of their arrival: sort them by `at`")
    pending, requests = deque(visitors), []
    while pending or engine.requests:
        if batch is None or not engine.requests:
            requests += _let_in(engine, pending, clock(), batch or len(pending))
        if engine.step() is None:
            if engine.requests:
                raise RuntimeError(f"{len(engine.requests)} requests wait and none of them is "
                                   "served: give the cache more blocks, or mend the scheduler")
            if pending:
                clock.skip_to(pending[0].at)
    return Run(requests, list(engine.records))


def _let_in(engine: Engine, pending: deque, now: float, most: int) -> list[Request]:
    requests = []
    while pending and pending[0].at <= now and len(requests) < most:
        visitor = pending.popleft()
        requests.append(engine.submit(visitor.prompt, Sampling(visitor.max_tokens, stop_ids=())))
        if requests[-1].reason is not None:
            raise ValueError(f"the visitor at {visitor.at} is {requests[-1].reason}")
        requests[-1].arrived_s = visitor.at         # it may have waited outside
    return requests


# --- who was in which step -------------------------------------------------------------------

LEFT, ROW = 22, 20          # room for a request's letter; height of its line
LEGEND = (("prefill", "prompt, read"), ("decode", "a token written"), ("waste", "waits"))


def timeline(run: Run, title: str, until: float | None = None) -> draw.Drawing:
    """Every request a line, every step as wide as it lasted; drawn from a run's step records.

    until  the clock's time at the right edge; else the run's end
    """
    started = min(request.arrived_s for request in run.requests)
    last = run.records[-1].ended_s
    scale = (WIDTH - LEFT - 2) / ((until or last) - started)

    def x(now: float) -> float:
        return LEFT + (now - started) * scale

    lines = [_line(run, request, 34 + i * ROW, x) for i, request in enumerate(run.requests)]
    bottom = 34 + len(lines) * ROW
    return draw.svg(
        WIDTH, bottom + 44,
        f"{title}. {len(run.requests)} requests, {len(run.records)} steps, done after "
        f"{last - started:.0f} of the clock's units; the longest gap lasts {run.gap(100):.1f}. "
        f"{_when(run, started)}",
        draw.text(0, 10, title, bold=True), *lines,
        draw.line(LEFT, bottom + 2, WIDTH, bottom + 2, "muted"),
        draw.text(LEFT, bottom + 13, f"{len(run.records)} steps", "muted", size=12),
        draw.text(x(last), bottom + 13, f"done at {last - started:.0f}", "muted", anchor="end",
                  size=12),
        draw.legend(bottom + 34, LEGEND, step=130))


def _when(run: Run, started: float) -> str:
    """The picture in words: when each request's reading and writing begin, and when it is done."""
    first = {}
    for record in run.records:
        for share in record.shares:
            first.setdefault(share.request_id, record.started_s)
    return "; ".join(
        f"{letter(r.id)} reads from {first[r.id] - started:.0f}, writes from "
        f"{r.token_times_s[0] - started:.0f} to {r.token_times_s[-1] - started:.0f}"
        for r in run.requests) + "."


def _line(run: Run, request: Request, y: float, x: Callable[[float], float]) -> str:
    """One request: a thin line while it is here, a box for each step that it had a share in."""
    pieces = [draw.text(0, y + 7, letter(request.id), bold=True),
              draw.line(x(request.arrived_s), y + 7, x(request.token_times_s[-1]), y + 7, "waste")]
    shortest = min(record.ended_s - record.started_s for record in run.records)
    for record in run.records:
        for share in record.shares:
            if share.request_id == request.id:
                pieces.append(_share(share.kind, record, shortest, y, x))
        if request.id in record.preempted:
            pieces.append(draw.text(x(record.started_s), y + 7, "×", "failure", anchor="middle",
                                    bold=True))
    return "".join(pieces)


def _share(kind: str, record: StepRecord, shortest: float, y: float,
           x: Callable[[float], float]) -> str:
    """A share's box. A token takes no longer than the shortest step: before it, one only waits."""
    left, right = x(record.started_s), x(record.ended_s)
    first = max(left, x(record.ended_s - shortest)) if kind == "decode" else left
    box = draw.rect(first + 0.75, y, max(0.5, right - first - 1.5), 14, kind, radius=1)
    return draw.shade(left, y, first - left, 14, kind, 0.25) + box if first > left + 1 else box


def letter(request_id: str) -> str:
    """Requests 0, 1, 2 are A, B, C to readers."""
    return chr(ord("A") + int(request_id) % 26)


# --- what a budget does ----------------------------------------------------------------------


def budget_figure(budgets: Sequence[int], runs: Mapping[int, Run], static: Run) -> Figure:
    """Tokens a tick, and the p99 gap, for each budget, on the tick clock; static as a line."""
    fig, (upper, lower) = figure(5, 5.2, rows=2)
    rates = [runs[budget].throughput / static.throughput for budget in budgets]
    gaps = [runs[budget].gap(99) for budget in budgets]
    best = max(range(len(budgets)), key=lambda i: rates[i])
    modelled(upper, budgets, rates, "decode", "throughput")
    modelled(upper, budgets, [1] * len(budgets), "waste", "static")
    direct_label(upper, budgets[best], rates[best], f"budget {budgets[best]}", "decode", dx=0,
                 dy=12)
    direct_label(upper, budgets[-1], 1, "static batches", "waste", dx=-1, dy=-11)
    modelled(lower, budgets, gaps, "prefill", "p99 gap")
    direct_label(lower, budgets[-1], gaps[-1], "whole prompts", "prefill", dx=-1, dy=11)
    for ax in (upper, lower):
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, [f"{b:,}" for b in budgets])
        ax.minorticks_off()
    upper.set(ylabel="throughput (1 = static)", ylim=(0, max(rates) * 1.25))
    lower.set(ylabel="p99 gap (ticks)", xlabel="budget: tokens a step", ylim=(0, max(gaps) * 1.25))
    finding(upper, f"A budget near the ridge writes {rates[best]:.1f} times as much as static "
                   f"batches, with gaps of {gaps[best]:.0f} tick")
    key(lower, "modelled", loc="upper left")
    return Figure(fig, f"On the tick clock, by budget from {budgets[0]} to {budgets[-1]:,}: "
                       f"throughput peaks at {budgets[best]} with {rates[best]:.1f} times the "
                       f"static rate; the p99 gap grows with the budget, from {gaps[0]:.0f} to "
                       f"{gaps[-1]:.0f} ticks.")


def real_figure(names: Sequence[str], runs: Sequence[Run]) -> Figure:
    """The toy on this machine's own clock: the steps and the p99 gap of each way to batch."""
    fig, (upper, lower) = figure(5, 4.6, rows=2)
    steps = [len(run.records) for run in runs]
    gaps = [run.gap(99) / runs[0].gap(50) for run in runs]
    for ax, values, digits, meaning, label in (
            (upper, steps, 0, "decode", "steps"),
            (lower, gaps, 1, "prefill", "p99 gap (1 = a usual gap)")):
        measured_bars(ax, names, values, meaning, label)
        for y, value in enumerate(values):
            direct_label(ax, value, y, f"{value:.{digits}f}", "ink", dx=6)
        ax.set(xlabel=label, xlim=(0, max(values) * 1.15))
    finding(upper, "On this machine, too, small chunks end the long silence")
    return Figure(fig, "Measured on this machine. " + "; ".join(
        f"{name}: {count} steps, p99 gap {gap:.1f} usual gaps"
        for name, count, gap in zip(names, steps, gaps, strict=True)) + ".")


def chunk_figure() -> Figure:
    """DeepSeek-V3 on an H800, modelled (E18): a decode step, and how a chunk lengthens it."""
    fig, ax = figure(5, 3.4)
    for batch, meaning, dx, dy in ((32, "decode", -4, 13), (128, "notes", 6, -12)):
        free = largest_free_chunk(batch)
        chunks = [0, free, 512, 1024]
        steps = [v3_step_s(batch, chunk) / v3_step_s(batch, 0) for chunk in chunks]
        modelled(ax, chunks, steps, meaning, f"{batch} streams")
        direct_label(ax, free, 1, f"{free} free", meaning, dx=dx, dy=dy)
        direct_label(ax, 512, steps[2], f"{batch} streams", meaning, dx=dx, dy=dy)
    ax.set(xlabel="rows of a prompt beside them", ylabel="step (1 = without)", ylim=(0, 5))
    finding(ax, "A chunk is free as long as memory is what the step waits for")
    key(ax, "modelled", loc="upper left")
    return Figure(fig, "Modelled for DeepSeek-V3 on an H800: the step keeps its length up to "
                       f"{largest_free_chunk(32)} prompt rows beside 32 streams and "
                       f"{largest_free_chunk(128)} beside 128, then grows with every row.")


def v3_step_s(batch: int, chunk: int, context: int = 4_989) -> float:
    """Seconds of a step of `batch` streams and a chunk of a prompt: bytes or operations decide.

    context  tokens of notes a stream; by default what was reported of that service (P-OI05)
    """
    work, chip = cost.V3_DECODE, hardware.H800
    flops = work.step_flops(batch, context) + chunk * work.flops_per_token
    return cost.step_seconds(work.step_bytes(batch, context), flops, chip.bandwidth_bytes_per_s,
                             chip.flops_per_s("fp8"))


def largest_free_chunk(batch: int) -> int:
    """Rows of a prompt that do not lengthen a step of so many streams, whole 16s."""
    chunk = 0
    while v3_step_s(batch, chunk + 16) <= v3_step_s(batch, 0):
        chunk += 16
    return chunk


# --- broken policies -------------------------------------------------------------------------


def starved_figure(counts: Sequence[int], waits: Mapping[str, Sequence[float]]) -> Figure:
    """How long the one long prompt waits, by how many short ones come, for each policy."""
    fig, ax = figure(5, 3.3)
    meanings = dict(zip(waits, ("notes", "failure", "decode"), strict=True))
    for name, values in waits.items():
        modelled(ax, counts, values, meanings[name], name)
        direct_label(ax, counts[-2], values[-2], name, meanings[name], dx=-6, dy=11)
    ax.set_yscale("log")
    ax.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    ax.minorticks_off()
    ax.set(xlabel="short requests that come along", ylabel="wait of the long one (ticks)",
           ylim=(18, 700))
    finding(ax, "Shortest first: the long prompt waits for as long as short ones come")
    key(ax, "modelled", loc="upper left")
    return Figure(fig, f"Wait of one long prompt beside {counts[0]} to {counts[-1]} short "
                       "requests: " + "; ".join(
        f"{name} {values[0]:.0f} to {values[-1]:.0f} ticks" for name, values in waits.items())
        + ".")


def thrash_figure(names: Sequence[str], runs: Sequence[Run], needed: int) -> Figure:
    """Rows computed by each policy for the same two answers, and the rows they need."""
    rows = [run.num_rows for run in runs]
    fig, ax = figure(5, 2.6)
    measured_bars(ax, names, rows, "miss", "rows computed")
    for y, count in enumerate(rows):
        direct_label(ax, count, y, f"{count:,}", "ink", dx=6)
    ax.axvline(needed, color=ax.xaxis.label.get_color(), linewidth=1)
    ax.set(xlabel=f"rows computed ({needed:,} are needed)", xlim=(0, max(rows) * 1.2))
    finding(ax, f"Thrashing: {max(rows) / needed:.0f} times the work, for the same tokens")
    return Figure(fig, f"Rows computed for two answers that need {needed}: " + "; ".join(
        f"{name} {count:,}" for name, count in zip(names, rows, strict=True)) + ".")


# --- a run to scrub through ------------------------------------------------------------------


def scrub(run: Run, limits: Limits, num_blocks: int) -> Stepper:
    """A recorded run, step by step: the batch, the budget, the blocks and who waits."""
    frames = [_frame(run, record, limits, num_blocks) for record in run.records]
    labels = [f"step {record.number + 1} of {len(run.records)}: {_summary(record)}"
              for record in run.records]
    return Stepper(frames, labels, "step",
                   "Requests join and leave between steps. Whoever writes takes one token of the "
                   "budget, a prompt takes what is left; when blocks run out, the request that was "
                   "admitted last gives its own back and reads again later.")


def _summary(record: StepRecord) -> str:
    by_kind = {kind: sum(share.num_tokens for share in record.shares if share.kind == kind)
               for kind in ("decode", "prefill")}
    words = f"{by_kind['decode']} write, {by_kind['prefill']} tokens of prompts are read"
    if record.preempted:
        words += f"; {', '.join(map(letter, record.preempted))} sent back"
    return words


def _frame(run: Run, record: StepRecord, limits: Limits, num_blocks: int) -> str:
    top = 78
    lines = [_progress(run, request, record, top + i * 24)
             for i, request in enumerate(run.requests)]
    bottom = top + len(lines) * 24 + 8
    return draw.svg(
        WIDTH, bottom + 78, f"Step {record.number + 1}: {_summary(record)}; "
        f"{record.blocks_held} of {num_blocks} blocks held, {record.num_waiting} wait.",
        draw.text(0, 8, f"Budget: {record.num_tokens} of {limits.max_tokens_per_step} tokens",
                  bold=True),
        _budget_bar(record, limits.max_tokens_per_step, 20),
        draw.text(0, 62, "Requests: notes, and what this step adds", bold=True), *lines,
        draw.text(0, bottom + 6, f"Blocks: {record.blocks_held} of {num_blocks} held after the "
                  f"step; {record.num_waiting} wait", bold=True),
        draw.rect(0, bottom + 18, WIDTH - 2, 14, "waste", filled=False, radius=2),
        draw.rect(0, bottom + 18, (WIDTH - 2) * record.blocks_held / num_blocks, 14, "notes",
                  radius=2),
        draw.legend(bottom + 58, (("notes", "notes"), ("prefill", "read now"),
                                  ("decode", "writes now")), step=118))


def _budget_bar(record: StepRecord, budget: int, y: float) -> str:
    """The budget as a bar: a piece for each request's share, in the order of the plan."""
    scale, x = (WIDTH - 2) / budget, 0.0
    pieces = [draw.rect(0, y, WIDTH - 2, 16, "waste", filled=False, radius=2)]
    for share in record.shares:
        width = share.num_tokens * scale
        pieces.append(draw.rect(x + 0.5, y, max(1, width - 1), 16, share.kind, radius=1))
        x += width
    return "".join(pieces)


def _progress(run: Run, request: Request, record: StepRecord, y: float) -> str:
    """One request in one step: noted before, added now, and how far its prompt goes."""
    longest = max(each.total for each in run.requests)
    scale = (WIDTH - LEFT - 112) / longest
    share = next((s for s in record.shares if s.request_id == request.id), None)
    computed = share.computed if share else _computed_before(run, request, record)
    words, meaning = _doing(run, request, record, share)
    pieces = [draw.text(0, y + 8, letter(request.id), bold=True),
              draw.rect(LEFT, y, len(request.prompt) * scale, 16, "waste", filled=False, radius=2),
              draw.text(WIDTH - 104, y + 8, words, meaning, size=12)]
    if computed:
        pieces.append(draw.rect(LEFT, y, computed * scale, 16, "notes", radius=2))
    if share:
        pieces.append(draw.rect(LEFT + computed * scale, y, max(3, share.num_tokens * scale), 16,
                                share.kind, radius=1))
    return "".join(pieces)


def _computed_before(run: Run, request: Request, record: StepRecord) -> int:
    """Tokens whose notes a request without a share still holds at this step."""
    computed = 0
    for past in run.records[:record.number + 1]:
        if request.id in past.preempted or request.id in past.finished:
            computed = 0
        for share in past.shares:
            if share.request_id == request.id and request.id not in past.finished:
                computed = share.computed + share.num_tokens
    return computed


def _doing(run: Run, request: Request, record: StepRecord, share) -> tuple[str, str]:
    """What a request does in a step, in a word or two, and that word's colour."""
    before = run.records[:record.number]
    if request.id in record.preempted:
        return "sent back", "failure"
    if share is not None:
        done = " (last)" if request.id in record.finished else ""
        return (f"reads {share.num_tokens}" if share.kind == "prefill" else "writes") + done, "ink"
    if any(request.id in past.finished for past in before):
        return "done", "muted"
    if request.arrived_s > record.started_s:
        return "not here yet", "muted"
    held = _computed_before(run, request, record) > 0
    return ("has its turn later" if held else "waits"), "muted"
