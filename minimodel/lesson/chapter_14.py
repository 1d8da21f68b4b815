"""Chapter 14: ranks that meet, accidents and what followed, and how often groups stop."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from ..model.corpus import town_notebook
from ..simulate import cost
from ..tokenizer import encode
from . import draw
from .charts import Size, compare_sizes
from .draw import WIDTH
from .explorable import Axis, Explorable, Line, Lines, Numbers, Slider
from .figures import Figure, direct_label, figure, finding, key, measured, measured_bars
from .town import RED_DOOR, TOWN

if TYPE_CHECKING:                       # they load torch, which drawings do without
    from ..cluster.group import Call, Change
    from ..cluster.launch import Workers

# --- plumbing ------------------------------------------------------------------------------


def until(is_true: Callable[[], object], workers: "Workers | None" = None,
          deadline_s: float = 90.0) -> None:
    """Wait for something. Raises TimeoutError when it does not come, WorkerError as soon as one
    of the workers that should bring it about has failed."""
    ends_at = time.monotonic() + deadline_s
    while not is_true():
        if workers is not None:
            workers.require_alive()
        if time.monotonic() > ends_at:
            raise TimeoutError(f"waited {deadline_s:g} s in vain: run the cell again when the "
                               "machine is less busy")
        time.sleep(0.001)


def outside():
    """In a worker, when all have come: the store that stands in the process which started it."""
    import torch.distributed as dist

    dist.barrier()              # or one's patience would begin while another still loads
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                         is_master=False)


def join(epoch: int, place: int, size: int, store, patience_s: float) -> None:
    """Leave the old group without waiting for anybody, and meet the members of an epoch."""
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", rank=place, world_size=size,
        store=dist.PrefixStore(f"epoch/{epoch}", store),
        timeout=timedelta(seconds=patience_s))


def meet(number: int) -> int:
    """All ranks of the group add up their numbers."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(number)
    dist.all_reduce(total)
    time.sleep(0.002)
    return int(total)


def gist(error: str) -> str:
    """What the network said, without where in its source, and of whom."""
    words = re.sub(r"\s*\[[^\]]*\](:\d+)?", "", error).strip()
    return re.split(r"\. |\n", words)[0].removesuffix(".")


def prompts(count: int) -> list[list[int]]:
    """Yours, and those of people from other towns: no two share more than the title."""
    asked = [TOWN.ask(RED_DOOR)]
    for seed in range(count - 1):
        town = town_notebook(Random(seed), 980, 8)
        asked.append(town.ask(town.facts[0]))
    return [encode(text) for text in asked]


# --- an accident, and what followed ------------------------------------------------------------


@dataclass(frozen=True)
class Accident:
    """One rank, killed or hung, while a group served some calls."""

    how: str
    at_s: float
    before: tuple[int, ...]             # of each call: who served it then
    calls: "tuple[Call, ...]"
    change: "Change"

    @property
    def seconds(self) -> dict[str, float]:
        """From the accident until it was noticed, decided, and rebuilt."""
        return {name: getattr(self.change, f"{name}_s") - self.at_s
                for name in ("noticed", "decided", "rebuilt")}

    def names(self) -> list[str]:
        """Of each call: who serves it, and who did."""
        return [str(call.member) if call.member == rank else f"{rank} → {call.member}"
                for rank, call in zip(self.before, self.calls, strict=True)]

    def gaps_s(self) -> list[float]:
        """The longest wait of each call for a next token."""
        return [max(after - before for before, after in pairwise(call.token_times_s))
                for call in self.calls]


def noticing_figure(killed_s: float, hung_s: float, patience_s: float) -> Figure:
    """How long the others wait before they hear that somebody is missing, in two ways to go."""
    sizes = [Size(f"killed: {1e3 * killed_s:,.0f} ms", 1e3 * killed_s, "failure", "measured"),
             Size(f"hangs: {1e3 * hung_s:,.0f} ms", 1e3 * hung_s, "failure", "measured")]
    fig, ax = compare_sizes(sizes, "ms that the others waited", (0.5, 3e4),
                            "A dead process hangs up; a hanging one says nothing", height=2.6)
    ax.set_xticks([1, 10, 100, 1_000, 10_000], ["1", "10", "100", "1,000", "10,000"])
    ax.axvline(1e3 * patience_s, 0.5, color=ax.spines["left"].get_edgecolor(), linestyle=":")
    direct_label(ax, 1e3 * patience_s, 1.45, "patience", "waste", dx=-6)
    key(ax, "measured", loc="lower left")
    return Figure(fig, f"Measured: after a rank was killed the others had an error within "
                       f"{1e3 * killed_s:.0f} ms; after it hung, only after {hung_s:.2f} s: the "
                       f"patience that they were given is {patience_s:g} s.")


