"""Chapter 08: drawings of memory in blocks, and the block map of a recorded run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import draw, facts
from .charts import Size, compare_sizes
from .draw import WIDTH
from .figures import Figure, direct_label, figure, finding, key, measured, modelled
from .stepper import Stepper

if TYPE_CHECKING:
    from ..engine.engine import Engine

PER_ROW = 6         # blocks in a line of memory

# --- reservation -----------------------------------------------------------------------------


def reserved_drawing(now: Sequence[int], end: Sequence[int], capacity: int) -> draw.Drawing:
    """Strips of reserved memory, one a request: noted now, noted by the end, never used.

    now, end   tokens of each request at this moment, and when its answer is complete
    """
    scale, strips = WIDTH / capacity, []
    for i, (noted, last) in enumerate(zip(now, end, strict=True)):
        y, a, b = 24 + 24 * i, noted * scale, last * scale
        strips += [draw.rect(0, y, WIDTH, 16, "waste", filled=False, radius=1),
                   draw.rect(0, y, b, 16, "decode", filled=False, radius=1),
                   draw.rect(0, y, a, 16, "notes", radius=1)]
    used, whole = sum(now), len(now) * capacity
    bottom = 24 + 24 * len(now) + 12
    return draw.svg(
        WIDTH, bottom + 10,
        f"{len(now)} requests have set aside {capacity} slots each; {used / whole:.0%} of them "
        f"hold notes now, and {(whole - sum(end)) / whole:.0%} never will.",
        draw.text(0, 8, f"{capacity:,} slots set aside for each request", bold=True), *strips,
        draw.legend(bottom, [("notes", "noted"), ("decode", "noted later"),
                             ("waste", "never used")]))


# --- one table -------------------------------------------------------------------------------


def table_drawing(table: Sequence[int], length: int, block_size: int,
                  num_blocks: int) -> draw.Drawing:
    """A request's blocks in the order of its tokens, and where each lies in memory."""
    used = {block: min(block_size, length - i * block_size) for i, block in enumerate(table)}
    bottom = 160 + -(-num_blocks // PER_ROW) * 40
    return draw.svg(
        WIDTH, bottom + 8,
        f"{length} tokens lie in blocks {', '.join(map(str, table))}, in this order, anywhere in "
        f"memory; only the last of them has empty slots.",
        draw.text(0, 8, "the block table, in the order of the tokens", bold=True),
        *(_place(i, block, i * block_size, i * block_size + used[block] - 1)
          for i, block in enumerate(table)),
        *(_block(block % PER_ROW * 71, 152 + block // PER_ROW * 40, 30, block, "",
                 used.get(block, 0) / block_size, held=block in used)
          for block in range(num_blocks)),
        draw.legend(bottom, [("notes", "notes"), ("waste", "held, empty")]))


def _place(i: int, block: int, first: int, last: int) -> str:
    """One place of a table: the block it names, its positions, and an arrow to the block."""
    x = i * 71
    return (draw.rect(x, 24, 64, 26, "notes", filled=False)
            + draw.text(x + 32, 37, block, bold=True, anchor="middle")
            + draw.text(x + 32, 62, f"{first} to {last}", "muted", anchor="middle", size=12)
            + draw.arrow(x + 32, 74, block % PER_ROW * 71 + 32, 150 + block // PER_ROW * 40,
                         "notes"))


def _block(x, y, height, number: int, owners: str, full: float, *, held: bool,
           edge: str | None = None, width: float = 64) -> str:
    """A block: its number, who holds it, and a bar of its slots, as far as they are written."""
    edge = edge or ("notes" if held else "grid")
    pieces = [draw.rect(x, y, width, height, edge, filled=False),
              draw.text(x + 5, y + 10, number, "muted", size=11),
              draw.text(x + width / 2 + 6, y + 14, owners, anchor="middle", size=12, bold=True)]
    if held:
        bar, wide = y + height - 9, width - 6
        pieces.append(draw.rect(x + 3, bar, wide, 6, "waste", filled=False, radius=1))
        if full:
            pieces.append(draw.rect(x + 3, bar, wide * full, 6, "notes", radius=1))
    return "".join(pieces)


# --- waste -----------------------------------------------------------------------------------


def memory_figure(used: Sequence[int], held: Sequence[int],
                  reserved: Sequence[int]) -> Figure:
    """Slots over the steps of one workload: holding notes, held by blocks, set aside in full."""
    steps = range(len(used))
    fig, ax = figure(5, 3.5)
    for slots, meaning, label in ((reserved, "waste", "reserved"), (held, "notes", "in blocks"),
                                  (used, "ink", "noted tokens")):
        line = measured(ax, steps, [n / 1000 for n in slots], meaning, label)
        line.set(marker="", zorder=2 + (meaning != "ink"))
    top = max(range(len(used)), key=lambda i: reserved[i])
    direct_label(ax, top, reserved[top] / 1000, "reserved", "waste", dx=10, dy=6)
    direct_label(ax, len(used) / 2, 0.34 * reserved[top] / 1000, "in blocks of 16,\nand noted",
                 "notes")
    ax.set(xlabel="step", ylabel="thousand slots", xlim=(0, None),
           ylim=(0, reserved[top] / 1000 * 1.15))
    finding(ax, f"At the peak, reservation takes {reserved[top] / held[top]:.0f} times the memory")
    key(ax, "measured", loc="upper right")
    return Figure(fig, f"Slots taken over {len(used)} steps: at the peak {reserved[top]:,} are "
                       f"reserved, {held[top]:,} are held in blocks, {used[top]:,} hold notes.")


def waste_figure(sizes: Sequence[int], wasted: Sequence[float],
                 on_paper: Sequence[float]) -> Figure:
    """Share of held slots that hold nothing, by block size; the largest size is reservation."""
    fig, ax = figure(5, 3.6)
    found, formula = [[100 * share for share in column] for column in (wasted, on_paper)]
    modelled(ax, sizes, formula, "ink", "equation 8.1")
    measured(ax, sizes, found, "waste", "counted")
    at = sizes.index(16)
    direct_label(ax, 16, found[at], f"{found[at]:.1f} %", "waste", dx=-6, dy=12)
    direct_label(ax, sizes[-1], found[-1], "reserved in full", "waste", dx=-10, dy=6)
    direct_label(ax, sizes[-1], formula[-1], "equation", "ink", dx=-1, dy=-62)
    ax.set_xscale("log", base=2)
    marked = [*sizes[:-2:2], sizes[-1]]
    ax.set_xticks(marked, [f"{n:,}" for n in marked])
    ax.minorticks_off()
    ax.set(xlabel="tokens in a block", ylabel="% of held slots empty", ylim=(-3, 100))
    finding(ax, f"Blocks of 16 waste {found[at]:.0f} %, reserving {found[-1]:.0f} %")
    key(ax, "measured", "modelled", loc="upper left")
    return Figure(fig, "Share of held slots that are empty, by block size: " + "; ".join(
        f"{size:,}: {share:.1f} %" for size, share in zip(sizes, found, strict=True)) + ".")


def indirection_figure(sizes: Sequence[int], ratios: Mapping[int, Sequence[float]]) -> Figure:
    """Time of a decode step by blocks, in times of the dense cache's, by block size and batch."""
    fig, ax = figure(5, 3.3)
    above = max(ratios, key=lambda batch: ratios[batch][0])
    for batch, meaning in zip(sorted(ratios), ("decode", "notes"), strict=True):
        label = "1 request" if batch == 1 else f"{batch} requests"
        measured(ax, sizes, ratios[batch], meaning, label)
        direct_label(ax, sizes[0], ratios[batch][0], label, meaning,
                     dy=12 if batch == above else -14)
    ax.axhline(1, color="#8e949e", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(n) for n in sizes])
    ax.minorticks_off()
    most = max(max(column) for column in ratios.values())
    ax.set(xlabel="tokens in a block", ylabel="time (1 = dense cache)", ylim=(0, most * 1.3))
    at = sizes.index(16)
    alone, together = (ratios[batch][at] for batch in sorted(ratios))
    finding(ax, f"{max(ratios)} requests: {ratios[max(ratios)][0]:.1f} times the dense step in "
                f"blocks of {sizes[0]}, {together:.1f} in blocks of 16")
    key(ax, "measured", loc="lower right")
    return Figure(fig, f"Measured time of a paged decode step against a dense one: at blocks of "
                       f"16 {alone:.1f} times as long for one request and {together:.1f} times for "
                       f"{max(ratios)} in one step; at blocks of {sizes[0]}, "
                       f"{ratios[min(ratios)][0]:.1f} and {ratios[max(ratios)][0]:.1f} times.")


