"""What chapter 04 shows: texts with their loss weights, runs as curves, a model at several ages.

`minimodel/data/training` holds what was recorded for it; `benchmarks/small_run.py` and
`benchmarks/recall_sweep.py` made these records and make them again.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ..engine.recall import Recall
from ..model.corpus import Document
from ..model.train import Recipe
from ..tokenizer import SPECIAL_TOKENS, decode
from . import draw, palette
from .ages import ANSWER
from .draw import WIDTH
from .figures import Figure, direct_label, figure, finding, key, measured, modelled
from .markup import Fragment, escape, in_notebook, present
from .progress import QUIET
from .stepper import Stepper
from .town import RED_DOOR

DATA = Path(__file__).parent.parent / "data"


# --- what was recorded ---------------------------------------------------------------------


def recorded(name: str) -> list[dict]:
    """The lines of a record in `minimodel/data`, such as "toy/training_log"."""
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- texts and their loss weights ----------------------------------------------------------

_SHADES = ((3.0, 42), (1.0, 28), (0.4, 16), (0.1, 7), (0.0, 0))     # weight from, percent of colour
_CSS = (
    ".ss-texts dt{font-weight:650;margin-top:.7rem}.ss-texts dd{margin:.1rem 0 0;max-width:46rem;"
    "font:.86em/1.7 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}"
    ".ss-texts span{padding:.12em 0;border-radius:2px}"
    ".ss-texts b{border-bottom:2px solid var(--ss-decode,#d27119)}"
    + "".join(f".ss-w{percent}{{background:color-mix(in srgb,var(--ss-decode,#d27119) {percent}%,"
              "transparent)}" for _, percent in _SHADES)
)
_LEGEND = (("0", 0), ("0.15 to 0.2", 7), ("0.4 to 0.9", 16), ("1", 28), ("3", 42))


def weighted_texts(documents: Mapping[str, Document], most: int = 5) -> Fragment:
    """The first lines of documents, each byte on a ground as strong as its loss weight."""
    key = " ".join(f'<span class="ss-w{percent}"> {words} </span>' for words, percent in _LEGEND)
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{_shaded(document, _lines(document, most))}</dd>"
                   for name, document in documents.items())
    text = "\n".join(f"{name}: {_readable(document.ids[:_lines(document, most)])!r}"
                     for name, document in documents.items())
    return Fragment(f"<style>{palette.css_for(_CSS)}{_CSS}</style>"
                    f'<dl class="ss-texts"><dt>loss weight</dt><dd>{key}</dd>{rows}</dl>', text)


def _lines(document: Document, most: int) -> int:
    """How many tokens the first lines of a document have."""
    ends = [place for place, token in enumerate(document.ids) if token == ord("\n")]
    return ends[most - 1] if len(ends) >= most else len(document)


def _readable(ids: Sequence[int]) -> str:
    """Text with its marks written out: the start of a text, the turns of a dialogue."""
    return "".join(decode([i]) if i < 256 else SPECIAL_TOKENS[i - 256] for i in ids)


def _shaded(document: Document, count: int) -> str:
    """Runs of equal weight as spans; values are underlined too, for colour alone tells nobody."""
    runs: list[tuple[float, list[int]]] = []
    for token, weight in list(zip(document.ids, document.weights, strict=True))[:count]:
        if not runs or runs[-1][0] != weight:
            runs.append((weight, []))
        runs[-1][1].append(token)
    pieces = []
    for weight, ids in runs:
        percent = next(percent for least, percent in _SHADES if weight >= least)
        tag = "b" if weight >= 3 else "span"
        pieces.append(f'<{tag} class="ss-w{percent}">{escape(_readable(ids))}</{tag}>')
    return "".join(pieces) + (" ..." if len(document) > count + 1 else "")


def teacher_forcing(text: str, weights: Sequence[float]) -> draw.Drawing:
    """Every place of a row reads one byte and is asked for the next one, all in one forward."""
    signs = draw.marks(text)
    if len(weights) != len(signs) - 1:
        raise ValueError(f"{len(weights)} weights do not fit {len(signs)} tokens: give one for "
                         f"each but the first, {len(signs) - 1}")
    step = min(40.0, (WIDTH - 64) / len(weights))
    pieces = [draw.text(0, 20, "reads"), draw.text(0, 84, "is asked"), draw.text(0, 122, "weight")]
    for i, (read, asked, weight) in enumerate(zip(signs, signs[1:], weights, strict=False)):
        x, middle = 64 + i * step, 64 + i * step + (step - 4) / 2
        pieces += [
            draw.shade(x, 6, step - 4, 28, "prefill", 0.2, edge="prefill"),
            draw.text(middle, 20, read, anchor="middle", bold=True),
            draw.arrow(middle, 38, middle, 66),
            draw.shade(x, 70, step - 4, 28, "decode", 0.5 * min(1, weight), edge="decode"),
            draw.text(middle, 84, asked, anchor="middle", bold=True),
            draw.text(middle, 122, f"{weight:g}", "muted", anchor="middle", size=12),
        ]
    return draw.svg(
        WIDTH, 134,
        f"{len(weights)} places of a row. Each reads one byte and all before it, and is asked for "
        "the byte that follows; the right byte then comes in at the next place, whatever the "
        "model said. Strings count from their repetition on.", *pieces)


# --- one step ------------------------------------------------------------------------------


def stretch_figure(before: Sequence[float], after: Sequence[float]) -> Figure:
    """Singular values of a gradient, largest first, before and after it is made orthogonal."""
    fig, ax = figure(5, 3.2)
    places = range(1, len(before) + 1)
    middle = len(before) // 2
    for values, meaning, words, dy in ((before, "ink", "the gradient", 14),
                                       (after, "prefill", "after five steps", 14)):
        measured(ax, places, values, meaning, words).set_markersize(3)
        direct_label(ax, middle, values[middle - 1], words, meaning, dx=2, dy=dy)
    ax.set_yscale("log")
    ax.set(xlabel="direction, from the strongest to the weakest", ylabel="stretch",
           ylim=(min(before) / 2, 4))
    finding(ax, "Muon gives every direction about the same stretch")
    key(ax, "measured", loc="lower left")
    return Figure(fig, f"The gradient's {len(before)} singular values fall from 1 to "
                       f"{min(before):.1g}; after five steps they lie between {min(after):.2f} "
                       f"and {max(after):.2f}.")


def schedule_figure(recipe: Recipe) -> Figure:
    """The plan of a run: how long its rows are, and the fraction of the full learning rates."""
    fig, (top, bottom) = figure(5, 4.6, rows=2)
    edges, lengths, first = [], [], 0
    for stage in recipe.stages:
        edges += [first, first + stage.steps]
        lengths += [stage.length] * 2
        first += stage.steps
    modelled(top, edges, lengths, "prefill", "row length")
    top.set_yscale("log", base=2)
    sizes = sorted({stage.length for stage in recipe.stages})
    top.set_yticks(sizes, [f"{size:,}" for size in sizes])
    top.set(ylabel="tokens in a row", ylim=(sizes[0] / 1.5, sizes[-1] * 1.5))
    finding(top, f"The plan: short rows first, and a rate that fades ({first:,} steps)")
    steps = sorted({0, recipe.warmup_steps, *edges[1:], *(e - 1 for e in edges[1::2])} - {first})
    modelled(bottom, steps, [100 * recipe.at(step)[1] for step in steps], "decode", "rate")
    bottom.set(xlabel="step", ylabel="% of the full rates", ylim=(0, None))
    key(bottom, "modelled", loc="lower left")
    return Figure(fig, "Rows grow from " + " to ".join(f"{size:,}" for size in sizes) + " tokens; "
                       "the learning rates are full at first and end at "
                       f"{100 * recipe.at(first - 1)[1]:.0f} %.")


# --- a run, live ---------------------------------------------------------------------------


def smoothed(rows: Sequence[Mapping], name: str, width: int = 10) -> tuple[list, list]:
    """Means of `width` steps each, of those that measured `name`; and the step each ends at."""
    steps, means = [], []
    for end in range(width, len(rows) + 1, width):
        seen = [row[name] for row in rows[end - width:end] if row[name] is not None]
        if seen:
            steps.append(rows[end - 1]["step"])
            means.append(sum(seen) / len(seen))
    return steps, means


def run_figure(rows: Sequence[Mapping], recipe: Recipe) -> Figure:
    """Loss and recall of a run as far as it has come."""
    fig, (top, bottom) = figure(5, 4.6, rows=2)
    steps, loss = smoothed(rows, "loss")
    at, recall = smoothed(rows, "recall")
    measured(top, steps, loss, "prefill", "loss").set_markersize(3)
    measured(bottom, at, [100 * r for r in recall], "notes", "values right, %").set_markersize(3)
    first = 0
    for stage in recipe.stages[:-1]:
        first += stage.steps
        for ax in (top, bottom):
            ax.axvline(first, color=palette.COLOURS["muted"].light, linewidth=1)
    top.text(first, 1.0, " notebooks from here", transform=top.get_xaxis_transform(), va="top",
             color=palette.COLOURS["muted"].light)
    top.set(ylabel="loss", xlim=(0, recipe.num_steps), ylim=(0, None))
    bottom.set(xlabel="step", ylabel="values right, %", xlim=(0, recipe.num_steps), ylim=(0, 100))
    finding(top, "First the copying, then the recall: this run" if recall and recall[-1] > 0.1
            else "This run so far: it copies at best, and recalls nothing yet")
    key(top, "measured", loc="lower left")
    return Figure(fig, run_words(rows))


def run_words(rows: Sequence[Mapping]) -> str:
    """What a run has reached, in a sentence."""
    _, loss = smoothed(rows, "loss")
    _, recall = smoothed(rows, "recall")
    words = f"After {len(rows)} steps"
    if loss:
        words += f" the loss has gone from {loss[0]:.2f} to {loss[-1]:.2f}"
    if recall:
        words += f"; of the values in its rows the model wrote {100 * recall[-1]:.0f} % whole"
    return words + "."


class LivePlot:
    """A plot that is drawn again while training goes on; a built page keeps the last one only.

    every_s  seconds between two drawings, so that drawing takes little of the time
    """

    def __init__(self, recipe: Recipe, every_s: float = 4.0,
                 clock: Callable[[], float] = time.monotonic):
        self.recipe, self.every_s, self.clock = recipe, every_s, clock
        self.handle, self.drawn = None, clock()

    def show(self, rows: Sequence[Mapping]) -> None:
        """Draw again, if someone watches and it is time."""
        if not self._someone_watches() or self.clock() - self.drawn < self.every_s:
            return
        self._put(run_figure(rows, self.recipe))
        self.drawn = self.clock()

    def finish(self, rows: Sequence[Mapping]) -> None:
        """Draw for the last time."""
        self._put(run_figure(rows, self.recipe))

    def _someone_watches(self) -> bool:
        return in_notebook() and not os.environ.get(QUIET)

    def _put(self, drawing: Figure) -> None:
        if not in_notebook():
            present(Fragment("", repr(drawing)))
        elif self.handle:
            self.handle.update(drawing)
        else:
            from IPython.display import display

            self.handle = display(drawing, display_id=True)


# --- runs, recorded ------------------------------------------------------------------------


def appears_figure(log: Sequence[Mapping], until: int = 1600,
                   run: str = "the run that made the shipped toy") -> Figure:
    """The moment recall appears: the loss in the shortest rows, half of them strings that repeat;
    then the values that the run writes whole. `run` says whose log it is.
    """
    log = [line for line in log if line["step"] <= until]
    echo = [line for line in log if line["length"] == log[0]["length"]]
    later = [line for line in log[len(echo):] if line["recall"] is not None]
    fig, (top, bottom) = figure(5, 5, rows=2)
    measured(top, [r["step"] for r in echo], [r["loss"] for r in echo], "prefill",
             "loss in the first, short rows").set_markersize(4)
    measured(bottom, [r["step"] for r in later], [100 * r["recall"] for r in later], "notes",
             "values right, %").set_markersize(4)
    fall = steepest_fall(echo)
    direct_label(top, fall[1]["step"], fall[1]["loss"], "it looks back, and copies", "prefill",
                 dx=12, dy=14)
    top.set(ylabel=f"loss, rows of {log[0]['length']}", xlim=(0, until), ylim=(0, None))
    bottom.set(xlabel="step", ylabel="values right, %", xlim=(0, until), ylim=(0, 100))
    for before, line in pairwise(later):
        if before["length"] != line["length"]:
            _from_here(bottom, before["step"], f"rows of {line['length']}")
    finding(top, "Within some 200 steps it learns to copy; then recall begins")
    key(top, "measured", loc="upper right")
    return Figure(
        fig,
        f"In {run} the loss in rows of {log[0]['length']} falls from "
        f"{echo[0]['loss']:.1f} to {echo[-1]['loss']:.1f}, fastest between steps "
        f"{fall[0]['step']} and {fall[1]['step']}. The values written whole rise from "
        f"{100 * later[0]['recall']:.0f} % at step {later[0]['step']} to "
        f"{100 * later[-1]['recall']:.0f} % at step {later[-1]['step']}, with a dip where the rows "
        "get longer.",
        caption=f"Recorded: the log of {run}. Longer rows hold more facts, so recall dips where "
                "they begin.")


def _from_here(ax, step: int, what: str) -> None:
    """A line where something new begins, and its name."""
    muted = palette.COLOURS["muted"].light
    ax.axvline(step, color=muted, linewidth=1)
    ax.text(step, 1.0, f" {what} from here", transform=ax.get_xaxis_transform(), va="top",
            color=muted)


def steepest_fall(log: Sequence[Mapping]) -> tuple[Mapping, Mapping]:
    """The two neighbouring lines between which the loss fell by the largest share."""
    return max(pairwise(log), key=lambda pair: pair[0]["loss"] / pair[1]["loss"])


def ages_stepper(ages: Sequence[Mapping]) -> Stepper:
    """The same question, answered by the same model at several ages."""
    frames = [_age(ages, place) for place in range(len(ages))]
    labels = [f"step {age['step']:,}: it answers {_one_line(age['answer'])!r}" for age in ages]
    return Stepper(
        frames, labels, "age of the model, in steps",
        "Early answers are random bytes, then strings of common letters; the right code comes only "
        "once a head looks at it in the notebook.")


def _one_line(answer: str) -> str:
    """An answer without what comes after its line, its unprintable bytes as dots."""
    line = answer.strip("\n").split("\n")[0]
    return "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in line)


def _age(ages: Sequence[Mapping], place: int) -> draw.Drawing:
    """One frame: answer, the chance of each right byte, the heads' looks, and the run so far."""
    age, step = ages[place], WIDTH / len(ANSWER)
    pieces = [draw.text(0, 10, "it answers", "muted", size=12),
              _mono(0, 32, _one_line(age["answer"]), 13),
              draw.text(0, 62, "chance it gives to each byte of the right answer", "muted",
                        size=12)]
    for i, (sign, chance) in enumerate(zip(draw.marks(ANSWER), age["chances"],
                                           strict=True)):
        pieces += [draw.shade(i * step, 74, step - 1, 24, "decode", 0.55 * chance, edge="grid"),
                   draw.text((i + 0.5) * step, 86, sign, anchor="middle", size=12)]
    pieces += _looks(124, age["looks"])
    pieces += _so_far(124, ages, place)
    value = age["chances"][-len(RED_DOOR.value) - 1:-1]
    return draw.svg(
        WIDTH, 222, f"At step {age['step']} it answers {_one_line(age['answer'])!r}. It gives the "
        f"digits of the code chances of {', '.join(f'{100 * c:.0f} %' for c in value)}; it copies "
        f"{100 * age['copied']:.0f} % of repeated bytes and recalls "
        f"{100 * age['recalled']:.0f} % of values.", *pieces)


