"""Chapter 12: two processes under one load, a handoff's messages, and chips that read or write."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from ..cluster import launch
from ..cluster.links import Sent
from ..cluster.messages import Block, Read, unpack
from ..engine.request import Request, Sampling
from ..model.corpus import Fact
from ..simulate import cost
from ..tokenizer import encode
from . import draw
from .charts import Size, compare_sizes
from .draw import WIDTH
from .explorable import Axis, Explorable, Line, Lines, Numbers, Slider
from .figures import Figure, direct_label, figure, finding, key, measured
from .town import TOWN

# --- the chapter's first two processes -----------------------------------------------------


def start():
    """What a new process needs by hand: the toy's next token after some, and where notes lie."""
    import torch

    from ..cache.paged import PagedCache
    from ..model import checkpoint
    from ..model.batch import Batch

    torch.set_grad_enabled(False)
    model = checkpoint.load()
    cache = PagedCache(model.config, 70)

    def next_token(new: Sequence[int], past: int) -> int:
        batch = Batch(new=[len(new)], past=[past])
        logits = model(torch.tensor(new), batch, cache.step([range(70)], batch))
        return int(logits[-1].argmax())
    return next_token, cache.blocks


# --- one load, served in three ways ------------------------------------------------------------

WAYS = {"together": 1 << 14, "chunked": 256, "split": 512}      # tokens in a step, at most
CHATS, CHAT_TOKENS, STRANGERS, STRANGER_TOKENS = 4, 120, 4, 2_049


def ask(num_lines: int, fact: Fact) -> list[int]:
    """A prompt of the town notebook's first lines, and a question."""
    return encode(replace(TOWN, lines=TOWN.lines[:num_lines]).ask(fact))


def stranger(number: int) -> list[int]:
    """A long prompt; no two begin alike."""
    return encode(f"{number}. " + 3 * TOWN.text)[:STRANGER_TOKENS]


def chats() -> dict[str, list[int]]:
    """Short prompts whose answers are long."""
    return {f"chat {i}": ask(9 + i, TOWN.facts[i % len(TOWN.facts)]) for i in range(CHATS)}


def serve_ways(world: launch.World) -> dict[str, dict]:
    """One process's part in all three ways, one after the other: tokens, their times, counts."""
    import torch
    import torch.distributed as dist

    from ..cluster import split
    from ..engine.scheduler import Limits
    from ..model import checkpoint

    torch.set_grad_enabled(False)
    model, found = checkpoint.load(), {}
    for way, most in WAYS.items():
        engine = split.make_engine(model, 1_000, limits=Limits(max_tokens_per_step=most))
        engine.generate([[255] * 65], Sampling(max_tokens=5))           # warm
        dist.barrier()
        found[way] = (_split if way == "split" else _together)(world, engine)
        dist.barrier()
    return found


def _together(world: launch.World, engine) -> dict:
    """Both processes read and write: each has half of all."""
    mine = dict([*chats().items()][world.rank::2])
    served = _drive(mine, range(world.rank, STRANGERS, 2), engine.submit, engine.step,
                    lambda: engine.scheduler.is_idle)
    return _seen(engine, served)


def _split(world: launch.World, engine) -> dict:
    """Rank 0 writes, rank 1 reads. Nobody loses patience: a busy machine is no failure."""
    from ..cluster import split

    side = split.connect(world, engine, **({} if world.rank else {"patience_s": 60,
                                                                   "retry_s": 20}))
    if world.rank:
        split.read_prompts(side)
        return _seen(engine, {})
    calls = _drive(chats(), range(STRANGERS), side.submit, side.poll, lambda: side.is_idle)
    split.hang_up(side)
    pulls = [(pull.ticket.num_tokens, pull.num_bytes, pull.ended_at - pull.accepted_at)
             for pull in side.decode.ended]
    return {**_seen(engine, {name: call.request for name, call in calls.items()}), "pulls": pulls}


def _drive(mine: Mapping, numbers: Sequence[int], submit: Callable, step: Callable,
           is_idle: Callable) -> dict:
    """All chats at once; a stranger whenever the first chat has written 15 tokens more.

    By tokens, not by seconds: so that they meet on a fast machine and on a slow one.
    """
    long, short = (Sampling(max_tokens=n, stop_ids=frozenset()) for n in (CHAT_TOKENS, 3))
    served = {name: submit(prompt, long) for name, prompt in mine.items()}
    first, left = next(iter(served.values())), list(numbers)
    while left or not is_idle():
        if left and len(first.output) >= 15 * (1 + len(numbers) - len(left)):
            number = left.pop(0)
            served[f"stranger {number}"] = submit(stranger(number), short)
        step()
    return served


