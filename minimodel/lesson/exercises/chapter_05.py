"""The exercises of chapter 05."""

import torch

from minimodel.cache.dense import DenseCache
from minimodel.engine.generate import generate_without_cache
from minimodel.lesson.exercises.common import (
    ODD,
    CountingModel,
    first_difference,
    odd_model,
    pair_in,
    random_tokens,
)
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


def check_positions(answer: object) -> Verdict:
    answer_with_notes, count = function_in(answer), 8
    for prompt_length, seed in ((23, 1), (9, 2), (1, 3)):
        model, prompt = CountingModel(odd_model(seed=5)), random_tokens(prompt_length, seed)
        expected = generate_without_cache(model.model, prompt, count, stop_ids=())
        cache = DenseCache(ODD, capacity=prompt_length + count, dtype=torch.float64)
        with torch.inference_mode():
            found = list(answer_with_notes(model, prompt, cache, count))
        if found != expected:
            return wrong(where_it_leaves(prompt_length, found, expected))
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


def where_it_leaves(prompt_length: int, found: list, expected: list[int]) -> str:
    """Where an answer leaves the slow one, and what to look at."""
    place = first_difference(found, expected)
    tokens = "token" if prompt_length == 1 else "tokens"
    where = (
        f"With a prompt of {prompt_length} {tokens} the answer differs from the slow one at token "
        f"{place + 1} of {len(expected)}."
    )
    if place == 0:
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
    ask, model = function_in(answer), odd_model(seed=5)
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


def check_fetching(answer: object) -> Verdict:
    value = number_in(answer)
    if abs(value - 9_999) <= 2:
        return right(
            "About 10,000 tokens. Fetching costs every token the same, computing costs it more the "
            "longer the text is: so a slow store loses on short prompts and wins on long ones. "
            "Smaller notes move the border down. Chapter 11 builds such a store."
        )
    if abs(value - 4_999) <= 2:
        return wrong(
            "At that length the *last* token takes longer to compute than to fetch. But over the "
            "whole text a token looks at half the length on average."
        )
    if abs(value - 40_000) <= 2:
        return wrong(
            "That compares the looking alone with the disk; the other 3 billion operations of a "
            "token take time too."
        )
    return wrong(
        f"{value:,.0f} is not it. A token takes 40 microseconds to fetch and 30 to compute before "
        "it looks at anything: how much looking fills the difference?"
    )


FETCHING = Exercise(
    id="5.6",
    kind="check",
    title="Fetch or compute again?",
    prompt="Notes can be kept on a disk and fetched when the same text comes again; or they are "
    "computed again. A model notes 60,000 bytes a token, and its disk delivers 1.5 GB a second. To "
    "compute a token takes 3 billion operations, and 200,000 more for every token it looks at, "
    "itself included; the machine does 100 trillion (1e14) of them a second. From what length of "
    "the text on is fetching faster? Two tokens more or less do not matter.",
    starter="answer = ...",
    check=check_fetching,
    hints=(
        "Write down the microseconds a token: to fetch it, and to compute it in a text of n "
        "tokens, where it looks at (n + 1) / 2 on average.",
        "Set 30 + 0.002 x (n + 1) / 2 equal to 40.",
    ),
    solution="""fetch_s = 60_000 / 1.5e9           # a token
compute_s = 3e9 / 1e14             # a token, without looking
look_s = 200_000 / 1e14            # a token, at one token
answer = 2 * (fetch_s - compute_s) / look_s - 1""",
)


# --- 5.7 -------------------------------------------------------------------------------


def check_together(answer: object) -> Verdict:
    answer_all, count = function_in(answer), 6
    for lengths in ((9, 4, 15), (3, 11)):
        prompts = [random_tokens(length, seed=length) for length in lengths]
        model = CountingModel(odd_model(seed=5, contrast=30))
        expected = [generate_without_cache(model.model, prompt, count, stop_ids=())
                    for prompt in prompts]
        cache = DenseCache(ODD, capacity=30, num_sequences=len(prompts), dtype=torch.float64)
        with torch.inference_mode():
            found = [list(one) for one in answer_all(model, list(map(list, prompts)), cache, count)]
        if problem := what_differs(lengths, found, expected):
            return wrong(problem)
        rows = sum(lengths) + len(lengths) * (count - 1)
        if (model.forwards, model.rows) != (count, rows):
            return wrong(
                f"The tokens are right. For prompts of {name_all(lengths)} tokens it took "
                f"{model.forwards} forwards and {model.rows} rows; {count} and {rows} will do: one "
                "forward a step, for all texts."
            )
    return right(
        "Each text got the tokens that it gets alone, and no row was wasted. Rows lie flat behind "
        "one another here, so lengths need not match. Chapter 09 builds its scheduler on this."
    )