def _mono(x: float, y: float, words: str, size: float) -> str:
    return (f'<text x="{x:g}" y="{y:g}" style="fill:{palette.var("ink")};white-space:pre;'
            f'font:{size:g}px ui-monospace,monospace">{escape(words)}</text>')


def _looks(y: float, looks: Sequence[Sequence[float]]) -> list[str]:
    """A square a head, as strong as its look at the code's first digit."""
    pieces = [draw.text(0, y + 4, "heads that look at the 4", "muted", size=12)]
    for layer, shares in enumerate(looks):
        top = y + 18 + 24 * layer
        pieces.append(draw.text(0, top + 9, f"layer {layer}", size=12))
        pieces += [draw.shade(56 + 24 * head, top, 19, 19, "prefill", min(1, share), edge="muted")
                   for head, share in enumerate(shares)]
    return pieces


def _so_far(y: float, ages: Sequence[Mapping], place: int) -> list[str]:
    """Two lines over all ages, with a mark at this one: copied and recalled."""
    left, right, top, bottom = 200, WIDTH - 8, y + 18, y + 84
    last = ages[-1]["step"]
    pieces = [draw.line(left, bottom, right, bottom, "muted")]
    for name, meaning, x in (("copied", "prefill", left), ("recalled", "notes", left + 108)):
        points = [(left + (right - left) * age["step"] / last,
                   bottom - (bottom - top) * age[name]) for age in ages]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        px, py = points[place]
        pieces += [
            f'<polyline points="{path}" style="fill:none;stroke:{palette.var(meaning)};'
            'stroke-width:2"/>',
            draw.rect(px - 4, py - 4, 8, 8, meaning, radius=4),
            draw.text(x, y + 4, f"{name} {100 * ages[place][name]:.0f} %", meaning, size=12,
                      bold=True),
        ]
    return pieces


