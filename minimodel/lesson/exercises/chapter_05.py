"""The exercises of chapter 05. Odd sizes everywhere, so that a transposed answer fails."""

import torch

from minimodel.cache.dense import DenseCache
from minimodel.config import ModelConfig
from minimodel.engine.generate import generate_without_cache
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
from minimodel.model.train import initialize
from minimodel.model.transformer import Transformer

ODD = ModelConfig(
    hidden_size=36,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    dense_size=28,
    num_experts=5,
    experts_per_token=2,
    expert_size=22,
)


def odd_model(seed: int = 5) -> Transformer:
    """A small model with random weights, in float64: near ties cannot flip a token."""
    torch.manual_seed(seed)
    model = Transformer(ODD)
    initialize(model)  # weights as before training: large enough for attention to matter
    return model.double().eval()


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pair_in(answer: object) -> tuple[float, float]:
    try:
        first, second = answer
    except (TypeError, ValueError):
        raise NotAnAnswer("Two numbers are asked for here, as in (100, 10).") from None
    if first is ... or second is ...:
        raise NotAnAnswer("There is nothing to check yet: put two numbers where the dots are.")
    return number_in(first), number_in(second)


# --- 5.1 -------------------------------------------------------------------------------


def check_rows(answer: object) -> Verdict:
    without, cached = pair_in(answer)
    if (without, cached) == (506, 3521):
        return wrong("The other way round: first without notes, then with them.")
    if without == 7 * 500:
        return wrong(
            "Seven forwards of 500 rows would be right if the text stayed as it is. Each token "
            "written joins the text that the next forward reads."
        )
    if without == sum(range(501, 508)):
        return wrong("The first token is written from the prompt alone: 500 rows, not 501.")
    if without != sum(range(500, 507)):
        return wrong(
            "Without notes, count one forward for each token written. The first computes the "
            "prompt's 500 rows; how many does the second compute?"
        )
    if cached == 507:
        return wrong(
            "Nearly: the last token is written but never read by anything, so nobody computes "
            "its row."
        )
    if cached == 500:
        return wrong(
            "The prompt is 500 rows; six of the tokens written are read too, each for one row."
        )
    if cached != 506:
        return wrong(
            "Without notes you are right. With notes every row is computed once: the prompt's, "
            "and one for each token that the model must read to write the next."
        )
    return right(
        "3,521 against 506: seven times fewer, as many times as tokens were written. That holds "
        "while the answer is short beside the prompt. For 1,000 tokens after a prompt of one it "
        "is 500,500 against 1,000, about half the number written."
    )


ROWS = Exercise(
    id="5.1",
    kind="check",
    title="Count the rows",
    prompt="A prompt has 500 tokens, and 7 are written. How many rows does the model compute "
    "without notes, and how many with them? Answer with two numbers.",
    starter="answer = (..., ...)   # (without notes, with notes)",
    check=check_rows,
    hints=(
        "Without notes the first token written takes a forward over 500 rows, the second one "
        "over 501.",
        "With notes the prompt is computed once. Which of the seven tokens does the model have "
        "to read in order to write the next?",
    ),
    solution="""without = sum(500 + i for i in range(7))
cached = 500 + 6
answer = (without, cached)""",
)


# --- 5.2 -------------------------------------------------------------------------------


def check_bytes(answer: object) -> Verdict:
    value, true = number_in(answer), 2 * 26 * 3 * 80 * 2 * 10_000
    if value == true:
        return right("249.6 million bytes, a quarter of a gigabyte, for one request's text.")
    if value * 2 == true:
        return wrong(
            "Half of it. There are two twos in this product: key *and* value, and 2 bytes a number."
        )
    if value * 4 == true:
        return wrong("A quarter of it: key *and* value, and 2 bytes a number, were both left out.")
    if value == true * 4:
        return wrong(
            "Four times too much: count the heads that notes are kept for, not the query heads."
        )
    if value == true / 26:
        return wrong("That is one layer; every layer keeps notes of its own.")
    if value == true / 10_000:
        return wrong("That is one token; 10,000 are asked for.")
    if value == true * 8:
        return wrong("Those are bits; bytes are asked for.")
    if value in (249.6, 0.2496, 249_600):
        return wrong("The right amount in another unit: write it in bytes.")
    return wrong(
        f"{value:,.10g} is not it. Multiply: key and value, layers, KV heads, numbers per head, "
        "bytes per number, tokens."
    )


BYTES = Exercise(
    id="5.2",
    kind="check",
    title="Size the notes",
    prompt="A model has 26 layers, 12 heads that read, 3 KV heads, heads of 80 numbers, and keeps "
    "its notes in 2 bytes a number. How many bytes do the notes of 10,000 tokens take?",
    starter="answer = ...",
    check=check_bytes,
    hints=(
        "The equation is in the chapter; one of the numbers given here does not belong in it.",
        "Per token: 2 times 26 times 3 times 80 numbers.",
    ),
    solution="per_token = 2 * 26 * 3 * 80 * 2\nanswer = per_token * 10_000",
)


# --- 5.3 -------------------------------------------------------------------------------