def what_differs(lengths: tuple[int, ...], found: list, expected: list) -> str | None:
    """The first answer that is not the one its prompt gets alone, in a sentence."""
    if len(found) != len(expected):
        return f"{len(expected)} prompts came, but the answers returned are {len(found)}."
    for length, ours, alone in zip(lengths, found, expected, strict=True):
        if first_difference(ours, alone) is not None:
            return (f"Among prompts of {name_all(lengths)} tokens, the one of {length} does not "
                    "get the answer that it gets alone. What do its notes hold that its prompt "
                    "does not?")
    return None


def name_all(lengths: tuple[int, ...]) -> str:
    return ", ".join(map(str, lengths[:-1])) + f" and {lengths[-1]}"


TOGETHER = Exercise(
    id="5.7",
    kind="code",
    title="Texts of different lengths, together",
    prompt="Several prompts can share each forward: the cache has a sequence for each, and `batch` "
    "takes one count of new rows for each. This version answers them all in step. But it first "
    "fills the short prompts up with zeros, as libraries that want rectangles do, and it does not "
    "hide the zeros from attention, as those libraries do. So all but the longest get wrong "
    "answers. Mend it; no zeros are needed. (`logits` has one row for each text: that of its last "
    "token.)",
    starter="""def answer_all(model, prompts, cache, count):
    longest = max(len(prompt) for prompt in prompts)
    new = [[0] * (longest - len(prompt)) + prompt
           for prompt in prompts]
    answers = [[] for _ in prompts]
    for _ in range(count):
        batch = cache.batch([len(rows) for rows in new])
        flat = torch.tensor([t for rows in new for t in rows])
        logits = model(flat, batch, cache)
        cache.commit(batch)
        new = [[best] for best in logits.argmax(-1).tolist()]
        answers = [a + rows for a, rows in zip(answers, new)]
    return answers""",
    answer="answer_all",
    check=check_together,
    hints=(
        "The zeros that fill a short prompt up are tokens like any other: they are noted, and "
        "looked at.",
        "Must `flat` be a rectangle? `batch` knows where one text ends and the next begins.",
    ),
    solution="""def answer_all(model, prompts, cache, count):
    new = prompts
    answers = [[] for _ in prompts]
    for _ in range(count):
        batch = cache.batch([len(rows) for rows in new])
        flat = torch.tensor([t for rows in new for t in rows])
        logits = model(flat, batch, cache)
        cache.commit(batch)
        new = [[best] for best in logits.argmax(-1).tolist()]
        answers = [a + rows for a, rows in zip(answers, new)]
    return answers""",
)


# --- 5.8 -------------------------------------------------------------------------------

WHY_NOT_QUERIES = Exercise(
    id="5.8",
    kind="think",
    title="What else could one keep?",
    prompt="We keep keys and values. Why not the queries? And why not the one vector that key and "
    "value are both made from: could that be smaller?",
    solution="**Queries** are used once, in the row's own step, to look back. No later token asks "
    "with an earlier token's query, so keeping it would cost memory and save nothing.\n\n"
    "**The vector before the projections** would do: key and value can be made from it again. "
    "In plain multi-head attention every query head has a key and a value, and usually all keys "
    "together are as wide as the row: then the row is half as large as the two together. In this "
    "toy, where four query heads share a pair, it has exactly as many numbers (128), so nothing "
    "is won. And each step would have to project every earlier token again: 2 times 128 times 128 "
    "operations an entry and layer, 32 times what looking at it costs.\n\n"
    "The idea is a good one all the same if the vector is small and the projection can be "
    "folded into the query. The turn by position stands in the way of that, so "
    "multi-head latent attention keeps a small turned key beside a small vector. Chapter 07 "
    "builds it.",
)

CHAPTER = Chapter(
    5,
    "Notes: the KV cache",
    [ROWS, BYTES, GROWING, POSITIONS, ASK_AGAIN, FETCHING, TOGETHER, WHY_NOT_QUERIES],
    given="import torch",
)
