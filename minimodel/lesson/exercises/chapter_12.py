"""The exercises of chapter 12. No two numbers of a task are equal, so a swapped pair fails."""

import math

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

# --- 12.1 ----------------------------------------------------------------------------------


def check_pull(answer: object) -> Verdict:
    pulled, computed = pair_in(answer)
    if (pulled, computed) == (12, 57):
        return wrong("The other way round: first the blocks, then the tokens.")
    if pulled == 62:
        return wrong("62 full blocks have keys, but five of them are there already: a pull asks "
                     "for what is missing.")
    if pulled == 58:
        return wrong("The last 11 tokens fill no block, so they have no key: they do not travel.")
    if pulled != 57:
        return wrong("How many *full* blocks of 16 are in 1,003 tokens? Take off what is there.")
    if computed == 11:
        return wrong("The prompt's last 11 tokens, yes. But the next step also computes the first "
                     "token of the answer, which the ticket brought: it has no notes yet.")
    if computed == 1:
        return wrong("One would do if every token of the prompt lay in a full block.")
    if computed != 12:
        return wrong("What does not lie in a full block is computed, and so is the first token.")
    return right("57 and 12: 62 full blocks less five, then the 11 tokens behind the last full "
                 "block, and the first token of the answer.")


PULL = Exercise(
    id="12.1", kind="check", title="Count a pull",
    prompt="A prompt of 1,003 tokens was read elsewhere (blocks of 16). The decode worker has the "
           "first five of its blocks in memory, from another request. How many blocks does it "
           "pull? And how many tokens does the request's first step there compute?",
    starter="answer = (..., ...)   # (blocks, tokens)",
    check=check_pull,
    hints=("1,003 is 62 times 16, and 11.",
           "The ticket holds the first token of the answer. Has it been through the model?"),
    solution="full = 1003 // 16\n"
             "answer = (full - 5, 1003 - 16 * full + 1)",
)

# --- 12.2 ----------------------------------------------------------------------------------


def check_overlap(answer: object) -> Verdict:
    in_turn, overlapped = pair_in(answer)
    load, compute, layers = 0.7, 0.4, 23
    if math.isclose(in_turn, 16.5, rel_tol=0.01) and math.isclose(overlapped, 25.3, rel_tol=0.01):
        return wrong("The other way round: overlapping cannot take longer.")
    if not math.isclose(in_turn, layers * (load + compute), rel_tol=0.01):
        return wrong("In turn, each of the 23 layers costs its loading and its computing.")
    if math.isclose(overlapped, layers * load, rel_tol=0.01):
        return wrong("When the last layer is here, it still has to be computed.")
    if math.isclose(overlapped, load + layers * compute, rel_tol=0.01):
        return wrong("Here loading is the slower one: computing waits for it at every layer.")
    if not math.isclose(overlapped, load + (layers - 1) * max(load, compute) + compute,
                        rel_tol=0.01):
        return wrong("The first layer is loaded, the last is computed, and between them the slower "
                     "of the two counts, once for each of the other 22.")
    return right("25.3 and 16.5 ms. A link twice as fast would bring 9.55: from there on computing "
                 "is the slower one, and a still faster link buys next to nothing.")


OVERLAP = Exercise(
    id="12.2", kind="check", title="Overlap on paper",
    prompt="A model has 23 layers. One layer of a prompt's notes takes 0.7 ms to arrive, and "
           "computing one layer of the next step takes 0.4 ms. How many milliseconds until the "
           "step is done, in turn and overlapped?",
    starter="answer = (..., ...)   # (in turn, overlapped), in ms",
    check=check_overlap,
    hints=("In turn: 23 times the sum.",
           "Overlapped: the drawing of the chapter, with 23 layers instead of 4."),
    solution="answer = (23 * (0.7 + 0.4),\n          0.7 + 22 * max(0.7, 0.4) + 0.4)",
)

# --- 12.3 ----------------------------------------------------------------------------------


