"""The exercises of chapter 15. No two numbers of a task are equal, so a swapped pair fails."""

import asyncio
import builtins
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minimodel.lesson.exercises.common import pair_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    NotAnAnswer,
    Verdict,
    function_in,
    right,
    wrong,
)

# --- 15.1 ----------------------------------------------------------------------------------


def check_turns(answer: object) -> Verdict:
    turns, home = pair_in(answer)
    if (turns, home) == (5_760, 2_400):
        return wrong("The other way round: first the four copies in turn, then the one.")
    if home == 7_200:
        return wrong("At the one copy, turn k finds what turn k - 1 has sent: the first finds "
                     "nothing.")
    if home != 5_760:
        return wrong("At one copy, turn k finds the whole prompt of turn k - 1. Add up 160 (k - 1) "
                     "for the nine turns.")
    if turns == 0:
        return wrong("Turn 5 comes to the copy that served turn 1, and finds its prompt there.")
    if turns == 1_440:
        return wrong("A quarter of the hits would be a fair guess. Which turns come to a copy that "
                     "has seen the chat before, and what did it see?")
    if turns != 2_400:
        return wrong("The second number is right. In turn, turn k comes to the copy of turn k - 4 "
                     "and finds that one's prompt.")
    return right("2,400 of 5,760. Even a copy that knows the chat remembers an old state of it, so "
                 "each copy ends up reading and keeping most of the chat.")


TURNS = Exercise(
    id="15.1", kind="check", title="A chat that wanders",
    prompt="A chat has nine turns. The prompt of turn k is 160 k + 1 tokens long and begins with "
           "the prompt of the turn before (without its last token). Nobody else is there, nothing "
           "is evicted, and only prompts can be found. How many tokens are found in all nine turns "
           "together if four copies serve in turn, and how many if one copy serves all?",
    starter="answer = (..., ...)   # (four copies in turn, one copy)",
    check=check_turns,
    hints=("At one copy, turn 2 finds 160 tokens, turn 3 finds 320, and so on.",
           "In turn, turns 1 to 4 find nothing. Turn 5 finds the 160 of turn 1."),
    solution="""in_turn = sum(160 * (k - 4) for k in range(5, 10))
at_home = sum(160 * (k - 1) for k in range(1, 10))
answer = (in_turn, at_home)                        # 2,400 and 5,760""",
)


# --- 15.2 ----------------------------------------------------------------------------------


def check_patience(answer: object) -> Verdict:
    tokens, requests = pair_in(answer)
    if (tokens, requests) == (30, 12_000):
        return wrong("The other way round: first the tokens, then the requests.")
    if tokens == 12_400:
        return wrong("The question's own 400 tokens are read in either place, so they cancel.")
    if tokens == 11_600:
        return wrong("At home 400 tokens are lacking, abroad 12,400. The difference is what the "
                     "queue may be.")
    if not math.isclose(tokens, 12_000):
        return wrong("Compare two sums of tokens: the queue plus 400, and 12,400. Where are they "
                     "equal?")
    if not math.isclose(requests, 30):
        return wrong("The first is right. Each of those who wait brings 400 tokens that are not "
                     "remembered.")
    return right("The queue may be as long as the document, which is 3 seconds here. Who would "
                 "have to wait longer is sooner served by a copy that reads all of it.")


PATIENCE = Exercise(
    id="15.2", kind="check", title="How long is too long",
    prompt="A document of 12,000 tokens is remembered at one copy only; another is idle. All "
           "strangers ask about it, with 400 tokens of their own, and 4,000 tokens are read in a "
           "second. By the cost of the chapter, how many tokens may wait at the home before the "
           "other copy costs the same? And how many strangers is that?",
    starter="answer = (..., ...)   # (tokens, strangers)",
    check=check_patience,
    hints=("At home: what waits, and 400. Abroad: 12,400.",
           "What waits are questions: the document is remembered."),
    solution="""tokens = 12_400 - 400
answer = (tokens, tokens / 400)                    # 12,000 and 30""",
)


