"""The texts that the toy learns from, all made here: town notebooks, dialogues, stories, code.

Every document is made to be *readable from itself*: what a question asks stands somewhere
above it, under names and numbers drawn afresh, so that the only way to answer is to read
the prompt. Nothing comes from outside, and a seed gives the same text on every machine.

A document is a list of token ids with a loss weight for each. Bytes that nobody could
predict (a new name, a code at its first mention) weigh little, the words of an answer weigh
one, and the value asked for weighs three: that is where recall is learned.

The *town notebook* is the book's running example:

    Town notebook
    The code of the red door is 4821.
    One day Tomo found a blue kite.
    The owner of lamp 42 is Mira.
    Q: What is the code of the red door?
    A: The code of the red door is 4821.<|end|>
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..tokenizer import ASSISTANT, END, START, SYSTEM, TOOL, TURN, USER, encode

COLOURS = ["red", "blue", "green", "white", "black", "pink", "gold", "gray", "brown", "teal"]
THINGS = ["door", "box", "lamp", "gate", "ship", "tower", "bell", "clock", "car", "key", "desk",
          "well", "barn", "mill", "cave", "coat", "drum", "fork", "hat", "jar", "kite", "lock",
          "map", "nest", "oar", "pot", "ring", "shed", "tent", "urn"]
ANIMALS = ["fox", "lark", "cat", "dog", "bear", "frog", "hen", "wolf", "goat", "crow", "mole",
           "hare"]
PLACES = ["Oslo", "Lima", "Rome", "Cairo", "Paris", "Delhi", "Quito", "Tunis", "Perth", "Milan",
          "Osaka", "Turin"]
MOODS = ["small", "proud", "tall", "shy", "wise", "loud", "kind", "brave", "quick", "sleepy"]
FOODS = ["bread", "soup", "rice", "plums", "honey", "cheese", "corn", "tea", "figs", "nuts"]
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"

TITLE = "Town notebook\n"
UNPREDICTABLE, TEMPLATE, ANSWER, VALUE = 0.15, 0.5, 1.0, 3.0      # loss weights


def syllables(rng: random.Random, count: int | None = None) -> str:
    count = count or rng.choice((2, 2, 3))
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(count))


def name(rng: random.Random) -> str:
    return syllables(rng).capitalize()


@dataclass
class Document:
    """Token ids, a loss weight for each, and where the answers' values stand."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    values: list[tuple[int, int]] = field(default_factory=list)     # (first id, length)

    def __len__(self) -> int:
        return len(self.ids)

    def mark(self, token: int, weight: float = 1.0) -> "Document":
        self.ids.append(token)
        self.weights.append(weight)
        return self

    def text(self, text: str, weight: float) -> "Document":
        new = encode(text, start=False)
        self.ids += new
        self.weights += [weight] * len(new)
        return self

    def value(self, text: str) -> "Document":
        self.values.append((len(self.ids), len(text)))
        return self.text(text, VALUE)


# --- facts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """One line of a notebook: `The code of the red door is 4821.`"""

    kind: str               # code, owner or phone
    key: str                # "the red door", "lamp 42", "Tomo"
    value: str

    @property
    def opening(self) -> str:
        return f"The {self.kind} of {self.key} is "

    @property
    def line(self) -> str:
        return f"{self.opening}{self.value}.\n"

    @property
    def question(self) -> str:
        asks = "Who" if self.kind == "owner" else "What"
        return f"Q: {asks} is the {self.kind} of {self.key}?\n"

    @property
    def answer(self) -> str:
        return f"A: {self.opening}{self.value}."


def draw_fact(rng: random.Random) -> Fact:
    kind = rng.choice(("code", "owner", "phone"))
    if kind == "code":
        key = f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}"
        return Fact(kind, key, f"{rng.randrange(10_000):04d}")
    if kind == "owner":
        return Fact(kind, f"{rng.choice(THINGS)} {rng.randrange(10, 100)}", name(rng))
    return Fact(kind, name(rng), f"{rng.randrange(1000):03d}-{rng.randrange(1000):03d}")


def landmarks(fact: Fact) -> set[str]:
    """What makes a key unlike another: its colour, thing and number, or a name's first letters."""
    if fact.kind == "phone":
        return {fact.key[:3]}
    return set(fact.key.removeprefix("the ").split())


