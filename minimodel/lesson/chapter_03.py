"""The drawings of chapter 03: a row's way through the experts, who reads what, who is busy."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import NamedTuple

import torch

from ..config import ModelConfig
from ..model import checkpoint
from ..model.batch import Batch
from ..model.transformer import Transformer
from ..tokenizer import START, encode
from . import draw, facts, palette
from .draw import WIDTH
from .explorable import Bar, Bars, Choice, Explorable, Slider, Spans
from .figures import Figure, direct_label, figure, finding, key, measured, modelled, reported
from .markup import escape
from .stepper import Stepper

BYTE_CLASSES = {
    "digits": "0123456789",
    "vowels": "aeiou",
    "consonants": "bcdfghjklmnpqrstvwxyz",
    "capitals": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "spaces": " ",
    "newlines": "\n",
    "other signs": "!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~\\",
}

FAINTEST, STRONGEST = 0.1, 0.4      # fill behind letters: ink stays readable on it in both themes


# --- listening at the gates ------------------------------------------------------------------


class Routes(NamedTuple):
    """Which experts read a text: their weights and numbers, both [layers, tokens, k]."""

    weights: torch.Tensor
    chosen: torch.Tensor


def routes(model: Transformer, ids: Sequence[int]) -> Routes:
    """Read a text and write down what every gate answers for every token.

    Raises ValueError for a model without expert layers, and for an empty text.
    """
    if not model.moe_layers() or not len(ids):
        raise ValueError("nothing to hear: routes needs a model with expert layers and at least "
                         "one token")
    heard = []                              # (weights, chosen) of each gate, in layer order
    hooks = [layer.gate.register_forward_hook(lambda gate, rows, out: heard.append(out))
             for layer in model.moe_layers()]
    try:
        with torch.inference_mode():
            # all logits are wanted, so that no layer skips a row
            model(torch.tensor(ids), Batch(new=[len(ids)], wanted=range(len(ids))))
    finally:
        for hook in hooks:
            hook.remove()
    weights, chosen = zip(*heard, strict=True)
    return Routes(torch.stack(weights), torch.stack(chosen))


def is_of(tokens: torch.Tensor, byte_class: str) -> torch.Tensor:
    """Which tokens are bytes of a class: truth values [tokens]."""
    return torch.isin(tokens, torch.tensor(encode(BYTE_CLASSES[byte_class], start=False)))


# --- one row through a layer -----------------------------------------------------------------


def layer_picture(config: ModelConfig, sign: str, chosen: Sequence[int],
                  weights: Sequence[float]) -> draw.Drawing:
    """How one token's row passes an expert layer, with the experts and weights it really got."""
    places = {expert: _place(expert) for expert in range(config.num_experts)}
    shared = max(y for _, y in places.values()) + 54        # middle of the shared expert's box
    named = ", ".join(f"{expert} ({weight:.0%})"
                      for expert, weight in zip(chosen, weights, strict=True))
    pieces = [
        draw.cells(0, 58, [sign], ["prefill"]),
        draw.text(0, 98, "a row", size=12),
        draw.arrow(28, 71, 50, 71),
        draw.rect(52, 54, 56, 34, "expert", filled=False),
        draw.text(80, 71, "gate", "expert", anchor="middle", bold=True),
        draw.text(126, 10, f"{config.num_experts} experts; run: {named}", bold=True),
        *(draw.line(108, 71, places[expert][0], places[expert][1] + 13, "expert")
          for expert in chosen),
        *(_expert(*place, expert, expert in chosen) for expert, place in places.items()),
        draw.rect(126, shared - 14, 172, 28, "expert"),
        _inside(212, shared, "shared expert: always"),
        draw.line(14, 108, 14, shared, "expert"),
        draw.arrow(14, shared, 124, shared, "expert"),
        draw.line(298, shared, 340, shared),
        draw.line(340, shared, 340, 84),
        draw.line(302, 71, 328, 71),
        draw.rect(328, 59, 24, 24, "ink", filled=False, radius=12),
        draw.text(340, 71, "+", anchor="middle", bold=True),
        draw.arrow(352, 71, 376, 71),
        *(draw.text(378, y, words, size=12)
          for y, words in ((71, "added"), (87, "to the"), (103, "stream"))),
    ]
    return draw.svg(
        WIDTH, shared + 16,
        f"For the byte {sign!r} the gate picks these of {config.num_experts} experts: {named}; the "
        "shared expert runs for every byte; the weighted results are added up.", *pieces)


