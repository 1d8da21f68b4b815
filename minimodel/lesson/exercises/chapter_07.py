"""The exercises of chapter 07."""

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from minimodel.lesson.exercises.common import (
    ODD,
    odd_model,
    pair_in,
    random_numbers,
    random_tokens,
    tensor_in,
)
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    NotAnAnswer,
    Verdict,
    function_in,
    number_in,
    right,
    wrong,
)
from minimodel.model.batch import Batch

# --- 7.1 -------------------------------------------------------------------------------


def check_designs(answer: object) -> Verdict:
    grouped, latent = pair_in(answer)
    true = 26 * 2 * 6 * 80 * 2, 26 * (320 + 48) * 2
    if (grouped, latent) == (true[1], true[0]):
        return wrong("The other way round: first the keys and values, then the latent.")
    if grouped * 2 == true[0]:
        return wrong("The first is half of it: a key *and* a value are noted, of 2 bytes a number.")
    if grouped == true[0] * 2:
        return wrong("The first is twice what it should be: a number takes 2 bytes, not 4.")
    if grouped == true[0] * 4:
        return wrong("For the first you counted all 24 heads; six of them have keys of their own.")
    if grouped != true[0]:
        return wrong("For the first, multiply: key and value, layers, KV heads, numbers in each, "
                     "bytes a number.")
    if latent in (true[1] * 24, true[1] * 6):
        return wrong("The first is right. The latent is noted once for all heads, not once a head.")
    if latent == true[1] * 2:
        return wrong("The first is right. One latent stands for keys *and* values: there is no "
                     "factor of two for them.")
    if latent in (26 * 320 * 2, 26 * 48 * 2):
        return wrong("The first is right. The entry of the second has two parts: latent and "
                     "rotary key.")
    if latent != true[1]:
        return wrong("The first is right. For the second: layers, times the numbers in latent and "
                     "rotary key, times bytes a number.")
    return right("49,920 against 19,136 bytes, though the latent serves 24 different keys and the "
                 "other design only six.")


DESIGNS = Exercise(
    id="7.1",
    kind="check",
    title="Size two designs",
    prompt="A model has 26 layers and 24 heads, and keeps 2 bytes a number. How many bytes of "
    "notes does a token leave with 6 KV heads of 80 numbers, and how many with a latent of 320 "
    "numbers and a rotary key of 48? Answer with two numbers.",
    starter="answer = (..., ...)   # (keys and values, latent)",
    check=check_designs,
    hints=(
        "One of the numbers given here belongs into neither product.",
        "Per layer, the first design notes 2 x 6 x 80 numbers, the second 320 + 48.",
    ),
    solution="answer = (26 * 2 * 6 * 80 * 2,\n          26 * (320 + 48) * 2)",
)


# --- 7.2 -------------------------------------------------------------------------------


def check_packed(answer: object) -> Verdict:
    value, true = number_in(answer), (384 / 2 + 384 / 16) * 3.5
    if value == true:
        return right("216 bytes an entry, 3.5 entries a token: 756 bytes.")
    if value == 384 / 2 * 3.5:
        return wrong("The scales are missing: one byte for every 16 numbers of an entry.")
    if value == (384 / 2 + 384 / 16) * 6:
        return wrong("Six owners, but not six entries a token: where four tokens share an entry, "
                     "each pays for a quarter of it.")
    if value == (384 / 2 + 384 / 16) * 14:
        return wrong("You multiplied by the tokens that share an entry; divide by them.")
    if value in (216, 192):
        return wrong("That is one entry. How many of them does a token pay for?")
    if value == (384 * 4 + 384 / 16) * 3.5 or value == 384 * 4 * 3.5:
        return wrong("Four *bits* a number are half a byte.")
    return wrong(f"{value:,.10g} is not it. First the bytes of one entry (numbers and scales), "
                 "then the entries a token pays for: the sum of one over the tokens that share "
                 "it.")


