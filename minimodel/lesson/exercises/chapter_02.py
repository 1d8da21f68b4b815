"""The exercises of chapter 02."""

import math

import torch

from minimodel.lesson.exercises.common import odd_model, random_numbers, random_tokens, tensor_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    Verdict,
    function_in,
    number_in,
    right,
    wrong,
)
from minimodel.model.batch import Batch

# --- 2.1 -------------------------------------------------------------------------------


def check_parameters(answer: object) -> Verdict:
    value, true = number_in(answer), 2 * 90 * 6 * 14 + 2 * 90 * 2 * 14
    if value == true:
        return right("20,160. With a key and a value for each of the six heads it would be 30,240: "
                     "sharing saves weights too, though that is not why it is done. Chapter 05 "
                     "shows why.")
    if value == 4 * 90 * 6 * 14:
        return wrong("That is a key and a value for every head that reads. Here only two heads "
                     "have them.")
    if value == true - 90 * 6 * 14:
        return wrong("Three projections are there; the fourth brings the mixed values of all six "
                     "heads back to a row of 90 numbers.")
    if value == 4 * 90 * 90:
        return wrong("The heads together need not be as wide as the row: six heads of 14 numbers "
                     "are 84.")
    return wrong(f"{value:,.0f} is not it. Add four matrices: queries, keys, values, and the one "
                 "that brings the result back.")


PARAMETERS = Exercise(
    id="2.1",
    kind="check",
    title="Count the weights of attention",
    prompt="A model's rows are 90 numbers wide. It has 6 heads that read and 2 KV heads, all of 14 "
    "numbers. How many weights do the four projections of one attention layer have together?",
    starter="answer = ...",
    check=check_parameters,
    hints=(
        "A projection from a row of 90 numbers to h heads of 14 numbers has 90 times 14 h weights.",
        "Queries: 90 x 84. Keys: 90 x 28. Values: as many as keys. What is the fourth matrix for?",
    ),
    solution="""queries = 90 * 6 * 14
keys = values = 90 * 2 * 14
output = 6 * 14 * 90
answer = queries + keys + values + output""",
)


# --- 2.2 -------------------------------------------------------------------------------


EPS = 0.5      # large, so that its place under the root shows


def check_norm(answer: object) -> Verdict:
    norm = function_in(answer)
    x, weight = random_numbers(5, 7, seed=1) * 3 + 2, random_numbers(7, seed=2)
    found = tensor_in(norm(x.clone(), weight, EPS), (5, 7), "The normalised rows")
    expected = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
    if torch.allclose(found, expected / weight):
        return wrong("The rows are right before the learned weight: multiply by it at the end.")
    over_tokens = x / (x.pow(2).mean(0, keepdim=True) + EPS).sqrt() * weight
    if torch.allclose(found, over_tokens):
        return wrong("This takes the mean over the *tokens*, so each token's row depends on the "
                     "others, later ones too. Every row is measured by its own numbers.")
    centred = x - x.mean(-1, keepdim=True)
    if torch.allclose(found, centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
                      * weight):
        return wrong("That is LayerNorm, which subtracts the mean first. RMSNorm does not.")
    if not torch.allclose(found, expected):
        return wrong("On 5 rows of 7 numbers the result differs from x / sqrt(mean(x²) + eps) "
                     "times the weight.")
    zero = tensor_in(norm(torch.zeros(3, 7).double(), weight, EPS), (3, 7), "Rows of zeros")
    if not torch.equal(zero, torch.zeros(3, 7).double()):
        return wrong("A row of zeros should stay zeros; that is what `eps` is for.")
    return right("Every row is measured by its own numbers, so no token can learn of another here: "
                 "in the whole model only attention looks across rows.")