def check_growing(answer: object) -> Verdict:
    if not isinstance(answer, type) and hasattr(answer, "write"):
        return wrong("Hand in the class itself: `GrowingNotes`, without brackets.")
    notes, width = function_in(answer)(), 7
    torch.manual_seed(53)
    sizes = (5, *[1] * 90, 905, 9000, *[1] * 6000)
    everything = torch.randn(sum(sizes), width)
    total, copied, place = 0, 0, None
    for count in sizes:
        notes.write(everything[total : total + count])
        found = notes.read()
        if tuple(found.shape) != (total + count, width):
            return wrong(
                f"After {total + count} entries of {width} numbers `read` returns a tensor of "
                f"shape {list(found.shape)}; it should return exactly those entries."
            )
        if place is not None and found.data_ptr() != place:
            copied += total  # the old entries were moved to another place
        total, place = total + count, found.data_ptr()
    if not torch.equal(found, everything):
        return wrong(
            f"After {total} entries `read` returns other numbers than were written. Are old "
            "entries copied when the memory grows?"
        )
    if copied / total > 4:
        return wrong(
            f"The entries are right, but each was copied {copied / total:,.0f} times on average, "
            "and that grows with the text. Make the room twice as large, not larger by a fixed "
            "amount, whenever it is full."
        )
    return right(
        f"All {total:,} entries are in place, and each was copied {copied / total:.1f} times on "
        "average. With doubling that stays below a small constant, however long the text gets."
    )


GROWING = Exercise(
    id="5.3",
    kind="code",
    title="Notes that grow without being copied",
    prompt="`torch.cat` copies all the notes there are for every token written: that is quadratic "
    "work again, if only of copying. Change `GrowingNotes` so that it sets memory aside, "
    "fills it, and doubles it when it is full. `write` takes [count, width] entries, `read` "
    "returns all of them.",
    starter="""class GrowingNotes:
    def __init__(self):
        self.entries = None

    def write(self, new):
        old = self.entries
        self.entries = (new if old is None
                        else torch.cat((old, new)))

    def read(self):
        return self.entries""",
    answer="GrowingNotes",
    check=check_growing,
    hints=(
        "Keep two things: the memory, which has room to spare, and how many entries are in it.",
        "`read` returns `self.memory[:self.count]`: a view, not a copy.",
        "When the new entries do not fit, make a memory of at least twice the size with "
        "`new.new_empty(...)` and copy the old entries into it once.",
    ),
    solution="""class GrowingNotes:
    def __init__(self):
        self.memory, self.count = None, 0

    def write(self, new):
        needed = self.count + len(new)
        if self.memory is None or needed > len(self.memory):
            self.grow(2 * needed, new)
        self.memory[self.count:needed] = new
        self.count = needed

    def grow(self, room, new):
        larger = new.new_empty(room, new.shape[1])
        if self.memory is not None:
            larger[:self.count] = self.read()
        self.memory = larger

    def read(self):
        return self.memory[:self.count]""",
)


# --- 5.4 -------------------------------------------------------------------------------


class CountingModel:
    """A model that counts the rows it computes."""

    def __init__(self, model: Transformer):
        self.model, self.config, self.rows = model, model.config, 0

    def __call__(self, tokens, batch, kv=None, positions=None):
        self.rows += len(tokens)
        return self.model(tokens, batch, kv, positions)


def check_positions(answer: object) -> Verdict:
    answer_with_notes, count = function_in(answer), 8
    for prompt_length, seed in ((23, 1), (9, 2), (1, 3)):
        model, prompt = CountingModel(odd_model()), random_tokens(prompt_length, seed)
        expected = generate_without_cache(model.model, prompt, count, stop_ids=())
        cache = DenseCache(ODD, capacity=prompt_length + count, dtype=torch.float64)
        with torch.inference_mode():
            found = list(answer_with_notes(model, prompt, cache, count))
        if found != expected:
            return wrong(first_difference(prompt_length, found, expected))
        if model.rows != prompt_length + count - 1:
            return wrong(
                f"The tokens are right, but {model.rows} rows were computed for a prompt of "
                f"{prompt_length} and {count} tokens written; with notes it takes "
                f"{prompt_length + count - 1}. Keep the cache, and mend the positions."
            )
    return right(
        "The same tokens for three prompts. Nothing had crashed and no shape was wrong: only "
        "comparing with the slow way finds such a fault."
    )