# --- 15.3 ----------------------------------------------------------------------------------


def cheapest(waiting: dict[str, int], remembered: dict[str, int], length: int) -> str:
    """The book's answer, that readers' functions are compared with."""
    return min(waiting, key=lambda name: waiting[name] + length - remembered.get(name, 0))


def check_cheapest(answer: object) -> Verdict:
    function, rng = function_in(answer), random.Random(153)
    for coarse in (1, 100) * 40:            # in hundreds, many are equal
        names = rng.sample("ABCDEFG", rng.randint(1, 5))
        length = rng.randint(1, 900)
        waiting = {name: rng.choice((0, rng.randint(1, 1_300) // coarse * coarse))
                   for name in names}
        known = {name: rng.randint(0, length - 1) // coarse * coarse
                 for name in names if rng.random() < 0.6}
        found = function(dict(waiting), dict(known), length)
        expected = cheapest(waiting, known, length)
        if found != expected:
            is_equal = found in waiting and cheapest({found: waiting[found],
                                                      expected: waiting[expected]},
                                                     known, length) == found
            why = "is as soon and stands before it" if is_equal else "has the first token soonest"
            return wrong(f"waiting={waiting}, remembered={known}, length={length}: you chose "
                         f"{found!r}; {expected!r} {why}.")
    return right("The sum of two lengths that are counted in the same unit; no threshold anywhere.")


CHEAPEST = Exercise(
    id="15.3", kind="code", title="The cheapest copy",
    prompt="`waiting` says for each copy how many tokens wait there to be read, and `remembered` "
           "how many tokens of a prompt of `length` tokens it remembers; who remembers none is not "
           "in it. Write `cheapest`: the name of the copy at which the first token comes soonest; "
           "of equal ones, the first in `waiting`. (The starter knows affinity only.)",
    starter="""def cheapest(waiting, remembered, length):
    return max(waiting, key=lambda name: remembered.get(name, 0))""",
    answer="cheapest", check=check_cheapest,
    hints=("Two things stand before the first token: what waits, and what is lacking.",
           "`min(waiting, key=...)` takes the first of equal ones."),
    solution="""def cheapest(waiting, remembered, length):
    def cost(name):
        return waiting[name] + length - remembered.get(name, 0)
    return min(waiting, key=cost)""",
)


# --- 15.4 ----------------------------------------------------------------------------------


def check_home(answer: object) -> Verdict:
    function = function_in(answer)
    names, openings = [f"copy {i}" for i in range(5)], [f"town {i}" for i in range(600)]
    home = {opening: function(opening, list(names)) for opening in openings}
    if strangers := [found for found in home.values() if found not in names]:
        return wrong(f"{strangers[0]!r} is no copy: return one of the names.")
    if home != {opening: function(opening, list(names)) for opening in openings}:
        return wrong("The same opening and the same names gave two different homes. Draw the lot "
                     "from a hash of both, not by chance.")
    with another_process():
        if home != {opening: function(opening, list(names)) for opening in openings}:
            return wrong("Another router, in a process of its own, would find other homes: Python "
                         "begins each process with another `hash`. Take one of hashlib.")
    shuffled = [names[i] for i in (3, 0, 4, 2, 1)]
    if home != {opening: function(opening, list(shuffled)) for opening in openings}:
        return wrong("The order of the names changed some homes. Routers may list copies in any "
                     "order, and should agree.")
    return lost_verdict(function, home, names)


@contextmanager
def another_process() -> Iterator[None]:
    """As in a process that was started anew, `hash` says something else of every text."""
    own = builtins.hash
    builtins.hash = lambda value: own(("another process", value))
    try:
        yield
    finally:
        builtins.hash = own


def lost_verdict(function: Callable, home: dict[str, str], names: list[str]) -> Verdict:
    """Who moves when a copy is lost, and how evenly homes are spread."""
    counts = Counter(home.values())
    least = min(counts.get(name, 0) for name in names)
    if least < len(home) / len(names) / 2:
        return wrong(f"600 openings on five copies, and one of them is home to {least}: the lots "
                     "are not fair. Use a good hash of the name and the opening together.")
    lost, *left = names[2], *names[:2], *names[3:]
    after = {opening: function(opening, list(left)) for opening in home}
    moved = sum(after[opening] != home[opening] for opening in home if home[opening] != lost)
    if moved:
        return wrong(f"When {lost} is lost, {moved} openings move that did not live there. Their "
                     "notes are where they were; let them stay.")
    heirs = {after[opening] for opening in home if home[opening] == lost}
    if len(heirs) < len(left) - 1:
        return wrong(f"All that lived on {lost} moves to {len(heirs)} of the other {len(left)}, "
                     "which will be busy. Where the lots of a copy depend on its name and the "
                     "opening as a good hash does, all the others share.")
    return right("Only what has lost its home moves, and the others share it. Every router "
                 "that knows the names agrees, without a word between them.")


HOME = Exercise(
    id="15.4", kind="code", title="A home for an opening",
    prompt="Write `home`: which of the `names` an `opening` (a text) belongs to. The same opening "
           "and names must always give the same home, homes must be spread evenly, and when a copy "
           "is lost only its own openings may move. (The starter moves nearly all. Python's own "
           "`hash` of a text is another one in every process.)",
    starter="""def home(opening, names):
    digest = hashlib.sha256(opening.encode()).digest()
    return names[int.from_bytes(digest, "big") % len(names)]""",
    answer="home", check=check_home,
    hints=("Let every copy draw a lot for the opening, and let the lowest win.",
           "The lot is a hash of the name and the opening together."),
    solution="""def home(opening, names):
    def lot(name):
        return hashlib.sha256(f"{name}/{opening}".encode()).digest()
    return min(names, key=lot)""",
)


# --- 15.5 ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Life:
    """One life of a copy, and the tokens that wait there."""

    to_read: int = 0


def check_counted(answer: object) -> Verdict:
    function = function_in(answer)
    lives, seen = {"A": Life(70), "B": Life(0)}, []
    function(lives, "A", 300, lambda: seen.append(lives["A"].to_read))
    if seen != [370]:
        return wrong("A had 70 tokens waiting and got a request of 300, so while it is answered, "
                     f"370 should wait there; `answer` was called {len(seen)} time(s) and saw "
                     f"{seen}.")
    if (lives["A"].to_read, lives["B"].to_read) != (70, 0):
        return wrong("After the answer, A should have its 70 again and B nothing; they have "
                     f"{lives['A'].to_read} and {lives['B'].to_read}.")
    for verdict in (meanwhile_verdict, hung_up_verdict, restart_verdict):
        if (problem := verdict(function)) is not None:
            return problem
    return right("Counted into one life, counted out of the same one, however it ends. A router "
                 "that forgets either will need a restart itself some day.")


def meanwhile_verdict(function: Callable) -> Verdict | None:
    lives = {"A": Life(20)}

    def another_comes():
        lives["A"].to_read += 90

    function(lives, "A", 300, another_comes)
    if (left := lives["A"].to_read) != 110:
        return wrong("Of 20 tokens that waited before, and 90 of a request that came meanwhile and "
                     f"is still there, {left} are left. Take off what you put on; do not put back "
                     "the count of before.")
    return None


def hung_up_verdict(function: Callable) -> Verdict | None:
    for error in (ConnectionResetError, TimeoutError, asyncio.CancelledError):
        lives = {"A": Life(50)}

        def end_badly(error=error):
            raise error("no answer")

        try:
            function(lives, "A", 300, end_badly)
        except error:
            if lives["A"].to_read != 50:
                return wrong(f"`answer` raised {error.__name__}, and {lives['A'].to_read} tokens "
                             "count where 50 were before. `try` and `finally` count a request out "
                             "whatever the error.")
        else:
            return wrong(f"`answer` raised {error.__name__}, and nobody was told: let the error "
                         "pass on.")
    return None


def restart_verdict(function: Callable) -> Verdict | None:
    lives = {"A": Life(40)}
    first = lives["A"]

    def restart():
        lives["A"] = Life(0)

    function(lives, "A", 300, restart)
    if lives["A"].to_read != 0:
        return wrong("A restarted while the request was under way, and its new life now counts "
                     f"{lives['A'].to_read} tokens, though nothing was counted in. Count out of "
                     "the life that you counted into.")
    if first.to_read != 40:
        return wrong(f"The old life should be left with 40 tokens, and has {first.to_read}.")
    return None


COUNTED = Exercise(
    id="15.5", kind="code", title="Counts that come back",
    prompt="`lives` maps each copy's name to its present life, an object with a count `to_read`. "
           "Write `counted`: count a request of so many `tokens` into the copy's life, call "
           "`answer()`, and count it out again, whatever happens meanwhile. `answer` may raise any "
           "error (a client hangs up, a task is cancelled), other requests come and go, and a copy "
           "may restart: then `lives[name]` is another object.",
    starter="""def counted(lives, name, tokens, answer):
    lives[name].to_read += tokens
    answer()
    lives[name].to_read -= tokens""",
    answer="counted", check=check_counted,
    hints=("`finally` runs whether or not there was an error, and lets the error pass.",
           "Look the life up once, before, and keep it."),
    solution="""def counted(lives, name, tokens, answer):
    life = lives[name]
    life.to_read += tokens
    try:
        answer()
    finally:
        life.to_read -= tokens""",
)


# --- 15.6 ----------------------------------------------------------------------------------


def reaction(epoch: int, expected: int, event_epoch: int, number: int, oldest: int) -> str:
    """The book's answer, that readers' functions are compared with."""
    if event_epoch < epoch or (event_epoch == epoch and number < expected):
        return "ignore"
    if event_epoch > epoch:
        expected = 0
    if event_epoch == epoch and number == expected:
        return "apply"
    return "replay" if oldest <= expected else "begin anew"


WHY = {
    "ignore": "An older life, or a number that was heard before, says nothing new.",
    "apply": "It is the very next event of the same life.",
    "replay": "Something was missed, and the copy still keeps all of it.",
    "begin anew": "Something was missed, and the copy no longer keeps all of it.",
}


def check_reaction(answer: object) -> Verdict:
    function = function_in(answer)
    cases = [(epoch, expected, other, number, oldest)
             for epoch in (3,) for expected in (0, 5) for other in (2, 3, 4)
             for number in (0, 4, 5, 9) for oldest in (0, 3, 6) if oldest <= number]
    for case in cases:
        found, wanted = function(*case), reaction(*case)
        if found not in WHY:
            raise NotAnAnswer(f"One of {', '.join(WHY)} is expected; this is {found!r}.")
        if found != wanted:
            epoch, expected, other, number, oldest = case
            return wrong(f"You are in epoch {epoch} and expect number {expected}. Event {number} "
                         f"of epoch {other} comes, and the copy keeps its events from {oldest} on: "
                         f"you say {found!r}, it should be {wanted!r}. {WHY[wanted]}")
    return right("Four answers for every event, and after each of them the index is as true as the "
                 "last event that was heard.")


REACTION = Exercise(
    id="15.6", kind="code", title="What to make of an event",
    prompt="You listen to a copy's events. You are in its `epoch` and expect the event with number "
           "`expected` next. An event of `event_epoch` with `number` arrives, and the copy keeps "
           "its events from number `oldest` on. Write `reaction`, which returns \"apply\", "
           "\"ignore\", \"replay\" (all that was missed is still there) or \"begin anew\". Of a "
           "new epoch nothing was heard yet, so number 0 would be expected; its first event is "
           "no gap for the numbers, but the old entries must go, so it is never just applied.",
    starter="""def reaction(epoch, expected, event_epoch, number, oldest):
    if number == expected:
        return "apply"
    return "replay\"""",
    answer="reaction", check=check_reaction,
    hints=("First find out what to ignore: older epochs, and old numbers of this one.",
           "A new epoch: `expected = 0`, and the answer is \"replay\" or \"begin anew\".",
           "A replay helps if the copy keeps the event that you expect: `oldest <= expected`."),
    solution="""def reaction(epoch, expected, event_epoch, number, oldest):
    if (event_epoch, number) < (epoch, expected):
        return "ignore"
    if (event_epoch, number) == (epoch, expected):
        return "apply"
    if event_epoch > epoch:
        expected = 0
    return "replay" if oldest <= expected else "begin anew\"""",
)


# --- 15.7 ----------------------------------------------------------------------------------


def check_moved(answer: object) -> Verdict:
    modulo, lots = pair_in(answer)
    if (modulo, lots) == (1_000, 7_000):
        return wrong("The other way round: by modulo nearly all move.")
    if lots == 0:
        return wrong("Those that lived on the lost copy must move: it is gone.")
    if not math.isclose(lots, 1_000):
        return wrong("With lots, only what lived on the lost copy moves: one in eight.")
    if modulo == 8_000:
        return wrong("Not quite all: where a hash leaves the same rest by 8 and by 7, the opening "
                     "stays. How often is that?")
    if modulo == 1_000:
        return wrong("That would be so if modulo left the others alone. Take hashes from 0 to 55: "
                     "which of them have the same rest by 8 and by 7?")
    if not math.isclose(modulo, 7_000):
        return wrong("The second is right. By modulo an opening stays where a hash has the same "
                     "rest by 8 and by 7: for 7 of every 56 hashes.")
    return right("7,000 against 1,000. After a fault that took an eighth of the memory, modulo "
                 "makes the service forget seven eighths of it.")


MOVED = Exercise(
    id="15.7", kind="check", title="One of eight",
    prompt="8,000 openings have their homes on eight copies. One copy is lost, the last of the "
           "list. How many openings change their home, on average, if homes are a hash modulo the "
           "number of copies, and how many with rendezvous hashing?",
    starter="answer = (..., ...)   # (modulo, rendezvous)",
    check=check_moved,
    hints=("With lots, an opening moves only if its home is gone.",
           "By modulo it stays if h % 8 == h % 7. Count for h from 0 to 55, then it repeats."),
    solution="""stays = sum(h % 8 == h % 7 for h in range(56)) / 56   # 7 of 56
answer = (8_000 * (1 - stays), 8_000 / 8)              # 7,000, 1,000""",
)


# --- 15.8 ----------------------------------------------------------------------------------

TWO_ROUTERS = Exercise(
    id="15.8", kind="think", title="Two routers",
    prompt="One router is a single point of failure, so you run two, and clients pick one by "
           "chance. Each has its own index and its own counts. Which policies still do what they "
           "promise? What goes wrong with the others, by how much, and what would you share "
           "between the two?",
    solution="**By opening** does not notice: both routers compute the same homes from the same "
             "names. **Round robin** stays even enough.\n\n"
             "**Counts** are halved: each router sees only the requests that it has sent itself. "
             "Where half of all pass through each, both see about half of every queue. Comparing "
             "copies still works on average, but two routers may send to the same idle copy at "
             "once, and anything absolute (a threshold, or a queue in seconds against a read in "
             "seconds, as in our cost) is off by a factor of two: the cost leaves a home only when "
             "its queue is twice as long as it should be.\n\n"
             "**Own history** misses what the other has sent, so the first prompt of a town is "
             "read once for each router, perhaps at two copies.\n\n"
             "**Share** what the copies know: let them report their queues in tokens and publish "
             "their events to both routers. Each router adds what it has sent since the last "
             "report. Reports that are old make both routers run after the same idle copy; a "
             "little chance in the choice, such as the better of two copies drawn at random, "
             "dampens that.",
)

CHAPTER = Chapter(
    15, "Which copy?",
    [TURNS, PATIENCE, CHEAPEST, HOME, COUNTED, REACTION, MOVED, TWO_ROUTERS],
    given="import hashlib",
)
