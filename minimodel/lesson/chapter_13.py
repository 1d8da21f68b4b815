"""Chapter 13: experts on several ranks: who sends whom what, bytes by width, balance, wires."""

import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

from ..cluster.balance import Placement, in_order, place_experts
from ..model import corpus
from ..simulate import cost
from . import draw
from .draw import WIDTH
from .explorable import Axis, Choice, Explorable, Line, Lines, Numbers, Slider
from .facts import find
from .figures import Figure, direct_label, figure, finding, key, measured, modelled, reported

# --- workers ---------------------------------------------------------------------------------


def half_of_experts(rank: int) -> Callable:
    """What a new process needs by hand: one half of the experts of the toy's last layer.

    Gives a function: rows [n, hidden], and the expert that each should visit, to their results.
    """
    import torch

    from ..model import checkpoint

    experts = checkpoint.load().layers[-1].mlp.experts
    mine = slice(8 * rank, 8 * rank + 8)
    experts.gate_up_proj.data = experts.gate_up_proj.data[mine].clone()
    experts.down_proj.data = experts.down_proj.data[mine].clone()

    @torch.no_grad()
    def run_local(rows, which):
        done = torch.empty_like(rows)
        for expert in which.unique().tolist():
            if expert // 8 != rank:
                raise ValueError(f"expert {expert} is not on rank {rank}: it holds {8 * rank} to "
                                 f"{8 * rank + 7}")
            here = which == expert
            done[here] = experts.run(expert - 8 * rank, rows[here])
        return done
    return run_local


def engine():
    """The toy in an engine of its own, with room for a batch of prompts in one step."""
    import torch

    from ..cache.paged import PagedCache
    from ..engine.engine import Engine
    from ..engine.scheduler import Limits
    from ..model import checkpoint

    torch.set_grad_enabled(False)
    model = checkpoint.load()
    return Engine(model, PagedCache(model.config, 300), Limits(max_tokens_per_step=1 << 14))


COUNTED = ("rows_sent", "bytes_sent", "rows_run", "expert_bytes", "communicating_s")


def traffic_of(runs: Sequence) -> dict[str, float]:
    """What a rank's expert layers have done so far, all together, and the time now."""
    sums = {name: sum(getattr(run.traffic, name) for run in runs) for name in COUNTED}
    return {**sums, "seconds": time.perf_counter()}


def counts_of(runs: Sequence) -> dict[str, list]:
    """By layer: the rows that a rank has run, and how often its own tokens chose each expert."""
    return {"rows": [run.traffic.rows_run for run in runs],
            "chosen": [list(run.traffic.chosen) for run in runs]}


def per_step(before: Mapping, runs: Sequence, num_steps: int) -> dict[str, float]:
    """What was done since an earlier look at the traffic, for each step."""
    after = traffic_of(runs)
    return {name: (after[name] - before[name]) / num_steps for name in before}


# --- the same tokens -------------------------------------------------------------------------

TIE = 1e-3          # logits that differ by less count as equally good


def same_tokens(model, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[int]],
                expected: Sequence[Sequence[int]]) -> int:
    """How many tokens of the answers are the expected ones, each up to the first that is not.

    Sums in another order move logits by their last digits, so two answers may part where `model`
    finds two tokens equally good, and only there: anywhere else this is an AssertionError.
    """
    return sum(_same_up_to_a_tie(model, *texts)
               for texts in zip(prompts, found, expected, strict=True))


def _same_up_to_a_tie(model, prompt, found, expected) -> int:
    import torch

    pairs = zip(found, expected, strict=True)
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        return len(expected)
    read = torch.tensor([[*prompt, *expected[:at]]])
    logits = model.logits_everywhere(read)[0, -1]
    apart = (logits[expected[at]] - logits[found[at]]).abs().item()
    if apart > TIE:
        raise AssertionError(f"token {at} of an answer is {found[at]}, not {expected[at]}, though "
                             f"their logits are {apart:.3g} apart")
    return at


# --- texts -----------------------------------------------------------------------------------

