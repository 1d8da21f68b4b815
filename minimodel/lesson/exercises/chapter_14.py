"""The exercises of chapter 14. No two numbers of a task are equal, so a swapped pair fails."""

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

# --- 14.1 ----------------------------------------------------------------------------------


def check_patience(answer: object) -> Verdict:
    noticed, decided = pair_in(answer)
    if (noticed, decided) == (17, 10):
        return wrong("The other way round: nobody decides before anybody has noticed.")
    if noticed == 3:
        return wrong("At second 3 it stops, and nobody hears of that. When does the meeting fail "
                     "that the others began right then?")
    if noticed == 7:
        return wrong("The patience is 7 seconds, but it begins at second 3, with the meeting.")
    if noticed != 10:
        return wrong("The others wait for 7 seconds from the moment at which they began to wait.")
    if decided == 10:
        return wrong("At second 10 the supervisor knows that *somebody* is missing. Who is silent "
                     "shows only after another patience.")
    if decided != 17:
        return wrong("From the first report on, those who are silent have another 7 seconds.")
    return right("10 and 17. Had the rank been killed, both would have been little more than 3: "
                 "its connections close, and its process is seen to have ended.")


PATIENCE = Exercise(
    id="14.1", kind="check", title="Two patiences",
    prompt="A group's patience is 7 seconds. At second 3 one rank hangs; all others begin to wait "
           "for it in a meeting right then. At which second does the supervisor notice that "
           "somebody is missing, and at which does it decide who?",
    starter="answer = (..., ...)   # (noticed, decided), in s",
    check=check_patience,
    hints=("A hanging rank closes no connection: only the end of the patience tells.",
           "Then each of the others reports. Who has not reported after another patience is out."),
    solution="noticed = 3 + 7\nanswer = (noticed, noticed + 7)",
)

# --- 14.2 ----------------------------------------------------------------------------------


def check_again(answer: object) -> Verdict:
    store, bare = pair_in(answer)
    if (store, bare) == (1_047, 7):
        return wrong("The other way round: first with the store.")
    if store == 8:
        return wrong("1,048 tokens less 1,040 in full blocks are 8, but the last of them was only "
                     "written, never computed: its notes are new work, not old.")
    if store == 11:
        return wrong("That is the end of the prompt. Blocks that the answer filled are in the "
                     "store as well.")
    if store != 7:
        return wrong("How many tokens had notes? How many of those lie in full blocks of 16?")
    if bare == 1_048:
        return wrong("The last token was written when the rank died, but not computed: nobody "
                     "computes it *again*.")
    if bare == 1_003:
        return wrong("The 45 tokens of the answer have notes, too (all but one).")
    if bare != 1_047:
        return wrong("Without a store nothing is found: all that had notes is computed again.")
    return right("7 and 1,047: the 65 full blocks hold 1,040 of 1,047 tokens, part of the answer "
                 "among them.")


AGAIN = Exercise(
    id="14.2", kind="check", title="Computed again",
    prompt="A rank dies. One of its calls has a prompt of 1,003 tokens, and 45 tokens of its "
           "answer were written. Blocks of 16 go into the store as soon as they are full. How many "
           "tokens that had been computed are computed again, with the store and without it? "
           "(Nobody else has any of its notes.)",
    starter="answer = (..., ...)   # (with the store, without)",
    check=check_again,
    hints=("The last token written has not been through the model yet.",
           "1,003 + 45 - 1 tokens had notes. 16 times 65 is 1,040."),
    solution="had = 1003 + 45 - 1\nanswer = (had % 16, had)",
)

# --- 14.3 ----------------------------------------------------------------------------------


def check_stops(answer: object) -> Verdict:
    hours, lost = pair_in(answer)
    between = 40_000 / 144
    if math.isclose(hours, 40_000, rel_tol=0.01):
        return wrong("40,000 hours is one chip. Any of the 144 stops the group.")
    if math.isclose(hours, between / 24, rel_tol=0.01):
        return wrong("That is in days; the question asks for hours.")
    if not math.isclose(hours, between, rel_tol=0.01):
        return wrong("144 chips fail 144 times as often as one: divide.")
    if math.isclose(lost, 144 * 0.2, rel_tol=0.01):
        return wrong("28.8 chip-hours is one stop. How many stops are there in 720 hours?")
    if math.isclose(lost, 720 / between * 0.2, rel_tol=0.01):
        return wrong("That is how long the group is away. In each of those hours 144 chips stand "
                     "still.")
    if math.isclose(lost, 720 / between * 144 * 12, rel_tol=0.01):
        return wrong("12 minutes are a fifth of an hour.")
    if not math.isclose(lost, 720 / between * 144 * 0.2, rel_tol=0.01):
        return wrong("Stops in 720 hours, times 144 chips, times a fifth of an hour.")
    return right("278 hours, and 75 of the month's 103,680 chip-hours: less than a thousandth. A "
                 "group twice as wide loses four times as much: twice the stops, twice the chips.")


