"""The exercises of chapter 08. Block sizes and tables are odd, so a swapped pair cannot pass."""

import random
from collections import Counter

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

# --- 8.1 -----------------------------------------------------------------------------------


def check_empty_slots(answer: object) -> Verdict:
    reserved, paged = pair_in(answer)
    if (reserved, paged) == (29, 4_317):
        return wrong("The other way round: first with 2,048 slots set aside for each request.")
    if reserved == 3 * 2_048:
        return wrong("6,144 slots are set aside. How many of them hold nothing?")
    if reserved != 4_317:
        return wrong("Reserved: three times 2,048 slots, less one for each token that is noted.")
    if paged == 116:
        return wrong("116 is the number of blocks. How many slots are that, and how many of them "
                     "hold a token?")
    if paged == 1_856:
        return wrong("1,856 slots are held. How many of them hold nothing?")
    if paged == 16 + 16 + 16 - 29:
        return wrong("Those are the written slots of the three last blocks; the empty ones are "
                     "asked for.")
    if paged != 29:
        return wrong("Only the last block of each request has empty slots. 37 tokens take 3 "
                     "blocks, which is 48 slots.")
    return right("4,317 against 29. The first number depends on how long the answers might have "
                 "become; the second is below 16 for each request, whatever its length.")


EMPTY_SLOTS = Exercise(
    id="8.1", kind="check", title="Count the empty slots",
    prompt="Three requests have noted 37, 500 and 1,290 tokens. How many slots stand empty if "
           "2,048 were set aside for each of them, and how many if each has blocks of 16? Answer "
           "with two numbers.",
    starter="answer = (..., ...)   # (reserved, in blocks)",
    check=check_empty_slots,
    hints=("1,827 tokens are noted in all.",
           "500 tokens take 32 blocks: 512 slots, 12 of them empty."),
    solution="noted = [37, 500, 1290]\n"
             "reserved = 3 * 2048 - sum(noted)\n"
             "paged = sum(-n % 16 for n in noted)\n"
             "answer = (reserved, paged)",
)

# --- 8.2 -----------------------------------------------------------------------------------


def check_slot(answer: object) -> Verdict:
    value = number_in(answer)
    if value == 41:
        return wrong("41 would be its slot if the blocks lay in order from 0. Look up the fourth "
                     "entry of the table.")
    if value in (13 * 12 + 5, 13 * 12 + 4):
        return wrong("Positions and places in the table count from 0: position 41 lies in place "
                     "3, the fourth.")
    if value == 5:
        return wrong("5 is the slot inside its block. Which block, and where does that begin?")
    if value in (1 * 12 + 4, 1 * 12 + 6):
        return wrong("The right block, and one slot off: position 36 is the first of that block.")
    if value != 17:
        return wrong("Divide 41 by 12: the quotient is a place in the table, the remainder a slot "
                     "in the block that stands there.")
    return right("41 = 3 x 12 + 5: place 3 of the table is block 1, whose slots begin at 12.")


SLOT = Exercise(
    id="8.2", kind="check", title="Find the slot",
    prompt="Blocks have 12 slots, and the slots of the whole memory are numbered through: block 0 "
           "has 0 to 11, block 1 has 12 to 23. A request's block table is `[9, 4, 13, 1]`. Which "
           "slot holds the entry of position 41?",
    starter="answer = ...",
    check=check_slot,
    hints=("Which place of the table is responsible for positions 36 to 47?",
           "slot = table[position // 12] * 12 + position % 12"),
    solution="table = [9, 4, 13, 1]\nanswer = table[41 // 12] * 12 + 41 % 12",
)

# --- 8.3 -----------------------------------------------------------------------------------

STEPS = [([9, 4, 13, 1], 0, 5, 7), ([9, 4, 13, 1], 3, 16, 7), ([6, 0, 2], 10, 1, 5),
         ([6, 0, 2], 4, 1, 5), ([8, 3], 0, 6, 3), ([2, 5, 1], 2, 7, 4)]