PACKED = Exercise(
    id="7.2",
    kind="check",
    title="Another 890",
    prompt="A design notes 384 numbers an entry, in 4 bits each, with a scale of one byte for "
    "every 16 of them, and no index. Six of its 48 layers own notes: in two of them 4 tokens "
    "share an entry, in two 2 tokens, in two each token has its own. How many bytes does a token "
    "leave?",
    starter="answer = ...",
    check=check_packed,
    hints=(
        "The bytes of an entry: 384 numbers of half a byte, and 384 / 16 scales.",
        "The entries a token pays for: 1/4 + 1/4 + 1/2 + 1/2 + 1 + 1.",
    ),
    solution="entry = 384 / 2 + 384 / 16\nanswer = entry * (2 / 4 + 2 / 2 + 2)",
)


# --- 7.3 -------------------------------------------------------------------------------


def check_crossover(answer: object) -> Verdict:
    value = number_in(answer)
    if value == 85:
        return right("256 x 128 / (512 - 128) is 85.3: up to 85 rows absorb, the 86th makes it "
                     "cheaper to unfold.")
    if abs(value - 256 * 128 / 384) < 0.01:
        return wrong("That is where both cost the same. How many *whole* rows lie below?")
    if value == 86:
        return wrong("At 86 rows unfolding is already cheaper; the crossover is at 85.3.")
    if value in (64, 128):
        return wrong("A row that absorbs meets the latent twice: to compare, and to mix.")
    if 80 <= value <= 90:
        return wrong("Close. The rotary key costs both forms the same, so it drops out; check the "
                     "division.")
    return wrong(f"{value:,.10g} is not it. Put the sizes into the chapter's formula: latent "
                 "times (plain key + value), over (2 latent - plain key - value).")


CROSSOVER = Exercise(
    id="7.3",
    kind="check",
    title="When absorbing stops",
    prompt="A model has latents of 256 numbers, plain keys of 48, rotary keys of 32 and values of "
    "80. By counted multiplications, up to how many new rows of one sequence should look at the "
    "latents as they are?",
    starter="answer = ...",
    check=check_crossover,
    hints=(
        "One of the four sizes does not appear in the formula. Why?",
        "256 x (48 + 80) over 2 x 256 - 48 - 80, and only whole rows exist.",
    ),
    solution="answer = 256 * (48 + 80) // (2 * 256 - 48 - 80)",
)


# --- 7.4 -------------------------------------------------------------------------------

HEADS, TOKENS, PLAIN, TURNED, LATENT, VALUE = 5, 37, 6, 4, 11, 7