NORM = Exercise(
    id="2.2",
    kind="code",
    title="A norm that leaks",
    prompt="This norm runs, and for a single row it even keeps its size in check. But it lets "
    "tokens see each other, later ones included. Mend it: `x` is [tokens, numbers], `weight` "
    "[numbers].",
    starter="""def rms_norm(x, weight, eps):
    square = x.pow(2).mean(0, keepdim=True)
    return weight * x / (square + eps).sqrt()""",
    answer="rms_norm",
    check=check_norm,
    hints=(
        "Along which axis does `mean(0)` go: over the numbers of a row, or over the rows?",
        "The last axis, -1, holds a row's numbers.",
    ),
    solution="""def rms_norm(x, weight, eps):
    square = x.pow(2).mean(-1, keepdim=True)
    return weight * x / (square + eps).sqrt()""",
)


# --- 2.3 -------------------------------------------------------------------------------


def check_position(answer: object) -> Verdict:
    value = number_in(answer)
    if value == 414:
        return right("414 - 411 = 1,003 - 1,000. Both turn by the same number of steps, and the "
                     "angle between them stays.")
    if value == 408:
        return wrong("The distance is right, its direction is not: the query stands *after* the "
                     "key it looks at.")
    if value == 1003:
        return wrong("Then the distance would be 592. What must stay as it is?")
    return wrong(f"With the query at {value:g} the distance to the key is {value - 411:g}. It was "
                 "3 before, and the score depends on the distance alone.")


POSITION = Exercise(
    id="2.3",
    kind="check",
    title="Move both along",
    prompt="A query at position 1,003 scores 2.5 against a key at position 1,000. The same two "
    "vectors, before turning, meet again with the key at position 411. At which position must the "
    "query stand to score 2.5 again?",
    starter="answer = ...",
    check=check_position,
    hints=(
        "Query and key are each turned by an angle that grows with the position. What is the "
        "difference of the two angles?",
    ),
    solution="answer = 411 + (1003 - 1000)",
)


# --- 2.4 -------------------------------------------------------------------------------