def _place(expert: int, per_line: int = 4) -> tuple[float, float]:
    """Where an expert's box stands."""
    line, column = divmod(expert, per_line)
    return 126 + 44 * column, 26 + 32 * line


def _expert(x: float, y: float, expert: int, runs: bool) -> str:
    """An expert's box: filled where it runs, an outline (over the gate's lines) where it rests."""
    if runs:
        return draw.rect(x, y, 40, 26, "expert") + _inside(x + 20, y + 13, str(expert))
    return (draw.rect(x, y, 40, 26, "paper") + draw.rect(x, y, 40, 26, "waste", filled=False)
            + draw.text(x + 20, y + 13, expert, "muted", anchor="middle", size=12))


def _inside(x: float, y: float, words: str) -> str:
    """Words in the middle of a box that is filled in the experts' colour."""
    return (f'<text x="{x:g}" y="{y + 4.5:g}" text-anchor="middle" style="fill:'
            f'{palette.inside_var("expert")};font-size:13px;font-weight:650">{words}</text>')


# --- how long the ways to run experts take -----------------------------------------------------


def ways_figure(rows: Sequence[int], times: Mapping[str, Sequence[float]], base: str) -> Figure:
    """Times of several ways as multiples of one of them, against the rows in a step."""
    # colour, and where the label stands: at which point, moved how far
    looks = {"loop over tokens": ("ink", -1, -2, 12), "all experts": ("waste", 0, 14, 12),
             "loop over experts": ("prefill", -1, -2, -36), "batched": ("decode", 0, 14, -12),
             base: ("expert", len(rows) // 2, 0, -12)}
    ratios = {name: [t / b for t, b in zip(times[name], times[base], strict=True)]
              for name in looks}
    fig, ax = figure(5, 3.6)
    for name, (meaning, at, dx, dy) in looks.items():
        measured(ax, rows, ratios[name], meaning, name)
        direct_label(ax, rows[at], ratios[name][at], name, meaning, dx=dx, dy=dy)
    slowest = ratios["loop over tokens"][-1]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.minorticks_off()
    ax.set_xticks(rows, [f"{n:,}" for n in rows])
    ax.set(xlabel="rows in a step", ylabel=f"time, {base} = 1",
           ylim=(0.7 * min(0.6, *map(min, ratios.values())), 3 * slowest))
    finding(ax, "The more rows a step has, the further a loop over tokens falls behind")
    key(ax, "measured", loc="upper left")
    return Figure(fig, f"Measured: with {rows[-1]:,} rows a loop over tokens takes {slowest:.0f} "
                       "times as long as sorting by expert, and running all experts "
                       f"{ratios['all experts'][-1]:.1f} times.")


# --- who reads what ----------------------------------------------------------------------------


def visits_stepper(groups: Mapping[str, torch.Tensor], what: str) -> Stepper:
    """A heat map for each layer: which share of a group's tokens visits which expert.

    groups  {name: shares [layers, experts]}
    what    how the groups are called, such as "kind of byte"
    """
    layers = len(next(iter(groups.values())))
    frames, labels = [], []
    for layer in range(layers):
        rows = {name: shares[layer] for name, shares in groups.items()}
        name, expert, share = _peak(rows)
        labels.append(f"layer {layer + 1}: {share:.0%} of {name} visit expert {expert}")
        frames.append(_map(rows, what, labels[-1]))
    return Stepper(frames, labels, "layer",
                   f"Which experts read which {what}, layer by layer: " + "; ".join(labels) + ".")


def _peak(rows: Mapping[str, torch.Tensor]) -> tuple[str, int, float]:
    """The strongest preference of a map: (group, expert, share)."""
    name = max(rows, key=lambda name: float(rows[name].max()))
    return name, int(rows[name].argmax()), float(rows[name].max())


def _map(rows: Mapping[str, torch.Tensor], what: str, alt: str) -> draw.Drawing:
    left, cell, height = 84, 17, 24
    count = len(next(iter(rows.values())))
    right = left + cell * count + 8
    pieces = [draw.text(0, 8, what, "muted", size=12),
              draw.text(right, 8, "most visited", "muted", size=12)]
    pieces += [draw.text(left + cell * (expert + 0.5), 8, expert, "muted", anchor="middle", size=11)
               for expert in range(count)]
    for line, (name, shares) in enumerate(rows.items()):
        y = 20 + height * line
        pieces.append(draw.text(0, y + height / 2, name))
        pieces += [draw.shade(left + cell * expert, y + 1, cell - 1, height - 2, "expert",
                              float(share), edge="grid") for expert, share in enumerate(shares)]
        pieces.append(draw.text(right, y + height / 2,
                                f"{int(shares.argmax())}: {float(shares.max()):.0%}", size=12))
    return draw.svg(WIDTH + 20, 22 + height * len(rows), alt, *pieces)


# --- a text, coloured by expert ----------------------------------------------------------------


def expert_stepper(text: str, heard: Routes, num_experts: int, layer: int) -> Stepper:
    """The text once for each expert of a layer, busiest first, its bytes filled by weight.

    heard  what the gates said about the bytes of `text`, without a start token
    layer  1 is the first layer with experts
    """
    if not 1 <= layer <= len(heard.chosen):
        raise ValueError(f"there is no expert layer {layer}: choose 1 to {len(heard.chosen)}")
    if heard.chosen.shape[1] != len(text):
        raise ValueError(f"{heard.chosen.shape[1]} tokens do not fit {len(text)} bytes: leave the "
                         "start token out")
    weights, chosen = heard.weights[layer - 1], heard.chosen[layer - 1]
    loads = chosen.flatten().bincount(minlength=num_experts)
    frames, labels = [], []
    for expert in loads.argsort(descending=True, stable=True).tolist():
        mine = (weights * (chosen == expert)).sum(-1).tolist()
        read = [byte for byte, weight in zip(text, mine, strict=True) if weight > 0]
        labels.append(f"expert {expert} of layer {layer}: {len(read)} of {len(text)} bytes, "
                      f"most often {_most_often(read)}")
        frames.append(_coloured(text, mine, labels[-1]))
    return Stepper(frames, labels, f"expert of layer {layer}",
                   "The same text for every expert of a layer, busiest first. Some experts read "
                   "one kind of byte, such as digits or spaces; no expert reads one fact.")


def _most_often(read: Sequence[str], most: int = 4) -> str:
    """The bytes that occur most often, most first."""
    counts = sorted({byte: read.count(byte) for byte in read}.items(), key=lambda pair: -pair[1])
    return " ".join(draw.marks("".join(byte for byte, _ in counts[:most]))) or "none"


def _coloured(text: str, strengths: Sequence[float], alt: str) -> draw.Drawing:
    """A text in rows, each byte in a box as strong as given; lines too long for the page go on."""
    boxes, words, line, column = [], [], 0, 0
    step, height = 8.6, 24
    columns = int(WIDTH // step)
    signs = draw.marks(text)
    rows: list[list[str]] = [[]]
    for byte, sign, strength in zip(text, signs, strengths, strict=True):
        if column == columns:
            line, column = line + 1, 0
            rows.append([])
        if strength > 0:
            boxes.append(draw.shade(column * step, line * height, step, height - 3, "expert",
                                    FAINTEST + (STRONGEST - FAINTEST) * strength, edge="expert"))
        rows[-1].append(sign)
        column += 1
        if byte == "\n":
            line, column = line + 1, 0
            rows.append([])
    for number, row in enumerate(filter(None, rows)):
        words.append(_letters(row, number * height + height / 2 - 1, step))
    return draw.svg(WIDTH, height * len(words), alt, *boxes, *words)


def _letters(signs: Sequence[str], y: float, step: float) -> str:
    """Signs in columns of one width, as one text element."""
    x = " ".join(f"{(column + 0.5) * step:.1f}" for column in range(len(signs)))
    return (f'<text x="{x}" y="{y + 4.5:g}" text-anchor="middle" style="fill:currentColor;'
            f'font:13px ui-monospace,monospace">{escape("".join(signs))}</text>')


# --- load ----------------------------------------------------------------------------------------


def loads_figure(on: torch.Tensor, off: torch.Tensor, layer: int) -> Figure:
    """How busy each expert of a layer is, busiest first, with the bias and without; mean = 1."""
    fig, ax = figure(5, 3.2)
    places = range(1, len(on) + 1)
    for loads, name, meaning, at in ((off, "bias off", "waste", 0), (on, "bias on", "expert", -1)):
        sorted_loads = sorted((loads / loads.mean()).tolist(), reverse=True)
        measured(ax, places, sorted_loads, meaning, name)
        side = {"dx": 10, "dy": 2} if at == 0 else {"dx": -1, "dy": 12}
        direct_label(ax, places[at], sorted_loads[at], name, meaning, **side)
    top, usual = (float(loads.max() / loads.mean()) for loads in (off, on))
    ax.set(xlabel="experts, busiest first", ylabel="load, mean = 1", ylim=(0, None))
    finding(ax, f"Without the bias, one expert of layer {layer} does {top:.1f} times its share")
    key(ax, "measured", loc="upper right")
    return Figure(fig, f"Loads of the {len(on)} experts of layer {layer}, busiest first: the "
                       f"busiest does {usual:.1f} times the mean with the bias and {top:.1f} times "
                       "without it.")


@cache
def recorded_runs() -> dict[bool, dict]:
    """The recorded training runs, by whether the bias moved (`benchmarks/expert_balance.py`)."""
    lines = _recorded("expert_balance.jsonl").splitlines()
    return {run["bias"]: run for run in map(json.loads, lines)}


def _recorded(name: str) -> str:
    """The text of a recorded result that ships with the package."""
    return files("minimodel").joinpath("data", name).read_text(encoding="utf-8")


def recorded_loads(run: Mapping, pick=max) -> list[float]:
    """The fullest (or, with `min`, the idlest) expert of any layer, in every report of a run."""
    return [pick(pick(layer) for layer in report["window"]) for report in run["reports"]]


def recorded_figure(runs: Mapping[bool, Mapping]) -> Figure:
    """The busiest and the idlest expert while a small model learns, with and without the bias."""
    fig, ax = figure(5, 3.4)
    steps = [report["step"] for report in runs[True]["reports"]]
    ends = {}
    for on, name, meaning in ((False, "bias off", "waste"), (True, "bias on", "expert")):
        for pick, which in ((max, "busiest"), (min, "idlest")):
            loads = recorded_loads(runs[on], pick)
            measured(ax, steps, loads, meaning, f"{which}, {name}")
            ends[which, on] = loads[-1]
            if pick is max:
                middle = len(steps) // 3
                direct_label(ax, steps[middle], loads[middle], name, meaning, dx=0, dy=12)
    ax.set(xlabel="training steps", ylabel="load over 25 steps, mean = 1", ylim=(0, None))
    finding(ax, "The bias brings all experts back to their share; without it, some idle")
    return Figure(
        fig,
        f"Recorded while a small model learns: after {steps[-1]} steps the busiest expert does "
        f"{ends['busiest', True]:.1f} times the mean with the bias, {ends['busiest', False]:.1f} "
        f"times without it, the idlest {ends['idlest', True]:.1f} and {ends['idlest', False]:.1f}.",
        caption=f"Recorded on {runs[True]['date']} by benchmarks/expert_balance.py, one seed: for "
                "each bias setting the busiest and the idlest expert of the model.")


# --- the same file elsewhere ---------------------------------------------------------------------


def transformers_version() -> int:
    """The major version of `transformers` here; 0 where it is not installed."""
    try:
        return int(version("transformers").split(".")[0])
    except PackageNotFoundError:
        return 0


def recorded_parity() -> str:
    """What the comparison with `transformers` gave on the day it was recorded, in a sentence."""
    found = json.loads(_recorded("expert_parity.json"))
    gap = found["largest_difference"]
    logits = f"logits at most {gap:.0e} apart" if gap else "not one logit apart"
    return (
        f"Recorded on {found['date']}, transformers {found['transformers']}, torch "
        f"{found['torch']}.\n{found['tokens']:,} tokens of the town notebook: the same experts "
        f"for {found['same_experts']:.0%} of them,\n{logits}."
    )


# --- at scale ------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A model's parameters: all of them, and those that one token meets."""

    name: str
    total: float
    active: float
    by_source: bool


def models(config: ModelConfig) -> list[Model]:
    """The toy and two production models."""
    total, active = map(float, facts.find("P-V301").value.split("/"))
    toy = Model("this book's toy", config.num_parameters(), config.num_active_parameters(), False)
    return [toy,
            Model("DeepSeek-V3", total, active, True),
            Model("DeepSeek-V4.1-Flash", facts.find("S11").number, facts.find("S12").number, True)]


def models_figure(config: ModelConfig) -> Figure:
    """All parameters and those a token meets, of the toy and of two production models."""
    rows = models(config)
    fig, ax = figure(5, 3)
    for place, row in enumerate(rows):
        y = len(rows) - 1 - place
        for value, meaning in ((row.total, "waste"), (row.active, "expert")):
            if row.by_source:
                reported(ax, value, y, meaning, "")
            else:
                modelled(ax, [value], [y], meaning, row.name)
        words = f"{row.name}: {row.active / row.total:.1%}"
        if row.by_source:
            direct_label(ax, (row.total * row.active) ** 0.5, y, words, "ink", dx=0, dy=14)
        else:
            direct_label(ax, row.total, y, words, "ink", dx=10)
    direct_label(ax, rows[-1].active, 0, "met by a token", "expert", dx=0, dy=-14)
    direct_label(ax, rows[-1].total, 0, "all", "waste", dx=0, dy=-14)
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set(xlim=(1e5, 2e13), ylim=(-0.6, len(rows) - 0.4), yticks=[],
           xlabel="parameters (log scale)")
    shares = [row.active / row.total for row in rows]
    finding(ax, f"A token meets {shares[0]:.0%} of the toy, a few percent of large models")
    key(ax, "modelled", "reported", loc="upper right")
    return Figure(
        fig,
        "Share of the parameters that a token meets: "
        + "; ".join(f"{row.name} {row.active / row.total:.1%}" for row in rows) + ".",
        table={"model": [row.name for row in rows],
               "parameters": [f"{row.total:,.0f}" for row in rows],
               "met by a token": [f"{row.active:,.0f}" for row in rows],
               "from": ["a source" if row.by_source else "its sizes" for row in rows]})


# --- play: each byte's experts -------------------------------------------------------------------


SENTENCES = {
    "town": "The code of the red door is 4821.\nQ: What is the code of the red door?\n",
    "sums": "12 + 30 = 42\n7 * 8 = 56\nmax(3, 14, 9) = 14\n",
    "code": "def kobo(x):\n    return x * 7\n\nprint(kobo(3))\n",
    "story": "Once a shy fox named Mira lived in Oslo. One day Mira found a red kite.\n",
    "copying": "copy: taro 4821 miku zed\n> taro 4821 miku zed\n",
}
_LABELS = {"town": "a fact and a question", "sums": "sums", "code": "code", "story": "a story",
           "copying": "copying"}
LONGEST = max(map(len, SENTENCES.values()))


@cache
def sentence_routes() -> dict:
    """What the toy's gates say about the sentences: two experts and their percents for each byte.

    {sentence: {"marks": [one sign a byte], "layers": [[[expert, percent, expert, percent] ...]]}}
    """
    model, found = checkpoint.load(), {}
    for name, text in SENTENCES.items():
        heard = routes(model, encode(text))
        layers = []
        for weights, chosen in zip(heard.weights[:, 1:], heard.chosen[:, 1:], strict=True):
            first = (100 * weights[:, 0]).round().int().tolist()
            layers.append([[one, percent, other, 100 - percent] for (one, other), percent
                           in zip(_by_weight(chosen, weights), _larger(first), strict=True)])
        found[name] = {"marks": draw.marks(text), "layers": layers}
    return found


def _by_weight(chosen: torch.Tensor, weights: torch.Tensor) -> list[list[int]]:
    """The two experts of each row, the one that counts more first."""
    return chosen.gather(-1, weights.argsort(dim=-1, descending=True)).tolist()


def _larger(percents: Sequence[int]) -> list[int]:
    return [max(percent, 100 - percent) for percent in percents]


def byte_experts(sentence: str, layer: int, place: int) -> dict:
    """The twin of the explorable: who reads one byte, and which bytes share its first expert."""
    found = sentence_routes()[sentence]
    marks, rows = found["marks"], found["layers"][layer - 1]
    at = min(place, len(marks)) - 1
    first, first_percent, second, second_percent = rows[at]
    shares = [first in (row[0], row[2]) for row in rows]
    blocks = [[mark, "prefill" if i == at else "expert" if share else None]
              for i, (mark, share) in enumerate(zip(marks, shares, strict=True))]
    return {"byte": marks[at], "first": first, "first_percent": first_percent, "second": second,
            "second_percent": second_percent, "others": sum(shares) - 1, "length": len(marks),
            "blocks": blocks}


BYTE_EXPERTS_JS = """({sentence, layer, place}, data) => {
  const {marks, layers} = data[sentence], rows = layers[layer - 1];
  const at = Math.min(place, marks.length) - 1;
  const [first, first_percent, second, second_percent] = rows[at];
  const shares = rows.map(row => row[0] === first || row[2] === first);
  const blocks = marks.map((mark, i) =>
    [mark, i === at ? "prefill" : shares[i] ? "expert" : null]);
  return {byte: marks[at], first, first_percent, second, second_percent,
          others: shares.filter(Boolean).length - 1, length: marks.length, blocks};
}"""


def byte_explorer() -> Explorable:
    """Choose a sentence, a layer and a byte; see its experts, and who shares the first of them."""
    return Explorable(
        alt="Bytes of one kind, such as digits or spaces, often share an expert; a byte's experts "
            "change from layer to layer, and with the text before it",
        twin=byte_experts, compute=BYTE_EXPERTS_JS, data=sentence_routes(),
        controls=[Choice("sentence", "text", _LABELS, start="town"),
                  Choice("layer", "layer", [1, 2, 3], start=3),
                  Slider("place", "byte", range(1, LONGEST + 1), start=29)],
        says="‘{byte}’ goes to expert {first} ({first_percent} %) and expert {second} "
             "({second_percent} %). {others} other bytes of {length} visit expert {first} too.",
        names={"byte": "the byte", "first": "its first expert", "first_percent": "weight, percent",
               "second": "its second expert", "second_percent": "its weight, percent",
               "others": "other bytes at the first expert", "length": "bytes in the text",
               "blocks": "the text"},
        picture=[
            Spans("The text, as layer {layer} sees it", [("blocks", "")],
                  {"prefill": "your byte", "expert": "at its first expert too"}),
            Bars("Weights of the two experts", [
                Bar("first_percent", "expert {first}", "expert", kind="measured"),
                Bar("second_percent", "expert {second}", "expert", kind="measured"),
            ], unit="%", high=100)])


# --- try it ---------------------------------------------------------------------------------------


LONGEST_TYPED = 500


def show_experts(text: str, layer: int = 3) -> Stepper:
    """Any text of yours, expert by expert of one layer.

    Raises ValueError for a text that is empty, too long, or not plain ASCII.
    """
    if not text.isascii() or not text.replace("\n", "").isprintable() or not text:
        raise ValueError("type some plain text: letters, digits and signs of ASCII")
    if len(text) > LONGEST_TYPED:
        raise ValueError(f"{len(text):,} bytes are too many to draw: {LONGEST_TYPED} at most")
    model = checkpoint.load()
    heard = routes(model, [START, *text.encode()])
    return expert_stepper(text, Routes(*(part[:, 1:] for part in heard)), model.config.num_experts,
                          layer)
