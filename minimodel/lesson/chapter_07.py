"""Chapter 07: where heads look, and its drawings: entries, rows, absorbing, bytes, recall."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..cache.dense import DenseCache
from ..config import ModelConfig
from ..engine.recall import Recall
from ..model.attention import rotary_angles, rotate
from ..model.transformer import Transformer
from ..simulate import cost
from . import draw, facts, palette
from .charts import Size, compare_sizes
from .draw import WIDTH
from .explorable import Bar, Bars, Choice, Explorable, Numbers, Slider
from .figures import Figure, direct_label, figure, finding, key, measured, modelled

MUTED = palette.colour("muted").light
STRONG, FAINT = 0.85, 0.4       # the two parts of an entry: keys or latent, values or rotary key


# --- where heads look ------------------------------------------------------------------------


def best_looks(model: Transformer, tokens: Sequence[int], layer: int) -> list[list[int]]:
    """For each KV head of `layer`, the place that each of its query heads likes best.

    The last token's query is compared with every noted key. Raises ValueError for a model whose
    entries are latents: they hold no keys.
    """
    config = model.config
    if config.latent_size:
        raise ValueError(f"latent_size={config.latent_size}: a latent holds no keys to look at; "
                         "give a model that notes keys and values")
    dtype, attention, heard = model.lm_head.weight.dtype, model.layers[layer].self_attn, []
    cache = DenseCache(config, len(tokens), dtype=dtype)
    hook = attention.q_proj.register_forward_hook(lambda module, x, out: heard.append(out[-1:]))
    with hook, torch.inference_mode():
        model(torch.tensor(tokens), cache.batch([len(tokens)]), cache)
    angles = rotary_angles(torch.tensor([len(tokens) - 1]), config, dtype)
    q = rotate(heard[0].unflatten(-1, (-1, config.head_dim)), *angles)[0]
    entries = cache.entries[config.cache_layer(layer), 0, :len(tokens)]
    k = entries.unflatten(-1, (2, config.num_kv_heads, -1))[:, 0]   # [tokens, KV heads, numbers]
    scores = q.unflatten(0, (config.num_kv_heads, -1)) @ k.permute(1, 2, 0)
    return scores.argmax(-1).tolist()


# --- what a token leaves ---------------------------------------------------------------------


def entries_drawing(designs: Mapping[str, ModelConfig]) -> draw.Drawing:
    """One token's notes in each design: an entry a layer, all to one scale."""
    scale = 340 / max(config.entry_width for config in designs.values())
    pieces, y = [], 8
    for name, config in designs.items():
        pieces.append(draw.text(0, y, f"{name}: {_numbers(config):,} numbers", bold=True))
        for layer in range(config.num_layers):
            pieces += _entry(y + 14 + 17 * layer, config, layer, scale)
        y += 34 + 17 * config.num_layers
    sizes = "; ".join(f"{name} {_numbers(config):,}" for name, config in designs.items())
    return draw.svg(WIDTH, y - 18,
                    f"Numbers that one token leaves in all layers, to one scale: {sizes}.",
                    *pieces)


def _numbers(config: ModelConfig) -> int:
    return config.entry_width * len(config.cache_layers)


