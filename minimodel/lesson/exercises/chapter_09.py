"""The exercises of chapter 09. No two numbers of a task are equal, so a swapped pair fails."""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minimodel.cache.blocks import BlockPool, BlockTable
from minimodel.lesson.exercises.common import pair_in
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

# --- 9.1 -----------------------------------------------------------------------------------


def check_slots(answer: object) -> Verdict:
    static, continuous = pair_in(answer)
    if (static, continuous) == (62, 87):
        return wrong("The other way round: first static batches, then continuous batching.")
    if static == 103 or continuous == 103:
        return wrong("103 tokens are written in all, but each step writes up to two of them.")
    if static != 87:
        return wrong("A static batch of two takes as many steps as the longer of its answers, and "
                     "there are three batches. Add up the three longer ones.")
    if continuous in (51.5, 52):
        return wrong("52 steps would do if work could be split evenly. But a request stays in its "
                     "slot: the last one, 29 tokens long, begins when a slot is free.")
    if continuous != 62:
        return wrong("Static is right. For continuous batching follow the two slots: the second is "
                     "busy until step 41, so when does the first slot begin the last request?")
    return right("87 and 62. The slot that was idle beside the answer of 41 tokens has served "
                 "three others meanwhile.")


SLOTS = Exercise(
    id="9.1", kind="check", title="Two slots",
    prompt="Six answers will be 3, 41, 8, 17, 5 and 29 tokens long. All requests are there from "
           "the start, in this order. Two fit into a step, and a step writes one token for each "
           "of them (the prompts are so short that you may forget about them). How many steps "
           "are taken until all is written, by static batches of two and by continuous batching?",
    starter="answer = (..., ...)   # (static, continuous)",
    check=check_slots,
    hints=("Static: the batches are (3, 41), (8, 17) and (5, 29), and each lasts as long as its "
           "longest.",
           "Continuous: the answer of 41 keeps one slot until step 41. The other slot goes through "
           "3, 8, 17, 5 one after another. How far is it then?"),
    solution="""static = max(3, 41) + max(8, 17) + max(5, 29)      # 87
first_slot = 3 + 8 + 17 + 5                        # 33, before 41
answer = (static, first_slot + 29)                 # 62""",
)


# --- 9.2 -----------------------------------------------------------------------------------


def check_chunks(answer: object) -> Verdict:
    value = number_in(answer)
    if value == 10:
        return right("Each step has 64 - 9 = 55 tokens left for the prompt: nine steps read 495 of "
                     "it, the tenth reads the rest and gives the first token.")
    if value == 8:
        return wrong("That is 500 tokens at 64 a step. But nine requests take one token of each "
                     "step before the prompt gets any.")
    if 9 <= value < 10:
        return wrong("Nine steps read 495 of the 500 tokens. What about the rest?")
    return wrong("How many tokens of a step's budget are left when everybody who writes has had "
                 "one? The prompt takes as many steps as it has pieces of that size.")


CHUNKS = Exercise(
    id="9.2", kind="check", title="Pieces of a prompt",
    prompt="A step has a budget of 64 tokens. Nine requests are running, all of them writing, and "
           "none is done soon. Now a prompt of 500 tokens is admitted. In how many steps is it "
           "read?",
    starter="answer = ...",
    check=check_chunks,
    hints=("Those who write are served first: one token each.", "Round up."),
    solution="answer = -(-500 // (64 - 9))",
)


# --- 9.3 -----------------------------------------------------------------------------------


def hand_out(remaining: list[int], budget: int, chunk: int) -> list[int]:
    """The book's answer, that readers' functions are compared with."""
    shares = []
    for count in remaining:
        shares.append(min(count, chunk, budget - sum(shares)))
    return shares


def check_hand_out(answer: object) -> Verdict:
    function, rng = function_in(answer), random.Random(93)
    for _ in range(40):
        remaining = [rng.choice((1, 1, rng.randint(2, 90))) for _ in range(rng.randint(1, 9))]
        budget, chunk = rng.randint(1, 70), rng.randint(1, 33)
        verdict = shares_verdict(function([*remaining], budget, chunk), remaining, budget, chunk)
        if verdict is not None:
            return verdict
    return right("One prompt can no longer take all that a step has left, so a short one behind it "
                 "is read beside it. The price: the long one needs more steps.")