def gap_figure(*accidents: Accident) -> Figure:
    """Each call's tokens, as the supervisor heard of them, around the accidents."""
    fig, axes = figure(5, 1.3 + 0.3 * sum(len(accident.calls) + 2 for accident in accidents),
                       rows=len(accidents))
    last = max(call.token_times_s[-1] - accident.at_s
               for accident in accidents for call in accident.calls)
    for ax, accident in zip(axes, accidents, strict=True):
        _draw_tokens(ax, accident)
        ax.set(xlim=(-0.06 * last, 1.04 * last))
    axes[-1].set_xlabel("seconds since the accident")
    rows = [row for accident in accidents for row in _rows(accident)]
    return Figure(fig, "Measured, the tokens of each call over time. Calls of healthy ranks have "
                  "the gap, too. The longest wait of each call: " + "; ".join(
                      f"rank {accident.change.dead[0]} {accident.how}, from "
                      f"{min(accident.gaps_s()):.2f} to {max(accident.gaps_s()):.2f} s"
                      for accident in accidents) + ".",
                  {name: [row[name] for row in rows] for name in rows[0]})


def _draw_tokens(ax, accident: Accident) -> None:
    dead = accident.change.dead
    for y, (rank, call) in enumerate(zip(accident.before, accident.calls, strict=True)):
        times = [at_s - accident.at_s for at_s in call.token_times_s]
        line = measured(ax, times, [y] * len(times), "failure" if rank in dead else "decode", "")
        line.set(linestyle="", markersize=4)
    ax.axvline(0, color=ax.spines["left"].get_edgecolor(), linestyle=":")
    ax.set_yticks(range(len(accident.calls)), accident.names())
    ax.set_ylim(len(accident.calls) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_ylabel("served by rank")
    finding(ax, f"Rank {dead[0]} {accident.how}: gaps of up to {max(accident.gaps_s()):.2g} s")


def _rows(accident: Accident) -> list[dict]:
    return [{"accident": accident.how, "served by rank": name, "tokens": len(call.output),
             "longest wait, s": round(gap_s, 3), "kind": "measured"}
            for name, call, gap_s in zip(accident.names(), accident.calls, accident.gaps_s(),
                                         strict=True)]


def again_figure(kept: "Call", bare: "Call") -> Figure:
    """What two calls of a dead rank cost a second time."""
    names = ["with notes\nin the store", "with none"]
    values = [kept.computed_again, bare.computed_again]
    fig, ax = figure(5, 2.3)
    measured_bars(ax, names, values, "prefill", "computed again")
    for y, value in enumerate(values):
        direct_label(ax, value, y, f"{value:,} tokens", "prefill")
    ax.set(xlabel="tokens computed a second time", xlim=(0, 1.4 * max(values)))
    finding(ax, "What is on disk outlives a rank")
    return Figure(fig, f"Measured: of two calls whose rank died, the one whose notes were in the "
                       f"store had {values[0]} tokens computed again, the other {values[1]}.")


# --- drawings ------------------------------------------------------------------------------


def meeting_drawing() -> draw.Drawing:
    """Three ranks step by step: one stops, and the others stop at the next meeting."""
    left, top, row, wide, gap = 62, 30, 44, 54, 12
    pieces = []
    for rank in range(3):
        y = top + rank * row
        pieces.append(draw.text(0, y + 13, f"rank {rank}", bold=True))
        for step in range(3):
            x = left + step * (wide + gap)
            lost = rank == 1 and step == 2
            pieces += [draw.shade(x, y, wide / 2 if lost else wide, 26, "decode", 0.3,
                                  edge="decode"),
                       draw.text(x + wide / 2 - (14 if lost else 0), y + 13,
                                 f"{step}", anchor="middle", size=12)]
        if rank == 1:
            pieces.append(draw.text(left + 2 * (wide + gap) + 34, y + 13, "✕", "failure",
                                    bold=True, size=18))
        else:
            x = left + 3 * (wide + gap)
            pieces += [draw.rect(x, y, WIDTH - x, 26, "waste", filled=False),
                       draw.text((x + WIDTH) / 2, y + 13, "waits for rank 1", "waste",
                                 anchor="middle", size=12)]
    bottom = top + 2 * row + 26
    for step in range(3):
        x = left + (step + 1) * wide + step * gap + gap / 2
        pieces += [draw.line(x, top - 8, x, bottom + 8, "failure" if step == 2 else "ink",
                             dashed=step == 2),
                   draw.text(x, top - 18, "meeting", "failure" if step == 2 else "ink",
                             anchor="middle", size=12)]
    return draw.svg(WIDTH, bottom + 12, "Three ranks compute, and meet after every piece of work. "
                    "Rank 1 stops in the middle of its third piece; ranks 0 and 2 finish theirs, "
                    "come to the meeting and wait there for rank 1.", *pieces)


_LANES = {"supervisor": 122, "rank 0": 216, "rank 1": 302, "rank 2": 388}
# What happens, from top to bottom: (step, [(from, to, words, meaning)])
_STORY = (
    ("1 notice", [("rank 1", "supervisor", "Lost(1)", "failure"),
                  ("rank 2", "supervisor", "Lost(1)", "failure")]),
    ("2 decide", [("supervisor", "rank 0", "kill", "failure")]),
    ("3 new epoch", [("supervisor", "rank 1", "Epoch(2, ranks 1 and 2)", "ink"),
                     ("supervisor", "rank 2", "Epoch(2, ranks 1 and 2)", "ink")]),
    ("4 join", [("rank 1", "supervisor", "Joined(2), has its experts", "expert"),
                ("rank 2", "supervisor", "Joined(2), has its experts", "expert")]),
    ("5 requeue", [("supervisor", "rank 2", "Serve(prompt, written)", "prefill")]),
)


def epoch_drawing() -> draw.Drawing:
    """The messages by which a group of three becomes one of two."""
    stops_at, row = 44, 26
    pieces, y, said, begins = [], stops_at + 8, [], {}
    for title, messages in _STORY:
        begins[title] = y
        pieces.append(draw.text(0, y + row, title, bold=True, size=12))
        for sender, to, words, meaning in messages:
            y += row
            pieces += [draw.arrow(*_shortened(_LANES[sender], _LANES[to], y), meaning),
                       draw.text(_LANES["supervisor"] + 9, y - 9, words, meaning, size=12)]
            said.append(f"{sender} to {to}: {words}")
        y += 12
    killed_at, meet_at = begins["3 new epoch"], begins["4 join"]
    pieces = [_lane("supervisor", (20, y, "muted")),
              _lane("rank 0", (20, stops_at, "decode"), (stops_at, killed_at, "failure")),
              *(_lane(name, (20, stops_at, "decode"), (stops_at, meet_at, "waste"),
                      (meet_at, y, "decode")) for name in ("rank 1", "rank 2")), *pieces,
              draw.text(_LANES["rank 0"], stops_at, "✕", "failure", anchor="middle", bold=True,
                        size=18)]
    return draw.svg(WIDTH, y + 2, "How an epoch begins, when rank 0 is lost. "
                    + "; ".join(said) + ".", *pieces)


def _lane(name: str, *parts: tuple[float, float, str]) -> str:
    """A name, and its line: from y to y in a meaning's colour, dashed where something broke."""
    x = _LANES[name]
    return draw.text(x, 10, name, anchor="middle", bold=True) + "".join(
        draw.line(x, y1, x, y2, meaning, dashed=meaning == "failure") for y1, y2, meaning in parts)


def _shortened(x1: float, x2: float, y: float) -> tuple[float, float, float, float]:
    """An arrow's ends, a little before the lanes."""
    side = 4 if x2 > x1 else -4
    return x1 + side, y, x2 - side, y


# --- how often a group stops (E9) --------------------------------------------------------------

# claims P-LL01: 419 unexpected interruptions in 54 days on 16,384 chips
LLAMA_CHIPS, LLAMA_STOPS, LLAMA_DAYS = 16_384, 419, 54
FAILURES_PER_CHIP_HOUR = LLAMA_STOPS / (LLAMA_DAYS * 24 * LLAMA_CHIPS)
MONTH_HOURS = 30 * 24
GROUPS = 100


def days_between_stops(chips: int) -> float:
    return cost.hours_between_stops(FAILURES_PER_CHIP_HOUR, chips) / 24


def stops_figure() -> Figure:
    """How often groups of several sizes stop, by one training run's rate of failures."""
    sizes = [Size(f"{chips:,} chips: {days:,.{places}f} days", days, "failure", "modelled")
             for chips, places in ((8, 0), (64, 0), (144, 1), (320, 1))
             for days in [days_between_stops(chips)]]
    hours = LLAMA_DAYS * 24 / LLAMA_STOPS
    sizes.append(Size(f"Llama 3, {LLAMA_CHIPS:,} chips: {hours:.1f} hours", hours / 24, "failure"))
    fig, ax = compare_sizes(sizes, "days between two stops", (0.003, 4_000),
                            "Whoever shares a step with more chips stops more often", height=4)
    ax.set_xticks([0.1, 1, 10, 100, 1_000], ["0.1", "1", "10", "100", "1,000"])
    key(ax, "modelled", "reported", loc="lower right")
    return Figure(fig, "Days between two stops of a group, modelled from the rate of one reported "
                       "training run: " + "; ".join(size.words for size in sizes) + ".")


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 144, 256, 320, 512, 1_024)