def first_difference(prompt_length: int, found: list, expected: list[int]) -> str:
    """Where an answer leaves the slow one, and what to look at."""
    pairs = zip(found, expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    tokens = "token" if prompt_length == 1 else "tokens"
    where = (
        f"With a prompt of {prompt_length} {tokens} the answer differs from the slow one at token "
        f"{same + 1} of {len(expected)}."
    )
    if same == 0:
        return f"{where} The very first step is wrong: which positions do the prompt's rows have?"
    return f"{where} The prompt is right, so look at where the rows after it believe they stand."


POSITIONS = Exercise(
    id="5.4",
    kind="code",
    title="Find the silent bug",
    prompt="This loop runs without complaint and writes wrong text. Find the fault and mend it. "
    "(The check compares the tokens with those of the slow way, on a small random model.)",
    starter="""def answer_with_notes(model, prompt, cache, count):
    new, answer = prompt, []
    while len(answer) < count:
        batch = cache.batch([len(new)])
        positions = torch.arange(len(new))
        logits = model(torch.tensor(new), batch,
                       cache, positions)
        cache.commit(batch)
        new = [int(logits[-1].argmax())]
        answer += new
    return answer""",
    answer="answer_with_notes",
    check=check_positions,
    hints=(
        "What does `positions` hold in the first step? In the second?",
        "A row's position counts the tokens noted before it; `cache.lengths[0]` knows them.",
    ),
    solution="""def answer_with_notes(model, prompt, cache, count):
    new, answer = prompt, []
    while len(answer) < count:
        batch = cache.batch([len(new)])
        noted = cache.lengths[0]
        positions = noted + torch.arange(len(new))
        logits = model(torch.tensor(new), batch,
                       cache, positions)
        cache.commit(batch)
        new = [int(logits[-1].argmax())]
        answer += new
    return answer""",
)


# --- 5.5 -------------------------------------------------------------------------------


def check_ask_again(answer: object) -> Verdict:
    ask, model = function_in(answer), odd_model()
    for number, (length, leftover, asked) in enumerate(((31, 0, 6), (31, 9, 11), (24, 5, 3))):
        document = random_tokens(length, seed=70 + length)
        question = random_tokens(asked, seed=10 + number)
        cache = DenseCache(ODD, capacity=60, dtype=torch.float64)
        with torch.inference_mode():
            for part in (document, random_tokens(leftover, seed=90 + number)):
                if part:
                    batch = cache.batch([len(part)])
                    model(torch.tensor(part), batch, cache)
                    cache.commit(batch)
            counting = CountingModel(model)
            found = number_in(ask(counting, cache, length, question))
            whole = model(torch.tensor(document + question), Batch(new=[length + asked]))
        if counting.rows != asked:
            return wrong(
                f"A question of {asked} tokens took {counting.rows} rows: the document's notes "
                "are there, use them."
            )
        if found != int(whole[-1].argmax()) and leftover:
            return wrong(
                f"With {leftover} notes of an earlier question behind the document, the answer is "
                "not the one that reading everything afresh gives. Do those notes still count?"
            )
        if found != int(whole[-1].argmax()):
            return wrong(
                "The answer is not the one that reading everything afresh gives. The document's "
                "notes must be read too: how many does the cache count when the question comes?"
            )
    return right(
        "Three questions, and no row of a document computed again. You have just built the idea "
        "that chapters 10 and 11 sell at a fraction of the price."
    )


ASK_AGAIN = Exercise(
    id="5.5",
    kind="code",
    title="Ask again, read once",
    prompt="The cache holds the notes of a document of `length` tokens, and perhaps those of an "
    "earlier question behind them. Write `ask`: forget what follows the document, compute the "
    "new question's rows only, and return the first token of the answer as an int.",
    starter="""def ask(model, cache, length, question):
    batch = cache.batch([len(question)])
    logits = model(torch.tensor(question), batch, cache)
    cache.commit(batch)
    return int(logits[-1].argmax())""",
    answer="ask",
    check=check_ask_again,
    hints=(
        "The first question works already. What is in the cache when the second one comes?",
        "Forgetting erases nothing: entries beyond `cache.lengths` are never read, and the next "
        "ones are written over them.",
    ),
    solution="""def ask(model, cache, length, question):
    cache.lengths = [length]
    batch = cache.batch([len(question)])
    logits = model(torch.tensor(question), batch, cache)
    cache.commit(batch)
    return int(logits[-1].argmax())""",
)


# --- 5.6 -------------------------------------------------------------------------------

WHY_NOT_QUERIES = Exercise(
    id="5.6",
    kind="think",
    title="What else could one keep?",
    prompt="We keep keys and values. Why not the queries? And why not the one vector that key and "
    "value are both made from: could that be smaller?",
    solution="**Queries** are used once, in the row's own step, to look back. No later token asks "
    "with an earlier token's query, so keeping it would cost memory and save nothing.\n\n"
    "**The vector before the projections** would do: key and value can be made from it again. "
    "With a key and a value for every query head (plain multi-head attention) it is half as "
    "large as the two together. In this toy, where four query heads share a pair, it has "
    "exactly as many numbers (128), so nothing is won. And each step would have to project every "
    "earlier token again: 2 times 128 times 128 operations an entry and layer, 32 times what "
    "looking at it costs.\n\nThe idea is a good one all the same if the vector is small and the "
    "projection can be folded into the query. The turn by position stands in the way of that, so "
    "multi-head latent attention keeps a small turned key beside a small vector. Chapter 07 "
    "builds it.",
)

CHAPTER = Chapter(
    5,
    "Notes: the KV cache",
    [ROWS, BYTES, GROWING, POSITIONS, ASK_AGAIN, WHY_NOT_QUERIES],
    given="import torch",
)