STRANGERS = ("dialogue", "records", "copying", "story", "sums", "code", "echo")


def texts_of(kind: str, count: int = 4, length: int = 600) -> list[list[int]]:
    """Fresh texts of one of the kinds that the toy was trained on."""
    return [corpus.DOMAINS[kind](Random(f"chapter 13/{kind}/{i}"), length).ids
            for i in range(count)]


def strangers() -> list[list[int]]:
    """Seven prompts, each of another kind, none of them a town notebook."""
    return [texts_of(kind, count=1)[0][:200 + 10 * i] for i, kind in enumerate(STRANGERS)]


# --- who sends whom ----------------------------------------------------------------------------


def exchange_drawing(held: Sequence[int], counts: Sequence[Sequence[int]]) -> draw.Drawing:
    """Two ranks with their rows, two halves of the experts, and the pairs that go between them."""
    left, middle, right, tall = 0, 165, 330, 46
    ys = (28, 148)
    pieces = [draw.text(left, 8, "rows", bold=True), draw.text(middle, 8, "experts", bold=True),
              draw.text(right, 8, "rows again", bold=True)]
    for rank, y in enumerate(ys):
        words = f"rank {rank}: {held[rank]:,}"
        pieces += [draw.shade(left, y, 90, tall, "prefill", 0.2, edge="prefill"),
                   draw.text(left + 45, y + tall / 2, words, anchor="middle", size=12),
                   draw.shade(middle, y, 90, tall, "expert", 0.25, edge="expert"),
                   draw.text(middle + 45, y + tall / 2, f"{8 * rank} to {8 * rank + 7}",
                             anchor="middle", size=12),
                   draw.shade(right, y, 90, tall, "prefill", 0.2, edge="prefill"),
                   draw.text(right + 45, y + tall / 2, words, anchor="middle", size=12)]
    for sender, its in enumerate(counts):
        for receiver, number in enumerate(its):
            pieces += _there_and_back(ys[sender] + 23, ys[receiver] + 23, number)
    pieces += [draw.text(127, 218, "dispatch", anchor="middle", bold=True),
               draw.text(293, 218, "combine", anchor="middle", bold=True)]
    travelling = sum(number for sender, its in enumerate(counts)
                     for receiver, number in enumerate(its) if sender != receiver)
    total = sum(map(sum, counts))
    return draw.svg(WIDTH, 228, "Rows go to the rank that holds their expert, and back: "
                    + "; ".join(f"rank {sender} sends {its[0]:,} to experts 0 to 7 and {its[1]:,} "
                                "to experts 8 to 15" for sender, its in enumerate(counts))
                    + f". {travelling:,} of {total:,} travel to the other rank.", *pieces)


def _there_and_back(y1: float, y2: float, number: int) -> list[str]:
    """Two arrows, out and home; the number stands beside the start, away from where they cross."""
    if y1 == y2:
        x, y, anchor, meaning = 127, y1 - 10, "middle", "muted"
    else:
        x, y, anchor, meaning = 108, y1 + (42 if y2 > y1 else -42), "end", "prefill"
    return [draw.arrow(92, y1, 163, y2, meaning), draw.arrow(257, y2, 328, y1, meaning),
            draw.text(x, y, f"{number:,}", anchor=anchor, size=12)]


# --- bytes by width ------------------------------------------------------------------------------

TOY_LAYERS, TOY_EXPERTS, TOY_CHOICES, TOY_HIDDEN, TOY_EXPERT_BYTES = 3, 16, 2, 128, 98_304


def expected_expert_bytes(tokens: int, width: int) -> float:
    """E5 for the toy: a rank's part of the experts that a step of so many tokens touches."""
    touched = cost.expected_distinct_experts(TOY_EXPERTS, TOY_CHOICES, tokens)
    return cost.expert_bytes_per_step(TOY_LAYERS, touched, width, TOY_EXPERT_BYTES)