STOPS = Exercise(
    id="14.3", kind="check", title="A month of a group",
    prompt="A chip fails once in 40,000 hours. A group of 144 needs 12 minutes to come back after "
           "each failure. How many hours lie between two stops, and how many chip-hours are lost "
           "in a month of 720 hours?",
    starter="answer = (..., ...)   # (hours between stops, chip-hours)",
    check=check_stops,
    hints=("Equation 14.1, with one over 40,000 for the rate.",
           "720 hours hold 720 / T stops, each of which costs 144 chips a fifth of an hour."),
    solution="between = 40_000 / 144\nanswer = (between, 720 / between * 144 * 12 / 60)",
)

# --- 14.4 ----------------------------------------------------------------------------------


def check_decide(answer: object) -> Verdict:
    decide = function_in(answer)
    cases = [
        (((0, 1, 2), {2, 0}, {1}), ((0, 2), set()),
         "Rank 1 has ended by itself: it is out, and there is nothing to kill."),
        (((0, 1, 2), {2, 0}, set()), ((0, 2), {1}),
         "Rank 1 is silent but has not ended: it may wake up later, so it is killed."),
        (((3, 5, 8, 9), {9, 5, 3}, {3}), ((5, 9), {8}),
         "Rank 3 said that it had lost the group, and ended after that: it is out."),
        (((2, 4, 7), {7, 0, 4, 2}, set()), ((2, 4, 7), set()),
         "Rank 0 is no member of this epoch, whatever it says. All members live: a false alarm "
         "costs an epoch, and no rank."),
        (((6, 1, 4), {4, 6}, {0}), ((4, 6), {1}),
         "Survivors are sorted, in whichever order members come: their order is their ranks."),
    ]
    for given, expected, why in cases:
        members, said, ended = given
        found = decide(tuple(members), set(said), set(ended))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise NotAnAnswer("`decide` must return two things: the survivors, in order, and the "
                              "set of those to kill.")
        survivors, kill = found
        if not isinstance(survivors, tuple | list):
            raise NotAnAnswer("The survivors must be a tuple or list: their order matters.")
        if (tuple(survivors), set(kill)) != expected:
            return wrong(f"With members {members}, {sorted(said)} reporting and {sorted(ended)} "
                         f"ended it gives {tuple(survivors)} and kills {sorted(kill)}; it should "
                         f"be {expected[0]} and {sorted(expected[1])}. {why}")
    return right("Alive is who says so and has not ended; the silent are killed; the order is by "
                 "number, the same wherever it is worked out.")


DECIDE = Exercise(
    id="14.4", kind="code", title="Who lives",
    prompt="Write `decide(members, said, ended)`. `members` are the ranks of this epoch, `said` "
           "the set of those that reported, `ended` the set of those whose process has ended. "
           "Return the survivors as a sorted tuple, and the set of members that must be killed. A "
           "rank that is no member does not count, whatever it says.",
    starter="""def decide(members, said, ended):
    return tuple(said), set()""",
    check=check_decide, answer="decide",
    hints=("A survivor is a member, has reported, and has not ended.",
           "To kill: members who neither reported nor ended."),
    solution="""def decide(members, said, ended):
    survivors = set(members) & said - ended
    return tuple(sorted(survivors)), set(members) - said - ended""",
)

# --- 14.5 ----------------------------------------------------------------------------------