def paged_waste(mean: float, block_size: int) -> float:
    """Share of held slots that are empty: half a block for each request (equation 8.1)."""
    half = (block_size - 1) / 2
    return half / (mean + half)


def scale_figure(reserved: float, paged: float) -> Figure:
    """Waste as this chapter counted it, as sources report it, and as the equation has it."""
    useful = facts.find("P-VP01").value.split("-")
    worst, best = (100 - float(share) for share in useful)
    after = float(facts.find("P-VB02").value.removeprefix("<"))
    short, long = (100 * paged_waste(mean, 128) for mean in (400, 12_035))
    fig, ax = compare_sizes([
        Size(f"here, reserved: {100 * reserved:.0f} %", 100 * reserved, "waste", "measured"),
        Size(f"before, at worst: {worst:.1f} %", worst, "waste"),
        Size(f"before, at best: {best:.1f} %", best, "waste"),
        Size(f"blocks of 128, mean 400: {short:.1f} %", short, "notes", "modelled"),
        Size(f"PagedAttention: under {after:.0f} %", after, "notes"),
        Size(f"here, blocks of 16: {100 * paged:.1f} %", 100 * paged, "notes", "measured"),
        Size(f"blocks of 128, long: {long:.1f} %", long, "notes", "modelled"),
    ], "% of KV memory that holds nothing", (0.025, 1300), "Small blocks cut waste from most of "
       "the memory to a few per cent", height=4.4)
    ax.set_xticks([1, 10, 100], ["1", "10", "100"])
    key(ax, "measured", "modelled", "reported", loc="lower right")
    return Figure(fig, f"Reported: {best:.1f} to {worst:.1f} % wasted before, under {after:.0f} % "
                       f"with PagedAttention. Counted here: {100 * reserved:.0f} % and "
                       f"{100 * paged:.1f} %. By the equation, blocks of 128 waste {short:.1f} % "
                       f"where 400 tokens are noted on average, and {long:.1f} % where 12,035 are.")