def shares_in(found: object, count: int) -> list[float]:
    """As many shares as there are requests; anything else is told so. A tuple will do, too."""
    try:
        shares = list(found)
    except TypeError:
        shares = []
    if len(shares) != count:
        raise NotAnAnswer(f"For {count} requests a list of {count} shares is expected; this is "
                          f"{found!r}.")
    return [number_in(share) for share in shares]


def shares_verdict(found: object, remaining: list[int], budget: int, chunk: int) -> Verdict | None:
    """What is wrong with the shares of one step; None where nothing is."""
    found = shares_in(found, len(remaining))
    case = (f"remaining={remaining}, budget={budget}, chunk={chunk}: your shares are "
            f"[{', '.join(f'{share:g}' for share in found)}]. ")
    if sum(found) > budget:
        return wrong(case + f"They add up to {sum(found):g}.")
    if max(found) > chunk:
        return wrong(case + f"One request takes {max(found):g} tokens of a step, over the chunk.")
    if any(share > count for share, count in zip(found, remaining, strict=True)):
        return wrong(case + "Somebody gets more than remains to be computed.")
    expected = hand_out(remaining, budget, chunk)
    if found != expected:
        return wrong(case + f"In the order of admission they should be {expected}.")
    return None


HAND_OUT = Exercise(
    id="9.3", kind="code", title="No prompt takes it all",
    prompt="`remaining` says what each running request has still to compute, in the order of "
           "admission. Write `hand_out`: each gets what remains, but never more than `chunk` "
           "tokens of one step, as far as the budget goes. Return the list of shares; 0 for who "
           "gets nothing. (The starter lets one long prompt take the whole step.)",
    starter="""def hand_out(remaining, budget, chunk):
    shares = []
    for count in remaining:
        share = min(count, budget)
        shares.append(share)
        budget -= share
    return shares""",
    answer="hand_out", check=check_hand_out,
    hints=("A share is the least of three numbers.",
           "Two of them are `count` and what is left of the budget."),
    solution="""def hand_out(remaining, budget, chunk):
    shares = []
    for count in remaining:
        share = min(count, chunk, budget)
        shares.append(share)
        budget -= share
    return shares""",
)


# --- 9.4 -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A request as the chapter's hand-built loop has it."""

    name: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    computed: int = 0
    table: BlockTable | None = None


def check_send_back(answer: object) -> Verdict:
    function = function_in(answer)
    for place in (2, 1):                # the last one, and one in the middle
        if (verdict := send_back_verdict(function, place)) is not None:
            return verdict
    return right("Blocks back, notes forgotten, first in the queue, and not one written token "
                 "lost. When it is admitted again, it reads its prompt and its own answer so far, "
                 "and goes on.")


def send_back_verdict(function: Callable, place: int) -> Verdict | None:
    """What is wrong after the running request at a place was sent back; None where nothing is."""
    pool = BlockPool(23, block_size=5)
    running = [Job(name, [7] * size, [1, 2], size + 1) for name, size in
               (("first", 11), ("second", 17), ("third", 23))]
    for job in running:
        job.table = pool.admit([], pool.blocks_for(job.computed))
    waiting, victim = deque([Job("newcomer", [9] * 4)]), running[place]
    others = [job for job in running if job is not victim]
    held, prompt = sum(len(job.table) for job in others), list(victim.prompt)
    function(victim, running, waiting, pool)
    misplaced = left_verdict(victim, running, waiting, others)
    return misplaced if misplaced is not None else kept_verdict(victim, pool, held, prompt)


def left_verdict(victim: Job, running: list, waiting: deque, others: list) -> Verdict | None:
    """What is wrong with where everybody is; None where nothing is."""
    if running != others:
        return wrong(f"The {victim.name} one was to be sent back, so exactly the others should be "
                     f"running afterwards, in the same order; there are {names_of(running)}.")
    if victim not in waiting:
        return wrong("The request waits nowhere: nobody will ever admit it again.")
    if waiting[0] is not victim:
        return wrong("It waits behind a newcomer, though it was admitted long before. It should "
                     "be first.")
    if names_of(waiting) != [victim.name, "newcomer"]:
        return wrong("It should wait once, and whoever waited before should still wait, behind "
                     f"it; waiting are {names_of(waiting)}.")
    return None


def names_of(jobs: Iterable[Job]) -> list[str]:
    return [job.name for job in jobs]