# --- recall, measured ----------------------------------------------------------------------


def recall_figure(sweep: Sequence[Mapping], live: Mapping[tuple[int, int], Recall]) -> Figure:
    """Recall by the number of facts, and by length with as many facts: recorded and of this run.

    sweep  lines with facts, bytes, asked, right
    live   {(facts, bytes): Recall}
    """
    fig, (top, bottom) = figure(5, 5.6, rows=2)
    facts, sizes = _varied(sweep)
    _recall_line(top, sweep, live, facts, 0)
    _recall_line(bottom, sweep, live, sizes, 1)
    top.set(xlabel=f"facts in a notebook of {facts[0][1]:,} bytes", ylabel="right, %")
    bottom.set(xlabel=f"bytes of a notebook with {sizes[0][0]} facts", ylabel="right, %")
    finding(top, "More facts cost recall; a longer way to them hardly does")
    table = _recall_table(sweep, live)
    return Figure(
        fig, "Share of values recalled: " + "; ".join(
            f"{f} facts in {b:,} bytes {s:.1f} %" for f, b, s in
            zip(table["facts"], table["bytes"], table["recorded, % right"], strict=True)) + ".",
        table=table)


def _varied(sweep: Sequence[Mapping]) -> tuple[list, list]:
    """The points at the most common size, and those with the most common number of facts."""
    points = [(line["facts"], line["bytes"]) for line in sweep]
    usual_facts, usual_bytes = (max({p[i] for p in points}, key=[p[i] for p in points].count)
                                for i in (0, 1))
    return ([p for p in sorted(points) if p[1] == usual_bytes],
            [p for p in sorted(points) if p[0] == usual_facts])


