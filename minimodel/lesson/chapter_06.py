"""Chapter 06: what it measures with, its drawings, and the roofline to play with."""

import math
from collections.abc import Callable, Mapping, Sequence

from ..config import ModelConfig
from ..engine.metrics import RequestTimes, percentile
from ..simulate import cost, hardware
from ..simulate.cost import DecodeWork
from . import draw, facts
from .draw import WIDTH
from .explorable import Axis, Choice, Explorable, Line, Lines, Numbers, Slider
from .figures import (
    Figure,
    direct_label,
    figure,
    finding,
    key,
    measured,
    modelled,
    modelled_bars,
    reported,
)

# --- measuring -------------------------------------------------------------------------------


def count_operations(fn: Callable[[], object]) -> int:
    """How many operations `fn()` hands to torch: matrix products, sums, views, all of them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.count += 1
            return operation(*args, **(kwargs or {}))

    with Counter() as counter:
        fn()
    return counter.count


# --- one answer in time ----------------------------------------------------------------------


def arrivals(times: RequestTimes) -> draw.Drawing:
    """One measured answer on the clock: the wait for the first token, then a box a token."""
    scale = (WIDTH - 2) / times.end_to_end_s
    first = times.ttft_s * scale
    boxes, x = [], first
    for gap in times.gaps_s:
        boxes.append(draw.rect(x + 0.75, 24, max(0.5, gap * scale - 1.5), 26, "decode", radius=1))
        x += gap * scale
    share = times.ttft_s / times.end_to_end_s
    return draw.svg(
        WIDTH, 84,
        f"The first token takes {share:.0%} of the whole answer's time, as long as "
        f"{times.ttft_s / percentile(times.gaps_s, 50):.0f} of the {len(times.gaps_s)} gaps.",
        draw.rect(0, 24, first - 1, 26, "prefill", radius=1), *boxes,
        draw.text(0, 10, "time to first token", "prefill", bold=True),
        draw.text(WIDTH, 10, f"{len(times.gaps_s)} gaps", "decode", anchor="end", bold=True),
        draw.line(0, 58, WIDTH, 58, "muted"),
        draw.text(0, 72, "the request arrives", "muted", size=12),
        draw.text(WIDTH, 72, "last token", "muted", anchor="end", size=12))


def gaps_figure(alone: Sequence[float], disturbed: Sequence[float]) -> Figure:
    """Each gap of one stream, measured, alone and with a stranger's prompt in one step."""
    usual = percentile(alone, 50)
    shown = [[gap / usual for gap in gaps] for gaps in (alone, disturbed)]
    worst = max(shown[1])
    place = shown[1].index(worst)
    fig, ax = figure(5, 3.2)
    measured(ax, range(1, len(alone) + 1), shown[0], "notes", "alone")
    measured(ax, range(1, len(disturbed) + 1), shown[1], "decode", "with the stranger")
    direct_label(ax, place + 1, worst, f"{worst:.0f} gaps long", "decode", dx=10)
    direct_label(ax, len(disturbed), shown[1][-1], "with the stranger", "decode", dx=-1, dy=24)
    direct_label(ax, len(alone), shown[0][-1], "alone", "notes", dx=-1, dy=-14)
    ax.set_yscale("log")
    ax.set(xlabel="gap, counted from the first", ylabel="length (1 = a usual gap)",
           ylim=(0.4, worst * 3))
    finding(ax, "One stranger's prompt, one long silence in your stream")
    key(ax, "measured", loc="upper left")
    return Figure(fig, f"Measured gaps of one stream: all near 1 when it is alone; with the "
                       f"stranger, gap {place + 1} is {worst:.0f} times as long.")


# --- this machine ----------------------------------------------------------------------------