def kept_verdict(victim: Job, pool: BlockPool, held: int, prompt: list[int]) -> Verdict | None:
    """What is wrong with what it still has, or with the blocks that the others held."""
    try:
        pool.check()
    except AssertionError as error:
        return wrong(f"The pool's books do not agree any more: {error}. `release` keeps them.")
    left = pool.num_blocks - len(pool.free)
    if left > held:
        return wrong(f"{left} blocks are held and the others hold {held}: its blocks were not "
                     "released.")
    if left < held:
        return wrong(f"The others held {held} blocks and are left with {left}: release its own "
                     "blocks and no others.")
    if victim.computed != 0:
        return wrong(f"Its blocks are gone, and it still counts {victim.computed} tokens as "
                     "computed. It would go on from notes that are somebody else's by then.")
    if victim.output != [1, 2]:
        return wrong(f"It had written [1, 2] and now has {victim.output}. Its reader has seen "
                     "these tokens already; they stay.")
    if victim.prompt != prompt:
        return wrong(f"Its prompt had {len(prompt)} tokens and now has {len(victim.prompt)}. It "
                     "will read prompt and output again as they are, so the prompt stays.")
    if victim.table is not None:
        return wrong("Its table was released, and it still refers to it. Set it to None.")
    return None


SEND_BACK = Exercise(
    id="9.4", kind="code", title="Send back",
    prompt="Write `send_back`: preempt a running request. `running` is a list, `waiting` a deque "
           "whose left end is admitted next, `pool` the block pool of chapter 08. The starter "
           "does two things, one of them not quite right, and forgets the rest.",
    starter="""def send_back(job, running, waiting, pool):
    running.remove(job)
    waiting.append(job)""",
    answer="send_back", check=check_send_back,
    hints=("What does it hold? `pool.release(job.table)`.",
           "What does it believe? `job.computed` counts notes that are no longer its own.",
           "Where should it stand in the queue? `appendleft`."),
    solution="""def send_back(job, running, waiting, pool):
    pool.release(job.table)
    job.table = None
    job.computed = 0
    running.remove(job)
    waiting.appendleft(job)""",
)


# --- 9.5 -----------------------------------------------------------------------------------


def check_recompute(answer: object) -> Verdict:
    rows, again = pair_in(answer)
    if (rows, again) == (540, 541):
        return wrong("The other way round: it cannot compute more rows for the second time than it "
                     "computes at all.")
    if rows == 500:
        return wrong("The prompt alone is not enough: the tokens it has written belong to the text "
                     "that the next token depends on.")
    if rows == 540:
        return wrong("The last token it wrote has to be computed, too: its row gives the next "
                     "token.")
    if rows != 541:
        return wrong("All of its text has to be read again, prompt and answer so far.")
    if again == 541:
        return wrong("Which token had no notes yet when it was sent back? The one that was written "
                     "last is computed in the step after.")
    if again != 540:
        return wrong("The first number is right. Of these rows, all that had notes are computed "
                     "for the second time.")
    return right("541 rows, of which 540 are done twice. In one step, if the budget allows, and "
                 "that is the point: it comes back as a prompt, and prompts are read fast.")


RECOMPUTE = Exercise(
    id="9.5", kind="check", title="The price of giving way",
    prompt="A request with a prompt of 500 tokens has written 41 tokens when it is preempted "
           "between two steps. After its return, how many rows are computed for it until it "
           "writes its next token? And how many of these are computed for the second time?",
    starter="answer = (..., ...)   # (rows, for the second time)",
    check=check_recompute,
    hints=("`total` does not change when it is preempted; `computed` does.",
           "Between two steps, one token of a writing request has no notes yet."),
    solution="""total = 500 + 41
answer = (total, total - 1)""",
)


# --- 9.6 -----------------------------------------------------------------------------------


def next_in_line(waiting: list[str], served: dict[str, int]) -> int:
    """The book's answer, that readers' functions are compared with."""
    return min(range(len(waiting)), key=lambda place: served.get(waiting[place], 0))


