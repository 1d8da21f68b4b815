"""The drawings of chapter 02: the machine, rotary clocks, who looks where, what a token costs."""

import math
from collections.abc import Sequence

import torch

from ..config import ModelConfig
from . import draw, facts, palette
from .charts import Size, compare_sizes
from .draw import WIDTH
from .figures import (
    Figure,
    direct_label,
    figure,
    finding,
    key,
    measured,
    measured_bars,
    modelled,
)
from .markup import escape
from .stepper import Stepper

LINE, LETTER = 32, 24                   # a line of text in a drawing, and the box of one sign
STRONGEST = 0.6                         # opacity of a weight of 1: ink stays readable on it
FAINTEST = 0.02                         # weights below are not drawn


def marks(text: str) -> list[str]:
    """One sign a token: a mark for the start token, then the text with its blanks made visible."""
    return ["^", *draw.marks(text)]


def named(mark: str) -> str:
    """A token's sign in quotes, as words about it use it."""
    return f"‘{mark}’"


# --- the machine ---------------------------------------------------------------------------


def machine(config: ModelConfig) -> draw.Drawing:
    """What happens to the bytes of a text, from top to bottom."""
    width = config.hidden_size
    middle, right = 70, 150
    pieces = [
        draw.cells(13, 0, ["T", "h", "e", "␣"], ["prefill"] * 4),
        draw.text(right, 13, "bytes of the text: the tokens"),
        draw.arrow(middle, 28, middle, 48),
        _box(48, "embedding", "prefill"),
        draw.text(right, 64, f"a row of {width} numbers for each"),
        draw.line(middle, 80, middle, 318),
        draw.rect(0, 98, WIDTH, 204, "muted", filled=False, radius=8),
        draw.text(408, 114, f"{config.num_layers} layers, one after another", "muted",
                  anchor="end", size=12),
        *_branch(134, "attention", "notes", ("looks back at", "earlier tokens")),
        *_branch(222, "feed-forward", "expert", ("works on each", "token alone")),
        draw.arrow(middle, 302, middle, 326),
        _box(326, "norm, head", "prefill"),
        draw.text(right, 342, f"{config.vocab_size} scores: how likely is each"),
        draw.text(right, 359, "token to come next?"),
        draw.arrow(middle, 358, middle, 378),
        draw.cells(57, 380, ["r"], ["decode"]),
        draw.text(right, 393, "the highest is written"),
    ]
    alt = (
        "Bytes become rows of numbers; each layer adds to every row what attention finds in "
        "earlier tokens and what the feed-forward step makes of it; the last row becomes one "
        f"score for each of {config.vocab_size} tokens."
    )
    return draw.svg(WIDTH, 408, alt, *pieces)


def _box(y: float, words: str, meaning: str) -> str:
    return draw.rect(8, y, 124, 32, meaning, filled=False) + draw.text(
        70, y + 16, words, meaning, anchor="middle", bold=True
    )


def _branch(y: float, words: str, meaning: str, does: tuple[str, str]) -> list[str]:
    """A side road of the stream: norm, the step itself, and its result added back."""
    stream, first, second, height = 70, 112, 190, 30
    centre = y + height / 2
    return [
        draw.line(stream, centre, first, centre),
        draw.rect(first, y, 60, height, "prefill", filled=False),
        draw.text(first + 30, centre, "norm", "prefill", anchor="middle"),
        draw.arrow(first + 60, centre, second, centre),
        draw.rect(second, y, 116, height, meaning, filled=False),
        draw.text(second + 58, centre, words, meaning, anchor="middle", bold=True),
        draw.line(second + 58, y + height, second + 58, y + 56),
        draw.arrow(second + 58, y + 56, stream + 11, y + 56),
        draw.rect(stream - 10, y + 46, 20, 20, "paper", radius=10),
        draw.rect(stream - 10, y + 46, 20, 20, "ink", filled=False, radius=10),
        draw.text(stream, y + 56, "+", anchor="middle", bold=True),
        draw.text(second + 126, centre - 8, does[0], "muted", size=12),
        draw.text(second + 126, centre + 8, does[1], "muted", size=12),
    ]


# --- rotary positions ----------------------------------------------------------------------