def expected_sent_bytes(tokens: int, width: int) -> float:
    """E6 for the toy: rows that one of `width` ranks sends in a step, there and back."""
    away = TOY_CHOICES * (1 - 1 / width)
    each = cost.all_to_all_bytes(tokens / width, away, TOY_HIDDEN, 4 + 4)
    return TOY_LAYERS * each


def mean(ranks: Sequence[Mapping], name: str) -> float:
    """A count of each step, on average over the ranks."""
    return sum(rank["step"][name] for rank in ranks) / len(ranks)


def bytes_figure(found: Mapping[int, Sequence[Mapping]], tokens: int = 8) -> Figure:
    """Expert weights that a rank reads a step, and rows that it sends, by the number of ranks."""
    fig, axes = figure(5, 6.2, rows=2)
    widths = list(found)
    for ax, name, expected, meaning, words in (
            (axes[0], "expert_bytes", expected_expert_bytes, "expert", "expert weights read"),
            (axes[1], "bytes_sent", expected_sent_bytes, "decode", "rows sent")):
        counted = [mean(found[width], name) / 1e3 for width in widths]
        paper = [expected(tokens, width) / 1e3 for width in widths]
        measured(ax, widths, counted, meaning, f"{words}, counted")
        modelled(ax, widths, paper, meaning, f"{words}, on paper").set_markersize(11)
        ax.set_xticks(widths, [str(width) for width in widths])
        ax.set(xlabel="ranks", ylabel="kB a rank and step", xlim=(0.7, 4.4),
               ylim=(0, 1.15 * max(*counted, *paper)))
        key(ax, "measured", "modelled", loc="upper right" if ax is axes[0] else "lower right")
    share = mean(found[widths[-1]], "expert_bytes") / mean(found[1], "expert_bytes")
    finding(axes[0], f"Of {widths[-1]} ranks, each reads {share:.0%} of the expert weights that "
                     "one reads alone")
    finding(axes[1], "but each sends rows, and one alone sends none")
    return Figure(fig, f"With {widths[-1]} ranks each reads {share:.0%} of the bytes of expert "
                       "weights that one rank alone reads in a step; what a rank sends rises from "
                       "nothing. Dashed, with hollow marks, what equations 13.1 and 13.2 expect.")


# --- balance -------------------------------------------------------------------------------------


def rows_per_rank(placement: Placement, chosen: Sequence[Sequence[int]]) -> list[int]:
    """How many rows every rank runs, by each token's own copy. chosen: [tokens][k]."""
    rows = [0] * len(placement.experts_of)
    for token, experts in enumerate(chosen):
        for expert in experts:
            rows[placement.home(int(expert), token)[0]] += 1
    return rows


def counted_imbalance(placement: Placement, chosen: Sequence[Sequence[int]]) -> float:
    """The fullest rank's rows over the mean (E8), from rows that were counted."""
    rows = rows_per_rank(placement, chosen)
    return max(rows) * len(rows) / sum(rows)


ROW, BAR, LEFT = 27, 18, 48


def placements_drawing(placed: Mapping[str, Placement], load: Sequence[float]) -> draw.Drawing:
    """Under each title the load of each GPU as a bar of its experts; dashed: the mean of all.

    Copies are darker than experts that lie in one place.
    """
    pieces, said, y = [], [], 0.0
    for title, placement in placed.items():
        factor = placement.imbalance(load)
        pieces += [draw.text(0, y + 8, f"{title}: {factor:.2f} times the mean", bold=True),
                   *_bars(placement, load, y + 24)]
        y += 24 + ROW * len(placement.experts_of) + 24
        said.append(f"{title}: the fullest GPU has {factor:.2f} times the mean; " + ", ".join(
            f"GPU {rank} holds {' and '.join(map(str, its))}"
            for rank, its in enumerate(placement.experts_of)))
    return draw.svg(WIDTH, y - 8, ". ".join(said) + ".", *pieces)