def check_next_in_line(answer: object) -> Verdict:
    function, rng = function_in(answer), random.Random(96)
    flood = ["busy"] * 5 + ["quiet"]
    if number_in(function([*flood], {"busy": 900, "quiet": 13})) != 5:
        return wrong("Five requests of a customer who has had 900 tokens stand before one of a "
                     "customer who has had 13. The quiet customer's, at place 5, should be next.")
    if number_in(function([*flood], {"busy": 900})) != 5:
        return wrong("Who has not been served at all is not in `served`, and has had 0 tokens.")
    for _ in range(60):
        names = [f"customer {i}" for i in range(rng.randint(1, 5))]
        waiting = [rng.choice(names) for _ in range(rng.randint(1, 11))]
        served = {name: rng.randint(0, 6) for name in names if rng.random() < 0.8}
        found = number_in(function([*waiting], dict(served)))
        if found != next_in_line(waiting, served):
            return wrong(f"waiting={waiting}, served={served}: place "
                         f"{next_in_line(waiting, served)} should be next, you said {found:g}. "
                         "Where several have had equally little, who waits longest is next.")
    return right("A thousand requests at once put a customer ahead of nobody: whoever has had "
                 "least is next. One gap is left: a newcomer's flood goes first until it has had "
                 "as much as the others. (Sheng and others let its count start at the least of "
                 "theirs.)")


NEXT_IN_LINE = Exercise(
    id="9.6", kind="code", title="Fair to customers",
    prompt="First come, first served is fair to requests, and unfair to customers: one of them "
           "sends a thousand requests, and all others wait. `waiting` names the customer of each "
           "waiting request, the longest wait first; `served` says how many tokens each customer "
           "has been given. Write `next_in_line`: the place in `waiting` of the request to admit "
           "next. It belongs to the customer with the fewest tokens; of several, take the one "
           "that waits longest.",
    starter="""def next_in_line(waiting, served):
    return 0""",
    answer="next_in_line", check=check_next_in_line,
    hints=("`served.get(name, 0)`", "`min(range(len(waiting)), key=...)` takes the first of equal "
           "ones."),
    solution="""def next_in_line(waiting, served):
    return min(range(len(waiting)),
               key=lambda place: served.get(waiting[place], 0))""",
)


# --- 9.7 -----------------------------------------------------------------------------------


def check_largest_chunk(answer: object) -> Verdict:
    value = number_in(answer)
    if value == 460:
        return right("500 rows take 25 ms, and 40 of them are the streams' own. So 500 is the "
                     "budget, found once for a model, a machine and a promise.")
    if value == 500:
        return wrong("500 is the budget. 40 of these rows belong to those who write.")
    if value == 300:
        return wrong("So many rows may come on top of the first 200. Those 200 are rows of the "
                     "step, too, and some of them belong to the streams.")
    if value == 260:
        return wrong("You took the 40 streams off the rows beyond the first 200. They are among "
                     "the first 200.")
    return wrong("A gap is as long as a step. How many rows may a step have if it may take 15 ms "
                 "more than the least? And whose are 40 of them?")


LARGEST_CHUNK = Exercise(
    id="9.7", kind="check", title="A budget from a promise",
    prompt="On some machine a step takes 10 ms up to 200 rows, and 0.05 ms more for each row "
           "beyond. 40 streams are being written, and no gap may be longer than 25 ms. How many "
           "tokens of a prompt may a step read at most?",
    starter="answer = ...",
    check=check_largest_chunk,
    hints=("15 ms beyond the first ten: how many rows is that?",
           "Every stream has one row in the step."),
    solution="answer = 200 + (25 - 10) / 0.05 - 40",
)


# --- 9.8 -----------------------------------------------------------------------------------

NEAR_TIES = Exercise(
    id="9.8", kind="think", title="The same question, another answer",
    prompt="A customer sends the same prompt twice at temperature 0, at noon and at night, and "
           "the answers differ from the fortieth token on. Nobody changed the model. What may "
           "have happened, what would you measure to find out, and what are the ways out?",
    solution="At noon the request shared its steps with others, so its rows were computed in "
             "larger products, which add the same numbers in another order. The logits differ in "
             "their last digits. Where two tokens were nearly equal, the other one won, and from "
             "there on the texts are different texts.\n\n"
             "**Measure** the logits of the token where they part, in both runs: the two best "
             "should be closer together than the runs differ. If they are not, it is a bug, such "
             "as a block that somebody else has written to.\n\n"
             "**Ways out.** Live with it, as most services do. Compute in more digits, which makes "
             "near ties rarer and steps slower. Or use kernels whose order of adding does not "
             "depend on the batch (*batch-invariant* kernels): exactly the same digits in any "
             "company, at the price of the shapes that would have been fastest.",
)

CHAPTER = Chapter(
    9, "The batch that never stops",
    [SLOTS, CHUNKS, HAND_OUT, SEND_BACK, RECOMPUTE, NEXT_IN_LINE, LARGEST_CHUNK, NEAR_TIES],
)