def clocks(config: ModelConfig, positions: Sequence[int] = (0, 1, 2, 20, 200),
           pairs: Sequence[int] = (0, 3, 6, 15)) -> draw.Drawing:
    """The angle of a few pairs at a few positions, as the hands of clocks."""
    radius, left, top = 20, 118, 46
    pieces = [
        draw.text(left + 80 * column, 10, f"pair {pair}", anchor="middle", bold=True)
        for column, pair in enumerate(pairs)
    ]
    for row, position in enumerate(positions):
        y = top + 52 * row
        pieces.append(draw.text(0, y, f"position {position}"))
        for column, pair in enumerate(pairs):
            angle = position * config.rope_theta ** (-2 * pair / config.head_dim)
            pieces += _clock(left + 80 * column, y, radius, angle)
    first, last = pairs[0], pairs[-1]
    return draw.svg(
        WIDTH, top + 52 * len(positions) - 24,
        f"From one position to the next pair {first} turns by a large angle; pair {last} has "
        f"hardly moved after {positions[-1]} positions.",
        *pieces,
    )


def _clock(x: float, y: float, radius: float, angle: float) -> list[str]:
    """A dial whose hand stands at `angle`, counted from the right, against the clock."""
    tip_x, tip_y = x + 0.86 * radius * math.cos(angle), y - 0.86 * radius * math.sin(angle)
    return [
        draw.rect(x - radius, y - radius, 2 * radius, 2 * radius, "grid", filled=False,
                  radius=radius),
        draw.line(x, y, tip_x, tip_y, "prefill"),
        draw.rect(tip_x - 3.5, tip_y - 3.5, 7, 7, "prefill", radius=3.5),
    ]


# --- who looks where -----------------------------------------------------------------------


def pattern(text: str, weights: torch.Tensor) -> draw.Drawing:
    """One head's weights [n, n] for the start token and the bytes of `text`: who looks where."""
    signs, left, top = marks(text), 92, 46
    size = (WIDTH - left) / len(signs)
    _require_square(weights, len(signs))
    pieces = [draw.text(left, 8, "… looks at this one", "muted", size=12),
              draw.text(0, 28, "this byte …", "muted", size=12)]
    for i, sign in enumerate(signs):
        y = top + i * size
        pieces.append(draw.text(left + (i + 0.5) * size, 32, sign, anchor="middle", bold=True))
        pieces.append(draw.text(left - 14, y + size / 2, sign, anchor="middle", bold=True))
        for j in range(len(signs)):
            box = (left + j * size + 1, y + 1, size - 2, size - 2)
            pieces.append(draw.shade(*box, "grid", 0.45) if j > i
                          else draw.shade(*box, "prefill", float(weights[i, j]), edge="grid"))
    backward = [i for i in range(1, len(signs)) if int(weights[i].argmax()) != i]
    most = max(backward or range(1, len(signs)), key=lambda i: float(weights[i].max()))
    return draw.svg(
        WIDTH, top + size * len(signs),
        f"Weights of one head on {len(signs)} tokens, a triangle: every token looks at itself and "
        f"at what stands before it. The {named(signs[most])} at place {most} looks hardest, at "
        f"{named(signs[int(weights[most].argmax())])}; all that lies to the right is masked.",
        *pieces,
    )


def _require_square(weights: torch.Tensor, count: int) -> None:
    if weights.shape != (count, count):
        raise ValueError(f"weights of shape {list(weights.shape)} do not fit {count} tokens (the "
                         f"start token counts): give [{count}, {count}]")


def looks_stepper(text: str, looks: torch.Tensor, wanted: int) -> Stepper:
    """Where the last token looks, layer by layer and head by head.

    looks   [layers, heads, tokens]: the last row's weights, the start token counted
    wanted  place of the token that the right answer is copied from
    """
    layers, heads, count = looks.shape
    signs = marks(text)
    if len(signs) != count:
        raise ValueError(f"{count} weights do not fit the start token and {len(text)} bytes: give "
                         f"weights for {len(signs)} tokens")
    frames, labels = [], []
    for layer in range(layers):
        for head in range(heads):
            frames.append(_look(signs, looks, layer, head, wanted))
            labels.append(f"layer {layer}, head {head}: {_strongest(signs, looks[layer, head])}")
    return Stepper(
        frames, labels, "layer and head",
        "Each head of each layer looks at other bytes of the text. Heads of the first layers look "
        "for letters and words nearby; some heads of the last layers look straight at the byte "
        f"that the answer needs, the {named(signs[wanted])} in the notebook.",
    )