def latent_inputs(seed: int) -> list[torch.Tensor]:
    shapes = ((HEADS, PLAIN), (HEADS, TURNED), (TOKENS, LATENT), (TOKENS, TURNED),
              (HEADS, PLAIN, LATENT), (HEADS, VALUE, LATENT))
    return [random_numbers(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def unfolded(plain, turned, latent, key, to_key, to_value, size=PLAIN + TURNED) -> torch.Tensor:
    """The slow form: every head's keys and values of all tokens; `size` scales the scores."""
    k, v = latent @ to_key.mT, latent @ to_value.mT
    scores = (k @ plain[:, :, None])[:, :, 0] + turned @ key.T
    weights = (scores / size ** 0.5).softmax(-1)
    return (weights[:, None] @ v)[:, 0]


def check_absorbed(answer: object) -> Verdict:
    look = function_in(answer)
    inputs = latent_inputs(seed=74)
    with FlopCounterMode(display=False) as counter:
        found = look(*[tensor.clone() for tensor in inputs])
    found = tensor_in(found, (HEADS, VALUE), "The mixed values")
    if not torch.allclose(found.double(), unfolded(*inputs), atol=1e-6):
        for size in (1, PLAIN, TURNED, LATENT, LATENT + TURNED):
            if torch.allclose(found.double(), unfolded(*inputs, size), atol=1e-6):
                return wrong("The scores are not scaled as they were: divide them by the square "
                             "root of a whole query's length *before* it was moved, its plain and "
                             "its turned part together.")
        return wrong("The mixture differs from that of the unfolded form. Both parts of a query "
                     "must be compared, and the sum of the two scores goes into the softmax.")
    unfolding = 2 * TOKENS * LATENT * HEADS * (PLAIN + VALUE)
    if counter.get_total_flops() > 0.7 * unfolding:
        return wrong("The numbers are right, but a key or a value is still made for each of the "
                     "noted tokens. Multiply the query with `to_key` first, mix the *latents*, "
                     "and multiply the mixture with `to_value` last.")
    return right(f"The same mixture; its products of matrices take {counter.get_total_flops():,} "
                 f"operations. Making keys and values alone would have taken {unfolding:,}.")


ABSORBED = Exercise(
    id="7.4",
    kind="code",
    title="Absorb",
    prompt="`look` computes what one new row reads from noted latents, in the slow way. Make it "
    "look at the latents as they are. Shapes: plain [heads, p], turned [heads, r], latent "
    "[tokens, c], key [tokens, r], to_key [heads, p, c], to_value [heads, v, c]; the result is "
    "[heads, v].",
    starter="""def look(plain, turned, latent, key, to_key, to_value):
    k = latent @ to_key.mT            # [heads, tokens, p]
    v = latent @ to_value.mT          # [heads, tokens, v]
    scores = (k @ plain[:, :, None])[:, :, 0] + turned @ key.T
    size = plain.shape[1] + turned.shape[1]
    weights = (scores / size ** 0.5).softmax(-1)
    return (weights[:, None] @ v)[:, 0]""",
    answer="look",
    check=check_absorbed,
    hints=(
        "Which of the four multiplications have a result with one row for each token?",
        "`(plain[:, None] @ to_key)[:, 0]` is a query that a latent can be compared with.",
        "`weights @ latent` is [heads, c]; each head's `to_value` makes its value from that.",
    ),
    solution="""def look(plain, turned, latent, key, to_key, to_value):
    moved = (plain[:, None] @ to_key)[:, 0]      # [heads, c]
    scores = moved @ latent.T + turned @ key.T
    size = plain.shape[1] + turned.shape[1]
    weights = (scores / size ** 0.5).softmax(-1)
    mixed = weights @ latent                     # [heads, c]
    return (to_value @ mixed[:, :, None])[:, :, 0]""",
)


# --- 7.5 -------------------------------------------------------------------------------

SOURCES = ((0, 1, 2, 3, 4), (0, 0, 2, 2, 2), (0, 1, 2, 2, 0), (0, 0, 0, 0, 0), (0, 1, 2, 0, 4))


def counted_rows(sources: tuple[int, ...], num_rows: int, num_wanted: int) -> list[int]:
    """Rows that go through each layer's feed-forward step, counted in a real model."""
    config = replace(ODD, num_layers=len(sources), kv_source_layers=sources)
    model, counts = odd_model(seed=7, config=config), []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda module, x, out: counts.append(len(out)))
    wanted = range(num_rows - num_wanted, num_rows)
    with torch.inference_mode():
        model(torch.tensor(random_tokens(num_rows, seed=75)), Batch([num_rows], wanted=wanted))
    return counts


def check_rows(answer: object) -> Verdict:
    rows_that_go_on = function_in(answer)
    for sources in SOURCES:
        for num_rows, num_wanted in ((23, 1), (9, 4)):
            found = rows_that_go_on(sources, num_rows, num_wanted)
            if not isinstance(found, list | tuple):
                raise NotAnAnswer("A list with one count for each layer is asked for; this is a "
                                  f"{type(found).__name__}.")
            expected = counted_rows(sources, num_rows, num_wanted)
            if list(found) != expected:
                return wrong(where_rows_differ(sources, num_rows, num_wanted, list(found),
                                               expected))
    return right("As the model itself counts them, for five layouts. The fewer and the earlier "
                 "the owners, the less of the model a prompt goes through.")


def where_rows_differ(sources, num_rows, num_wanted, found, expected) -> str:
    said = (f"For sources {sources}, {num_rows} rows and logits wanted for the last "
            f"{num_wanted}, the model computes {expected}; you say {found}.")
    last = max(sources)
    if len(found) == len(expected) and found[last] == num_rows and last < len(sources):
        return f"{said} In the last owner itself rows stop too: once the entry is written."
    if len(found) != len(expected):
        return f"{said} One count for each of the {len(expected)} layers is asked for."
    if found[:last] == expected[:last]:
        return f"{said} From the last owner on, those rows go on whose logits are wanted."
    return f"{said} The last layer that owns notes is number {last}."


ROWS = Exercise(
    id="7.5",
    kind="code",
    title="Which rows go on?",
    prompt="Write a function that says, for each layer, how many rows of a prompt go through its "
    "feed-forward step. `sources` is a model's `kv_source_layers`; logits are wanted for the last "
    "`num_wanted` of `num_rows` rows.",
    starter="""def rows_that_go_on(sources, num_rows, num_wanted):
    return [num_rows for layer in range(len(sources))]""",
    answer="rows_that_go_on",
    check=check_rows,
    hints=(
        "Find the last layer that owns notes: some layer reads it, perhaps only itself.",
        "Before that layer all rows go on. In it they leave their entry, and then?",
    ),
    solution="""def rows_that_go_on(sources, num_rows, num_wanted):
    last_owner = max(sources)
    return [num_rows if layer < last_owner else num_wanted
            for layer in range(len(sources))]""",
)


# --- 7.6 -------------------------------------------------------------------------------


def check_rounding(answer: object) -> Verdict:
    rounded, bits, group = function_in(answer), 5, 6
    sizes = random_numbers(13, 1, seed=76).exp()
    entries = random_numbers(13, 24, seed=77) * sizes
    entries[4] = 0
    entries[5, 7] = 40.0
    together = tensor_in(rounded(entries.clone(), bits, group), (13, 24), "The rounded entries")
    if together.isnan().any():
        return wrong("An entry of zeros came back as nan: its scale is zero, and nothing divided "
                     "by nothing is no number. Keep the scale above zero.")
    alone = torch.cat([rounded(row[None].clone(), bits, group) for row in entries])
    if not torch.allclose(together, alone, atol=1e-9):
        return wrong("An entry that is rounded alone comes back as other numbers than the same "
                     "entry among twelve others. A text would depend on how it was cut into "
                     "steps: take each scale from one entry only.")
    allowed = entries.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True) / 15
    error = (together - entries).unflatten(-1, (-1, group)).abs()
    if (error > 0.51 * allowed + 1e-9).any():
        return wrong("Some numbers move by more than half a step. Each group of `group` "
                     "neighbouring numbers needs a scale of its own: its largest number over the "
                     "largest whole number of so many bits.")
    steps = (together.unflatten(-1, (-1, group)) / allowed.clamp_min(1e-9))
    if not torch.allclose(steps, steps.round(), atol=0.02):     # a scale plus 1e-6 will do
        return wrong("The result holds numbers between the steps: divide by the scale, round to "
                     "whole numbers, and multiply again.")
    return right("Each entry is rounded by itself, in groups, and a large number spoils its own "
                 "group only.")


