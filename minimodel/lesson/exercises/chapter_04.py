"""The exercises of chapter 04. Odd sizes everywhere, so that a transposed answer fails."""

import math
import random
from dataclasses import replace

import torch

from minimodel.engine.recall import Recall
from minimodel.lesson.exercises.common import pair_in, random_numbers, tensor_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    Verdict,
    function_in,
    number_in,
    right,
    wrong,
)
from minimodel.model.corpus import Document, Fact, Notebook, town_notebook


def close(found: float, expected: float, within: float = 0.01) -> bool:
    """Whether a number is right to a hundredth of its size."""
    return abs(found - expected) <= within * abs(expected)


def same(found: float, expected: float) -> bool:
    """Whether a number is right up to rounding, in float32 too."""
    return math.isclose(found, expected, rel_tol=1e-6)


# --- 4.1 -------------------------------------------------------------------------------


def check_floor(answer: object) -> Verdict:
    value, letter = number_in(answer), math.log(26)
    if close(value, letter / 2):
        return right(
            "ln 26 = 3.26 for each letter of the first string, nothing for those of the second: "
            "1.63 on average. A run whose loss stops at 3.26 has not found the repetition; one "
            "that gets below 1.63 has seen what it should not."
        )
    if close(value, letter):
        return wrong(
            "That is the surprise at one letter that nobody can foresee. Half of the letters "
            "can be foreseen."
        )
    if close(value, 0, 1e-6) or abs(value) < 0.01:
        return wrong("The first string is a surprise to the best of readers.")
    if close(value, 0.5 * math.log2(26)):
        return wrong("That is in bits. The loss is counted with the natural logarithm.")
    if close(value, math.log(264) / 2):
        return wrong("264 tokens exist, but a good reader knows that only 26 of them occur here.")
    return wrong(
        "For each of the 60 letters: what chance can the best reader give it? Then the mean of "
        "-ln of these chances."
    )


FLOOR = Exercise(
    id="4.1",
    kind="check",
    title="The loss that nobody can beat",
    prompt="A row is a string of 30 random letters (of 26), followed by the same string once more. "
    "All 60 letters weigh the same, and the model knows how long the strings are. What is the "
    "lowest loss that a model can reach that sees only what stands before each letter?",
    starter="answer = ...",
    check=check_floor,
    hints=(
        "A letter that can only be guessed has a chance of 1/26, a surprise of ln 26.",
        "A letter that is known for sure has a surprise of 0. How many are there of each?",
    ),
    solution="answer = 30 * math.log(26) / 60",
)


# --- 4.2 -------------------------------------------------------------------------------


def true_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    log_chances = logits[:-1].log_softmax(-1)
    surprise = -log_chances[torch.arange(len(ids) - 1), ids[1:]]
    return (surprise * weights[1:]).sum() / weights[1:].sum()


def check_loss(answer: object) -> Verdict:
    loss_of_text, length, vocabulary = function_in(answer), 11, 7
    logits = 3 * random_numbers(length, vocabulary, seed=42)
    ids = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(4))
    weights = torch.tensor([0.7, 0.15, 0.15, 3, 0.5, 1, 1, 0, 3, 0.9, 0.2], dtype=torch.float64)
    found = number_in(loss_of_text(logits, ids, weights))
    log_chances = logits.log_softmax(-1)
    places = torch.arange(length)
    unshifted = -(log_chances[places, ids] * weights).sum() / weights.sum()
    late = -(log_chances[places[1:], ids[:-1]] * weights[:-1]).sum() / weights[:-1].sum()
    surprise = -log_chances[places[:-1], ids[1:]]
    expected = float(true_loss(logits, ids, weights))
    if same(found, expected):
        return right(
            "Each row is judged by the token after it, and by that token's weight. The last row "
            "has nothing to be judged by, and the first token is nobody's question."
        )
    if same(found, float(unshifted)):
        return wrong(
            "Each row is asked for the token that it has just read. A model learns that in a few "
            "steps: it repeats its input. Which token is a row to be asked for?"
        )
    if same(found, float(late)):
        return wrong("Shifted the wrong way: these rows are asked for the token before them.")
    if same(found, float(surprise.mean())):
        return wrong("Shifted rightly, but every token counts the same: use the weights.")
    if same(found, float((surprise * weights[:-1]).sum() / weights[:-1].sum())):
        return wrong(
            "The tokens are shifted, the weights are not: a token's weight belongs to the row "
            "that is asked for it."
        )
    if same(found, float((surprise * weights[1:]).sum() / weights.sum())):
        return wrong("The sum of the weights still counts the first token, which nobody is asked "
                     "for.")
    if same(found, float((surprise * weights[1:]).mean())):
        return wrong(
            "Divide by the sum of the weights, not by the number of rows; otherwise a text with "
            "many light bytes looks better learned than it is."
        )
    return wrong(f"The loss of the test's 11 tokens is {expected:.4f}; yours is {found:.4f}.")