def draw_facts(rng: random.Random, count: int, distinct: bool = False) -> list[Fact]:
    """`count` facts, no key twice; `distinct` keys share no colour, thing, number or first letters.

    Raises ValueError if that many distinct facts cannot be drawn.
    """
    if count < 1:
        raise ValueError(f"cannot draw {count} facts: ask for at least 1")
    facts, keys, taken = [], set(), set()
    for _ in range(200 * count):
        fact = draw_fact(rng)
        if (fact.kind, fact.key) in keys or (distinct and landmarks(fact) & taken):
            continue
        keys.add((fact.kind, fact.key))
        taken |= landmarks(fact)
        facts.append(fact)
        if len(facts) == count:
            return facts
    raise ValueError(f"could not draw {count} facts with distinct keys: ask for fewer")


def story_line(rng: random.Random) -> str:
    who = name(rng)
    return rng.choice((
        f"One day {who} found a {rng.choice(COLOURS)} {rng.choice(THINGS)}.\n",
        f"{who} was hungry and ate some {rng.choice(FOODS)}.\n",
        f"Once a {rng.choice(MOODS)} {rng.choice(ANIMALS)} named {who} "
        f"lived in {rng.choice(PLACES)}.\n",
        f"Then {who} met a {rng.choice(ANIMALS)} named {name(rng)}.\n",
        f"In {rng.choice(PLACES)} a {rng.choice(MOODS)} {rng.choice(ANIMALS)} was asleep.\n"))


# --- the running example -------------------------------------------------------------


@dataclass(frozen=True)
class Notebook:
    """A town notebook: its lines, and the facts among them."""

    lines: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        return TITLE + "".join(self.lines)

    def ask(self, fact: Fact) -> str:
        """The prompt that asks for one fact: the notebook, then the question."""
        return self.text + fact.question

    def value_span(self, fact: Fact) -> range:
        """Token positions of a fact's value, the start token counted."""
        first = 1 + self.text.index(fact.line) + len(fact.opening)
        return range(first, first + len(fact.value))