def stops(chips: int, chip_hours: int, restart_minutes: float) -> dict:
    """E9 for one group, and for GROUPS of them."""
    days = [cost.hours_between_stops(1 / chip_hours, size) / 24 for size in SIZES]
    hours = cost.hours_between_stops(1 / chip_hours, chips)
    restart_hours = restart_minutes / 60
    return {"line": days, "days": hours / 24,
            "chance": 100 * cost.chance_of_a_stop(hours, MONTH_HOURS),
            "lost": cost.chip_hours_lost(chips, restart_hours),
            "away": 100 * cost.unavailable_share(hours, restart_hours),
            "stops_a_day": GROUPS * 24 / hours}


STOPS_JS = """({chips, chip_hours, restart_minutes}, {sizes, month_hours, groups}) => {
  const between = size => 1 / (1 / chip_hours * size), hours = between(chips);
  const restart_hours = restart_minutes / 60;
  return {line: sizes.map(size => between(size) / 24), days: hours / 24,
          chance: 100 * (1 - Math.exp(-month_hours / hours)),
          lost: chips * restart_hours,
          away: 100 * restart_hours / (hours + restart_hours),
          stops_a_day: groups * 24 / hours};
}"""


def stops_explorable() -> Explorable:
    """Group size, failures and restarts, against stops and lost chip-hours."""
    return Explorable(
        alt="Twice as many chips in a group: half the time between its stops, and twice as many "
            "chips that stand still in each",
        twin=stops, compute=STOPS_JS,
        data={"sizes": list(SIZES), "month_hours": MONTH_HOURS, "groups": GROUPS},
        controls=[Slider("chips", "chips in the group", list(SIZES), start=64),
                  Slider("chip_hours", "hours until a chip fails",
                         [5_000, 10_000, 20_000, 50_677, 100_000, 200_000], start=50_677),
                  Slider("restart_minutes", "minutes of a restart",
                         [0.1, 0.5, 1, 2, 5, 10, 20, 30, 60], start=10)],
        says="A group of {chips} stops every {days} days, with a chance of {chance} percent at "
             "least once in 30 days. Each stop costs {lost} chip-hours; it is away {away} percent "
             "of the time. 100 such groups: {stops_a_day} stops a day.",
        names={"line": "days between stops, by size", "days": "days between stops",
               "chance": "chance of a stop in 30 days, percent", "lost": "chip-hours lost a stop",
               "away": "time away, percent", "stops_a_day": "stops a day of 100 groups"},
        picture=[
            Numbers([("{days}", "days between stops"),
                     ("{chance} %", "chance of a stop in 30 days"),
                     ("{lost}", "chip-hours lost by one"),
                     ("{away} %", "of the time away"),
                     ("{stops_a_day}", "stops a day of 100 groups")]),
            Lines("Days between stops, by the size of the group",
                  Axis("chips in the group", 1, 2_000, log=True),
                  Axis("days", 0.1, 10_000, log=True),
                  [Line(list(SIZES), "line", "one group", "failure", at=2, dots=False),
                   Line("chips", "days", "{days} days", "failure", dy=-14)])])