# --- the block map of a recorded run ---------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The pool after one step of an engine: who holds which blocks, and what has changed."""

    step: int
    tables: Mapping[str, tuple[int, ...]]       # by name: A, or A2 for its second answer
    noted: Mapping[str, int]                    # tokens whose notes are in the table's blocks
    free: tuple[int, ...]                       # the next to be taken first
    waiting: tuple[str, ...] = ()               # sent away, or not let in yet
    events: tuple[str, ...] = ()

    def holders(self, block: int) -> list[str]:
        return [name for name, table in self.tables.items() if block in table]

    def written(self, block: int, block_size: int) -> int:
        """Slots of a block that hold notes."""
        return max((min(block_size, self.noted[name] - table.index(block) * block_size)
                    for name, table in self.tables.items() if block in table), default=0)


def name_of(request_id: str) -> str:
    """Requests 0, 1, 2 are A, B, C; the second answer of 1, `1/1`, is B2."""
    number, _, answer = request_id.partition("/")
    return chr(65 + int(number)) + (str(int(answer) + 1) if answer else "")


def record(engine: "Engine", arrivals: Mapping[int, Mapping]) -> list[Moment]:
    """Run an engine and keep every moment at which its block tables have changed.

    arrivals  {step: arguments of `submit`}; a request of step 3 is there when step 3 begins
    Raises ValueError for a request that the engine rejects.
    """
    nobody = ("nobody is here, all blocks are free",)
    moments = [replace(_moment(engine, 0), events=nobody)]
    step, last = 0, max(arrivals, default=-1)
    while step <= last or not engine.scheduler.is_idle:
        if step in arrivals and (reason := engine.submit(**arrivals[step]).reason):
            raise ValueError(reason)
        engine.step()
        step += 1
        now = _moment(engine, step)
        if events := tuple(_events(moments[-1], now)):
            moments.append(replace(now, events=events))
    return moments