def check_fence(answer: object) -> Verdict:
    accept = function_in(answer)
    messages = [(1, "a", [7, 8]), (1, "b", [3]), (2, "a", [9]), (1, "a", [9, 1]), (2, "b", [5, 6]),
                (1, "b", [5]), (3, "b", [2]), (2, "a", [1]), (3, "a", [1, 0])]
    expected = {"a": [7, 8, 9, 1, 0], "b": [3, 5, 6, 2]}
    found = accept(list(messages))
    if not isinstance(found, dict):
        raise NotAnAnswer("`accept` must return a dict: of each call, its tokens.")
    found = {call: list(tokens) for call, tokens in found.items()}
    everything: dict[str, list[int]] = {}
    for _, call, tokens in messages:
        everything.setdefault(call, []).extend(tokens)
    if found == everything:
        return wrong("All messages were taken, also those of ranks that had been given up: the "
                     "answer holds some tokens twice.")
    last = {call: [token for epoch, name, tokens in messages for token in tokens
                   if name == call and epoch == 3] for call in "ab"}
    if found == last:
        return wrong("Only the last epoch's messages were taken. What an epoch wrote while it was "
                     "the newest stays.")
    per_call = {"a": [7, 8, 9, 1, 1, 0], "b": [3, 5, 6, 2]}
    if found == per_call:
        return wrong("The epoch is the group's: once a message of epoch 3 has come, for any call, "
                     "one of epoch 2 is too late, for every call.")
    if found != expected:
        return wrong(f"It gives {found}, not {expected}. A message of an epoch older than the "
                     "newest seen so far is dropped; all others count, in order.")
    if accept([]) != {}:
        return wrong("Without messages there are no calls: an empty dict.")
    return right("The late ranks were not even wrong: greedy answers are the same everywhere. They "
                 "were late, and a token that is written twice is as bad as a wrong one.")


FENCE = Exercise(
    id="14.5", kind="code", title="A fence of numbers",
    prompt="Where a silent machine cannot be switched off, its messages must be ignored instead. "
           "Write `accept(messages)`. Each message is `(epoch, call, tokens)`: the next tokens of "
           "a call's answer, sent by a member of that epoch. Messages come in the order of the "
           "list. One that is older than the newest epoch seen *so far*, for whichever call, is "
           "dropped. Return, for each call, the tokens that count.",
    starter="""def accept(messages):
    answers = {}
    for epoch, call, tokens in messages:
        if epoch > 0:               # all of them
            answers.setdefault(call, []).extend(tokens)
    return answers""",
    check=check_fence, answer="accept",
    hints=("Remember the newest epoch that any message has had.",
           "The newest epoch is one number for all calls: compare before you take the tokens."),
    solution="""def accept(messages):
    answers, newest = {}, 0
    for epoch, call, tokens in messages:
        newest = max(newest, epoch)
        if epoch == newest:
            answers.setdefault(call, []).extend(tokens)
    return answers""",
)

# --- 14.6 ----------------------------------------------------------------------------------


def check_place(answer: object) -> Verdict:
    place = function_in(answer)
    cases = [([[0, 1, 2, 3], [4, 5, 6, 7]], 11, 7), ([[5, 0], [8, 2, 3, 7], [1]], 9, 4),
             ([[], [4, 1, 0]], 5, 3), ([[2, 0], [1, 2]], 3, 2)]
    for held, num_experts, room in cases:
        said = f"With {held}, {num_experts} experts and room for {room}"
        found = place([list(experts) for experts in held], num_experts, room)
        if not isinstance(found, list | tuple) or len(found) != len(held):
            raise NotAnAnswer("`place` must return a list with one list of experts a survivor.")
        found = [list(experts) for experts in found]
        if (fault := _fault(found, held, num_experts, room)) is not None:
            return wrong(f"{said} it gives {found}. {fault}")
    for held, num_experts, room in (([[0, 1, 2], [3, 4, 5]], 9, 4), ([[0]], 3, 2)):
        try:
            found = place([list(experts) for experts in held], num_experts, room)
        except ValueError:
            continue
        return wrong(f"With {held}, {num_experts} experts and room for {room} in each it gives "
                     f"{found}. They do not fit: raise a ValueError that says so, or answers go on "
                     "with experts that are nowhere.")
    return right("Only what nobody has is fetched, by whoever has least. `_place` fetches more, "
                 "and balances by load instead: with weights of gigabytes one would want both.")


def _fault(found: list[list], held: list[list], num_experts: int, room: int) -> str | None:
    missing = set(range(num_experts)) - {expert for experts in found for expert in experts}
    if missing:
        return f"Expert {min(missing)} is nowhere."
    if max(map(len, found)) > room:
        return f"A rank has {max(map(len, found))} experts, and room for {room}."
    fetched = sum(len(set(new) - set(old)) for new, old in zip(found, held, strict=True))
    least = num_experts - len({expert for experts in held for expert in experts})
    if fetched > least:
        return (f"That fetches {fetched} experts; {least} would do, if everybody keeps what it "
                "has and only what nobody has is fetched.")
    if any(set(old) - set(new) for new, old in zip(found, held, strict=True)):
        return "Nothing is gained by throwing away an expert that is there and has room."
    sizes = sorted(map(len, held))
    for _ in range(least):
        sizes[0] += 1
        sizes.sort()
    if max(map(len, found)) > sizes[-1]:
        return (f"The fullest rank has {max(map(len, found))} experts where {sizes[-1]} would do: "
                "give each missing one to whoever has fewest.")
    return None