def _bars(placement: Placement, load: Sequence[float], top: float) -> list[str]:
    """One bar a GPU, to the scale on which the mean is always as long."""
    loads, pieces = placement.loads(load), []
    scale = (WIDTH - LEFT) / 1.65 / (sum(loads) / len(loads))       # 1.65 means fit
    for rank, experts in enumerate(placement.experts_of):
        y, x = top + ROW * rank, float(LEFT)
        pieces.append(draw.text(0, y + BAR / 2, f"GPU {rank}", size=12))
        for expert in experts:
            width = scale * load[expert] / len(placement.copies_of[expert])
            strength = 0.12 if len(placement.copies_of[expert]) == 1 else 0.45
            pieces.append(draw.shade(x, y, max(1, width - 1), BAR, "expert", strength,
                                     edge="expert"))
            if width > 18:
                pieces.append(draw.text(x + width / 2, y + BAR / 2, expert, anchor="middle",
                                        size=11))
            x += width
    mean_x, bottom = LEFT + (WIDTH - LEFT) / 1.65, top + ROW * len(loads)
    return [*pieces, draw.line(mean_x, top - 4, mean_x, bottom - 4, "ink", dashed=True)]


def arrangements(mixed: Sequence[float], own: Sequence[float]) -> dict[str, Placement]:
    """Four ways to place a layer's experts on four ranks, for traffic whose loads are `own`."""
    return {"in order": in_order(len(own), 4),
            "placed for mixed text": place_experts(mixed, 4),
            "placed for what comes": place_experts(own, 4),
            "and four copies": place_experts(own, 4, redundant=4)}


def balance_figure(mixed, sums) -> Figure:
    """The worst layer's imbalance on four ranks, by the placement, for mixed text and for sums.

    mixed, sums: choices of the experts, [layers, tokens, k]
    """
    found = imbalances(mixed, sums)
    fig, ax = figure(5, 4.2)
    names = list(found["sums"])
    places = range(len(names))
    for kind, meaning, dx in (("sums", "failure", 12), ("mixed text", "prefill", -12)):
        values = [found[kind][name] for name in names]
        measured(ax, values, places, meaning, kind)
        ax.lines[-1].set_linestyle("")
        for value, y in zip(values, places, strict=True):
            direct_label(ax, value, y, f"{value:.2f}", meaning, dx=dx)
    ax.set_yticks(places, [name.replace(" for", "\nfor") for name in names])
    ax.set(xlabel="rows of the fullest rank, mean = 1", xlim=(0.8, None), ylim=(3.5, -0.9))
    right = max(found["sums"].values())
    ax.set_xlim(0.75, right + 0.35)
    direct_label(ax, found["sums"]["in order"], 0, "only sums", "failure", dx=0, dy=17)
    direct_label(ax, found["mixed text"]["in order"], 0, "mixed", "prefill", dx=0, dy=17)
    before, after = found["sums"]["in order"], found["sums"]["and four copies"]
    finding(ax, f"Traffic of one kind: {before:.2f} times the mean in order, {after:.2f} with four "
                "copies")
    key(ax, "measured", loc="lower right")
    return Figure(fig, "Counted rows of the fullest of four ranks over the mean, worst of three "
                       "layers. " + " ".join(
                           f"{kind}: " + ", ".join(f"{name} {value:.2f}" for name, value
                                                   in values.items()) + "."
                           for kind, values in found.items()))


def imbalances(mixed, sums) -> dict[str, dict[str, float]]:
    """The worst layer's counted imbalance: {kind of text: {arrangement: rows over mean}}."""
    found: dict[str, dict[str, float]] = {}
    for kind, chosen in (("sums", sums), ("mixed text", mixed)):
        worst: dict[str, float] = {}
        for everything, own in zip(mixed, chosen, strict=True):
            placed = arrangements(loads(everything), loads(own))
            for name, placement in placed.items():
                worst[name] = max(worst.get(name, 0), counted_imbalance(placement, own.tolist()))
        found[kind] = worst
    return found


def loads(chosen) -> list[int]:
    """How many rows each of the toy's experts got. chosen: [tokens, k]."""
    return chosen.flatten().bincount(minlength=TOY_EXPERTS).tolist()