def _moment(engine: "Engine", step: int) -> Moment:
    running = sorted(engine.scheduler.running, key=lambda request: name_of(request.id))
    return Moment(step, {name_of(r.id): tuple(r.table) for r in running},
                  {name_of(r.id): r.computed for r in running}, tuple(engine.pool.free),
                  tuple(name_of(r.id) for r in engine.scheduler.waiting))


def _events(before: Moment, now: Moment) -> Iterator[str]:
    """What happened to the tables between two moments, a few words each."""
    for name in sorted(before.tables.keys() - now.tables.keys()):
        yield f"{name} is sent away" if name in now.waiting else f"{name} ends"
    for name, table in now.tables.items():
        old = before.tables.get(name)
        if old is None:
            yield f"{name} arrives" if len(name) == 1 else f"{name} shares {name[0]}'s blocks"
            continue
        yield from (f"{name} copies block {a} to {b}"
                    for a, b in zip(old, table, strict=False) if a != b)
        yield from (f"{name} grows by block {block}" for block in table[len(old):])


def block_map(moments: Sequence[Moment], block_size: int) -> Stepper:
    """A recorded run, to step through: the pool's blocks, the tables, the free list."""
    most = max(len(moment.tables) for moment in moments)
    olds = [moments[0], *moments[:-1]]
    return Stepper(
        [map_frame(moment, old, block_size, most)
         for old, moment in zip(olds, moments, strict=True)],
        [f"step {moment.step}: {'; '.join(moment.events)}" for moment in moments],
        "moments at which a table changes",
        "Requests take blocks when they arrive and one more whenever the last is full; answers to "
        "one prompt share its blocks and copy only the one they write to; who ends gives all "
        "back, and the next takes them, wherever they lie.")


def map_frame(moment: Moment, old: Moment, block_size: int, num_lines: int) -> draw.Drawing:
    """One moment: every block with its holders, then every table, then the free list."""
    num_blocks = len(moment.free) + len({b for table in moment.tables.values() for b in table})
    pieces = []
    for block in range(num_blocks):
        holders = moment.holders(block)
        fresh = set(holders) - set(old.holders(block))
        x, y = block % PER_ROW * 71, block // PER_ROW * 47
        words = " ".join(holders) if len(holders) <= 3 else f"{len(holders)} hold it"
        pieces.append(_block(x, y, 40, block, words,
                             moment.written(block, block_size) / block_size,
                             held=bool(holders), edge="decode" if fresh else None))
    y = -(-num_blocks // PER_ROW) * 47 + 10
    pieces.append(draw.legend(y, [("notes", "notes"), ("decode", "edge: just taken"),
                                  ("waste", "held, empty")]))
    for i, (name, table) in enumerate(moment.tables.items()):
        pieces += [draw.text(0, y + 28 + 20 * i, name, bold=True),
                   draw.text(36, y + 28 + 20 * i, " ".join(map(str, table))),
                   draw.text(WIDTH, y + 28 + 20 * i, f"{moment.noted[name]} tokens", "muted",
                             anchor="end")]
    bottom = y + 28 + 20 * num_lines
    following = " ".join(map(str, moment.free[:8])) + (" ..." if len(moment.free) > 8 else "")
    held = num_blocks - len(moment.free)
    return draw.svg(
        WIDTH, bottom + 12,
        f"Step {moment.step}: {'; '.join(moment.events)}. {held} of {num_blocks} blocks are held.",
        *pieces, draw.text(0, bottom, f"free, next first: {following}", "muted"))