def _seen(engine, served: Mapping[str, Request]) -> dict:
    beside = [record.num_tokens for record in engine.records
              if any(share.kind == "decode" for share in record.shares)]
    return {"answers": {name: request.output for name, request in served.items()},
            "times": {name: request.token_times_s for name, request in served.items()},
            "most_tokens": max(beside, default=0)}


def answers(ranks: Sequence[dict], way: str) -> dict[str, list[int]]:
    """What was written, by name, whichever process wrote it."""
    return {name: tokens for rank in ranks for name, tokens in rank[way]["answers"].items()}


def most_tokens(ranks: Sequence[dict], way: str) -> int:
    """In any step beside somebody's next token."""
    return max(rank[way]["most_tokens"] for rank in ranks)


def gaps_ms(ranks: Sequence[dict], way: str) -> list[float]:
    """Between any two tokens of the chats from each one's second on, the shortest first."""
    return sorted(1e3 * (after - before) for times in _chat_times(ranks, way)
                  for before, after in pairwise(times[1:]))


def first_gaps_ms(ranks: Sequence[dict], way: str) -> list[float]:
    """Between the first and the second token of each chat: split, its handoff lies there."""
    return sorted(1e3 * (times[1] - times[0]) for times in _chat_times(ranks, way))


def _chat_times(ranks: Sequence[dict], way: str) -> list[list[float]]:
    return [times for rank in ranks for name, times in rank[way]["times"].items()
            if name.startswith("chat")]