LOSS = Exercise(
    id="4.2",
    kind="code",
    title="One place on",
    prompt="`logits` [n, vocabulary] has a row for each of a text's n tokens, `ids` [n] are the "
    "tokens and `weights` [n] their loss weights. This function runs, gives a number, and "
    "trains a model that repeats its last token for ever. Mend it.",
    starter="""def loss_of_text(logits, ids, weights):
    log_chances = logits.log_softmax(-1)
    places = torch.arange(len(ids))
    surprise = -log_chances[places, ids]
    return (surprise * weights).sum() / weights.sum()""",
    answer="loss_of_text",
    check=check_loss,
    hints=(
        "Row 0 has read token 0. Which token does it have to foresee?",
        "The last row has no target: leave it out. A token's weight goes with the token.",
    ),
    solution="""def loss_of_text(logits, ids, weights):
    log_chances = logits[:-1].log_softmax(-1)
    targets, weights = ids[1:], weights[1:]
    places = torch.arange(len(targets))
    surprise = -log_chances[places, targets]
    return (surprise * weights).sum() / weights.sum()""",
)


# --- 4.3 -------------------------------------------------------------------------------


def check_mirror(answer: object) -> Verdict:
    mirror_document, lengths = function_in(answer), (5, 9, 14)
    for seed, length in enumerate(lengths):
        doc = mirror_document(random.Random(seed), length)
        if not isinstance(doc, Document):
            return wrong(f"A `Document` is asked for; this is a {type(doc).__name__}.")
        text = bytes(i for i in doc.ids if i < 256).decode("ascii", errors="replace")
        first, _, second = text.partition("\n")
        if len(doc.ids) != len(doc.weights):
            return wrong(f"{len(doc.ids)} ids and {len(doc.weights)} weights: use `doc.text`.")
        letters = first.isalpha() and first.islower()
        if len(first) != length or not letters or second.rstrip("\n") != first[::-1]:
            return wrong(
                f"For length {length} the text is {text!r}: a string of {length} lower-case "
                "letters, a line end, and the same string backwards are asked for."
            )
        bytes_only = [w for i, w in zip(doc.ids, doc.weights, strict=True) if i < 256]
        if any(bytes_only[:length]):
            return wrong(
                "The letters of the first string carry weight. Nobody can foresee them: the "
                "gradients they cause are noise."
            )
        if any(w != 1 for w in bytes_only[length + 1:2 * length + 1]):
            return wrong("Every letter of the mirrored string can be foreseen: let each count one.")
    texts = {tuple(mirror_document(random.Random(seed), 14).ids) for seed in range(9)}
    if len(texts) < 9:
        return wrong("Other seeds give the same text. A text seen twice can be learned by heart.")
    again = mirror_document(random.Random(4), 14).ids
    if again != mirror_document(random.Random(4), 14).ids:
        return wrong("One seed gives two texts: draw with `rng` alone, so that a run can be made "
                     "again.")
    return right(
        "The first byte of the mirror can be foreseen too, unlike that of an echo: it is the byte "
        "before the line end. And no head that looks for *what came next* will do: this task asks "
        "for *what came before*."
    )