def roof_figure(peaks: Mapping[str, float], bandwidth: float,
                toy: Mapping[str, tuple[float, float]],
                wide: tuple[Sequence[float], Sequence[float], str]) -> Figure:
    """This machine's roofline, and what the toy and a large matrix reach under it.

    peaks      FLOP/s by number type: each is a flat roof
    bandwidth  bytes/s
    toy        {"prefill": (intensity, FLOP/s), "decode": ...}
    wide       intensities and FLOP/s of the large matrix, and its number type
    """
    intensities = [0.1 * 10 ** (i / 12) for i in range(49)]     # 0.1 to 1,000
    fig, ax = figure(5, 3.9)
    for name, peak in peaks.items():
        roof = [cost.roofline_flops_per_s(i, peak, bandwidth) / 1e9 for i in intensities]
        modelled(ax, intensities, roof, "ink", f"roof, {name}").set_markevery(48)
        direct_label(ax, 1000, peak / 1e9, name, "ink", dx=-4, dy=9)
    x, y, name = wide
    measured(ax, x, [v / 1e9 for v in y], "decode", f"large matrix, {name}")
    direct_label(ax, x[1], y[1] / 1e9, f"large matrix, {name},\n1 to 256 rows", "decode", dx=8,
                 dy=-10)
    for phase, dx, dy in (("prefill", 0, -14), ("decode", 9, 0)):
        measured(ax, [toy[phase][0]], [toy[phase][1] / 1e9], phase, f"toy, {phase}")
        direct_label(ax, toy[phase][0], toy[phase][1] / 1e9, f"the toy's {phase}", phase, dx=dx,
                     dy=dy)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(xlabel="FLOP for each byte", ylabel="billion FLOP/s", xlim=(0.1, 1200))
    gap = toy["prefill"][1] / toy["decode"][1]
    finding(ax, f"The toy computes {gap:.0f} times as fast when it reads as when it writes")
    key(ax, "measured", "modelled", loc="upper left")
    under = cost.roofline_flops_per_s(toy["decode"][0], min(peaks.values()), bandwidth)
    return Figure(fig, f"This machine's roofline. The toy's prefill reaches {gap:.0f} times the "
                       f"FLOP/s of its decode, and decode stays {under / toy['decode'][1]:.0f} "
                       f"times under the roof. With ever more rows, the large matrix climbs to "
                       f"{max(y) / y[0]:.0f} times the FLOP/s that it reaches with one.")


def rows_figure(rows: Sequence[int], seconds: Sequence[float], bound: Sequence[float]) -> Figure:
    """A large matrix times ever more rows: measured time, and the least by the roofline."""
    fig, ax = figure(5, 3.3)
    times, least = ([s / seconds[0] for s in column] for column in (seconds, bound))
    modelled(ax, rows, least, "ink", "the roofline's bound")
    measured(ax, rows, times, "decode", "measured")
    direct_label(ax, rows[1], least[1], "the bound", "ink", dx=0, dy=-13)
    direct_label(ax, rows[4], times[4], "measured", "decode", dx=-8, dy=10)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(rows, [str(n) for n in rows])
    ax.minorticks_off()
    ax.set(xlabel="rows that share the matrix", ylabel="time (1 = one row)",
           ylim=(min(least) / 2, None))
    finding(ax, f"{rows[-3]} rows take {times[-3]:.1f} times as long as one")
    key(ax, "measured", "modelled", loc="upper left")
    flat = sum(floor <= 1.1 * least[0] for floor in least)
    return Figure(fig, f"Time for a large matrix times 1 to {rows[-1]} rows. The bound is flat up "
                       f"to {rows[flat - 1]} rows and rises with each from there; measured, "
                       f"{rows[flat - 1]} rows take {times[flat - 1]:.1f} times as long as one, "
                       f"and {rows[-1]} rows {times[-1]:.0f} times.")


# --- batch against speed ---------------------------------------------------------------------