def gaps_figure(ranks: Sequence[dict]) -> Figure:
    """The gaps of each way, by the share of gaps that are no longer."""
    shares = [50, 75, 90, 95, 98, 100]
    fig, ax = figure(5, 3.7)
    said, found = [], {way: gaps_ms(ranks, way) for way in WAYS}
    order = sorted(found, key=lambda way: found[way][-1])
    for way, meaning in zip(WAYS, ("failure", "prefill", "decode"), strict=True):
        gaps = found[way]
        values = [gaps[min(len(gaps) - 1, len(gaps) * share // 100)] for share in shares]
        measured(ax, range(len(shares)), values, meaning, way)
        direct_label(ax, len(shares) - 1, values[-1], way, meaning, dy=12 * (order.index(way) - 1))
        said.append(f"{way} {values[0]:.0f} at the median, {values[-1]:.0f} at most")
    ax.set_yscale("log")
    ax.set_xticks(range(len(shares)), [f"{share} %" for share in shares])
    ax.minorticks_off()
    ax.set(xlabel="of the gaps are no longer than", ylabel="ms", xlim=(-0.3, len(shares) + 0.6))
    most = [most_tokens(ranks, way) for way in WAYS]
    finding(ax, f"Beside your next token: {most[0]:,} tokens together, {most[1]} chunked, "
                f"{most[2]} split")
    key(ax, "measured", loc="upper left")
    return Figure(fig, "Measured on this machine, gaps between the tokens of the chats in ms: "
                  + "; ".join(said) + ".")


# --- a handoff's messages ----------------------------------------------------------------------

ROW = 34


def messages_drawing(log: Sequence[Sent]) -> draw.Drawing:
    """What the two workers `p` and `d` said to each other; messages of one kind as one arrow."""
    runs = [(kind, sender, [*group]) for (kind, sender), group in groupby(
        log, key=lambda sent: (type(unpack(sent.data)).__name__, sent.sender))]
    left, right, top = 60, WIDTH - 60, 46
    bottom = top + ROW * len(runs)
    pieces = [draw.text(left, 12, "prefill", "prefill", anchor="middle", bold=True),
              draw.text(right, 12, "decode", "decode", anchor="middle", bold=True),
              draw.line(left, 24, left, bottom, "prefill"),
              draw.line(right, 24, right, bottom, "decode")]
    for i, (kind, sender, group) in enumerate(runs):
        y = top + ROW * i + 12
        ends = (left, right) if sender == "p" else (right, left)
        meaning = "notes" if kind == "Block" else "ink"
        pieces += [draw.text(WIDTH / 2, y - 11, _said(kind, group), anchor="middle", size=12),
                   draw.arrow(ends[0], y, ends[1], y, meaning)]
    return draw.svg(WIDTH, bottom + 8, "Messages of one handoff, in order: " + "; ".join(
        f"{'prefill' if sender == 'p' else 'decode'} sends {_said(kind, group)}"
        for kind, sender, group in runs) + ".", *pieces)


def _said(kind: str, group: Sequence[Sent]) -> str:
    size = sum(len(sent.data) for sent in group)
    message = unpack(group[0].data)
    if isinstance(message, Read):
        count = sum(len(unpack(sent.data).keys) for sent in group)
        return f"Read: {count} blocks, please ({size:,} B)"
    if isinstance(message, Block):
        return f"{len(group)} x Block ({size:,} B)"
    return f"{kind} ({size:,} B)" if len(group) == 1 else f"{len(group)} x {kind} ({size:,} B)"


# --- layer by layer ----------------------------------------------------------------------------


def overlap_drawing(layers: int = 4, load_s: float = 3, compute_s: float = 2) -> draw.Drawing:
    """Loading and computing layers, in turn and overlapped, to one scale of time (modelled)."""
    total = cost.in_turn_seconds(layers, load_s, compute_s)
    scale, done = WIDTH / total, cost.overlapped_seconds(layers, load_s, compute_s)
    pieces = [draw.text(0, 10, f"in turn: {total:g}", bold=True),
              draw.text(0, 84, f"overlapped: {done:g}", bold=True)]
    for i in range(layers):
        ready = (i + 1) * load_s
        starts = max(ready, load_s + i * max(load_s, compute_s))
        for x, y, width, name, meaning in (
                (i * load_s, 24, load_s, f"load {i}", "notes"),
                (layers * load_s + i * compute_s, 24, compute_s, f"{i}", "decode"),
                (i * load_s, 98, load_s, f"load {i}", "notes"),
                (starts, 128, compute_s, f"{i}", "decode")):
            pieces += [draw.shade(scale * x, y, scale * width - 2, 26, meaning, 0.25,
                                  edge=meaning),
                       draw.text(scale * (x + width / 2) - 1, y + 13, name, anchor="middle",
                                 size=12)]
    pieces.append(draw.legend(176, [("notes", "a layer travels"), ("decode", "it is computed")]))
    return draw.svg(WIDTH, 188, f"Modelled: {layers} layers that take {load_s:g} to load and "
                    f"{compute_s:g} to compute take {total:g} in turn, and {done:g} if a layer is "
                    "computed while the next is underway.", *pieces)


LINK_BYTES_PER_S = 400e9 / 8            # 400 Gb/s, what one network card gives
# name, bytes of notes a token, bytes besides: claims S39 and P-DI14 (twice: the windows of all 40
# layers), P-IS01, P-IS03
TRAVELLERS = (("V4.1-Flash", 890, 2_830_080), ("DeepSeek-V3", 70_272, 0),
              ("Llama-405B", 516_096, 0))


def travel_ms(num_tokens: int) -> dict[str, float]:
    """Equation 12.1 for three models over one 400 Gb/s link."""
    return {name: 1e3 * cost.handoff_seconds(num_tokens, each, LINK_BYTES_PER_S, besides)
            for name, each, besides in TRAVELLERS}


def travel_figure(num_bytes: int, seconds: float) -> Figure:
    """How long 100,000 tokens' notes travel (modelled), and the toy's own handoff (measured)."""
    sizes = [Size(f"{name}, 100,000 tokens: {ms:,.1f} ms", ms, "notes", "modelled")
             for name, ms in travel_ms(100_000).items()]
    sizes.append(Size(f"the toy here, {num_bytes / 1e6:.1f} MB: {1e3 * seconds:.0f} ms",
                      1e3 * seconds, "notes", "measured"))
    fig, ax = compare_sizes(sizes, "ms", (0.005, 2e4), "Small notes make a far reader thinkable",
                            height=3.6)
    ax.set_xticks([0.1, 1, 10, 100, 1_000], ["0.1", "1", "10", "100", "1,000"])
    key(ax, "modelled", "measured", loc="lower left")
    return Figure(fig, "How long notes travel: modelled over 400 Gb/s, the toy's measured on this "
                       "machine: " + "; ".join(size.words for size in sizes) + ".")


# --- how many read, how many write -------------------------------------------------------------

CHIPS = 16
READS_PER_S = 20_000            # tokens of prompts, by a chip that only reads (assumed)
STEP_MS, EACH_MS = 10, 0.05     # a step of B answers takes STEP_MS + EACH_MS x B (assumed)
MOST_ANSWERS = 128              # side by side on one chip: its memory is full (assumed)


def reads_per_chip(prompt: int, wait_s: float) -> float:
    """Requests/s that one chip can read so that the mean time to the first token meets the goal.

    Arrivals at random, equal prompts (queue M/D/1): s + s rho / (2 (1 - rho)) = the goal.
    """
    service = prompt / READS_PER_S
    room = wait_s - service
    return 0.0 if room <= 0 else 2 * room / (service + 2 * room) / service


def writes_per_chip(answer: int, gap_ms: int) -> float:
    """Requests/s that one chip can write with no gap above the goal."""
    together = max(0, min(MOST_ANSWERS, int((gap_ms - STEP_MS) / EACH_MS)))
    return 1e3 * together / (STEP_MS + EACH_MS * together) / answer


def ratio(readers: int, prompt: int, answer: int, wait_s: float, gap_ms: int) -> dict:
    """What `readers` of the chips and the rest of them achieve together under both goals."""
    splits = range(1, CHIPS)
    read = [n * reads_per_chip(prompt, wait_s) for n in splits]
    write = [(CHIPS - n) * writes_per_chip(answer, gap_ms) for n in splits]
    both = [min(pair) for pair in zip(read, write, strict=True)]
    best = both.index(max(both))
    here = readers - 1
    side = "reading" if read[here] < write[here] else "writing"
    share = f"{best + 1} to {CHIPS - best - 1}" if both[best] else "none"
    return {"read": read, "write": write, "both": both, "now": both[here], "share": share,
            "writers": CHIPS - readers, "side": side, "best": both[best],
            "best_readers": best + 1}


RATIO_JS = """({readers, prompt, answer, wait_s, gap_ms},
               {chips, reads_per_s, step_ms, each_ms, most}) => {
  const service = prompt / reads_per_s, room = wait_s - service;
  const reads = room <= 0 ? 0 : 2 * room / (service + 2 * room) / service;
  const together = Math.max(0, Math.min(most, Math.trunc((gap_ms - step_ms) / each_ms)));
  const writes = 1e3 * together / (step_ms + each_ms * together) / answer;
  const read = [], write = [], both = [];
  for (let n = 1; n < chips; n++) {
    read.push(n * reads); write.push((chips - n) * writes);
    both.push(Math.min(n * reads, (chips - n) * writes));
  }
  const best = both.indexOf(Math.max(...both)), here = readers - 1;
  const share = both[best] > 0 ? (best + 1) + " to " + (chips - best - 1) : "none";
  return {read, write, both, now: both[here], share, writers: chips - readers,
          side: read[here] < write[here] ? "reading" : "writing", best: both[best],
          best_readers: best + 1};
}"""


def ratio_figure() -> Explorable:
    """Share 16 chips between reading and writing, under two goals."""
    splits = list(range(1, CHIPS))
    return Explorable(
        alt="Requests a second that meet both goals rise with every chip that reads until writing "
            "is the limit, then fall; where the top lies depends on the traffic and on both goals",
        twin=ratio, compute=RATIO_JS,
        data={"chips": CHIPS, "reads_per_s": READS_PER_S, "step_ms": STEP_MS, "each_ms": EACH_MS,
              "most": MOST_ANSWERS},
        controls=[Slider("readers", "chips that read", splits, start=4),
                  Slider("prompt", "tokens in a prompt", [1_000, 2_000, 4_000, 8_000],
                         start=2_000),
                  Slider("answer", "tokens in an answer", [500, 1_000, 2_000, 4_000], start=500),
                  Slider("wait_s", "first token within", [0.15, 0.3, 0.5, 1, 2], start=1,
                         unit=" s"),
                  Slider("gap_ms", "next token within", [11, 12, 13, 15, 20], start=15,
                         unit=" ms")],
        says="{readers} chips read and {writers} write: {now} requests a second meet both goals, "
             "and {side} is the limit. Best share: {share} ({best}).",
        names={"read": "readers' limit, requests/s", "write": "writers' limit, requests/s",
               "both": "goodput, requests/s", "now": "goodput of this share",
               "share": "the best share", "writers": "chips that write", "side": "the limit",
               "best": "best goodput"},
        picture=[
            Numbers([("{now}", "requests/s within both goals"),
                     ("{share}", "the best share"),
                     ("{best}", "requests/s with that")]),
            Lines("Goodput of 16 chips, by how many of them read",
                  Axis("chips that read", 0, CHIPS), Axis("requests/s", 0, 240),
                  [Line(splits, "read", "reading allows", "prefill", at=12, dots=False),
                   Line(splits, "write", "writing allows", "decode", at=2, dots=False),
                   Line(splits, "both", "both", "notes", at=8, dy=16),
                   Line("readers", "now", "{now}", "failure", dy=-14)])])