ROUNDING = Exercise(
    id="7.6",
    kind="code",
    title="Notes that depend on their neighbours",
    prompt="This `rounded` runs, and answers change with the way a prompt is cut into steps. Find "
    "out why, and mend it: every `group` neighbouring numbers of an entry share a scale (no need "
    "to round that). `entries` is [rows, width], and an entry of zeros must stay one.",
    starter="""def rounded(entries, bits, group):
    top = 2 ** (bits - 1) - 1
    scale = entries.abs().amax(0, keepdim=True) / top
    scale = scale.clamp_min(1e-9)
    return (entries / scale).round() * scale""",
    answer="rounded",
    check=check_rounding,
    hints=(
        "`amax(0)` goes over the rows: whose numbers decide about the scale of the first row?",
        "`entries.unflatten(-1, (-1, group))` is [rows, groups, group]; `flatten(-2)` undoes it.",
    ),
    solution="""def rounded(entries, bits, group):
    top = 2 ** (bits - 1) - 1
    groups = entries.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / top
    scale = scale.clamp_min(1e-9)
    return ((groups / scale).round() * scale).flatten(-2)""",
)


# --- 7.7 -------------------------------------------------------------------------------


def check_spacing(answer: object) -> Verdict:
    value, snapshot = number_in(answer), 12 * 160 * 400
    exact = snapshot / (650 / 4)
    if value == 4727:
        return right("768,000 bytes over 4,727 tokens are 162.5 bytes a token, a quarter of 650. "
                     "A prompt that leaves a stored one loses half of that distance on average: "
                     "over two thousand tokens to compute again.")
    if abs(value - exact) < 1:
        return wrong("Just short: rounded down, the snapshots cost a little more than a quarter. "
                     "Round up.")
    if value in (snapshot, snapshot / 1e6):
        return wrong("That is the size of a snapshot in bytes. How many tokens must share it?")
    if abs(value - snapshot / 650) < 1:
        return wrong("There the snapshots cost as much as the notes; a quarter is allowed.")
    if abs(value - snapshot / (650 * 1.25)) < 1:
        return wrong("The notes' own 650 bytes are not part of what the snapshots may cost.")
    return wrong(f"{value:,.10g} is not it. A snapshot is layers x tokens x bytes; spread over "
                 "the distance it may cost a quarter of 650 bytes a token.")