def toy_batch_figure(batches: Sequence[int], steps: Mapping[int, Sequence[float]]) -> Figure:
    """The toy, measured: what a stream loses and what all streams together gain, by batch.

    steps  {tokens noted by each request: seconds of a step at each batch}
    """
    fig, ax = figure(5, 3.6)
    (few, short), (many, long) = sorted(steps.items())
    for noted, seconds, meaning in ((few, short, "decode"), (many, long, "notes")):
        speed = [seconds[0] / s for s in seconds]
        total = [b * v for b, v in zip(batches, speed, strict=True)]
        measured(ax, speed, total, meaning, f"{noted:,} tokens of notes each")
        for i in (len(batches) // 2, -1):
            direct_label(ax, speed[i], total[i], f"{batches[i]}", meaning, dx=7, dy=9)
    direct_label(ax, 0.04, batches[-1] * 1.3, f"{few} tokens of notes each", "decode")
    direct_label(ax, 0.04, 1.9, f"{many:,} tokens\nof notes each", "notes")
    ax.set_yscale("log")
    ax.set(xlabel="speed of one stream (1 = alone)", ylabel="tokens in all (1 = alone)",
           xlim=(0, 1.15), ylim=(0.7, batches[-1] * 2))
    gains = [batches[-1] * seconds[0] / seconds[-1] for seconds in (short, long)]
    finding(ax, f"{batches[-1]} streams write {gains[0]:.0f} times as much with short notes, "
                f"{gains[1]:.0f} times with long ones")
    key(ax, "measured", loc="upper right")
    return Figure(fig, f"With {few} tokens of notes each, {batches[-1]} streams write "
                       f"{gains[0]:.0f} times as much as one, each at "
                       f"{gains[0] / batches[-1]:.0%} of its speed; with {many:,}, "
                       f"{gains[1]:.0f} times, each at {gains[1] / batches[-1]:.0%}.")


def v3_batch_figure() -> Figure:
    """DeepSeek-V3 on H800s, modelled (E18), as far as the memory holds it; and the service."""
    chip, per_gpu = hardware.H800, facts.find("P-OI08").number / 8
    noted = int(facts.find("P-OI05").number)
    fig, ax = figure(5, 3.7)
    for context, meaning in ((1_000, "decode"), (noted, "notes")):
        batches = [b for b in (1, 8, 32, 128, 512)
                   if cost.V3_DECODE.step_bytes(b, context) <= chip.memory_bytes]
        speed = [1 / cost.decode_step_seconds(b, context, cost.V3_DECODE,
                                              chip.bandwidth_bytes_per_s) for b in batches]
        total = [b * v for b, v in zip(batches, speed, strict=True)]
        modelled(ax, speed, total, meaning, f"{context:,} tokens each")
        for b, x, y in zip(batches[2:], speed[2:], total[2:], strict=True):
            direct_label(ax, x, y, str(b), meaning, dx=7, dy=9)
    direct_label(ax, 131, 32_000, "1,000 tokens\nof notes each", "decode")
    direct_label(ax, 128, 600, f"{noted:,} tokens\nof notes each", "notes", dx=-4)
    reported(ax, 21, per_gpu, "ink", "reported, 2025")
    least_s = cost.decode_step_seconds(per_gpu / 21, noted, cost.V3_DECODE,
                                       chip.bandwidth_bytes_per_s)
    ax.set_yscale("log")
    ax.set(xlabel="tokens/s for one user", ylabel="tokens/s for one GPU", xlim=(0, 200),
           ylim=(100, 60_000))
    finding(ax, f"Memory alone would allow {1 / least_s / 21:.0f} times the reported speed")
    key(ax, "modelled", "reported", loc="lower left")
    return Figure(fig, "Modelled for DeepSeek-V3 on H800: tokens a second for one GPU fall from "
                       "thousands to under 200 as the speed for one user rises to 150. The "
                       f"reported service point, 20 to 22 and {per_gpu:,.0f}, lies below the "
                       f"curve: its {per_gpu / 21:.0f} requests could each have had "
                       f"{1 / least_s:.0f} tokens a second.")


def cards_figure() -> Figure:
    """How many of each chip hold the weights of DeepSeek-V4.1-Flash (E16)."""
    checkpoint = facts.find("P-V411").number * 1e9
    names = ["RTX 5090", "H100", "H200", "Ascend 950DT", "B200", "GB300"]
    needed = [cost.chips_needed(checkpoint, hardware.chip(name)) for name in names]
    fig, ax = figure(5, 3.0)
    modelled_bars(ax, names, needed, "notes", "chips needed")
    for y, count in enumerate(needed):
        direct_label(ax, count, y, str(count), "ink", dx=6)
    ax.set(xlabel="chips that hold the weights", xlim=(0, max(needed) * 1.12))
    finding(ax, f"{needed[0]} desktop cards, or {needed[-1]} of the largest")
    return Figure(fig, "Chips needed to hold the 510 GB checkpoint: " + "; ".join(
        f"{name} {count}" for name, count in zip(names, needed, strict=True)) + ".")


# --- the roofline to play with ---------------------------------------------------------------

PREFILL_ROWS = 1_000
BATCHES = [2**i for i in range(11)]
MACHINE = "this machine"
MENU = ("H100", "H800", "H200", "B200", "GB300", "RTX 5090", "Ascend 950DT")


def toy_work(config: ModelConfig) -> DecodeWork:
    """The toy's decode step in 4-byte numbers, as if every expert were wanted."""
    return DecodeWork(4 * config.num_parameters(), config.flops(1) - config.flops_per_entry,
                      config.kv_bytes_per_token(), config.flops_per_entry)


def _numbers(peak: float, bandwidth: float, memory: float, work: DecodeWork) -> dict:
    return {"peak": peak, "bandwidth": bandwidth, "memory": memory, "weights": work.weight_bytes,
            "token": work.flops_per_token, "notes": work.kv_bytes_per_token,
            "look": work.flops_per_entry}


def menu() -> dict[str, dict]:
    """Every chip's numbers and the work it is given; a peak of 0 is one that nobody verified."""
    chips = {name: hardware.chip(name) for name in MENU}
    return {name: _numbers(chip.flops_per_s("fp8") if "fp8" in chip.precisions() else 0,
                           chip.bandwidth_bytes_per_s, chip.memory_bytes, cost.V3_DECODE)
            for name, chip in chips.items()} | {
                MACHINE: _numbers(0, 0, 0, toy_work(ModelConfig()))}


def rates_in(words: str) -> tuple[float, float]:
    """`this machine: 93.5 GFLOP/s, 28.2 GB/s` as FLOP/s and bytes/s."""
    peak, bandwidth = (float(part.split()[0]) for part in words.split(": ")[1].split(", "))
    return peak * 1e9, bandwidth * 1e9


def on_the_roof(chip: str, batch: int, context: int) -> dict:
    """Where a decode step of `batch` requests stands on a chip's roofline, and what it takes.

    chip  a name of the menu, or `this machine: ... GFLOP/s, ... GB/s`
    """
    name, peak, bandwidth, memory, work = chosen(chip)
    top, ridge = peak or math.inf, peak / bandwidth
    path = [intensity_of(work, rows, context) for rows in BATCHES]
    intensity, held = intensity_of(work, batch, context), work.step_bytes(batch, context)
    reading = PREFILL_ROWS * work.flops_per_token / work.step_bytes(PREFILL_ROWS, 1)
    roof_x = [0.1, ridge, 10_000] if peak else [0.1, 10_000]

    def roof(x: float) -> float:
        return cost.roofline_flops_per_s(x, top, bandwidth)

    step_s = work.step_flops(batch, context) / roof(intensity)
    return {
        "name": name, "intensity": intensity, "ridge": ridge if peak else "not known",
        "roof_x": roof_x, "roof_y": [*map(roof, roof_x)],
        "path_x": path, "path_y": [*map(roof, path)], "decode_y": roof(intensity),
        "prefill_x": reading, "prefill_y": roof(reading),
        "step_ms": 1e3 * step_s, "per_user": 1 / step_s, "per_chip": batch / step_s,
        "gigabytes": held / 1e9,
        "waits": "arithmetic" if peak and intensity >= ridge else "memory",
        "fits": f" That is more than its {memory / 1e9:g} GB hold." if memory < held else "",
    }


def chosen(chip: str) -> tuple[str, float, float, float, DecodeWork]:
    """A menu entry's name, FLOP/s (0: not known), bytes/s, bytes of memory, and its work."""
    name, numbers = chip.split(": ")[0], menu()[chip.split(": ")[0]]
    work = DecodeWork(numbers["weights"], numbers["token"], numbers["notes"], numbers["look"])
    if name == MACHINE:
        return name, *rates_in(chip), math.inf, work
    return name, numbers["peak"], numbers["bandwidth"], numbers["memory"], work


def intensity_of(work: DecodeWork, rows: int, context: int) -> float:
    return cost.intensity_flops_per_byte(work.step_flops(rows, context),
                                         work.step_bytes(rows, context))


ON_THE_ROOF_JS = """({chip, batch, context}, menu) => {
  const name = chip.split(": ")[0], m = menu[name];
  let peak = m.peak, bandwidth = m.bandwidth;
  if (name === "this machine") [peak, bandwidth] =
    chip.split(": ")[1].split(", ").map(part => parseFloat(part) * 1e9);
  const top = peak || Infinity, roof = x => Math.min(top, x * bandwidth);
  const bytes = (rows, tokens) => m.weights + rows * tokens * m.notes;
  const flops = rows => rows * (m.token + context * m.look);
  const at = rows => flops(rows) / bytes(rows, context);
  const path_x = Array.from({length: 11}, (_, i) => at(2 ** i));
  const intensity = at(batch), reached = roof(intensity), ridge = peak / bandwidth;
  const reading = 1000 * m.token / bytes(1000, 1);
  const step = flops(batch) / reached, held = bytes(batch, context);
  const roof_x = peak ? [0.1, ridge, 10000] : [0.1, 10000];
  return {
    name, intensity, ridge: peak ? ridge : "not known", roof_x, roof_y: roof_x.map(roof),
    path_x, path_y: path_x.map(roof), decode_y: reached,
    prefill_x: reading, prefill_y: roof(reading),
    step_ms: 1000 * step, per_user: 1 / step, per_chip: batch / step, gigabytes: held / 1e9,
    waits: peak && intensity >= ridge ? "arithmetic" : "memory",
    fits: m.memory === 0 || held <= m.memory ? ""
      : ` That is more than its ${m.memory / 1e9} GB hold.`,
  };
}"""


def roofline(peak: float, bandwidth: float) -> Explorable:
    """Choose a chip, a batch and how much each request has noted; the machine's own rates given."""
    here = f"{MACHINE}: {peak / 1e9:.1f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s"
    return Explorable(
        alt="A larger batch moves decode to the right along the roof, until the notes, which no "
            "request shares, hold it back; prefill stands far to the right from the start",
        twin=on_the_roof, compute=ON_THE_ROOF_JS, data=menu(),
        controls=[
            Choice("chip", "chip", {**{name: name for name in MENU},
                                    here: "this machine, when this page was built"}, "H800"),
            Slider("batch", "requests in the step", BATCHES, start=1),
            Slider("context", "tokens each has noted", [0, 500, 1_000, 2_000, 4_989, 10_000,
                                                        20_000, 50_000], start=4_989),
        ],
        says="{name}: a step fetches {gigabytes} GB and waits for {waits}.{fits}",
        names={"roof_x": "roof: FLOP for each byte", "roof_y": "roof: FLOP/s",
               "path_x": "decode by batch: FLOP for each byte",
               "path_y": "decode by batch: FLOP/s", "decode_y": "decode: FLOP/s at most",
               "prefill_x": "prefill: FLOP for each byte", "prefill_y": "prefill: FLOP/s at most",
               "ridge": "ridge, FLOP for each byte", "intensity": "decode: FLOP for each byte",
               "step_ms": "step, ms at least", "per_user": "tokens/s for each, at most",
               "per_chip": "tokens/s of the chip, at most", "gigabytes": "GB fetched a step",
               "waits": "waits for", "fits": "remark"},
        picture=[
            Numbers([("{per_user}", "tokens/s for each request, at most"),
                     ("{per_chip}", "tokens/s of the chip, at most"),
                     ("{intensity}", "FLOP for each byte (ridge: {ridge})")]),
            Lines("Decode under the roof of {name}",
                  Axis("FLOP for each byte", 0.1, 10_000, log=True),
                  Axis("FLOP/s", 1e9, 1e16, log=True),
                  [Line("roof_x", "roof_y", "roof", "ink", at=0, dy=18, dots=False),
                   Line("path_x", "path_y", "", "decode", dots=False),
                   Line("intensity", "decode_y", "decode", "decode", dy=16),
                   Line("prefill_x", "prefill_y", "prefill", "prefill", dy=16)]),
        ])