def _recall_line(ax, sweep, live, points: Sequence[tuple[int, int]], axis: int) -> None:
    lines = {(line["facts"], line["bytes"]): line for line in sweep}
    x = [point[axis] for point in points]
    shares = [100 * lines[p]["right"] / lines[p]["asked"] for p in points]
    measured(ax, x, shares, "notes", "recorded").set_markersize(4)
    for point in points:
        _whiskers(ax, point[axis], Recall("", lines[point]["asked"], lines[point]["right"]),
                  "notes")
    ran = [point for point in points if point in live]
    ax.plot([p[axis] * 1.05 for p in ran], [100 * live[p].share for p in ran], linestyle="",
            marker="o", markersize=7, color=palette.COLOURS["decode"].light)
    for point in ran:
        _whiskers(ax, point[axis] * 1.05, live[point], "decode")
    direct_label(ax, x[0], 40, f"recorded, {lines[points[0]]['asked']} a point", "notes", dx=2)
    if ran:
        direct_label(ax, x[0], 24, f"this run, {live[ran[0]].asked} a point", "decode", dx=2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{value:,}" for value in x])
    ax.minorticks_off()
    ax.set_ylim(0, 104)


def _whiskers(ax, x: float, recall: Recall, meaning: str) -> None:
    """Wilson's interval at 95 %."""
    low, high = recall.interval()
    ax.plot([x, x], [100 * low, 100 * high], color=palette.COLOURS[meaning].light, linewidth=1.5)


def _recall_table(sweep, live) -> dict[str, list]:
    table = {name: [] for name in ("facts", "bytes", "recorded, % right", "recorded, interval",
                                   "this run")}
    for line in sweep:
        recall = Recall("", line["asked"], line["right"])
        now = live.get((line["facts"], line["bytes"]))
        row = (line["facts"], line["bytes"], 100 * recall.share,
               "{:.0%} to {:.0%}".format(*recall.interval()),
               f"{now.right} of {now.asked}" if now else "")
        for column, value in zip(table.values(), row, strict=True):
            column.append(value)
    return table


def cheating_figure(honest: Sequence[float], cheating: Sequence[float], floor: float) -> Figure:
    """Loss on noise, with the causal mask and without it, against what no reader can beat."""
    fig, ax = figure(5, 3.2)
    for losses, meaning, words, share, place in (
            (honest, "prefill", "with the mask", 1, {"dx": -4, "dy": 12}),
            (cheating, "failure", "without the mask", 0.7, {"dx": -12, "dy": -8})):
        rows = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
        steps, means = smoothed(rows, "loss", 5)
        measured(ax, steps, means, meaning, words).set_markersize(3)
        at = round(share * len(steps)) - 1
        direct_label(ax, steps[at], means[at], words, meaning, **place)
    ax.axhline(floor, color=palette.COLOURS["ink"].light, linestyle="--", linewidth=1.5)
    direct_label(ax, len(honest), floor, "nobody beats this", "ink", dx=-4, dy=-10)
    ax.set(xlabel="step", ylabel="loss on noise", xlim=(0, None), ylim=(0, None))
    beaten = cheating[-1] < floor
    finding(ax, "A loss below what noise allows: the model has seen the answers" if beaten
            else "This run so far: no loss is below what noise allows")
    key(ax, "measured", "modelled", loc="upper right")
    return Figure(fig, f"Trained on noise, the loss with the mask ends at {honest[-1]:.2f}, near "
                       f"the floor of {floor:.2f}; without it the loss falls to "
                       f"{cheating[-1]:.2f}{', which no honest reader can reach' * beaten}.")