def check_slots(answer: object) -> Verdict:
    slots = function_in(answer)
    for table, past, new, size in STEPS:
        found = slots(list(table), past, new, size)
        if found is None:
            return wrong("This returns nothing. Hand back a list: one slot for each row.")
        found = list(found)
        expected = [table[p // size] * size + p % size for p in range(past, past + new)]
        if found == expected:
            continue
        if any(isinstance(slot, (tuple, list)) for slot in found):
            return wrong(f"A slot is one number here, numbered through as in 8.2; {found[0]} is "
                         "several. Where do the slots of a block begin?")
        case = f"For the table {table}, blocks of {size}, {past} tokens noted and {new} new"
        if len(found) != new:
            return wrong(f"{case}, {new} slots are asked for; this returns {len(found)}.")
        place = next(i for i, pair in enumerate(zip(found, expected, strict=True))
                     if pair[0] != pair[1])
        return wrong(f"{case}, row {place} belongs to position {past + place}, in slot "
                     f"{expected[place]}; this says {found[place]}. A step may cross from one "
                     "block into the next, and the next may lie anywhere.")
    return right("Prompts, chunks and single tokens, within a block and across: the same "
                 "arithmetic for all. `PagedStep` works out such a list once a step, for all "
                 "layers; it is often called the slot mapping.")


SLOT_MAPPING = Exercise(
    id="8.3", kind="code", title="Where do this step's rows go?",
    prompt="A step computes `new` rows of a request that has `past` tokens noted. `slots` should "
           "return, for each row, the slot that its entry is written to (numbered through, as in "
           "8.2). This one works as long as the step stays inside one block. Mend it.",
    starter="""def slots(table, past, new, size):
    first = table[past // size] * size + past % size
    return list(range(first, first + new))""",
    answer="slots",
    check=check_slots,
    hints=("The rows stand at positions past, past + 1, ... up to past + new - 1.",
           "Look every position up in the table, not only the first."),
    solution="""def slots(table, past, new, size):
    return [table[position // size] * size + position % size
            for position in range(past, past + new)]""",
)

# --- 8.4 -----------------------------------------------------------------------------------


def check_own(answer: object) -> Verdict:
    own = function_in(answer)
    for free, holders in (([5, 2], 1), ([5, 2], 3), ([7], 2), ([], 2), ([], 1)):
        verdict = own_verdict(own, free, holders)
        if verdict is not None:
            return verdict
    return right("Alone, shared, and with nothing free: the copy is counted, the others keep "
                 "theirs, and a failure leaves nothing behind. Nothing was copied before "
                 "somebody wrote, which is the whole idea.")


def own_verdict(own, free: list[int], holders: int) -> Verdict | None:
    """What is wrong with one call of a reader's `own`; None if nothing is."""
    table, place, block = [4, 6, 3], 1, 6
    count = [0] * 9
    count[4], count[3], count[6] = 1, 1, holders
    state, copies = (list(table), list(count), list(free)), []

    def copy(source: int, target: int) -> None:
        copies.append((source, target))

    done = own(table, place, count, free, copy)
    case = f"With {holders} holding the block and {len(state[2])} blocks free"
    alone, possible = holders == 1, bool(state[2])
    if alone or not possible:
        if (table, count, free) != state or copies:
            return wrong(f"{case}, nothing should change" + (
                ": a block that one table holds can be written to as it is." if alone else
                ": there is no block for the copy, so say False before you touch anything."))
        if done != alone:
            return wrong(f"{case}, this returns {done!r}; it should be {alone}.")
        return None
    if table[place] == block or table[place] not in state[2]:
        return wrong(f"{case}, the table should name a free block in place of {block}; it names "
                     f"{table[place]}.")
    target = table[place]
    if copies != [(block, target)]:
        return wrong(f"{case}, `copy` should be called once, as copy({block}, {target}): the "
                     f"source first. It was called with {copies}.")
    if count[block] != holders - 1:
        return wrong(f"{case}, {holders - 1} should hold it afterwards; its count says "
                     f"{count[block]}.")
    if count[target] != 1 or target in free:
        return wrong(f"{case}, the copy is now held by one table. Its count says {count[target]}, "
                     f"and it {'is' if target in free else 'is not'} in the free list.")
    if not done:
        return wrong(f"{case}, this returns {done!r}; after the copy the table owns its block: "
                     "True.")
    return stray_change(case, state, (table, count, free), place, target)


def stray_change(case: str, before, after, place: int, target: int) -> Verdict | None:
    """What a copy has changed beside the block, its copy and their counts; None if nothing."""
    (table, count, free), touched = before, (before[0][place], target)
    if after[0] != [*table[:place], target, *table[place + 1:]]:
        return wrong(f"{case}, only place {place} of the table should change: {table} became "
                     f"{after[0]}.")
    if any(a != b for i, (a, b) in enumerate(zip(count, after[1], strict=True))
           if i not in touched):
        return wrong(f"{case}, only the counts of blocks {touched[0]} and {target} should change: "
                     f"{count} became {after[1]}.")
    if after[2] != [block for block in free if block != target]:
        return wrong(f"{case}, one block should leave the free list: {free} became {after[2]}.")
    return None


OWN = Exercise(
    id="8.4", kind="code", title="Copy on write, to the last case",
    prompt="`own` makes the block at `place` of a table the table's own before it is written to. "
           "`count` holds how many tables hold each block, `free` the free blocks, and "
           "`copy(source, target)` copies one. It should return True, or, if a copy is needed and "
           "no block is free, False with nothing changed. Two things are missing here.",
    starter="""def own(table, place, count, free, copy):
    block = table[place]
    if count[block] > 1:
        table[place] = free.pop(0)
        copy(block, table[place])
        count[block] -= 1
    return True""",
    answer="own",
    check=check_own,
    hints=("How many tables hold the new block afterwards, and who wrote that down?",
           "`free.pop(0)` of an empty list raises. What should happen instead, and before what?"),
    solution="""def own(table, place, count, free, copy):
    block = table[place]
    if count[block] == 1:
        return True
    if not free:
        return False
    target = free.pop(0)
    count[target] = 1
    copy(block, target)
    table[place] = target
    count[block] -= 1
    return True""",
)

# --- 8.5 -----------------------------------------------------------------------------------


def check_faults(answer: object) -> Verdict:
    faults, rng = function_in(answer), random.Random(85)
    for case in range(30):
        tables = [rng.sample(range(11), rng.randint(1, 4)) for _ in range(rng.randint(0, 4))]
        held = Counter(block for table in tables for block in table)
        count = [held[block] for block in range(11)]
        expected = {}
        for block in rng.sample(range(11), case % 3):
            by = rng.choice((1, 2, -1 if count[block] else 1))
            count[block] += by
            expected[block] = by
        found = faults([list(table) for table in tables], list(count))
        if not isinstance(found, dict):
            return wrong("Return a dictionary, {block: how much its count is too high}; this is a "
                         f"{type(found).__name__}.")
        if {b: by for b, by in found.items() if by} == expected:
            if 0 in found.values():
                return wrong("Leave out the blocks whose counts are right.")
            continue
        missed = next((block for block, by in expected.items() if found.get(block) != by), None)
        if missed is None:
            extra = next(block for block in found if block not in expected)
            return wrong(f"Block {extra} is in {held[extra]} tables and counts {count[extra]}: "
                         "nothing is wrong with it.")
        return wrong(f"Block {missed} is in {held[missed]} tables and counts {count[missed]}, so "
                     f"{expected[missed]:+d} belongs in the answer; yours has "
                     f"{found.get(missed, 'nothing')}.")
    return right("Leaks (too high) and double frees (too low), also of blocks that somebody still "
                 "holds. This is the first half of `BlockPool.check`.")


FAULTS = Exercise(
    id="8.5", kind="code", title="Find the miscounted blocks",
    prompt="Given all block tables and the reference counts, return which counts are wrong and by "
           "how much: `{block: count - tables that hold it}`, right ones left out. The starter "
           "finds a lost block only when nobody holds it any more.",
    starter="""def faults(tables, count):
    held = {block for table in tables for block in table}
    return {block: number for block, number in enumerate(count)
            if number and block not in held}""",
    answer="faults",
    check=check_faults,
    hints=("A block that two tables hold and that counts 3 will leak later. Whether it is held at "
           "all is not enough to know; how often?",
           "`Counter(block for table in tables for block in table)` of the module collections "
           "counts them."),
    solution="""def faults(tables, count):
    found = {}
    for block, number in enumerate(count):
        held = sum(block in table for table in tables)
        if number != held:
            found[block] = number - held
    return found""",
)

# --- 8.6 -----------------------------------------------------------------------------------


def check_block_size(answer: object) -> Verdict:
    value = number_in(answer)
    if value == 32:
        return right("32: half a block is 15.5 slots, 3.7 % of 415.5. At 64 it is 7.3 %. For the "
                     "12,035 tokens that a prompt of one published trace has on average, even "
                     "blocks of 512 would do.")
    if 32 < value < 35:
        return wrong("By the equation even 34 would do; asked for is a power of two.")
    if value in (1, 2, 4, 8, 16):
        return wrong(f"Blocks of {value:.0f} stay under 4 %, but larger ones do, too.")
    if value == 64:
        return wrong("Blocks of 64 waste 31.5 slots a request: 7.3 % of 431.5.")
    return wrong("Try powers of two in equation 8.1 with a mean of 400 tokens.")


BLOCK_SIZE = Exercise(
    id="8.6", kind="check", title="Choose a block size",
    prompt="Requests have noted 400 tokens on average. By equation 8.1, which is the largest power "
           "of two that you can choose as block size so that under 4 % of the held slots are "
           "empty?",
    starter="answer = ...",
    check=check_block_size,
    hints=("Beside its 400 noted slots, a request holds (s - 1) / 2 empty ones on average.",
           "Solve x / (400 + x) = 0.04 for x, the waste of one request in slots."),
    solution="def waste(s):\n    half = (s - 1) / 2\n    return half / (400 + half)\n\n"
             "answer = max(s for s in (2**i for i in range(12))\n             if waste(s) < 0.04)",
)

# --- 8.7, 8.8 ------------------------------------------------------------------------------

TWO_FAULTS = Exercise(
    id="8.7", kind="think", title="One too few, one too many",
    prompt="A program forgets one decrement of a reference count; another one decrements once too "
           "often. Who notices each fault, when, and which is worse?",
    solution="**One decrement too few** is a leak: the block never returns to the free list. "
             "Every answer stays right. The pool shrinks, batches get smaller, requests are sent "
             "away, and after hours or weeks the service stops; a restart hides it. Operators "
             "notice, not readers.\n\n"
             "**One too many** frees a block that somebody still reads. The next request writes "
             "its notes there. The first one then answers from a stranger's text: nothing crashes, "
             "and the answer may even carry a piece of that text. Its reader notices, or nobody "
             "does. This is the worse fault: it breaks both correctness and privacy.\n\n"
             "The same check finds both: count how many tables name each block, and compare.",
)

SMALLEST = Exercise(
    id="8.8", kind="think", title="Why not blocks of one token?",
    prompt="Blocks of one slot waste nothing. Name three things that get worse, and say which of "
           "them you could measure in this chapter.",
    solution="**The table** has an entry for every token: a 100,000-token prompt needs 100,000 "
             "numbers, made and read in every step.\n\n"
             "**Reading** gathers many small pieces instead of few large ones. The ratio of paged "
             "to dense decode, by block size, shows it.\n\n"
             "**Bookkeeping**: every token takes a block from the free list and gives one back; "
             "the workload cell ran longer for small blocks. The same holds for everything that "
             "is done by block: keys (chapter 10), files on disk (chapter 11), messages to "
             "another worker (chapter 12).\n\n"
             "(They would buy something, too: any two prompts could share their beginning to the "
             "very token at which they part.)",
)

CHAPTER = Chapter(
    8, "Paged memory",
    [EMPTY_SLOTS, SLOT, SLOT_MAPPING, OWN, FAULTS, BLOCK_SIZE, TWO_FAULTS, SMALLEST],
)