def _entry(y: float, config: ModelConfig, layer: int, scale: float) -> list[str]:
    """One layer's entry: two parts, or a word on whose entry this layer reads."""
    left, label = 56, draw.text(0, y + 6, f"layer {layer}", "muted", size=12)
    if layer not in config.cache_layers:
        source = config.kv_source_layers[layer]
        return [label, draw.text(left, y + 6, f"reads layer {source}'s notes", "muted", size=12)]
    first, words = ((config.latent_size, "latent, rotary key") if config.latent_size
                    else (config.entry_width // 2, "keys, values"))
    edge = left + first * scale
    end = left + config.entry_width * scale
    parts = [draw.shade(left, y, edge - left, 12, "notes", STRONG),
             draw.shade(edge, y, end - edge, 12, "notes", FAINT)]
    fits = layer == 0 and end + 120 < WIDTH
    return [label, *parts, *([draw.text(end + 8, y + 6, words, "notes", size=12)] * fits)]


# --- which rows go on ------------------------------------------------------------------------


def rows_drawing(counts: Mapping[str, Sequence[tuple[int, int]]]) -> draw.Drawing:
    """Per layer: rows that left an entry (0: the layer owns no notes), and rows that went on."""
    columns, pieces, y = (56, 244), [], 8
    longest = max(row for layers in counts.values() for pair in layers for row in pair)
    for name, layers in counts.items():
        pieces.append(draw.text(0, y, name, bold=True))
        pieces += [draw.text(x, y + 20, words, "muted", size=12) for x, words in
                   zip(columns, ("leave an entry", "look and think"), strict=True)]
        for layer, rows in enumerate(layers):
            top = y + 32 + 20 * layer
            pieces.append(draw.text(0, top + 7, f"layer {layer}", "muted", size=12))
            pieces += [_rows_bar(x, top, count, longest, meaning) for x, count, meaning in
                       zip(columns, rows, ("notes", "prefill"), strict=True)]
        y += 54 + 20 * len(layers)
    alt = "; ".join(
        f"{name}: rows that go on in each layer {', '.join(f'{b:,}' for _, b in layers)}"
        for name, layers in counts.items())
    return draw.svg(WIDTH, y - 18, f"{alt}.", *pieces)


def _rows_bar(x: float, y: float, count: int, longest: int, meaning: str) -> str:
    if not count:
        return draw.text(x, y + 7, "none", "muted", size=12)
    return draw.bar(x, y, max(1.5, 110 * count / longest), f"{count:,}", meaning, height=14)


# --- latents as they are, or unfolded --------------------------------------------------------


def absorb_figure(new: Sequence[int], timed: Sequence[float], counted: Sequence[float],
                  crossover: float) -> Figure:
    """How many times longer unfolding takes, against the number of new rows."""
    fig, ax = figure(5, 3.5)
    modelled(ax, new, counted, "ink", "counted operations")
    measured(ax, new, timed, "notes", "measured time")
    ax.axhline(1, color=MUTED, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(new, [f"{n}" for n in new])
    ticks = [0.5, 1, 2, 4, 8, 16]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set(xlabel="new rows that look at the same entries",
           ylabel="time unfolded over absorbed", ylim=(0.35, 40))
    direct_label(ax, crossover, 1, f"on paper equal at {crossover:.0f} rows", "ink", dx=-4, dy=-16)
    finding(ax, "Few rows look at latents as they are; many rows unfold them")
    key(ax, "measured", "modelled", loc="upper right")
    return Figure(fig, f"Unfolding takes {timed[0]:.0f} times as long as absorbing for one new "
                       f"row, and {timed[-1]:.2f} times for {new[-1]}; on paper the two are equal "
                       f"at {crossover:.0f} rows.")


# --- three toys compared ---------------------------------------------------------------------


def ratios_figure(ratios: Mapping[str, Mapping[str, float]]) -> Figure:
    """For each design: bytes, time to read and time to write, as multiples of the first toy's."""
    fig, ax = figure(5, 3.6)
    meanings = {"bytes": "notes", "reading": "prefill", "writing": "decode"}
    labels = []
    for design, measures in ratios.items():
        for what, ratio in measures.items():
            draw_it = modelled if what == "bytes" else measured
            draw_it(ax, [ratio], [len(labels)], meanings[what], f"{design}, {what}")
            dx = -10 if ratio < 1 else 10       # away from the line at 1
            direct_label(ax, ratio, len(labels), f"{ratio:.2f}", meanings[what], dx=dx)
            labels.append(f"{design}: {what}")
    ax.axvline(1, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(labels)), labels)
    largest = max(ratio for measures in ratios.values() for ratio in measures.values())
    ax.set(xlim=(0, 1.25 * max(1, largest)), ylim=(len(labels) - 0.5, -0.5),
           xlabel="times the toy of chapter 05")
    finding(ax, "Smaller notes: a latent costs time to read, sharing saves it")
    key(ax, "measured", "modelled", loc="lower right")
    return Figure(fig, "; ".join(
        f"{design}: " + ", ".join(f"{what} {ratio:.2f}" for what, ratio in measures.items())
        for design, measures in ratios.items()) + ", each as a multiple of the toy of chapter 05.")


# --- what the cards have recorded ------------------------------------------------------------

_COUNTED = re.compile(r"^\| *(story|dense)\b[^|]*\| *([\d,]+) of ([\d,]+) *\|", re.MULTILINE)


def recorded_recall(folder: Path) -> dict[str, Recall]:
    """What a checkpoint's card has recorded: answers counted on many notebooks, by kind.

    Raises ValueError for a card without such a table.
    """
    card = (Path(folder) / "README.md").read_text(encoding="utf-8")
    rows = {kind: Recall(kind, asked=_whole(asked), right=_whole(right))
            for kind, right, asked in _COUNTED.findall(card)}
    if set(rows) != {"story", "dense"}:
        raise ValueError(f"the card in {folder} counts {sorted(rows) or 'nothing'}: measure story "
                         "and dense with benchmarks/recall.py")
    return rows


def _whole(number: str) -> int:
    return int(number.replace(",", ""))


# --- fewer bits ------------------------------------------------------------------------------


def bits_figure(found: Mapping[str, Mapping[int, Recall]]) -> Figure:
    """Share of answers that are right, against the bits of a noted number, for each design."""
    fig, ax = figure(5, 3.5)
    bits = list(next(iter(found.values())))
    colours = ("notes", "ink", "muted")
    for (design, counts), colour in zip(found.items(), colours, strict=False):
        shares = [100 * counts[b].share for b in bits]
        measured(ax, range(len(bits)), shares, colour, design)
    ax.set_xticks(range(len(bits)), [f"{b}" for b in bits])
    ax.set(xlabel="bits a noted number", ylabel="answers right, %", ylim=(-4, 104))
    _end_labels(ax, found, bits, colours)
    finding(ax, "Eight bits change nothing, two bits forget everything")
    return Figure(fig, "Share of right answers by bits: " + "; ".join(
        f"{design} " + ", ".join(f"{b}: {counts[b].share:.0%}" for b in bits)
        for design, counts in found.items()) + ".")


def _end_labels(ax, found: Mapping[str, Mapping[int, Recall]], bits: Sequence[int],
                colours: Sequence[str]) -> None:
    """Each line's name beside the point where the lines lie farthest apart, top to bottom."""
    spread = [max(c[b].share for c in found.values()) - min(c[b].share for c in found.values())
              for b in bits]
    place = spread.index(max(spread))
    ordered = sorted(zip(found, colours, strict=False),
                     key=lambda pair: -found[pair[0]][bits[place]].share)
    for rank, (design, colour) in enumerate(ordered):
        share = 100 * found[design][bits[place]].share
        dx, dy = (10, 6) if rank == 0 else (-10, -6 * rank)
        direct_label(ax, place, share, design, colour, dx=dx, dy=dy)


# --- at scale --------------------------------------------------------------------------------

REPORTED = {"P-IS03": "LLaMA-3.1 405B", "P-IS01": "DeepSeek-V3", "S39": "DeepSeek-V4.1-Flash"}


def bytes_of(id: str) -> float:
    """A claim about bytes of notes per token, in bytes."""
    claim = facts.find(id)
    return claim.number * {"kB": 1_000, "B/token": 1}[claim.unit]


def sizes_figure(toys: Mapping[str, ModelConfig]) -> Figure:
    """Bytes of notes a token leaves: V3 with keys and values, three designs, the toys."""
    plain = cost.kv_bytes_grouped(61, 128, 128, 2)
    rows = [("V3 with MHA", plain, "modelled")]
    rows += [(name, bytes_of(id), "reported") for id, name in REPORTED.items()]
    rows += [(f"{name} toy", config.kv_bytes_per_token(), "modelled")
             for name, config in toys.items()]
    rows.sort(key=lambda row: -row[1])
    fig, ax = compare_sizes(
        [Size(f"{name}: {size:,.0f} B", size, "ink" if name.endswith("toy") else "notes", kind)
         for name, size, kind in rows],
        "bytes of notes per token", (3, 3e9), "From 4 MB to under a kilobyte a token", height=4.2)
    key(ax, "modelled", "reported", loc="lower right")
    return Figure(fig, "Bytes of notes per token: "
                  + "; ".join(f"{name} {size:,.0f}" for name, size, _ in rows) + ".",
                  table={"model": [row[0] for row in rows],
                         "bytes per token": [row[1] for row in rows],
                         "kind": [row[2] for row in rows]})


# --- play ------------------------------------------------------------------------------------

SCALE_EVERY = {32: None, 16: None, 8: 32, 4: 16}    # numbers that share a scale of one byte


def count_bytes(layers: int, kv_heads: int, head_dim: int, latent: int, share: int,
                bits: int) -> dict:
    """The twin of the byte counter.

    latent  numbers of latent and rotary key together; with 0, an entry holds keys and values
    share   layers in a row that read one layer's notes
    """
    owners = -(-layers // share)
    numbers = latent or 2 * kv_heads * head_dim
    every = SCALE_EVERY[bits]
    entry = cost.packed_bytes(numbers, bits, every) if every else numbers * bits / 8
    per_token = cost.kv_bytes_shared(entry, [1] * owners)
    return {"owners": owners, "numbers": numbers, "entry": entry, "per_token": per_token,
            "holds": "latent and rotary key" if latent else "keys and values",
            "prompt_mb": per_token / 10, "ratio": bytes_of("P-IS03") / per_token}


COUNT_BYTES_JS = """({layers, kv_heads, head_dim, latent, share, bits}, every) => {
  const owners = Math.ceil(layers / share);
  const numbers = latent || 2 * kv_heads * head_dim;
  const scales = every.numbers[bits] ? numbers / every.numbers[bits] : 0;
  const entry = numbers * bits / 8 + scales;
  const per_token = owners * entry;
  return {owners, numbers, entry, per_token,
          holds: latent ? "latent and rotary key" : "keys and values",
          prompt_mb: per_token / 10, ratio: every.largest / per_token};
}"""


def byte_counter(config: ModelConfig) -> Explorable:
    """Layers, heads, latent, sharing, precision to bytes a token; it starts at a toy's sizes."""
    return Explorable(
        alt="Fewer KV heads, a latent in their place, layers that share notes and fewer bits each "
            "divide the bytes that a token leaves, and the divisions multiply",
        twin=count_bytes,
        compute=COUNT_BYTES_JS,
        data={"numbers": {str(bits): every for bits, every in SCALE_EVERY.items()},
              "largest": bytes_of("P-IS03")},
        controls=[
            Slider("layers", "layers", range(1, 129), start=config.num_layers),
            Slider("kv_heads", "KV heads", [1, 2, 3, 4, 6, 8, 16, 32, 64, 128],
                   start=config.num_kv_heads),
            Choice("head_dim", "numbers in a key", [32, 64, 128], start=config.head_dim),
            Slider("latent", "latent and rotary key in their place (0: none)",
                   [0, 64, 96, 160, 320, 576, 1088], start=0, unit=" numbers"),
            Slider("share", "layers that read one layer's notes", [1, 2, 3, 4, 6, 8, 10, 20],
                   start=1),
            Choice("bits", "bits a number", {32: "32", 16: "16", 8: "8, and scales",
                                             4: "4, and scales"}, start=32),
        ],
        says="{owners} layers keep an entry of {entry} bytes ({holds}): {per_token} bytes a token.",
        names={"owners": "layers that keep notes", "numbers": "numbers in an entry",
               "holds": "what an entry holds",
               "entry": "bytes of an entry", "per_token": "bytes a token",
               "prompt_mb": "MB for 100,000 tokens", "ratio": "times under LLaMA-3.1 405B"},
        picture=[
            Numbers([("{per_token}", "bytes a token"),
                     ("{prompt_mb} MB", "for 100,000 tokens")]),
            Bars("Bytes of notes a token", [
                Bar("per_token", "your design", "notes", kind="modelled"),
                *[Bar(bytes_of(id), name, "waste", kind="reported")
                  for id, name in REPORTED.items()],
                Bar(config.kv_bytes_per_token(), "the toy of chapter 05", "ink", kind="modelled"),
            ], unit="B", log=(10, 10_000_000)),
        ])