def check_sharing(answer: object) -> Verdict:
    mix = function_in(answer)
    for heads, kv_heads in ((6, 2), (12, 3)):
        share = heads // kv_heads
        q = random_numbers(heads, 5, 7, seed=3)
        k, v = random_numbers(kv_heads, 5, 7, seed=4), random_numbers(kv_heads, 5, 7, seed=5)
        found = tensor_in(mix(q, k, v), (heads, 5, 7), "The mixed values")
        for head, row in ((head, row) for head in range(heads) for row in range(5)):
            keys, values = k[head // share, :row + 1], v[head // share, :row + 1]
            expected = (keys @ q[head, row] / 7 ** 0.5).softmax(0) @ values
            if not torch.allclose(found[head, row], expected):
                return wrong(
                    f"Row {row} of head {head} is wrong; with {heads} heads and {kv_heads} KV "
                    f"heads it should read KV head {head // share}. List which one each head "
                    "reads.")
    return right("Neighbours share: of six heads and two KV heads, 0, 1, 2 read the first and 3, "
                 "4, 5 the second. Alternating them would do as well in a model *trained* that "
                 "way; with weights trained for one order the other gives nonsense, without any "
                 "error.")


SHARING = Exercise(
    id="2.4",
    kind="code",
    title="Who shares with whom?",
    prompt="Heads that stand next to each other share a KV head. This version has the right shapes "
    "and the wrong numbers. Mend it: `q` is [heads, tokens, numbers], `k` and `v` have fewer "
    "heads.",
    starter="""def mix(q, k, v):
    share = len(q) // len(k)
    k, v = k.repeat(share, 1, 1), v.repeat(share, 1, 1)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    n = q.shape[1]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v""",
    answer="mix",
    check=check_sharing,
    hints=(
        "Try `torch.tensor([0, 1]).repeat(3)`: which KV head does each of six heads get?",
        "The chapter's `look` uses another function that repeats.",
    ),
    solution="""def mix(q, k, v):
    share = len(q) // len(k)
    k = k.repeat_interleave(share, dim=0)
    v = v.repeat_interleave(share, dim=0)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    n = q.shape[1]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v""",
)


# --- 2.5 -------------------------------------------------------------------------------


def may_look(row: int, column: int, window: int) -> bool:
    return row - window < column <= row


def check_window(answer: object) -> Verdict:
    make = function_in(answer)
    for length, window in ((7, 3), (5, 1), (4, 9)):
        found = tensor_in(make(length, window), (length, length), "The mask").bool()
        for row in range(length):
            for column in range(length):
                allowed = may_look(row, column, window)
                if bool(found[row, column]) != allowed:
                    verb = "may" if allowed else "may not"
                    why = ("it would look into the future" if column > row
                           else f"that is {row - column} back" if column < row
                           else "every token sees itself")
                    return wrong(f"With {length} tokens and a window of {window}, token {row} "
                                 f"{verb} look at token {column}: {why}.")
    return right("With such a mask a token costs the same however long the text is. What lies "
                 "further back is out of this layer's sight, though a second layer sees twice as "
                 "far: its neighbours have looked at theirs.")


WINDOW = Exercise(
    id="2.5",
    kind="code",
    title="Look back, but not far",
    prompt="Some models let a layer look at the last few tokens only. Write "
    "`window_mask(length, window)`: a [length, length] tensor of truth values, true where token i "
    "may look at token j, which is itself and the `window - 1` tokens before it.",
    starter="""def window_mask(length, window):
    everything = torch.ones(length, length, dtype=torch.bool)
    return everything.tril(0)""",
    answer="window_mask",
    check=check_window,
    hints=(
        "The causal mask keeps what lies on the diagonal and below. Now take away what lies too "
        "far below.",
        "`triu(-2)` keeps the diagonal, everything above it, and two diagonals below it.",
    ),
    solution="""def window_mask(length, window):
    everything = torch.ones(length, length, dtype=torch.bool)
    return everything.tril(0) & everything.triu(1 - window)""",
)


# --- 2.6 -------------------------------------------------------------------------------


def check_crossing(answer: object) -> Verdict:
    value = number_in(answer)
    crossing = 2 * 2_000_000 / (4 * 3 * 6 * 20) - 1
    if abs(value - math.ceil(crossing)) <= 2:
        return right("About 2,777 tokens. Beyond that, more than half of the work of reading a "
                     "prompt is looking back.")
    if abs(value - crossing / 2) <= 2:
        return wrong("Nearly: at that length the *last* token spends as much on looking back as on "
                     "the rest. Those before it look at less: over the whole prompt a token looks "
                     "at half the length on average.")
    if abs(value - 2 * crossing) <= 4:
        return wrong("Twice too far: a token looked at costs two operations for each number of the "
                     "query and two for each number of the value, four in all.")
    return wrong(f"{value:,.0f} is not it. One token looked at costs 4 x 3 layers x 6 heads x 20 "
                 "numbers operations. How many tokens does a row look at on average?")


CROSSING = Exercise(
    id="2.6",
    kind="check",
    title="When does looking back win?",
    prompt="A model has 3 layers and 6 heads of 20 numbers. Besides looking back, a row costs it 2 "
    "million operations. From what prompt length on does looking back cost more than all the rest, "
    "summed over the whole prompt? Two tokens more or less do not matter.",
    starter="answer = ...",
    check=check_crossing,
    hints=(
        "Row i, counted from zero, looks at i + 1 tokens: in a prompt of n tokens that is "
        "(n + 1) / 2 on average.",
        "Set 4 x 3 x 6 x 20 x (n + 1) / 2 equal to 2,000,000.",
    ),
    solution="""one_look = 4 * 3 * 6 * 20
answer = 2 * 2_000_000 / one_look - 1""",
)


# --- 2.7 -------------------------------------------------------------------------------


def check_surprise(answer: object) -> Verdict:
    surprise, model = function_in(answer), odd_model(seed=2, contrast=30)
    for prompt_length, count, seed in ((9, 5, 1), (1, 3, 2), (14, 1, 3)):
        prompt, text = random_tokens(prompt_length, seed), random_tokens(count, seed + 50)
        whole = torch.tensor(prompt + text)
        with torch.inference_mode():
            batch = Batch(new=[len(whole)], wanted=range(len(whole)))
            chances = model(whole, batch).log_softmax(-1)
            found = number_in(surprise(model, prompt, text))
        exact = -sum(float(chances[prompt_length + i - 1, byte]) for i, byte in enumerate(text))
        shifted = -sum(float(chances[prompt_length + i, byte]) for i, byte in enumerate(text))
        if abs(found - shifted) < 1e-6:
            return wrong("Row i holds the scores for the token *after* token i. This asks each row "
                         "about the very token it has just read.")
        if abs(found + exact) < 1e-6:
            return wrong("The sign: a likely text should surprise little, and never less than 0.")
        if abs(found * count - exact) < 1e-6 and count > 1:
            return wrong("That is the mean over the bytes; the sum is asked for.")
        if abs(found - exact) > 1e-6:
            return wrong(f"For a prompt of {prompt_length} and a text of {count} tokens the "
                         f"surprise is {exact:.3f}, not {found:.3f}.")
    return right("This number, averaged over much text, is the *loss* that training lowers: "
                 "chapter 04.")


SURPRISE = Exercise(
    id="2.7",
    kind="code",
    title="How surprised is it?",
    prompt="The surprise of a text is minus the sum of the logarithms of the chances that the "
    "model gave to each of its tokens, when it had read all tokens before it. One forward over "
    "prompt and text is enough. The starter is off by something; find it. `prompt` and `text` are "
    "lists of token ids; return a number.",
    starter="""def surprise(model, prompt, text):
    tokens = torch.tensor(prompt + text)
    batch = Batch(new=[len(tokens)], wanted=range(len(tokens)))
    chances = model(tokens, batch).log_softmax(-1)
    total = 0.0
    for place in range(len(prompt), len(tokens)):
        total -= float(chances[place, tokens[place]])
    return total""",
    answer="surprise",
    check=check_surprise,
    hints=(
        "After reading the prompt's last token, the model gives its chances for the text's first.",
        "The chances for the token at `place` are in row `place - 1`.",
    ),
    solution="""def surprise(model, prompt, text):
    tokens = torch.tensor(prompt + text)
    batch = Batch(new=[len(tokens)], wanted=range(len(tokens)))
    chances = model(tokens, batch).log_softmax(-1)
    total = 0.0
    for place in range(len(prompt), len(tokens)):
        total -= float(chances[place - 1, tokens[place]])
    return total""",
)


# --- 2.8 -------------------------------------------------------------------------------

NO_POSITIONS = Exercise(
    id="2.8",
    kind="think",
    title="A model without positions",
    prompt="Take the turning away: queries and keys meet as they come. One text is `red door?`, "
    "another `door red?`. In the row of the `?`, could the first layer tell them apart? Could the "
    "second?",
    solution="**The first layer** could not, seen from one token. Scores would depend on what the "
    "tokens are, not where they stand, and a sum does not know the order of its terms: the last "
    "token would see the bytes before it as a bag of letters.\n\n"
    "**The second** could. Because of the mask each earlier row has seen another bag: the first "
    "`d` of `red door?` has `r` and `e` before it, that of `door red?` nothing. The second layer "
    "reads those rows. Models trained without any positions do learn order this way (Haviv and "
    "others, 2022, arXiv 2203.16634). Without mask *and* without positions, the order of the bytes "
    "before the `?` would make no difference to its row at all.",
)

CHAPTER = Chapter(
    2,
    "A transformer that reads bytes",
    [PARAMETERS, NORM, POSITION, SHARING, WINDOW, CROSSING, SURPRISE, NO_POSITIONS],
    given="import torch\nfrom minimodel.model.batch import Batch",
)