# --- how wide ------------------------------------------------------------------------------------

# layers, experts, k, hidden, bytes of an expert, bytes of a number there and back. V4.1-Flash:
# claims P-V404, P-V406, P-V407, P-V412; out in FP8 and back in BF16 as in P-OI17, assumed for it.
MODELS = {"V4.1-Flash": (40, 384, 6, 5120, 18.8e6, 3),
          "the toy": (TOY_LAYERS, TOY_EXPERTS, TOY_CHOICES, TOY_HIDDEN, TOY_EXPERT_BYTES, 8)}
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
MEMORY_BYTES_PER_S = 8e12           # of a B200: claim P-HW06


def spread(model: str, width: int, per_chip: int, wire: int) -> dict:
    """E5 and E6: what each of `width` chips reads and sends in a step, and at all other widths.

    wire: what a chip sends a second, in GB. A group has no more chips than a layer has experts.
    """
    layers, experts, k, hidden, expert_bytes, there_and_back = MODELS[model]
    chips = min(width, experts)
    def read_mb(n: int) -> float:
        touched = cost.expected_distinct_experts(experts, k, n * per_chip)
        return cost.expert_bytes_per_step(layers, touched, n, expert_bytes) / 1e6

    def sent_mb(n: int) -> float:
        away = k * (1 - 1 / n)
        return layers * cost.all_to_all_bytes(per_chip, away, hidden, there_and_back) / 1e6

    widths = [n for n in WIDTHS if n <= experts]
    read, sent = read_mb(chips), sent_mb(chips)
    return {"chips": chips, "widths": widths, "read": [read_mb(n) for n in widths],
            "several": widths[1:], "sent": [sent_mb(n) for n in widths[1:]],
            "read_now": read, "sent_now": sent,
            "rows": cost.rows_per_expert(chips * per_chip, k, experts),
            "read_ms": 1e3 * cost.transfer_seconds(1e6 * read, MEMORY_BYTES_PER_S),
            "sent_ms": 1e3 * cost.transfer_seconds(1e6 * sent, 1e9 * wire)}


SPREAD_JS = """({model, width, per_chip, wire}, {models, widths: all, memory}) => {
  const [layers, experts, k, hidden, bytes, there_and_back] = models[model];
  const chips = Math.min(width, experts);
  const widths = all.filter(n => n <= experts), several = widths.slice(1);
  const read_mb = n => layers * experts * (1 - Math.pow(1 - k / experts, n * per_chip)) / n
                       * bytes / 1e6;
  const sent_mb = n => layers * per_chip * k * (1 - 1 / n) * hidden * there_and_back / 1e6;
  const read_now = read_mb(chips), sent_now = sent_mb(chips);
  return {chips, widths, read: widths.map(read_mb), several, sent: several.map(sent_mb),
          read_now, sent_now, rows: chips * per_chip * k / experts,
          read_ms: 1e3 * 1e6 * read_now / memory, sent_ms: 1e3 * 1e6 * sent_now / (1e9 * wire)};
}"""


