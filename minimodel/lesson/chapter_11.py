"""Chapter 11: a record's bytes, processes that remember, and what it is worth to remember."""

import json
import math
import os
import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import minimodel

from ..cache import record
from ..cache.record import HEAD_BYTES, NO_KEY
from ..cache.store_index import RETENTION_S
from ..simulate import hardware
from ..simulate.replay import in_store, retention_curve
from ..simulate.traces import DAY_S, HOUR_S, Traffic, return_times, synthesise, tokens_per_day
from . import draw, facts
from .charts import Size, compare_sizes
from .draw import WIDTH
from .explorable import Axis, Bar, Bars, Explorable, Line, Lines, Numbers, Slider
from .figures import Figure, direct_label, figure, finding, key, measured, modelled

# --- a record's bytes ------------------------------------------------------------------------

# name, bytes, colour; in the order of the file
FIELDS = (("magic", 4, "ink"), ("checksum", 4, "failure"), ("created", 8, "decode"),
          ("retention", 4, "decode"), ("length", 4, "waste"), ("key", 32, "hit"),
          ("parent", 32, "prefill"), ("fingerprint", 32, "expert"), ("payload", 8, "notes"))
PER_LINE, BYTE_WIDTH, BYTE_HEIGHT = 16, 26, 23


def record_drawing(raw: bytes) -> draw.Drawing:
    """The head of a record, byte by byte, the first bytes of its payload, and what they say."""
    header, checksum = record.unpack(raw[:HEAD_BYTES])
    meanings = [meaning for _, size, meaning in FIELDS for _ in range(size)]
    pieces = [_byte(i, raw[i], meaning) for i, meaning in enumerate(meanings)]
    bottom = -(-len(meanings) // PER_LINE) * BYTE_HEIGHT + 14
    said = _said(header, checksum)
    for i, ((name, _, meaning), words) in enumerate(zip(FIELDS, said, strict=True)):
        y = bottom + 22 * i
        pieces += [draw.shade(0, y - 7, 14, 14, meaning, 0.35, edge=meaning),
                   draw.text(22, y, name, bold=True), draw.text(112, y, words)]
    return draw.svg(
        WIDTH, bottom + 22 * len(FIELDS), f"The first {len(meanings)} bytes of a record: its head "
        f"names what follows ({', '.join(name for name, _, _ in FIELDS[:-1])}), then "
        f"{header.num_bytes:,} bytes of notes begin.", *pieces)


def _byte(i: int, value: int, meaning: str) -> str:
    x, y = i % PER_LINE * BYTE_WIDTH, i // PER_LINE * BYTE_HEIGHT
    return (draw.shade(x, y, BYTE_WIDTH - 2, BYTE_HEIGHT - 3, meaning, 0.28, edge=meaning)
            + draw.text(x + BYTE_WIDTH / 2 - 1, y + BYTE_HEIGHT / 2 - 1.5, f"{value:02x}",
                        anchor="middle", size=12))


def _said(header: record.Header, checksum: int) -> list[str]:
    """What each field of a record's head says, in words."""
    created = datetime.fromtimestamp(header.created_s, UTC)
    parent = "zeros: a first block" if header.parent == NO_KEY else _short(header.parent)
    return [repr(record.MAGIC)[2:-1], f"{checksum:,}, of all that follows it",
            f"{created:%Y-%m-%d %H:%M} UTC", f"{header.ttl_s:,} s after its last use",
            f"{header.num_bytes:,} bytes of payload", _short(header.key), parent,
            _short(header.fingerprint), "the block's entries begin"]


def _short(digest: bytes) -> str:
    return f"{digest.hex()[:16]} ..."


# --- other processes -------------------------------------------------------------------------


def run_program(program: str, folder: Path, prompt: Sequence[int]) -> dict:
    """What a program prints as JSON, run by a new Python process, the prompt on its input.

    Raises RuntimeError, with what it said last, if the program fails.
    """
    done = subprocess.run(_command(program, folder), input=json.dumps(list(prompt)), text=True,
                          capture_output=True, env=_environment(), timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the program failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def kill_when(program: str, folder: Path, prompt: Sequence[int], word: str) -> int:
    """Run such a program until it prints `word`, then kill it as `kill -9` does; which signal.

    Raises RuntimeError if it ends without that word.
    """
    with subprocess.Popen(_command(program, folder), stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, env=_environment()) as process:
        try:
            process.stdin.write(json.dumps(list(prompt)))
            process.stdin.close()
            if not any(line.strip() == word for line in process.stdout):
                raise RuntimeError(f"the program ended and never said {word!r}")
        finally:
            process.send_signal(signal.SIGKILL)
    return -process.returncode


def command_line(*words: object) -> str:
    """What `python -m minimodel WORDS` prints."""
    done = subprocess.run([sys.executable, "-m", "minimodel", *map(str, words)], text=True,
                          capture_output=True, env=_environment(), timeout=300, check=False)
    return (done.stdout + done.stderr).rstrip()


def _command(program: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", program, str(folder)]


def _environment() -> dict[str, str]:
    """This process's environment, in which the package is found as it is here."""
    package = str(Path(minimodel.__path__[0]).resolve().parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


# --- what a second send takes ----------------------------------------------------------------


def second_send_figure(lengths: Sequence[int], memory: Sequence[float],
                       disk: Sequence[float]) -> Figure:
    """How many times less than the first send: tokens computed, and time from memory and disk."""
    fig, ax = figure(5, 3.7)
    measured(ax, lengths, lengths, "hit", "tokens computed")
    measured(ax, lengths, memory, "notes", "time, from memory")
    measured(ax, lengths, disk, "disk", "time, from disk")
    last, above = lengths[-1], memory[-1] >= disk[-1]
    direct_label(ax, last, last, "tokens\ncomputed", "hit", dx=9)
    for ratios, name, meaning, up in ((memory, "memory", "notes", above),
                                      (disk, "disk", "disk", not above)):
        direct_label(ax, last, ratios[-1], f"time,\nfrom {name}", meaning, dx=9,
                     dy=8 if up else -12)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    ax.set(xlabel="tokens in the prompt", ylabel="times less than the first send",
           xlim=(lengths[0] * 0.85, last * 3.6), ylim=(1, last * 2))
    finding(ax, f"{lengths[-1]:,} tokens: {disk[-1]:.0f} times sooner from disk, "
                f"{memory[-1]:.0f} times from memory")
    key(ax, "measured", loc="upper left")
    return Figure(fig, "Measured: how many times sooner the first token of a second send comes, "
                       "from memory and from disk: " + "; ".join(
                           f"{n:,} tokens {m:.0f} and {d:.0f}"
                           for n, m, d in zip(lengths, memory, disk, strict=True)) + ".")


# --- load or recompute -----------------------------------------------------------------------

SHARE_OF_PEAK = 0.4         # an assumption of this book: what a chip's prefill achieves
# name, bytes of notes a token, parameters active while a prompt is read, chip
V3 = ("DeepSeek-V3 on one H800", 70_272, 37e9, hardware.H800)      # claims P-IS01, P-V301
V41 = ("V4.1-Flash on one B200", 890, 8e9, hardware.B200)           # claims S39, P-V402


def break_even(kv_bytes_per_token: float, tokens_per_s: float) -> float:
    """Equation 11.1: bytes/s above which loading notes is faster than computing them."""
    return kv_bytes_per_token * tokens_per_s


def tokens_per_s(active_parameters: float, flops_per_s: float) -> float:
    """How fast a prompt is read: two operations a parameter and token; attention left out."""
    return flops_per_s / (2 * active_parameters)


def modelled_break_even(kv_bytes: float, active: float, chip: hardware.Chip) -> float:
    return break_even(kv_bytes, tokens_per_s(active, SHARE_OF_PEAK * chip.flops_per_s("fp8")))


def break_even_figure(needed: float, found: float) -> Figure:
    """Bytes/s that loading must reach to win, and bytes/s that there are.

    needed, found  of the toy and of this folder, as measured
    """
    gb = {id: float(facts.find(id).value) for id in ("P-MC11", "P-MC12")}
    drive = float(facts.find("P-HW16").value.split()[0])
    peak = float(facts.find("P-FS02").value) * 2**30 / 1e9
    sizes = [Size(f"LLaMA3-70B on 8 H800 needs {gb['P-MC12']:.0f}", gb["P-MC12"], "prefill"),
             Size(f"LLaMA3-70B on 8 A800 needs {gb['P-MC11']:.0f}", gb["P-MC11"], "prefill")]
    for name, kv_bytes, active, chip in (V3, V41):
        value = modelled_break_even(kv_bytes, active, chip) / 1e9
        sizes.append(Size(f"{name} needs {value:.2f}", value, "prefill", "modelled"))
    sizes += [Size(f"the toy here needs {needed / 1e9:.3f}", needed / 1e9, "prefill", "measured"),
              Size(f"this folder gives {found / 1e9:.2g}", found / 1e9, "disk", "measured"),
              Size(f"one NVMe drive gives {drive:.0f}", drive, "disk"),
              Size(f"3FS gives a client {peak:.0f} at its peak", peak, "disk")]
    fig, ax = compare_sizes(sizes, "GB/s", (2e-5, 1e5), "Small notes make loading win by far; "
                            "large ones need fast disks", height=4.8)
    ax.set_xticks([0.01, 1, 100], ["0.01", "1", "100"])
    key(ax, "measured", "modelled", "reported", loc="center right")
    return Figure(fig, "GB/s at which loading notes is as fast as computing them, and GB/s that "
                       "storage gives: " + "; ".join(size.words for size in sizes) + ".")


# --- how long to remember --------------------------------------------------------------------

SEED = 11
WARM_S = 14 * DAY_S         # of four weeks: before, the store is emptier than it will be
HOURS = (1, 3, 12, 24, 48, 72, 168, 336)
CLASSES = ("chat", "agent")


@cache
def trace() -> list:
    """Four weeks of made-up requests."""
    return synthesise(Traffic(), SEED)


def to_petabytes(num_bytes: float) -> float:
    """The trace's bytes, scaled to a service of as many tokens a day as the video reports."""
    return num_bytes * float(facts.find("S52").value) / tokens_per_day(trace()) / 1e15


@cache
def kept() -> dict[str, list[list[float]]]:
    """For each class and each of HOURS: tokens found, tokens asked for, petabytes held."""
    found = {}
    for name in CLASSES:
        mine = [request for request in trace() if request.retention == name]
        curve = retention_curve(mine, [hours * HOUR_S for hours in HOURS], warmup_s=WARM_S)
        found[name] = [[replay.hits.hit_tokens, replay.hits.tokens,
                        to_petabytes(replay.mean_bytes)] for replay in curve.values()]
    return found


def waits_figure() -> Figure:
    """How long blocks wait until they are wanted again, as this book's traffic has it."""
    fig, ax = figure(5, 3.6)
    edges = [10 ** (exponent / 4) for exponent in range(2, 26)]      # seconds
    ends = {}
    for name, meaning in zip(CLASSES, ("decode", "expert"), strict=True):
        waits = sorted(return_times(r for r in trace() if r.retention == name))
        within = [100 * bisect_right(waits, edge) / len(waits) for edge in edges]
        modelled(ax, [edge / HOUR_S for edge in edges], within, meaning, name).set(marker="")
        ends[name] = within[-1]
        direct_label(ax, edges[13] / HOUR_S, within[13], f"{name}s", meaning, dx=0, dy=-14)
        at = RETENTION_S[name] / HOUR_S
        ax.axvline(at, color="#8e949e", linewidth=1, linestyle=":")
        direct_label(ax, at, 8, f"{at / 24:.0f} days", "muted", dx=4 if name == "chat" else -4)
    ax.set_xscale("log")
    ticks = {1 / 60: "a minute", 1: "an hour", 24: "a day"}
    ax.set_xticks([*ticks], [*ticks.values()])
    ax.minorticks_off()
    ax.set(xlabel="since the block was last used", ylabel="% of wanted blocks", xlim=(1e-3, 4e3),
           ylim=(0, 104))
    finding(ax, "Most blocks that are wanted again are wanted within the hour")
    key(ax, "modelled", loc=(0.42, 0.26))
    return Figure(fig, "Made-up traffic: share of the blocks a lookup asks for that were used "
                       f"within a time; in the end {ends['chat']:.0f} % of chats' and "
                       f"{ends['agent']:.0f} % of agents', the rest was never there before.")


def remember(agent: int, chat: int) -> dict:
    """Keep agents' and chats' blocks for so many hours: what is found, and what lies on disk."""
    table, chosen = kept(), {"agent": HOURS.index(agent), "chat": HOURS.index(chat)}
    rows = {name: table[name][chosen[name]] for name in CLASSES}
    asked = sum(row[1] for row in rows.values())
    hit = 100 * sum(row[0] for row in rows.values()) / asked
    most = 100 * sum(table[name][-1][0] for name in CLASSES) / asked
    return {"hit": hit, "lost": most - hit, "held": rows["agent"][2] + rows["chat"][2],
            "agent_held": rows["agent"][2], "chat_held": rows["chat"][2],
            "agent_hit": 100 * rows["agent"][0] / rows["agent"][1],
            "chat_hit": 100 * rows["chat"][0] / rows["chat"][1],
            "agent_curve": [100 * found / of for found, of, _ in table["agent"]],
            "chat_curve": [100 * found / of for found, of, _ in table["chat"]]}


REMEMBER_JS = """({agent, chat}, {hours, table}) => {
  const a = table.agent[hours.indexOf(agent)], c = table.chat[hours.indexOf(chat)];
  const share = row => 100 * row[0] / row[1], last = hours.length - 1;
  const hit = 100 * (a[0] + c[0]) / (a[1] + c[1]);
  const most = 100 * (table.agent[last][0] + table.chat[last][0]) / (a[1] + c[1]);
  return {hit, lost: most - hit, held: a[2] + c[2], agent_held: a[2], chat_held: c[2],
          agent_hit: share(a), chat_hit: share(c),
          agent_curve: table.agent.map(share), chat_curve: table.chat.map(share)};
}"""


def retention() -> Explorable:
    """Choose how long each class is kept, and see what it finds and what it holds."""
    reported = float(facts.find("S34").value) / 1000
    return Explorable(
        alt="The first hours of retention find most of what there is to find; the days after them "
            "add a token or two in a hundred, and most of the disks",
        twin=remember, compute=REMEMBER_JS, data={"hours": list(HOURS), "table": kept()},
        controls=[Slider("agent", "keep agents' notes", HOURS, start=72, unit=" h"),
                  Slider("chat", "keep chats' notes", HOURS, start=168, unit=" h")],
        says="{hit} % of prompt tokens are found, with {held} PB on disk; keeping everything for "
             "two weeks would find {lost} points more.",
        names={"hit": "found, % of tokens", "lost": "points lost against two weeks",
               "held": "held, PB", "agent_held": "agents' PB", "chat_held": "chats' PB",
               "agent_hit": "agents' hit rate, %", "chat_hit": "chats' hit rate, %",
               "agent_curve": "agents, by retention", "chat_curve": "chats, by retention"},
        picture=[
            Numbers([("{hit} %", "of prompt tokens found"), ("{held} PB", "on disk"),
                     ("{lost}", "points less than two weeks find")]),
            Bars("Held on average, scaled to 155 trillion tokens a day", [
                Bar("chat_held", "chats, {chat} h", "decode"),
                Bar("agent_held", "agents, {agent} h", "expert"),
                Bar("held", "together", "disk"),
                Bar(reported, "what the video reports", "disk", kind="reported"),
            ], unit="PB", high=180),
            Lines("Found, by how long notes are kept", Axis("hours kept", 1, 400, log=True),
                  Axis("% of prompt tokens", 60, 100),
                  [Line(list(HOURS), "chat_curve", "chats", "decode", at=2, dots=False),
                   Line(list(HOURS), "agent_curve", "agents", "expert", at=2, dots=False),
                   Line("chat", "chat_hit", "{chat_hit} %", "decode", dy=14),
                   Line("agent", "agent_hit", "{agent_hit} %", "expert")])])


def capacity_figure(capacities: Sequence[float]) -> Figure:
    """Two ways to spend disks: keep for a time, or keep what fits; both on the same traffic."""
    table = kept()
    by_time = [(sum(table[name][i][2] for name in CLASSES),
                100 * sum(table[name][i][0] for name in CLASSES)
                / sum(table[name][i][1] for name in CLASSES)) for i in range(len(HOURS))]
    forever = dict.fromkeys(RETENTION_S, math.inf)
    by_room = [(to_petabytes(capacity), 100 * in_store(
        trace(), forever, capacity, warmup_s=WARM_S).hits.by_token) for capacity in capacities]
    fig, ax = figure(5, 3.5)
    for points, meaning, label in ((by_time, "disk", "kept for a time"),
                                   (by_room, "hit", "kept while there is room")):
        modelled(ax, *zip(*points, strict=True), meaning, label)
    direct_label(ax, *by_room[0], "while there is room", "hit", dx=8, dy=-8)
    direct_label(ax, *by_time[-2], "for a time", "disk", dx=-2, dy=14)
    ax.set_xscale("log")
    ax.set_xticks([1, 10, 100], ["1", "10", "100"])
    ax.minorticks_off()
    ax.set(xlabel="petabytes on disk (log scale)", ylabel="% of tokens found",
           ylim=(min(hit for _, hit in by_time) - 2, 95))
    finding(ax, "Ten times the disks find a few tokens more in a hundred")
    key(ax, "modelled", loc="lower right")
    return Figure(fig, "Made-up traffic, scaled: " + "; ".join(
        f"{held:.0f} PB find {hit:.1f} %" for held, hit in by_room) + " with a capacity; "
        + "; ".join(f"{held:.0f} PB find {hit:.1f} %" for held, hit in by_time)
        + " with a retention.")