def check_beat(answer: object) -> Verdict:
    beat = function_in(answer)
    cases = [
        ((31.0, 300.0, 40.0, 30.0), 31.0, "The lease ended at 31, and the beat came at 40. By then "
         "the blocks may be somebody else's: a lease that has ended stays ended."),
        ((30.0, 300.0, 30.0, 30.0), 30.0, "A beat that comes at the very moment of the end is too "
         "late: other rules already count the lease as over."),
        ((30.0, 300.0, 2.0, 30.0), 30.0, "Two seconds after the start, 2 + 20 is less than 30: "
         "that would make the lease *shorter*, and a beat never takes time away."),
        ((30.0, 300.0, 25.0, 30.0), 45.0, "At 25 seconds, a beat prolongs a lease of 30 to "
         "25 + 20."),
        ((12.0, 90.0, 11.0, 9.0), 17.0, "Two thirds of *this* lease, of 9 seconds, are 6: "
         "11 + 6."),
        ((298.0, 300.0, 297.0, 30.0), 300.0, "Nothing prolongs a lease beyond `ends_at`: a worker "
         "that beats for ever would hold the blocks for ever."),
    ]
    for given, expected, why in cases:
        found = beat(*given)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise NotAnAnswer("`beat` must return a time: when the lease ends now.")
        if not math.isclose(found, expected):
            return wrong(f"beat{given} gives {found:g}, not {expected:g}. {why}")
    return right("Ended stays ended, never shorter, never beyond the end: three comparisons, and "
                 "each is somebody's lost answer when it is missing.")


BEAT = Exercise(
    id="12.3", kind="code", title="A beat",
    prompt="Write `beat(expires_at, ends_at, now, lease_s)`: the time at which the lease ends "
           "after a beat at `now`. A beat prolongs it to two thirds of a lease from now, with the "
           "three exceptions that the chapter gives.",
    starter="""def beat(expires_at, ends_at, now, lease_s):
    return now + 2 / 3 * lease_s""",
    check=check_beat, answer="beat",
    hints=("What if `now` is not before `expires_at`?",
           "`max` keeps it from getting shorter, `min` from going too far."),
    solution="""def beat(expires_at, ends_at, now, lease_s):
    if now >= expires_at:
        return expires_at
    longer = max(expires_at, now + 2 / 3 * lease_s)
    return min(ends_at, longer)""",
)

# --- 12.4 ----------------------------------------------------------------------------------


def check_ask(answer: object) -> Verdict:
    ask = function_in(answer)
    cases = [
        ((["a", "b", "c"], {}, set(), 5.0), ["a", "b", "c"],
         "Nothing is here and nothing was asked for: ask for all, in the order of `keys`."),
        ((["a", "b", "c"], {}, {"b"}, 5.0), ["a", "c"], "`b` is here already."),
        ((["a", "b", "c"], {"a": 4.9}, set(), 5.0), ["b", "c"],
         "`a` was asked for a tenth of a second ago: it is underway."),
        ((["a", "b", "c"], {"a": 4.0, "c": 4.8}, set(), 5.0), ["a", "b"],
         "`a` was asked for a second ago and did not come: it may be lost, so ask again."),
        ((["a", "b", "c"], {"a": 4.5, "c": 4.75}, set(), 5.0), ["a", "b"],
         "`a` was asked for 0.5 seconds ago, and underway is what was asked for *less* than that "
         "ago."),
        ((list("abcdefg"), {"a": 4.9}, set(), 5.0), ["b", "c", "d"],
         "At most four may be underway, and one is: there is room for three, in their order."),
        ((list("abcdefg"), {"a": 4.0}, set(), 5.0), ["a", "b", "c", "d"],
         "Nothing is underway: `a` was asked for a second ago, so it takes no room. Ask for four."),
        ((list("abcdefg"), {"a": 4.0, "b": 4.9}, {"b"}, 5.0), ["a", "c", "d", "e"],
         "`b` has come, so it takes no room any more."),
    ]
    for given, expected, why in cases:
        copies = tuple(type(part)(part) if isinstance(part, list | dict | set) else part
                       for part in given)
        found = ask(*copies)
        if not isinstance(found, list | tuple):
            raise NotAnAnswer("`ask` must return a list of keys.")
        if list(found) != expected:
            return wrong(f"With keys {given[0]}, asked {given[1]}, here {sorted(given[2])} and now "
                         f"{given[3]:g} it asks for {list(found)}, not for {expected}. {why}")
    return right("A request that is lost costs a retry, one that is merely slow costs nothing, and "
                 "a prompt of any length never fills the link's queue.")