PLACE = Exercise(
    id="14.6", kind="code", title="Fetch as little as possible",
    prompt="Write `place(held, num_experts, room)` for one layer. `held` says which experts each "
           "survivor has; return the same with the missing ones added, so that each of experts "
           "0 to `num_experts` - 1 is somewhere. Nobody gives away what it has, no expert that "
           "somebody has is fetched, nobody has more than `room`, and each missing expert goes to "
           "whoever has fewest by then. Raise a `ValueError` if they do not fit.",
    starter="""def place(held, num_experts, room):
    experts = list(range(num_experts))
    return [experts[rank::len(held)] for rank in range(len(held))]""",
    check=check_place, answer="place",
    hints=("First find the experts that nobody has.",
           "`min(placed, key=len)` is whoever has fewest; if even that one is full, refuse."),
    solution="""def place(held, num_experts, room):
    placed = [list(experts) for experts in held]
    there = {expert for experts in held for expert in experts}
    for expert in range(num_experts):
        if expert not in there:
            lightest = min(placed, key=len)
            if len(lightest) >= room:
                raise ValueError(f"no room for expert {expert}")
            lightest.append(expert)
    return placed""",
)

# --- 14.7 ----------------------------------------------------------------------------------

SKIP = Exercise(
    id="14.7", kind="think", title="Why stop at all?",
    prompt="A chip of 64 dies. Instead of stopping, the other 63 could go on and leave out its "
           "experts: each token still has most of its chosen ones. What happens to the answers? "
           "Would it be better to give the token its next best experts? What would you tell the "
           "client?",
    solution="**The answers change**, and nothing says so. A token that loses an expert gets "
             "another vector, writes other notes, and every later token reads those. It stays "
             "fluent, so no monitor turns red. Chapter 03's frozen gate shows where that leads.\n\n"
             "**The next best** experts are the same in kind: another model, a little nearer to "
             "the first one, which nobody has tested. And the notes that it writes are wrong for "
             "everybody who finds them later: under the fingerprint of the right model they would "
             "go into the prefix cache and the store, and outlive the accident. Such a mode would "
             "need a fingerprint of its own.\n\n"
             "**It can be a choice** if it is one: a service that may rather be worse than late, "
             "says so in its answer, and keeps those notes to itself. With copies of the busy "
             "experts on other ranks, a death may even take nothing away, and the next step goes "
             "on as it should. But *some* expert usually has one copy only.",
)

# --- 14.8 ----------------------------------------------------------------------------------

SUPERVISOR = Exercise(
    id="14.8", kind="think", title="Who watches the supervisor?",
    prompt="Our supervisor keeps each call's prompt and answer, and decides alone who lives. What "
           "is lost when its process dies? You add a second one that takes over when the first is "
           "silent. What can go wrong, and what must be stored where so that it does not?",
    solution="**Lost** are all calls that are not answered: their prompts, what was written, who "
             "serves them. The members are fine, and useless: nobody tells them of an epoch, and "
             "in our launcher they end themselves when their parent is gone.\n\n"
             "**Two supervisors** are two that can be wrong about each other. If the first was "
             "only slow, both decide: one kills whom the other counts on, both begin an epoch 7, "
             "with different members. The number is no fence if two can hand out the same one.\n\n"
             "**So the numbers** must come from something that gives each only once: a store that "
             "several machines keep by majority (Raft, Paxos). Whoever wants to be supervisor asks "
             "it for the next epoch; members follow the highest they have seen and ignore the "
             "rest, so a supervisor that wakes up late finds nobody who listens. Placement and "
             "members belong there, too: they are small and change seldom. Prompts and tokens are "
             "not and do; they can stay with the front end that holds the client's connection, "
             "which sends them again to whoever is supervisor now. If that front end dies, its "
             "clients are gone with it, and need no answer.",
)

CHAPTER = Chapter(14, "One dead chip",
                  [PATIENCE, AGAIN, STOPS, DECIDE, FENCE, PLACE, SKIP, SUPERVISOR])