def town_notebook(rng: random.Random, num_bytes: int, num_facts: int | None = None) -> Notebook:
    """A notebook of at most `num_bytes` bytes.

    With `num_facts`, that many facts with distinct keys, spread among story lines. Without,
    a dense list: facts only, as many as fit. Raises ValueError if the facts do not fit.
    """
    if num_facts is None:
        facts, room = [], num_bytes - len(TITLE)
        for fact in draw_facts(rng, max(1, num_bytes // 30)):
            if len(fact.line) <= room:
                facts.append(fact)
                room -= len(fact.line)
        if not facts:
            raise ValueError(f"no fact fits into {num_bytes} bytes: allow at least 60")
        return Notebook(tuple(f.line for f in facts), tuple(facts))
    facts = draw_facts(rng, num_facts, distinct=True)
    room = num_bytes - len(TITLE) - sum(len(fact.line) for fact in facts)
    if room < 0:
        raise ValueError(f"{num_facts} facts do not fit into {num_bytes} bytes: "
                         f"allow {num_bytes - room} or ask for fewer")
    story = []
    while len(line := story_line(rng)) <= room:
        story.append(line)
        room -= len(line)
    lines = [fact.line for fact in facts] + story
    rng.shuffle(lines)
    order = {line: place for place, line in enumerate(lines)}
    return Notebook(tuple(lines), tuple(sorted(facts, key=lambda fact: order[fact.line])))


# --- documents for training ------------------------------------------------------------


def add_answer(doc: Document, fact: Fact, end: int) -> None:
    doc.text(fact.opening, ANSWER).value(fact.value).text(".", ANSWER).mark(end)


def notebook_document(rng: random.Random, length: int) -> Document:
    """Facts, in half of the documents among story lines; then question after question."""
    doc = Document().mark(START, 0.0).text(TITLE, TEMPLATE)
    story = rng.uniform(0.2, 0.7) if rng.random() < 0.5 else 0.0
    room = length * rng.uniform(0.35, 0.6)
    count = max(2, int(room * (1 - story) / 36))
    waiting = draw_facts(rng, count)
    facts = tuple(waiting)
    while waiting:
        if rng.random() < story:
            doc.text(story_line(rng), 0.2)
            continue
        fact = waiting.pop()
        doc.text(fact.opening, UNPREDICTABLE).text(fact.value, UNPREDICTABLE).text(".\n", ANSWER)
    for fact in in_rounds(rng, facts):
        if doc.values and len(doc) > length - 80:
            return doc
        doc.text("Q: ", TEMPLATE).text(fact.question[3:], UNPREDICTABLE).text("A: ", ANSWER)
        add_answer(doc, fact, END)
        doc.text("\n", TEMPLATE)


def in_rounds(rng: random.Random, items: tuple) -> Iterator:
    """All items in random order, then all again in another, for ever."""
    while True:
        yield from rng.sample(items, len(items))


def dialogue_document(rng: random.Random, length: int) -> Document:
    """A system prompt with tools and facts, then turns: questions, tool calls, small talk."""
    me = name(rng)
    tools = [f"{syllables(rng, 2)}_{rng.choice(THINGS)}" for _ in range(rng.randrange(1, 4))]
    doc = Document().mark(START, 0.0).mark(SYSTEM)
    doc.text("You are ", TEMPLATE).text(me, UNPREDICTABLE).text(". Be brief.\nTools: ", TEMPLATE)
    doc.text(", ".join(tools), UNPREDICTABLE).text("\nFacts:\n", TEMPLATE)
    facts = draw_facts(rng, max(1, int(length * rng.uniform(0.3, 0.5) / 38)))
    for fact in facts:
        doc.text(fact.opening, UNPREDICTABLE).text(fact.value, UNPREDICTABLE).text(".\n", ANSWER)
    doc.mark(TURN)
    while not doc.values or len(doc) < length - 80:
        dice = rng.random()
        if dice < 0.75:
            fact = rng.choice(facts)
            doc.mark(USER).text(fact.question[3:-1], UNPREDICTABLE).mark(TURN).mark(ASSISTANT)
            add_answer(doc, fact, TURN)
        elif dice < 0.93:
            call_tool(doc, rng.choice(tools), rng.randrange(100))
        else:
            doc.mark(USER).text("Who are you?", UNPREDICTABLE).mark(TURN)
            doc.mark(ASSISTANT).text(f"I am {me}.", ANSWER).mark(TURN)
    return doc


def call_tool(doc: Document, tool: str, number: int) -> None:
    doc.mark(USER).text(f"Use {tool} on {number}.", UNPREDICTABLE).mark(TURN)
    doc.mark(ASSISTANT).text(f'{{"tool": "{tool}", "arg": {number}}}', ANSWER).mark(TURN)
    doc.mark(TOOL).text("ok", TEMPLATE).mark(TURN).mark(ASSISTANT).text("Done.", ANSWER).mark(TURN)


def story_document(rng: random.Random, length: int) -> Document:
    doc = Document().mark(START, 0.0)
    while len(doc) < length - 30:
        who, other, animal = name(rng), name(rng), rng.choice(ANIMALS)
        place, thing = rng.choice(PLACES), f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
        doc.text(f"Once a {rng.choice(MOODS)} {animal} named ", TEMPLATE).text(who, UNPREDICTABLE)
        doc.text(f" lived in {place}. ", 0.6)
        for _ in range(rng.randrange(2, 6)):
            doc.text(rng.choice((
                f"One day {who} found a {thing}. ",
                f"{who} was hungry and ate some {rng.choice(FOODS)}. ",
                f"Then {who} met a {rng.choice(ANIMALS)} named {other}. ",
                f"\"{rng.choice(('Hello', 'Come here', 'Look'))},\" said {who} to {other}. ",
                f"{other} gave the {thing} to {who}. ",
                f"{who} and {other} walked back to {place}. ")), 0.9)
        mood = rng.choice(("happy", "tired", "glad"))
        doc.text(f"The {animal} {who} was {mood}. The end.\n", 0.9)
    return doc


def sums_document(rng: random.Random, length: int) -> Document:
    doc = Document().mark(START, 0.0)
    while len(doc) < length - 12:
        a, b, small, other = (rng.randrange(limit) for limit in (100, 100, 13, 13))
        three = [rng.randrange(100) for _ in range(3)]
        question, result = rng.choice((
            (f"{a} + {b} = ", a + b),
            (f"{max(a, b)} - {min(a, b)} = ", abs(a - b)),
            (f"{small} * {other} = ", small * other),
            (f"max({', '.join(map(str, three))}) = ", max(three))))
        doc.text(question, UNPREDICTABLE).text(f"{result}\n", 0.7)
    return doc


def code_document(rng: random.Random, length: int) -> Document:
    doc = Document().mark(START, 0.0)
    while len(doc) < length - 30:
        function, variable = syllables(rng, 2), rng.choice("abcnxy")
        doc.text("def ", TEMPLATE).text(f"{function}({variable}):\n", 0.4)
        if rng.random() < 0.4:
            doc.text(f"    if {variable} == {rng.randrange(10)}:\n"
                     f"        return {rng.randrange(10)}\n", 0.6)
        doc.text(f"    return {variable} {rng.choice('+-*')} {rng.randrange(10)}\n\n", 0.6)
        doc.text(f"print({function}({rng.randrange(10)}))\n", 0.6)
    return doc


def records_document(rng: random.Random, length: int) -> Document:
    """Lines of JSON, then look-ups: `get("Kobo").id == 4821`."""
    doc, ids = Document().mark(START, 0.0), {}
    while len(doc) < length * 0.55 or len(ids) < 2:
        who, number = name(rng), f"{rng.randrange(10_000):04d}"
        if who in ids:
            continue
        ids[who] = number
        doc.text('{"name": "', 0.7).text(who, UNPREDICTABLE).text('", "id": ', 0.7)
        doc.text(number, UNPREDICTABLE).text("}\n", ANSWER)
    for who in in_rounds(rng, tuple(ids)):
        if doc.values and len(doc) > length - 24:
            return doc
        doc.text('get("', TEMPLATE).text(who, UNPREDICTABLE).text('").id == ', 0.7)
        doc.value(ids[who]).text("\n", ANSWER)


def copying_document(rng: random.Random, length: int) -> Document:
    doc = Document().mark(START, 0.0)
    while len(doc) < length - 20:
        count = rng.randrange(2, max(3, min(24, (length - len(doc)) // 12)))
        words = [syllables(rng) if rng.random() < 0.6 else str(rng.randrange(10_000))
                 for _ in range(count)]
        doc.text("copy: ", TEMPLATE).text(" ".join(words), UNPREDICTABLE)
        doc.text("\n> ", ANSWER).text(" ".join(words) + "\n", ANSWER)
    return doc


def echo_document(rng: random.Random, length: int) -> Document:
    """Random printable strings, each repeated: the plainest lesson in looking back.

    One byte before is enough to find the place, so the heads that continue a pattern
    (induction heads, arXiv 2209.11895) form within a few hundred steps.
    """
    printable = [chr(code) for code in range(33, 127)]
    doc = Document().mark(START, 0.0)
    while len(doc) < length - 12:
        count = rng.randrange(4, max(5, min(40, (length - len(doc)) // 2)))
        letters = printable if rng.random() < 0.5 else rng.sample(printable, rng.randrange(6, 30))
        text = "".join(rng.choice(letters) for _ in range(count))
        doc.text(text, 0.0).text("\n", 0.2)
        for _ in range(rng.choice((1, 1, 2))):
            doc.text(text[:1], 0.0).text(text[1:] + "\n", 1.0)
    return doc


DOMAINS: dict[str, Callable[[random.Random, int], Document]] = {
    "notebook": notebook_document, "dialogue": dialogue_document, "records": records_document,
    "copying": copying_document, "story": story_document, "sums": sums_document,
    "code": code_document, "echo": echo_document}


def training_row(rng: random.Random, length: int, mix: dict[str, float]) -> Document:
    """One row of `length` + 1 ids: documents drawn by the weights in `mix`, packed and cut.

    Half of the rows are filled by one long document, half by several shorter ones.
    """
    row, long = Document(), rng.random() < 0.5
    while len(row) < length + 1:
        domain = rng.choices(list(mix), list(mix.values()))[0]
        room = length + 1 - len(row)
        wanted = room if long else max(min(128, length), int(room * rng.uniform(0.2, 1)))
        doc = DOMAINS[domain](rng, min(wanted, max(room, min(128, length))))
        row.values += [(len(row) + first, size) for first, size in doc.values]
        row.ids += doc.ids
        row.weights += doc.weights
    del row.ids[length + 1:], row.weights[length + 1:]
    row.values = [(first, size) for first, size in row.values if first + size <= length + 1]
    return row
