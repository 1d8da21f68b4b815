"""The drawings of chapter 05: which rows are computed, work and memory by length, times."""

from collections.abc import Sequence

from ..config import ModelConfig
from . import draw, facts
from .figures import Figure, direct_label, figure, finding, key, measured, modelled, reported
from .stepper import Stepper

PER_ROW = 14  # cells of a text in one line of the drawing
WIDTH = 420


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
    marks = [{" ": "␣", "\n": "↵"}.get(character, character) for character in text]
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
        *legend(bottom),
    )


def legend(y: float) -> list[str]:
    """What the cells' colours mean."""
    pieces, x = [], 0
    for meaning, words in (
        ("prefill", "prompt, computed"),
        ("decode", "answer, computed"),
        ("notes", "read from notes"),
    ):
        pieces += [draw.rect(x, y - 6, 12, 12, meaning), draw.text(x + 18, y, words, size=12)]
        x += 142
    return pieces


def work_stepper(config: ModelConfig, lengths: Sequence[int]) -> Stepper:
    """Work for the next token with and without notes, and the notes' memory, at each length."""
    frames, labels = [], []
    longest = config.flops(max(lengths), num_logits=1)
    most_bytes = max(lengths) * config.kv_bytes_per_token()
    for length in lengths:
        naive, cached = config.flops(length, num_logits=1), config.flops(1, length - 1)
        held = length * config.kv_bytes_per_token()
        frames.append(
            draw.svg(
                WIDTH,
                190,
                (
                    f"At {length} tokens the next one costs {naive / 1e6:,.0f} million operations "
                    f"without notes and {cached / 1e6:.1f} million with "
                    f"{held / 1e6:.2f} MB of notes."
                ),
                draw.text(
                    0,
                    10,
                    f"Work for the next token: {naive / cached:,.0f} times less with notes",
                    bold=True,
                ),
                *labelled_bar(
                    26, naive / longest, f"without notes: {quantity(naive)}FLOP", "prefill"
                ),
                *labelled_bar(
                    76, cached / longest, f"with notes: {quantity(cached)}FLOP", "decode"
                ),
                draw.text(0, 136, "Memory that the notes take", bold=True),
                *labelled_bar(148, held / most_bytes, f"{quantity(held)}B", "notes"),
            )
        )
        labels.append(f"{length:,} tokens so far")
    return Stepper(
        frames,
        labels,
        "length of the text",
        (
            "The work for one more token grows with the whole text without notes and hardly at all "
            "with them; the price is memory that grows by the same amount for every token."
        ),
    )


def labelled_bar(y: float, share: float, label: str, meaning: str) -> list[str]:
    """A hollow bar (counted, not measured) with its words above it."""
    return [
        draw.text(0, y + 6, label),
        draw.rect(0, y + 18, max(1.5, share * (WIDTH - 4)), 16, meaning, filled=False, radius=2),
    ]


def quantity(value: float) -> str:
    """A number with its prefix: 1,234,000 is `1.2 M`."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.1f} {prefix}"
    return f"{value:,.0f} "


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
    finding(ax, "Without notes a token costs more the longer the text; with notes it hardly does")
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
    modelled(ax, lengths, counted, "notes", "counted operations")
    measured(ax, lengths, timed, "decode", "measured time")
    direct_label(ax, lengths[-1], counted[-1], "counted", "notes", dx=-12, dy=-1)
    direct_label(ax, lengths[-1], timed[-1], "measured", "decode", dx=-4, dy=14)
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
    fig, ax = figure(5, 3.2)
    for place, (name, size, by_source) in enumerate(rows):
        y = len(rows) - 1 - place
        words = f"{name}: {size:,.0f} B"
        if by_source:
            reported(ax, size, y, "notes", words)
        else:
            modelled(ax, [size], [y], "decode", words)
            direct_label(ax, size, y, words, "decode")
        ax.texts[-1].set(position=(0, 13), ha="center")
    ax.set_xscale("log")
    ax.set(
        xlim=(30, 8e6),
        ylim=(-0.5, len(rows) - 0.2),
        yticks=[],
        xlabel="bytes per token (log scale)",
    )
    finding(ax, "A token's notes: from half a megabyte to under a kilobyte")
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