def _strongest(signs: Sequence[str], weights: torch.Tensor, most: int = 3) -> str:
    """The places that get most of a look, in words: `‘4’ 95 %, ‘i’ 5 %`."""
    top = weights.topk(most)
    return ", ".join(
        f"{named(signs[place])} {100 * weight:.0f} %"
        for weight, place in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        if weight >= FAINTEST
    )


def _look(signs: Sequence[str], looks: torch.Tensor, layer: int, head: int, wanted: int) -> str:
    """One frame: the text with what this head looks at coloured, and a map of all heads."""
    weights, lines = looks[layer, head].tolist(), _lines(signs)
    step = min(20.0, WIDTH / max(len(line) for line in lines))
    boxes, reader = [], ""
    for row, line in enumerate(lines):
        for column, place in enumerate(line):
            x, y = column * step, row * LINE
            if weights[place] >= FAINTEST:
                boxes.append(draw.shade(x, y, step - 1, LETTER, "prefill",
                                        STRONGEST * weights[place], edge="prefill"))
            if place == len(signs) - 1:
                reader = draw.rect(x, y, step - 1, LETTER, "decode", filled=False)
    below = len(lines) * LINE + 12
    return draw.svg(
        WIDTH, below + 22 * len(looks),
        f"Layer {layer}, head {head} looks at {_strongest(signs, looks[layer, head])}.",
        *boxes, reader,
        *(_text_line([signs[place] for place in line], row, step)
          for row, line in enumerate(lines)),
        *_map_of_heads(below, signs[wanted], looks[:, :, wanted], layer, head),
    )


def _lines(signs: Sequence[str]) -> list[list[int]]:
    """The places of the tokens, line by line, as the text itself breaks."""
    lines = [[]]
    for place, sign in enumerate(signs):
        lines[-1].append(place)
        if sign == draw.marks("\n")[0]:
            lines.append([])
    return [line for line in lines if line]


def _text_line(signs: Sequence[str], row: int, step: float) -> str:
    """A line of tokens as one text element, each sign in the middle of its box."""
    x = " ".join(f"{(column + 0.5) * step - 0.5:.1f}" for column in range(len(signs)))
    return (
        f'<text x="{x}" y="{row * LINE + LETTER / 2 + 5:g}" text-anchor="middle" '
        f'style="fill:{palette.var("ink")};font:14px ui-monospace,monospace">'
        f'{escape("".join(signs))}</text>'
    )


def _map_of_heads(y: float, sign: str, shares: torch.Tensor, layer: int, head: int) -> list[str]:
    """All heads as squares, as strong as they look at the wanted byte; this one has an edge."""
    left, step = 64, 22
    right = left + step * shares.shape[1] + 14
    caption = ("all heads: how much of", f"each look goes to the {named(sign)}",
               "of the right fact")
    pieces = [draw.text(right, y + 10 + 16 * i, words, "muted", size=12)
              for i, words in enumerate(caption)]
    for row, in_layer in enumerate(shares.tolist()):
        pieces.append(draw.text(0, y + step * row + 9, f"layer {row}", size=12))
        pieces += [draw.shade(left + step * column, y + step * row, 18, 18, "prefill", share,
                              edge="grid") for column, share in enumerate(in_layer)]
    pieces.append(draw.rect(left + step * head, y + step * layer, 18, 18, "decode", filled=False))
    return pieces


# --- the answer, layer by layer --------------------------------------------------------------