MIRROR = Exercise(
    id="4.3",
    kind="code",
    title="A new kind of text",
    prompt="Write `mirror_document(rng, length)`: a `Document` of `length` random lower-case "
    "letters, a line end, and the same letters backwards. The weights should be right for it: "
    "nothing where nobody can know, one where the model can. `doc.text(text, weight)` "
    "appends a text.",
    starter="""def mirror_document(rng, length):
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = "".join(rng.choice(letters) for _ in range(length))
    doc = Document()
    return doc.text(text + "\\n" + text, 1.0)""",
    answer="mirror_document",
    check=check_mirror,
    hints=(
        "`text[::-1]` is a string backwards.",
        "Two pieces, two weights: append the first string with 0.0, the mirror with 1.0.",
    ),
    solution="""def mirror_document(rng, length):
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = "".join(rng.choice(letters) for _ in range(length))
    doc = Document().text(text, 0.0).text("\\n", 0.2)
    return doc.text(text[::-1], 1.0)""",
)


# --- 4.4 -------------------------------------------------------------------------------


def chosen_by(bias: torch.Tensor, seed: int, tokens: int = 701, k: int = 3) -> torch.Tensor:
    """Counts [experts] of a gate that likes some experts better than others."""
    experts = len(bias)
    liking = torch.linspace(-0.3, 0.3, experts, dtype=torch.float64)
    scores = (random_numbers(tokens, experts, seed=seed) + 3 * liking).sigmoid()
    return (scores + bias).topk(k, dim=-1).indices.flatten().bincount(minlength=experts)


def check_balance(answer: object) -> Verdict:
    balance, experts = function_in(answer), 11
    bias, loads = torch.zeros(experts, dtype=torch.float64), []
    for step in range(300):
        counts = chosen_by(bias, seed=step)
        loads.append(float(counts.max() / counts.double().mean()))
        new = tensor_in(balance(bias.clone(), counts, 0.01), (experts,), "The new bias")
        if step == 0 and (new - bias).abs().max() > 0.05:
            return wrong(
                f"One step at a rate of 0.01 moved a bias by {(new - bias).abs().max():.2g}. Only "
                "the sign of the difference counts: a step is the same for an expert that is a "
                "little over its share and for one that is far over it."
            )
        bias = new
    start, end = sum(loads[:5]) / 5, sum(loads[-50:]) / 50
    if end > start - 0.05:
        return wrong(
            f"The fullest expert had {start:.2f} times the mean load at the start, and after 300 "
            f"steps it has {end:.2f}. Which way must the bias of a full expert go?"
        )
    if end > 1.25:
        return wrong(
            f"It gets better, from {start:.2f} times the mean load to {end:.2f}, and stops there. "
            "Do all experts move, and by the rate?"
        )
    if bias.mean().abs() > 0.01:
        return wrong(
            "The loads are even, but the biases drift: take their mean away, since only "
            "differences matter to the choice."
        )
    return right(
        f"From {start:.2f} times the mean load to {end:.2f}. The gate likes some experts better, "
        "as before: their *scores* have not changed, only who gets chosen."
    )


BALANCE = Exercise(
    id="4.4",
    kind="code",
    title="Nobody idle, nobody drowned",
    prompt="`counts` [experts] says how many tokens chose each expert in this step. Write "
    "`balance(bias, counts, rate)`, which returns the gate's next bias: up by `rate` for experts "
    "below the mean load, down for those above it, with a mean of zero. The check lets a gate "
    "with favourites run for 300 steps.",
    starter="""def balance(bias, counts, rate):
    mean = counts.float().mean()
    bias = bias + rate * (counts - mean).sign()
    return bias - bias.mean()""",
    answer="balance",
    check=check_balance,
    hints=(
        "An expert is chosen when its score plus its bias is large. What does a larger bias do to "
        "one that is full already?",
        "`(mean - counts).sign()` is plus one where an expert has too few tokens.",
    ),
    solution="""def balance(bias, counts, rate):
    mean = counts.float().mean()
    bias = bias + rate * (mean - counts).sign()
    return bias - bias.mean()""",
)


# --- 4.5 -------------------------------------------------------------------------------