SPACING = Exercise(
    id="7.7",
    kind="check",
    title="How far apart?",
    prompt="A store keeps 650 bytes of notes a token, and at every place where a prompt may be "
    "taken up again a snapshot of a window: 12 layers, 160 tokens, 400 bytes each. How many "
    "tokens must lie between two snapshots, at least, so that they add no more than a quarter to "
    "the notes?",
    starter="answer = ...",
    check=check_spacing,
    hints=(
        "A snapshot has 12 x 160 x 400 bytes.",
        "Over g tokens that is 768,000 / g bytes each. It may be 650 / 4.",
    ),
    solution="import math\n\nanswer = math.ceil(12 * 160 * 400 / (650 / 4))",
)


# --- 7.8 -------------------------------------------------------------------------------

WHICH_OWN = Exercise(
    id="7.8",
    kind="think",
    title="Which layers should own notes?",
    prompt="If one layer owned all notes and the others read them, a token would leave a quarter "
    "of what the toy leaves. Suppose it were layer 0: reading a prompt would touch next to "
    "nothing. Why would that model hardly ever find the code of the red door? And what do you give "
    "up the later the last owner stands?",
    solution="**An entry of layer 0 knows its own byte and its place, and nothing else**: it is "
    "made before any row has looked at another. Every later layer would look into the same "
    "entries. The question's rows could find a 4 in the notebook, but not the 4 *that follows "
    "'red door is'*, because no note says what stood before it. (Chapter 05: an entry is a note "
    "about a token *after that text*. In layer 0 it is not yet.) At least one layer must look "
    "back before the entries are made that the answer needs. So sharing begins late in the toy, "
    "and in the middle of V4.1-Flash.\n\n**A later last owner** gives notes that more layers have "
    "worked on, and costs time in prefill: every row of a prompt goes that far. In the limit it "
    "is the ordinary model, whose rows stop only in the last layer. In V4.1-Flash it stands in "
    "the middle, which makes reading half of writing.",
)

CHAPTER = Chapter(
    7,
    "Smaller notes",
    [DESIGNS, PACKED, CROSSOVER, ABSORBED, ROWS, ROUNDING, SPACING, WHICH_OWN],
    given="import torch",
)