ASK = Exercise(
    id="12.4", kind="code", title="What to ask for",
    prompt="Write `ask(keys, asked, here, now)`: which keys a decode worker should ask for now, in "
           "the order of `keys`. `asked` says when a key was last asked for, `here` which blocks "
           "have come. One that was asked for less than 0.5 seconds ago is underway; at most four "
           "may be underway at a time.",
    starter="""def ask(keys, asked, here, now):
    return [key for key in keys if key not in here]""",
    check=check_ask, answer="ask",
    hints=("First find those that are underway: asked for, not here, and not long ago.",
           "Then take keys that are neither here nor underway, as many as there is room for."),
    solution="""def ask(keys, asked, here, now):
    underway = {key for key, when in asked.items()
                if key not in here and now - when < 0.5}
    wanted = [key for key in keys
              if key not in here and key not in underway]
    return wanted[:4 - len(underway)]""",
)

# --- 12.5 ----------------------------------------------------------------------------------


def check_ratio(answer: object) -> Verdict:
    readers, goodput = pair_in(answer)
    if readers == 8 and math.isclose(goodput, 24.8, rel_tol=0.01):
        return wrong("Eight is the number that write. How many read?")
    if readers == 4:
        return wrong("Four read 22 requests a second. Could a fifth be spared from writing?")
    if readers == 6:
        return wrong("Six could read 33, but the seven that are left write only 21.7.")
    if readers != 5:
        return wrong("Try each number: the smaller of 5.5 n and 3.1 (13 - n) is what counts.")
    if math.isclose(goodput, 27.5, rel_tol=0.01):
        return wrong("Five can read 27.5 requests a second; can the other eight write as many?")
    if not math.isclose(goodput, 24.8, rel_tol=0.01):
        return wrong("Eight chips write: 3.1 requests a second each.")
    return right("Five read and eight write 24.8 requests a second; 10 % of the reading is idle. A "
                 "chip is whole, so the two limits seldom meet exactly.")


RATIO = Exercise(
    id="12.5", kind="check", title="Share 13 chips",
    prompt="Within both latency goals, a chip reads 5.5 requests a second, or writes 3.1. Of 13 "
           "chips, how many should read, and how many requests a second do the 13 then serve?",
    starter="answer = (..., ...)   # (chips that read, requests/s)",
    check=check_ratio,
    hints=("A request needs both: the smaller of the two limits counts.",
           "n that read allow 5.5 n; the others allow 3.1 (13 - n). Compare n = 4, 5 and 6."),
    solution="goodput = {n: min(5.5 * n, 3.1 * (13 - n)) for n in range(1, 13)}\n"
             "readers = max(goodput, key=goodput.get)\n"
             "answer = (readers, goodput[readers])",
)

# --- 12.6 ----------------------------------------------------------------------------------

PUSH = Exercise(
    id="12.6", kind="think", title="Pull or push",
    prompt="Our decode worker pulls. Instead, the prefill worker could push each piece of a prompt "
           "as soon as it is computed, into blocks that the decode worker has set aside. What does "
           "that gain, what must the two tell each other first, and what happens to those blocks "
           "when the client leaves in the middle?",
    solution="**It gains** time: the notes of the first piece travel while the second is computed, "
             "and when the prompt is read, nearly everything is there. A pull begins only then.\n\n"
             "**First** the decode worker must have chosen blocks, for the whole prompt, before "
             "anything is computed, and have told where they lie. They stand empty all that time, "
             "and memory is what a decode worker has least of.\n\n"
             "**When the client leaves**, bytes may still be underway to those blocks. Given to "
             "somebody else, they would be overwritten by a stranger's notes, with no error. So "
             "they must stay set aside until the sender has said that nothing more comes, or until "
             "a time is over after which it surely has given up. In our design only a step of the "
             "engine writes into blocks, so a late one is simply dropped; with cards that write "
             "into memory by themselves (RDMA) there is nobody to drop it.",
)

CHAPTER = Chapter(12, "Reading here, writing there", [PULL, OVERLAP, BEAT, ASK, RATIO, PUSH])