def check_whole(answer: object) -> Verdict:
    share_of_values = function_in(answer)
    bytes_right = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0],
                               dtype=torch.bool)
    spans = [(1, 1), (3, 4), (8, 3), (11, 5), (15, 2)]      # one, all, one wrong, all, one wrong
    found = number_in(share_of_values(bytes_right, spans))
    by_byte = sum(int(bytes_right[a:a + n].sum()) for a, n in spans) / sum(n for _, n in spans)
    if same(found, 0.6):
        return right(
            "Three of five values are whole. Of their bytes 13 of 15 are right: a door with one "
            "wrong digit stays shut."
        )
    if same(found, by_byte):
        return wrong("That is the share of right bytes. A value with one wrong digit is wrong.")
    if same(found, 3):
        return wrong("That many are whole; a share of the five is asked for.")
    if same(found, 1.0):
        return wrong("A value counts only if all of its bytes are right, not if any is.")
    if same(found, float(bytes_right.double().mean())):
        return wrong("That counts all the bytes, and those between the values are not asked for.")
    return wrong(f"Three of the test's five values are whole, 0.6; yours gives {found:.3g}.")


WHOLE = Exercise(
    id="4.5",
    kind="code",
    title="Whole values",
    prompt="`bytes_right` [n] says for each byte whether it was foreseen; `spans` lists the "
    "values as (first byte, length). Return the share of values that are right *whole*.",
    starter="""def share_of_values(bytes_right, spans):
    found = [bytes_right[first:first + length]
             for first, length in spans]
    return torch.cat(found).float().mean()""",
    answer="share_of_values",
    check=check_whole,
    hints=(
        "One number a value, not one a byte: a value is either right or wrong.",
        "`all()` of a value's bytes is true if none is wrong; then take the mean over values.",
    ),
    solution="""def share_of_values(bytes_right, spans):
    whole = [bool(bytes_right[first:first + length].all())
             for first, length in spans]
    return sum(whole) / len(whole)""",
)


# --- 4.6 -------------------------------------------------------------------------------


def check_interval(answer: object) -> Verdict:
    low, high = pair_in(answer)
    true_low, true_high = Recall("", 40, 36).interval()
    if close(low, true_low) and close(high, true_high):
        return right(
            "Between 77 % and 96 %: so 36 of 40 is no proof of nine in ten, and two versions of a "
            "model that got 36 and 38 cannot be told apart. The interval is not symmetric, since "
            "there is more room below 90 % than above."
        )
    if close(low, true_high) and close(high, true_low):
        return wrong("The right numbers, in the wrong order: the low end first.")
    if low < 0 or high > 1:
        return wrong("Shares are asked for, between 0 and 1.")
    if abs(low - 0.807) < 0.005 and abs(high - 0.993) < 0.005:
        return wrong(
            "That is the plain interval, 0.9 plus and minus 1.96 standard errors, which is too "
            "sure of itself when a share is near one. Wilson's is built into `Recall`."
        )
    return wrong("Make a `Recall` with 40 asked and 36 right, and look at its `interval()`.")


INTERVAL = Exercise(
    id="4.6",
    kind="check",
    title="How sure are forty questions?",
    prompt="A changed model answers 36 of 40 questions. Between which shares does the true one "
    "lie, by Wilson's interval at 95 %? Answer with two numbers between 0 and 1.",
    starter="answer = (..., ...)   # (low, high)",
    check=check_interval,
    hints=(
        "The cell that asked twelve questions a point printed such intervals. How did it get them?",
        "`Recall` of `minimodel.engine.recall` takes a kind, the number asked and right.",
    ),
    solution='answer = Recall("changed", asked=40, right=36).interval()',
)


# --- 4.7 -------------------------------------------------------------------------------


def by_key(notebook: Notebook, fact: Fact) -> str:
    """A reader that looks the key up in the text, as one should."""
    opening = f"{fact.opening}"
    line = next(line for line in notebook.text.splitlines() if line.startswith(opening))
    return line.removeprefix(opening).rstrip(".")


def by_kind(notebook: Notebook, fact: Fact) -> str:
    """A reader that answers with the last value of the right kind."""
    lines = [line for line in notebook.text.splitlines()
             if line.startswith(f"The {fact.kind} of ")]
    return lines[-1].split(" is ")[1].rstrip(".")


def by_heart(notebook: Notebook, fact: Fact) -> str:
    """A reader that does not look at all."""
    return "4821"


def with_value(notebook: Notebook, fact: Fact, value: str) -> Notebook:
    other = replace(fact, value=value)
    return Notebook(tuple(other.line if line == fact.line else line for line in notebook.lines),
                    tuple(other if f == fact else f for f in notebook.facts))


