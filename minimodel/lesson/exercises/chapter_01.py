"""The exercises of chapter 01: what is remembered, what it costs, and how to order a prompt."""

import itertools
import random

from minimodel.lesson.exercises.common import pair_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    Verdict,
    function_in,
    number_in,
    right,
    wrong,
)

# --- 1.1 -----------------------------------------------------------------------------------


def check_hits_and_misses(answer: object) -> Verdict:
    hits, misses = pair_in(answer)
    if (hits, misses) == (16, 624):
        return wrong("The other way round: first the tokens that are remembered.")
    if (hits, misses) == (640, 0):
        return wrong("640 is 40 full blocks, but the last token is always computed: without it "
                     "there would be nothing to choose the answer's first token by. So how many "
                     "whole blocks lie before the last token?")
    if (hits, misses) == (639, 1):
        return wrong("The last token is computed, true. But only whole blocks are found: 639 "
                     "tokens are 39 blocks and 15 tokens more.")
    if hits + misses != 640:
        return wrong(f"Every token of the prompt is a hit or a miss: together 640, not "
                     f"{hits + misses:g}.")
    if hits % 16:
        return wrong(f"{hits:g} is no whole number of blocks of 16.")
    if hits != 624:
        return wrong("Leave out the last token, then count the whole blocks of 16 before it.")
    return right("39 blocks are found, and the last one is read again in full: the price of a "
                 "prompt that ends exactly with a block. That is why the demonstrations of this "
                 "book use prompts of one token more.")


HITS_AND_MISSES = Exercise(
    id="1.1", kind="check", title="Hits and misses",
    prompt="A prompt of exactly 640 tokens is sent, and sent again at once. How many of its tokens "
           "are hits the second time, and how many are misses? Blocks have 16 tokens.",
    starter="answer = (..., ...)   # (hits, misses)",
    check=check_hits_and_misses,
    hints=("The last token is always computed. Which blocks lie wholly before it?",
           "639 tokens can be looked up: that is 39 whole blocks and a rest."),
    solution="hits = (640 - 1) // 16 * 16\nanswer = (hits, 640 - hits)",
)

# --- 1.2 -----------------------------------------------------------------------------------

_TRUE = (10_001 * 0.15 + 200 * 0.60) / (10_000 * 0.003 + 1 * 0.15 + 200 * 0.60)     # 10.79


def check_ratio(answer: object) -> Verdict:
    value = number_in(answer)
    if abs(value - 50) < 0.1:
        return wrong("50 is the ratio for one remembered token. One token of the prompt is not "
                     "remembered, and the answer costs the same both times.")
    if abs(value - 10_001 * 0.15 / (10_000 * 0.003 + 0.15)) < 0.1:
        return wrong("That is the input alone. Add the answer to both bills.")
    if abs(value * _TRUE - 1) < 0.02:
        return wrong("Upside down: divide the first bill by the second.")
    if abs(value - _TRUE) > 0.02 * _TRUE:
        return wrong("Write both bills as sums: hits x 0.003 + misses x 0.15 + answer x 0.60, each "
                     "in dollars for a million such requests, and divide the first by the second.")
    return right(f"{_TRUE:.1f} times. Of the second bill, "
                 f"{200 * 0.6 / (10_000 * 0.003 + 0.15 + 200 * 0.6):.0%} is the answer, although "
                 "it has fifty times fewer tokens than the prompt.")


RATIO = Exercise(
    id="1.2", kind="check", title="Your own bill",
    prompt="A prompt of 10,001 tokens, an answer of 200, and the prices of this chapter: 0.003 for "
           "a hit, 0.15 for a miss, 0.60 for a token written (dollars per million). The same "
           "request is sent twice. How many times cheaper is the second bill? One decimal will do.",
    starter="answer = ...",
    check=check_ratio,
    hints=("The first time there are 10,001 misses, the second time 10,000 hits and 1 miss.",
           "The answer's 200 tokens stand in both bills."),
    solution="first = 10_001 * 0.15 + 200 * 0.60\n"
             "second = 10_000 * 0.003 + 1 * 0.15 + 200 * 0.60\n"
             "answer = first / second",
)

# --- 1.3 -----------------------------------------------------------------------------------


def _equal_from_the_start(first, second) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1],
                                              zip(first, second, strict=False)))


def remembered(first, second, size: int) -> int:
    """What the solution does, for the check."""
    return min(_equal_from_the_start(first, second), max(0, len(second) - 1)) // size * size


def check_hits(answer: object) -> Verdict:
    hits, rng = function_in(answer), random.Random(13)
    page = [rng.randrange(256) for _ in range(100)]
    other = [*page[:41], page[41] ^ 1, *page[42:]]
    cases = [
        (page, other, 7, "two prompts that differ at place 41"),
        (page, other, 16, "two prompts that differ at place 41"),
        (page, page[:50], 10, "a second prompt that is the beginning of the first"),
        (page[:37], page, 9, "a second prompt that goes on where the first ends"),
        (page, page[1:], 5, "a second prompt that lacks the first token"),
        (page[:48], page[:48], 16, "twice the same 48 tokens"),
        (page[:49], page[:49], 16, "twice the same 49 tokens"),
        (page[:5], page[:5], 16, "twice the same 5 tokens"),
        (page, [], 16, "an empty second prompt"),
        ([], page, 16, "an empty first prompt"),
    ]
    for first, second, size, case in cases:
        found, expected = hits(list(first), list(second), size), remembered(first, second, size)
        if found is None:
            return wrong("This returns nothing. Hand back a number of tokens.")
        found = number_in(found)
        if found == expected:
            continue
        told = f"For {case}, in blocks of {size}, {expected} tokens are hits; this says {found:g}."
        if found > _equal_from_the_start(first, second):
            return wrong(f"{told} Equal tokens after the first difference do not count.")
        if found % size:
            return wrong(f"{told} Only whole blocks are found.")
        if found >= len(second) > 0:
            return wrong(f"{told} The last token of the second prompt is always computed.")
        return wrong(f"{told} Every whole block before the first difference counts, also where one "
                     "prompt is longer than the other.")
    return right("Equal from the start, up to the first difference; whole blocks; never the last "
                 "token. The engine arrives at the same number without seeing both prompts at "
                 "once: it compares the blocks' names.")


