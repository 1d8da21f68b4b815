"""The drawings of chapter 05: which rows are computed, work and memory by length, times."""

from collections.abc import Sequence

from ..config import ModelConfig
from . import draw, facts
from .charts import Size, compare_sizes
from .draw import WIDTH, labelled_bar, quantity
from .figures import Figure, direct_label, figure, finding, key, measured, modelled
from .stepper import Stepper

PER_ROW = 14  # cells of a text in one line of the drawing
COLOURS = (
    ("prefill", "prompt, computed"),
    ("decode", "answer, computed"),
    ("notes", "read from notes"),
)


def rows_stepper(prompt: str, answer: str) -> Stepper:
    """Token by token: the rows that are computed with and without notes, and their sums."""
    frames, labels = [], []
    for written in range(1, len(answer) + 1):
        frames.append(rows_frame(prompt + answer[: written - 1], len(prompt), written))
        labels.append(f"writing token {written} of {len(answer)}: {answer[written - 1]!r}")
    return Stepper(
        frames,
        labels,
        "token being written",
        (
            "Without notes every token written computes the whole text again; with notes it "
            "computes the prompt once and then one row a token."
        ),
    )


def rows_frame(text: str, prompt_length: int, written: int) -> str:
    """One token's step: the text's cells twice, coloured by what is computed now."""
    length = len(text)
    new = length if written == 1 else 1
    naive_rows = sum(range(prompt_length, length + 1))
    computed = ["prefill" if i < prompt_length else "decode" for i in range(length)]
    with_notes = ["notes"] * (length - new) + computed[length - new :]
    marks = draw.marks(text)
    lines = -(-length // PER_ROW) * (draw.CELL + draw.GAP)
    second, bottom = lines + 48, 2 * lines + 84
    now = f"{new} {'row' if new == 1 else 'rows'} now"
    return draw.svg(
        WIDTH,
        bottom + 24,
        f"Token {written}: {length} rows computed without notes, {new} with notes; "
        f"{naive_rows} against {length} in all so far.",
        draw.text(0, 12, f"Without notes: {length} rows now, {naive_rows} so far", bold=True),
        draw.cells(0, 26, marks, computed, per_row=PER_ROW),
        draw.text(0, second, f"With notes: {now}, {length} so far", bold=True),
        draw.cells(0, second + 14, marks, with_notes, per_row=PER_ROW),
        draw.legend(bottom, COLOURS),
    )


def work_stepper(config: ModelConfig, lengths: Sequence[int]) -> Stepper:
    """Work for the next token with and without notes, and the notes' memory, at each length."""
    longest = max(lengths)
    return Stepper(
        [work_frame(config, length, longest) for length in lengths],
        [f"{length:,} tokens so far" for length in lengths],
        "length of the text",
        "Without notes the work for one more token grows faster than the text; with notes it is "
        "one row, whose looking grows slowly; the price is memory, the same for every token.",
    )


def work_frame(config: ModelConfig, length: int, longest: int) -> str:
    """One length: three bars, each on its own scale, which the longest text fills."""
    naive, cached = config.flops(length, num_logits=1), config.flops(1, length - 1)
    looking = length * config.flops_per_entry
    held, per_token = length * config.kv_bytes_per_token(), config.kv_bytes_per_token()
    room = WIDTH - 4
    row = room / config.flops(1, longest - 1)  # pixels an operation
    layers = (cached - looking) * row
    return draw.svg(
        WIDTH,
        198,
        f"At {length} tokens the next one costs {naive / 1e6:,.0f} million operations without "
        f"notes, {cached / 1e6:.1f} million with {held / 1e6:.2f} MB of notes.",
        draw.text(0, 10, f"Work for the next token: {naive / cached:,.0f} times less", bold=True),
        labelled_bar(
            26,
            naive / config.flops(longest, num_logits=1),
            f"without notes: {quantity(naive)}FLOP",
            "prefill",
        ),
        draw.text(
            0, 82, f"with notes: {quantity(cached)}FLOP, {looking / cached:.0%} of it looking"
        ),
        draw.rect(0, 94, layers, 16, "decode", filled=False, radius=2),
        draw.rect(layers, 94, looking * row, 16, "notes", filled=False, radius=2),
        draw.text(0, 140, "Memory that the notes take", bold=True),
        labelled_bar(156, held / (longest * per_token), f"{quantity(held)}B", "notes"),
    )


def times_figure(
    lengths: Sequence[int], without: Sequence[float], cached: Sequence[float]
) -> Figure:
    """Milliseconds for one more token, measured, against the length of the text."""
    fig, ax = figure(5, 3.4)
    measured(ax, lengths, [1e3 * t for t in without], "prefill", "without notes")
    measured(ax, lengths, [1e3 * t for t in cached], "decode", "with notes")
    direct_label(ax, lengths[-1], 1e3 * without[-1], "without notes", "prefill", dx=-10, dy=-2)
    direct_label(ax, lengths[-1], 1e3 * cached[-1], "with notes", "decode", dx=-1, dy=12)
    ax.set(
        xlabel="tokens in the text", ylabel="ms for the next token", xlim=(0, None), ylim=(0, None)
    )
    finding(ax, "Without notes, each token costs more than the last")
    key(ax, "measured", loc="center left")
    return Figure(
        fig,
        (
            f"Measured time for one more token: between {lengths[0]} and {lengths[-1]} tokens it "
            f"grows {without[-1] / without[0]:.0f} times without notes; with notes "
            f"{cached[-1] / cached[0]:.1f} times."
        ),
    )


def gain_figure(lengths: Sequence[int], counted: Sequence[float], timed: Sequence[float]) -> Figure:
    """How many times cheaper a token is with notes: counted in FLOPs, and measured in seconds."""
    fig, ax = figure(5, 3.4)
    modelled(ax, lengths, counted, "ink", "counted operations")
    measured(ax, lengths, timed, "ink", "measured time")
    direct_label(ax, lengths[-1], counted[-1], "counted", "ink", dx=-12, dy=-1)
    direct_label(ax, lengths[-2], timed[-2], "measured", "ink", dx=10, dy=-12)
    ax.set(xlabel="tokens in the text", ylabel="times cheaper with notes", xlim=(0, None))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(lengths[0] * 0.9, lengths[-1] * 1.15)
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    finding(ax, "One row keeps no machine busy: time gains less than the count promises")
    key(ax, "measured", "modelled", loc="upper left")
    return Figure(
        fig,
        (
            f"At {lengths[-1]} tokens a token takes {counted[-1]:,.0f} times fewer operations with "
            f"notes, and {timed[-1]:.0f} times less measured time."
        ),
    )


SOURCES = {
    "P-IS03": "LLaMA-3.1 405B",
    "P-IS02": "Qwen-2.5 72B",
    "P-IS01": "DeepSeek-V3",
    "S39": "DeepSeek-V4.1-Flash",
}


def entry_sizes(config: ModelConfig) -> list[tuple[str, float, bool]]:
    """Bytes of notes per token, largest first: (name, bytes, is it reported by a source?)."""
    register = facts.load()
    units = {"kB": 1_000, "B/token": 1}
    rows = [
        (name, float(register[id].value) * units[register[id].unit], True)
        for id, name in SOURCES.items()
    ]
    rows.append(("this book's toy", config.kv_bytes_per_token(), False))
    return sorted(rows, key=lambda row: -row[1])


def entry_sizes_figure(config: ModelConfig) -> Figure:
    """Bytes of notes a token leaves behind, in the toy and in four production models."""
    rows = entry_sizes(config)
    fig, ax = compare_sizes(
        [Size(f"{name}: {size:,.0f} B", size, "notes" if by_source else "ink",
              "reported" if by_source else "modelled") for name, size, by_source in rows],
        "bytes per token", (8, 2e7),
        "A token's notes: from half a megabyte to under a kilobyte", height=3.2,
    )
    key(ax, "modelled", "reported", loc="lower right")
    return Figure(
        fig,
        "Bytes of notes per token: "
        + "; ".join(f"{name} {size:,.0f}" for name, size, _ in rows)
        + ".",
        table={
            "model": [row[0] for row in rows],
            "bytes per token": [row[1] for row in rows],
            "from": ["a source" if row[2] else "its sizes" for row in rows],
        },
    )