def guesses_figure(right: int, probabilities: torch.Tensor) -> Figure:
    """The chance that each depth gives to the right byte; probabilities [depths, vocabulary]."""
    names = ["embedding", *(f"after layer {i}" for i in range(len(probabilities) - 1))]
    shares = [100 * p for p in probabilities[:, right].tolist()]
    best = [_printed(token) for token in probabilities.argmax(-1).tolist()]
    fig, ax = figure(5, 3)
    measured_bars(ax, names, shares, "decode", f"chance of {named(chr(right))}, %")
    for row, (share, token) in enumerate(zip(shares, best, strict=True)):
        side = {"dx": 6} if share < 60 else {"dx": -6}
        note = direct_label(ax, share, row, f"best guess: {token}", "decode", **side)
        if share >= 60:
            note.set_color("#000000")
    ax.set(xlabel=f"chance of the right byte {named(chr(right))}, %", xlim=(0, 100))
    finding(ax, f"On its way through the layers the right byte rises from {shares[0]:.1f} "
                f"to {shares[-1]:.1f} %")
    listed = "; ".join(f"{name} {share:.1f} %" for name, share in zip(names, shares, strict=True))
    return Figure(
        fig, f"Chance of the right byte at each depth: {listed}.",
        table={"depth": names, "chance of the right byte, %": shares, "best guess": best},
    )


def _printed(token: int) -> str:
    """A token's sign for a plot: the byte itself where it can be printed, else its number."""
    if token == ord(" "):
        return "‘ ’"
    return named(chr(token)) if 32 < token < 127 else f"token {token}"


# --- what a token costs ----------------------------------------------------------------------


def cost_figure(lengths: Sequence[int], looking: Sequence[float], rest: Sequence[float],
                seconds: Sequence[float]) -> Figure:
    """Operations (counted) and time (measured) per token of a prompt, by its length."""
    fig, (top, bottom) = figure(5, 5.6, rows=2)
    modelled(top, lengths, [x / 1e6 for x in looking], "notes", "looking back, million operations")
    modelled(top, lengths, [x / 1e6 for x in rest], "prefill", "all the rest, million operations")
    direct_label(top, lengths[-1], looking[-1] / 1e6, "looking back", "notes", dx=-14)
    direct_label(top, lengths[-1], rest[-1] / 1e6, "all the rest", "prefill", dx=-2, dy=10)
    top.set(ylabel="million operations", xlim=(0, None), ylim=(0, None))
    finding(top, "Looking back grows with the prompt; the rest of the work does not")
    key(top, "modelled", loc="upper left")
    measured(bottom, lengths, [1e6 * t for t in seconds], "prefill", "time, microseconds")
    bottom.set(xlabel="tokens in the prompt", ylabel="µs per token", xlim=(0, None), ylim=(0, None))
    key(bottom, "measured", loc="upper left")
    return Figure(
        fig,
        f"Per token of a prompt: looking back grows from {looking[0] / 1e6:.1f} to "
        f"{looking[-1] / 1e6:.1f} million operations between {lengths[0]:,} and {lengths[-1]:,} "
        f"tokens, the rest stays at {rest[0] / 1e6:.1f}; the measured time grows "
        f"{seconds[-1] / min(seconds):.1f} times from its lowest.",
    )


# --- at scale ----------------------------------------------------------------------------------


def sizes(config: ModelConfig) -> list[tuple[str, float, float]]:
    """What the toy and DeepSeek-V3 are made of: (name, the toy's, DeepSeek-V3's)."""
    active = float(facts.find("P-V301").value.split("/")[1])       # "total / active"
    return [
        ("layers", config.num_layers, facts.find("P-V304").number),
        ("heads that read", config.num_heads, facts.find("P-V312").number),
        ("numbers in a row", config.hidden_size, facts.find("P-V310").number),
        ("parameters a token meets", config.num_active_parameters(), active),
    ]


def sizes_figure(config: ModelConfig) -> Figure:
    """How many times the toy's sizes a production model has."""
    rows = sizes(config)
    times = [theirs / ours for _, ours, theirs in rows]
    fig, ax = compare_sizes(
        [Size(f"{name}: {float(f'{ratio:.2g}'):,.0f}x", ratio, "prefill")
         for (name, _, _), ratio in zip(rows, times, strict=True)],
        "times the toy's size", (0.3, 2e7),
        "The same parts, more of each: DeepSeek-V3 against the toy",
    )
    key(ax, "reported", loc="upper right")
    return Figure(
        fig,
        "DeepSeek-V3 against the toy: "
        + "; ".join(f"{name} {theirs:,.0f} against {ours:,.0f}" for name, ours, theirs in rows)
        + ".",
        table={
            "size": [row[0] for row in rows],
            "toy": [row[1] for row in rows],
            "DeepSeek-V3": [f"{row[2]:,.0f}" for row in rows],
        },
    )