def check_changed(answer: object) -> Verdict:
    answers_changed = function_in(answer)
    notebook = town_notebook(random.Random(47), 640, num_facts=9)
    for reader, name in ((by_key, "a reader that looks up the key"),
                         (by_kind, "one that takes the last value of the right kind"),
                         (by_heart, "one that never looks")):
        for fact in (notebook.facts[0], notebook.facts[5], notebook.facts[8]):
            value = "Zazu" if fact.kind == "owner" else "0000"
            other = with_value(notebook, fact, value)
            expected = [old for old, new in zip(notebook.facts, other.facts, strict=True)
                        if reader(notebook, old) != reader(other, new)]
            found = list(answers_changed(reader, notebook, fact, value) or ())
            if not all(isinstance(f, Fact) for f in found):
                return wrong("A list of facts is asked for, those of the old notebook: this one "
                             f"holds a {type(found[0]).__name__}.")
            keys, wanted = [f.key for f in found], [f.key for f in expected]
            if sorted(keys) != sorted(wanted):
                return wrong(
                    f"With {name}, a change of {fact.key} should change the answers about "
                    f"{wanted or 'nothing'}; you found {keys or 'none'}."
                )
    return right(
        "For a reader one answer changes; for one that goes by kind several may, or the wrong "
        "ones; for one that knows by heart none does. No share of right answers tells these three "
        "apart as clearly."
    )


CHANGED = Exercise(
    id="4.7",
    kind="code",
    title="Change one fact",
    prompt="`ask(notebook, fact)` gives some reader's answer. Write `answers_changed(ask, "
    "notebook, fact, value)`: give `fact` another value, ask for *all* facts before and after, "
    "and return the facts (of the old notebook) whose answers changed. `with_value(notebook, "
    "fact, value)` makes the changed notebook.",
    starter="""from minimodel.lesson.exercises.chapter_04 import with_value


def answers_changed(ask, notebook, fact, value):
    other = with_value(notebook, fact, value)
    if ask(notebook, fact) != ask(other, fact):
        return [fact]
    return []""",
    answer="answers_changed",
    check=check_changed,
    hints=(
        "The interesting answers are those that should not change: ask for every fact.",
        "The facts of both notebooks stand in the same order: go through them side by side.",
    ),
    solution="""from minimodel.lesson.exercises.chapter_04 import with_value


def answers_changed(ask, notebook, fact, value):
    other = with_value(notebook, fact, value)
    return [old for old, new in zip(notebook.facts, other.facts)
            if ask(notebook, old) != ask(other, new)]""",
)


# --- 4.8 -------------------------------------------------------------------------------

TOO_GOOD = Exercise(
    id="4.8",
    kind="think",
    title="Other ways to be too good",
    prompt="Without the mask, a loss was too good to be true. Find three other ways in which a "
    "model's *measured* recall could be better than its recall in use, and say for each what this "
    "chapter does against it, or could do.",
    solution="**Texts that come again.** If a notebook of the test was in training, the answer may "
    "come from the weights. The corpus draws every text afresh, and the tests draw from seeds that "
    "training never uses. (With text from the world this is the hard one: nobody knows all that "
    "is in it.)\n\n"
    "**A guess that pays.** With two facts of different kinds, whoever copies some value of the "
    "right kind is right. Ask among many facts, several of each kind; or change one fact and see "
    "which answers follow it.\n\n"
    "**Help that is not there in use.** Under teacher forcing, the digits written so far are "
    "always right. In use a wrong digit stays and leads on. For a value that must be whole this "
    "happens to make no difference, since the first wrong byte decides; for a long answer it "
    "does.\n\n"
    "Others: few questions and a lucky seed (look at the interval); choosing the best of many "
    "runs by the same test that is then reported; facts that always stand in the same place; and "
    "questions that only ask what the training asked.",
)

CHAPTER = Chapter(
    4,
    "Teaching the toy",
    [FLOOR, LOSS, MIRROR, BALANCE, WHOLE, INTERVAL, CHANGED, TOO_GOOD],
    given="import math\n\nimport torch\n\nfrom minimodel.engine.recall import Recall\n"
    "from minimodel.model.corpus import Document",
)
