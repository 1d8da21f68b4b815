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
    if without == 7 * 500:
        return wrong(
            "Seven forwards of 500 rows would be right if the text stayed as it is. Each "
            "token written joins the text that the next forward reads."
        )
    if without == sum(range(501, 508)):
        return wrong("The first token is written from the prompt alone: 500 rows, not 501.")
    if without != sum(range(500, 507)):
        return wrong(
            "Without notes, count one forward for each token written. The first reads the "
            "prompt's 500 rows; how many does the second read?"
        )
    if cached == 507:
        return wrong(
            "Nearly: the last token is written but never read by anything, so nobody "
            "computes its row."
        )
    if cached != 506:
        return wrong(
            "Without notes you are right. With notes every row is computed once, and the "
            "last token written needs no row at all."
        )
    return right(
        "3,521 against 506: seven times fewer, about as many times as tokens were written."
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
        return right("249.6 million bytes, a quarter of a gigabyte, for one reader's text.")
    if value * 2 == true:
        return wrong("Half of it: a token notes a key *and* a value.")
    if value == true * 4:
        return wrong(
            "Four times too much: count the heads that notes are kept for, not the heads "
            "that read them."
        )
    if value == true / 26:
        return wrong("That is one layer; every layer keeps notes of its own.")
    return wrong(
        f"{value:,.0f} is not it. Multiply: key and value, layers, KV heads, numbers per "
        "head, bytes per number, tokens."
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
    notes = function_in(answer)()
    written, moves, place = torch.empty(0, 6), 0, None
    for count in (5, *[1] * 90):
        new = torch.randn(count, 6)
        notes.write(new)
        written = torch.cat((written, new))
        found = notes.read()
        if tuple(found.shape) != tuple(written.shape):
            return wrong(
                f"After {len(written)} entries of 6 numbers `read` returns a tensor of "
                f"shape {list(found.shape)}; it should return exactly those entries."
            )
        if not torch.equal(found, written):
            return wrong(
                f"After {len(written)} entries `read` returns other numbers than were "
                "written. Are old entries copied when the memory grows?"
            )
        moves += found.data_ptr() != place
        place = found.data_ptr()
    if moves > 12:
        return wrong(
            f"The entries are right, but they moved {moves} times in 91 writes: each move "
            "copies all of them. Make room for twice as many whenever the room is full."
        )
    return right(
        f"All entries in place after 91 writes, and the memory moved {moves} times. Copying "
        "now costs at most about one extra copy per entry, however long the text gets."
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


def check_positions(answer: object) -> Verdict:
    answer_with_notes, model = function_in(answer), odd_model()
    for prompt_length, seed in ((23, 1), (9, 2), (1, 3)):
        prompt = random_tokens(prompt_length, seed)
        expected = generate_without_cache(model, prompt, 8, stop_ids=())
        cache = DenseCache(ODD, capacity=prompt_length + 8, dtype=torch.float64)
        with torch.inference_mode():
            found = list(answer_with_notes(model, prompt, cache, 8))
        if found != expected:
            same = next(
                (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
                min(len(found), len(expected)),
            )
            tokens = "token" if prompt_length == 1 else "tokens"
            return wrong(
                f"With a prompt of {prompt_length} {tokens} the answer differs from the slow "
                f"one at token {same + 1} of 8. The prompt is right, so look at where the "
                "rows after it believe they stand."
            )
    return right(
        "The same tokens for three prompts. Nothing had crashed, no shape was wrong, and the "
        "text still looked like text: only comparing with the slow way finds such a fault."
    )


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


class CountingModel:
    """A model that counts the rows it computes."""

    def __init__(self, model: Transformer):
        self.model, self.config, self.rows = model, model.config, 0

    def __call__(self, tokens, batch, kv=None, positions=None):
        self.rows += len(tokens)
        return self.model(tokens, batch, kv, positions)


def check_ask_again(answer: object) -> Verdict:
    ask, model = function_in(answer), odd_model()
    document = random_tokens(31, seed=7)
    cache = DenseCache(ODD, capacity=60, dtype=torch.float64)
    with torch.inference_mode():
        batch = cache.batch([len(document)])
        model(torch.tensor(document), batch, cache)
        cache.commit(batch)
        for number, length in enumerate((6, 11, 3), start=1):
            question = random_tokens(length, seed=10 + number)
            counting = CountingModel(model)
            found = ask(counting, cache, len(document), question)
            full = model(torch.tensor(document + question), Batch(new=[len(document) + length]))
            if number_in(found) != int(full[-1].argmax()):
                return wrong(
                    f"Question {number} got another token than reading everything afresh "
                    "gives. Do the notes of the question before it still count?"
                )
            if counting.rows != length:
                return wrong(
                    f"Question {number} has {length} tokens, but {counting.rows} rows were "
                    "computed: the document's notes are there, use them."
                )
    return right(
        "Three questions, one reading of the document. You have just built the idea that "
        "chapters 10 and 11 sell at a fiftieth of the price."
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
    "**The vector before the projections** would do: key and value can be made from it "
    "again. In this toy it has as many numbers as key and value together (128), so "
    "nothing is won, and each step would have to project every earlier token again: "
    "linear work per token where there was almost none. The idea is a good one all the "
    "same if the vector is small and the projection can be folded into the query. That "
    "is multi-head latent attention, and chapter 07 builds it.",
)

CHAPTER = Chapter(
    5,
    "Notes: the KV cache",
    [ROWS, BYTES, GROWING, POSITIONS, ASK_AGAIN, WHY_NOT_QUERIES],
    given="import torch",
)