def spread_figure() -> Explorable:
    """Bytes that a chip reads and sends in a step, by the number of chips."""
    return Explorable(
        alt="The more chips share the experts, the fewer bytes of their weights each reads in a "
            "step and the more rows share them; what each sends soon stops growing",
        twin=spread, compute=SPREAD_JS,
        data={"models": MODELS, "widths": WIDTHS, "memory": MEMORY_BYTES_PER_S},
        controls=[Choice("model", "model", list(MODELS), start="V4.1-Flash"),
                  Slider("width", "chips in the group (of the toy: at most 16)", WIDTHS, start=8),
                  Slider("per_chip", "requests on each chip", [1, 2, 4, 8, 16, 32, 64, 128, 256],
                         start=64),
                  Choice("wire", "a chip sends", {50: "50 GB/s", 900: "900 GB/s"}, start=900)],
        says="{chips} chips with {per_chip} requests each: a chip reads {read_now} MB of expert "
             "weights a step ({read_ms} ms) and sends {sent_now} MB ({sent_ms} ms); {rows} rows "
             "share an expert.",
        names={"chips": "chips in this group", "widths": "chips", "several": "chips, if several",
               "read": "reads, MB", "sent": "sends, MB", "rows": "rows an expert",
               "read_now": "reads now, MB", "sent_now": "sends now, MB",
               "read_ms": "reading, ms", "sent_ms": "sending, ms"},
        picture=[
            Numbers([("{read_now}", "MB of expert weights a chip reads a step"),
                     ("{read_ms}", "ms for that, at 8 TB/s"),
                     ("{rows}", "rows share an expert"),
                     ("{sent_now}", "MB a chip sends a step"),
                     ("{sent_ms}", "ms for that")]),
            Lines("Of {chips} chips, each reads {read_now} MB a step and sends {sent_now} MB",
                  Axis("chips in the group", 1, 128, log=True),
                  Axis("MB", 0.001, 1_000_000, log=True),
                  [Line("widths", "read", "expert weights", "expert", at=1, dy=-14),
                   Line("several", "sent", "rows sent", "decode", at=1, dy=20),
                   Line("chips", "read_now", "", "failure"),
                   Line("chips", "sent_now", "", "failure")])])


# --- the wires at scale ------------------------------------------------------------------------

DEEPEP = {"P-EP01": 8, "P-EP02": 16, "P-EP03": 32, "P-EP04": 64, "P-EP05": 128, "P-EP06": 256}


def deepep_us() -> dict[int, tuple[float, float]]:
    """By the number of GPUs: microseconds of DeepEP's dispatch and combine, as reported."""
    found = {}
    for id, width in DEEPEP.items():
        out, back = find(id).value.split(";")
        found[width] = (float(out.split("/")[0]), float(back.split("/")[0]))
    return found


def on_paper_us() -> tuple[float, float]:
    """Equation 13.2 for DeepEP's test, at the 50 GB/s of a 400 Gb/s card: out in FP8, back BF16."""
    return tuple(1e6 * cost.transfer_seconds(cost.all_to_all_bytes(128, 8, 7168, size), 50e9)
                 for size in (1, 2))


def deepep_figure() -> Figure:
    """DeepEP's own times by the number of GPUs, and equation 13.2's for its test."""
    fig, ax = figure(5, 4)
    times, paper = deepep_us(), on_paper_us()
    widths = list(times)
    for way, name, meaning in ((0, "dispatch", "decode"), (1, "combine", "expert")):
        for width in widths:
            value = times[width][way]
            reported(ax, width, value, meaning, f"{value:.0f}")
            if width > widths[0]:           # above the mark, or below where a line is in the way
                above = abs(value + 22 - paper[way]) > 14
                ax.texts[-1].set(position=(0, 12 if above else -12), ha="center")
        modelled(ax, [widths[0], widths[-1]], [paper[way]] * 2, meaning, f"{name} on paper")
        direct_label(ax, widths[-1], times[widths[-1]][way], name, meaning, dx=0, dy=28)
    ax.set_xscale("log", base=2)
    ax.set_xticks(widths, [str(width) for width in widths])
    ax.minorticks_off()
    ax.set(xlabel="GPUs in the group", ylabel="µs, one layer", ylim=(0, 450), xlim=(6.4, 330))
    out, home = (times[widths[-1]][way] / times[widths[0]][way] for way in (0, 1))
    finding(ax, f"From 8 to 256 GPUs, rows take {out:.1f} times as long out, {home:.1f} times back")
    key(ax, "reported", "modelled", loc="upper left")
    return Figure(fig, "DeepEP's reported times for 128 tokens: dispatch rises from "
                       f"{times[8][0]:.0f} to {times[256][0]:.0f} µs between 8 and 256 GPUs, "
                       f"combine from {times[8][1]:.0f} to {times[256][1]:.0f}; on paper, over "
                       f"50 GB/s, {paper[0]:.0f} and {paper[1]:.0f} µs. Up to 16 GPUs the reports "
                       "lie below the paper, from 64 on above it.")