HITS = Exercise(
    id="1.3", kind="code", title="What is remembered?",
    prompt="`hits(first, second, size)` should say how many tokens of `second` are hits after "
           "`first` was sent, both lists of tokens, in blocks of `size`. This one counts equal "
           "tokens wherever they stand. Mend it.",
    starter="""def hits(first, second, size=16):
    return sum(a == b for a, b in zip(first, second))""",
    answer="hits",
    check=check_hits,
    hints=("Stop at the first pair that differs.",
           "Of what is left, cut off the last token of `second`, then what is no whole block: "
           "`number // size * size`."),
    solution="""def hits(first, second, size=16):
    same = 0
    for a, b in zip(first, second):
        if a != b:
            break
        same += 1
    return min(same, max(0, len(second) - 1)) // size * size""",
)

# --- 1.4 -----------------------------------------------------------------------------------

PARTS = [("It is 09:41.\n", 1440), ("You are the clerk of a town.\n", 0),
         ("Q: What is the code of the red door?\n", 5000), ("Town notebook\n...\n", 2),
         ("Answer in one line.\n", 0)]


def check_arrange(answer: object) -> Verdict:
    arrange, rng = function_in(answer), random.Random(14)
    for case in range(8):
        parts = PARTS if case == 0 else [
            (f"part {number}\n", rng.choice((0, 1, 3, 500))) for number in range(rng.randint(1, 7))]
        found = arrange(list(parts))
        if not isinstance(found, str):
            return wrong(f"Return one text, the prompt; this is a {type(found).__name__}.")
        ordered = sorted(parts, key=lambda part: part[1])
        if found == "".join(text for text, _ in ordered):
            continue
        if sorted(found) != sorted("".join(text for text, _ in parts)):
            return wrong("A part is missing, or there is something in the prompt that no part has. "
                         "Join the texts as they are.")
        if found == "".join(text for text, _ in reversed(ordered)):
            return wrong("The other way round: what changes most often should stand last.")
        texts = [text for text, _ in ordered]
        if sorted(texts, key=found.find) != texts:
            if [dict(parts)[text] for text in sorted(texts, key=found.find)] == [
                    often for _, often in ordered]:
                return wrong("Parts that change equally often should keep their order: a prompt "
                             "that is shuffled differs from its last send.")
            return wrong(f"For {[often for _, often in parts]} changes a day, a part that changes "
                         "more often stands before one that changes less.")
        return wrong("Join the texts as they are, with nothing between them.")
    return right("What never changes comes first, the question last. A part that changes makes "
                 "everything behind it new, so it should have as little as possible behind it. "
                 "(For parts of one length no order has more hits. A very long part may deserve a "
                 "place before a short one that changes a little less often.)")


ARRANGE = Exercise(
    id="1.4", kind="code", title="A prompt in the right order",
    prompt="A prompt is put together from parts; each is a pair of its text and of how many times "
           "a day that text changes. `arrange(parts)` should return the prompt in the order that "
           "this chapter's rule asks for. Parts that change equally often keep their order.",
    starter="""def arrange(parts):
    return "".join(text for text, changes in parts)""",
    answer="arrange",
    check=check_arrange,
    hints=("Everything behind a changed byte is read again. So what should stand at the very end?",
           "`sorted(parts, key=...)` keeps equal ones in their order."),
    solution="""def arrange(parts):
    ordered = sorted(parts, key=lambda part: part[1])
    return "".join(text for text, changes in ordered)""",
)

# --- 1.5 -----------------------------------------------------------------------------------

WHY = Exercise(
    id="1.5", kind="think", title="Who gains?",
    prompt="A seller could keep the notes, save the work, and charge the full price all the same. "
           "Give two reasons to pass the saving on, and one thing that a price of zero for hits "
           "would invite.",
    solution="**Customers arrange their prompts.** Who pays less for a remembered token puts the "
             "fixed text first and the clock last. That raises the share of hits, and every hit "
             "is work that the seller's machines need not do. Without the discount nobody would "
             "bother, and most of the saving would never arise.\n\n"
             "**Long prompts become possible.** An agent that sends its whole history again at "
             "every step is too dear at the full price and affordable at a fiftieth. The seller "
             "sells the first reading, and the answers. (Competitors who pass it on are a third "
             "reason.)\n\n"
             "**A hit is not free to serve.** The notes take disk, they are read and moved, and "
             "each token written looks back at all of them. At a price of zero one would send huge "
             "prompts for tiny answers, and keep notes alive by asking again, just in case.\n\n"
             "How the seller in this chapter chose its ratio is not public. Its lists have had "
             "several.",
)

CHAPTER = Chapter(1, "The second send", [HITS_AND_MISSES, RATIO, HITS, ARRANGE, WHY])
