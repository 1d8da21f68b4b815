"""The exercises of chapter 06. No two numbers of a task are equal, so a swapped pair fails."""

import math
import random

import torch

from minimodel.cache.dense import DenseCache
from minimodel.engine.generate import generate_with_cache
from minimodel.engine.metrics import Goals, RequestTimes, goodput
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
    NotAnAnswer,
    Verdict,
    function_in,
    number_in,
    right,
    wrong,
)

# --- 6.1 -----------------------------------------------------------------------------------


def check_clocks(answer: object) -> Verdict:
    first, per_token = pair_in(answer)
    if math.isclose(first, 0.2, abs_tol=0.001) and math.isclose(per_token, 0.9, abs_tol=0.001):
        return wrong("The other way round: first the time to first token, then TPOT.")
    if math.isclose(first, 2.9, abs_tol=0.001):
        return wrong("2.9 is when the first token came. How long had the request waited by then?")
    if not math.isclose(first, 0.9, abs_tol=0.001):
        return wrong("The time to first token runs from the arrival, 2.0, to the first token.")
    if math.isclose(per_token, 1.7 / 5, abs_tol=0.001):
        return wrong("That is the whole time divided by all five tokens. The first token's wait is "
                     "in TTFT already; TPOT leaves that token out.")
    if math.isclose(per_token, 0.8 / 5, abs_tol=0.001):
        return wrong("Five tokens have four gaps between them.")
    if math.isclose(per_token, 0.15, abs_tol=0.001):
        return wrong("That is the middle one of the gaps; TPOT is their mean.")
    if not math.isclose(per_token, 0.2, abs_tol=0.001):
        return wrong("TTFT is right. TPOT is the time from the first token to the last, divided by "
                     "the number of gaps between them.")
    return right("0.9 s, then 0.8 s for four gaps: 0.2 s a token. The mean hides that one of the "
                 "gaps was twice as long as that.")


CLOCKS = Exercise(
    id="6.1", kind="check", title="Read two clocks",
    prompt="A request arrives at 2.0 s. Its five tokens come at 2.9, 3.0, 3.1, 3.3 and 3.7 s. What "
           "are its time to first token and its time per output token (TPOT), in seconds?",
    starter="answer = (..., ...)   # (TTFT, TPOT)",
    check=check_clocks,
    hints=("TTFT begins when the request arrives, not when the clock reads zero.",
           "From the first token to the last there are 0.8 s. How many gaps share them?"),
    solution="answer = (2.9 - 2.0, (3.7 - 2.9) / 4)",
)


# --- 6.2 -----------------------------------------------------------------------------------


def check_ridge(answer: object) -> Verdict:
    value = number_in(answer)
    if math.isclose(value, 150, rel_tol=1e-6):
        return right("The ridge is at 300 operations a byte. A one-byte weight serves two of them "
                     "for every row, so 150 rows use all that one fetch pays for.")
    if math.isclose(value, 300, rel_tol=1e-6):
        return wrong("300 is the ridge, in operations for each byte. One row makes *two* "
                     "operations of each weight, and a weight is one byte here.")
    if math.isclose(value, 600, rel_tol=1e-6):
        return wrong("The two operations that a row makes of each weight lower the number of rows "
                     "that are needed; you have multiplied by them.")
    if math.isclose(value, 75, rel_tol=1e-6):
        return wrong("Half of it. Are you counting two bytes a weight the wrong way round? Here a "
                     "weight is one byte.")
    if math.isclose(value, 0.15, rel_tol=1e-3) or math.isclose(value, 150_000, rel_tol=1e-3):
        return wrong("A thousand times off: a TFLOP is a thousand times a GFLOP, and both rates "
                     "must be in the same unit.")
    return wrong("First the ridge: FLOP/s over bytes/s. Then ask how many operations `B` rows make "
                 "of each byte they fetch.")


RIDGE = Exercise(
    id="6.2", kind="check", title="How many rows until it is no longer memory?",
    prompt="A chip multiplies at 900 TFLOP/s and reads its memory at 3 TB/s. Its weights take one "
           "byte each. How many rows must share a weight matrix until arithmetic takes as long as "
           "fetching it?",
    starter="answer = ...",
    check=check_ridge,
    hints=("The ridge of a chip is its FLOP/s over its bytes/s.",
           "B rows make 2 B operations of each weight that is fetched."),
    solution="ridge = 900e12 / 3e12     # operations for each byte\nanswer = ridge * 1 / 2",
)


# --- 6.3 -----------------------------------------------------------------------------------


def some_requests(rng: random.Random) -> list[RequestTimes]:
    requests = []
    for _ in range(40):
        times, now = [], rng.uniform(0, 50)
        arrived = now
        now += rng.choice([0.5, 1.9, 2.1, 4.0])
        gap = rng.choice([0.04, 0.09, 0.11, 0.3])
        for _ in range(rng.choice([1, 2, 7, 30])):
            times.append(now)
            now += gap * rng.choice([0.2, 1, 1.4])      # uneven: mean, middle and longest differ
        requests.append(RequestTimes(arrived, times))
    return requests


def check_goodput(answer: object) -> Verdict:
    function, goals = function_in(answer), Goals(ttft_s=2.0, tpot_s=0.1)
    slow_start = [(0.0, [3.0, 3.01, 3.02, 3.03])]
    if number_in(function(slow_start, 2.0, 0.1, 10.0)) > 0:
        return wrong("A request that waits 3 s for its first token, with a goal of 2 s, counts as "
                     "served well. Does your function look at the first token?")
    long_answer = [(0.0, [1.0 + 0.05 * i for i in range(200)])]
    if number_in(function(long_answer, 2.0, 0.1, 10.0)) == 0:
        return wrong("A request with a first token after 1 s and gaps of 0.05 s does not count, "
                     "though the goals are 2 s and 0.1 s. A long answer may take long.")
    single = [(5.0, [6.5])]
    if number_in(function(single, 2.0, 0.1, 10.0)) == 0:
        return wrong("An answer of one token has no gap, so its TPOT is 0 and meets any goal. Here "
                     "it came after 1.5 s of 2, and did not count.")
    uneven = [(0.0, [1.0, 1.15, 1.16, 1.17])]
    if number_in(function(uneven, 2.0, 0.1, 10.0)) == 0:
        return wrong("Gaps of 0.15, 0.01 and 0.01 s do not count, though the goal for TPOT is 0.1 "
                     "s. TPOT is the mean gap, not the longest.")
    spread = [(0.0, [1.9, 2.05])]
    if number_in(function(spread, 2.0, 0.1, 10.0)) > 0:
        return wrong("Two tokens with a gap of 0.15 s between them count as served well, though "
                     "the goal is 0.1 s. How many gaps do two tokens have?")
    for seed in range(3):
        requests = some_requests(random.Random(600 + seed))
        expected = goodput(requests, goals, duration_s=70.0)
        plain = [(r.arrived_s, list(r.token_times_s)) for r in requests]
        found = number_in(function(plain, goals.ttft_s, goals.tpot_s, 70.0))
        if math.isclose(found, expected * 70, rel_tol=1e-6):
            return wrong("That is how many requests met both goals. Goodput is a rate: how many a "
                         "second?")
        if not math.isclose(found, expected, rel_tol=1e-6):
            return wrong(f"Of {len(requests)} requests in 70 s you find {found:.4f} good ones a "
                         f"second; there are {expected:.4f}.")
    return right("Requests that meet both goals, a second. A service can raise its throughput and "
                 "lower this number at the same time: put more of them into each step.")


GOODPUT = Exercise(
    id="6.3", kind="code", title="Goodput",
    prompt="Write `goodput`: how many requests a second meet both goals. A request is a pair "
           "(arrival, list of token times). TPOT leaves the first token out and is 0 for an answer "
           "of one token. The starter has the wrong clock: it divides the whole time by all the "
           "tokens.",
    starter="""def goodput(requests, ttft_goal, tpot_goal, seconds):
    good = 0
    for arrived, times in requests:
        per_token = (times[-1] - arrived) / len(times)
        if per_token <= tpot_goal:
            good += 1
    return good / seconds""",
    answer="goodput", check=check_goodput,
    hints=("Two numbers for each request: `times[0] - arrived`, and the mean of the gaps.",
           "n tokens have n - 1 gaps. What if n is 1?"),
    solution="""def goodput(requests, ttft_goal, tpot_goal, seconds):
    good = 0
    for arrived, times in requests:
        first, gaps = times[0] - arrived, len(times) - 1
        tpot = (times[-1] - times[0]) / gaps if gaps else 0
        good += first <= ttft_goal and tpot <= tpot_goal
    return good / seconds""",
)


# --- 6.4 -----------------------------------------------------------------------------------


def check_batch(answer: object) -> Verdict:
    value = round(number_in(answer), 6)         # 70 / 0.4 is not quite 175
    if value == 125:
        return right("Time would allow 175 requests, memory only 125: the notes fill the chip "
                     "before the streams get too slow. Smaller notes (chapter 07) raise both "
                     "limits.")
    if value == 175:
        return wrong("175 requests keep every stream fast enough. But do the weights and the notes "
                     "of 175 requests fit into 80 GB?")
    if value == 200:
        return wrong("That is all of the memory over 0.4 GB. The weights need their room as well, "
                     "and their time in each step.")
    if value == 250:
        return wrong("That is the time limit without the weights: a step fetches them once.")
    if value in (124, 126):
        return wrong("One off. Requests may fill the memory to the last byte here.")
    return wrong("Two limits. Time: weights and notes must pass through the memory in 25 ms, which "
                 "is 100 GB. Room: both must fit into 80 GB. Each request's notes take 0.4 GB.")


LARGEST_BATCH = Exercise(
    id="6.4", kind="check", title="The largest batch",
    prompt="A chip has 80 GB of memory and reads it at 4 TB/s. It holds 30 GB of weights. Each "
           "request has 8,000 tokens noted at 50,000 bytes a token. Every stream must get at "
           "least 40 tokens a second. How many requests can it serve at once, if memory is all "
           "that a step waits for?",
    starter="answer = ...",
    check=check_batch,
    hints=("At 40 tokens a second a step may take 25 ms. How many bytes does the memory deliver in "
           "that time?",
           "Each request brings 0.4 GB of notes. What else must the memory hold?"),
    solution="""notes = 8_000 * 50_000               # bytes each
by_time = (4e12 / 40 - 30e9) / notes     # 175
by_room = (80e9 - 30e9) / notes          # 125
answer = min(by_time, by_room)""",
)


# --- 6.5 -----------------------------------------------------------------------------------


def check_pieces(answer: object) -> Verdict:
    function, model = function_in(answer), odd_model(seed=6, contrast=30)
    for mine_length, stranger_length, piece, seed in ((11, 23, 5, 1), (4, 9, 9, 2), (7, 26, 13, 3)):
        verdict = pieces_verdict(function, model, mine_length, stranger_length, piece, seed)
        if verdict is not None:
            return verdict
    return right("The same tokens, and no step is longer than its piece. Your stream pauses a few "
                 "times for a little instead of once for long. Chapter 09 lets a scheduler do it.")


def answer_in(found: object) -> tuple[list, object]:
    """What `read_in_pieces` returns: your tokens, and the stranger's first."""
    try:
        written, first = found
        return list(written), first
    except (TypeError, ValueError):
        raise NotAnAnswer("Return two things: the list of tokens that you wrote meanwhile, and "
                          "the stranger's first token.") from None


def pieces_verdict(function, model, mine_length: int, stranger_length: int, piece: int,
                   seed: int) -> Verdict | None:
    """What is wrong with one run of the reader's loop; None where nothing is."""
    mine, stranger = random_tokens(mine_length, seed), random_tokens(stranger_length, seed + 50)
    steps = -(-stranger_length // piece)
    cache = DenseCache(ODD, capacity=60, num_sequences=2, dtype=torch.float64)
    alone = DenseCache(ODD, capacity=60, dtype=torch.float64)
    with torch.inference_mode():
        batch = alone.batch([mine_length])
        last = int(model(torch.tensor(mine), batch, alone)[-1].argmax())
        cache.entries[:, 0], cache.lengths = alone.entries[:, 0], [mine_length, 0]
        counting = CountingModel(model)
        written, first = answer_in(function(counting, cache, last, stranger, piece))
    expected = generate_with_cache(model, mine, steps + 1, stop_ids=())[1:]
    theirs = generate_with_cache(model, stranger, 1, stop_ids=())[0]
    if counting.forwards != steps:
        return wrong(f"A prompt of {stranger_length} tokens in pieces of {piece} took "
                     f"{counting.forwards} steps; it should take {steps}.")
    if counting.rows != steps + stranger_length:
        return wrong(f"{counting.rows} rows were computed in all. Each of {steps} steps computes "
                     f"one row of yours, and together the stranger's {stranger_length}.")
    if first_difference(written, expected) is not None:
        return wrong(f"Your own stream should have written {expected} meanwhile, and wrote "
                     f"{written}. Which row of the logits is yours, and which token goes in "
                     "next?")
    if number_in(first) != theirs:
        return wrong("Your stream is right, but the stranger's first token is not the one that "
                     "reading the prompt at once gives. It comes from the last piece's last row.")
    return None


IN_PIECES = Exercise(
    id="6.5", kind="code", title="Cut the stranger's prompt",
    prompt="The cache holds two requests: yours, whose last token `mine` has no row yet, and a "
           "stranger whose prompt is still unread. Write `read_in_pieces`: in each step compute "
           "one row of yours and at most `piece` rows of the stranger's prompt, until it is read. "
           "Return the tokens that you wrote meanwhile, and the stranger's first token. (The "
           "starter reads the whole prompt in a single step.)",
    starter="""def read_in_pieces(model, cache, mine, stranger, piece):
    written = []
    batch = cache.batch([1, len(stranger)])
    logits = model(torch.tensor([mine, *stranger]),
                   batch, cache)
    cache.commit(batch)
    written.append(int(logits[0].argmax()))
    return written, int(logits[1].argmax())""",
    answer="read_in_pieces", check=check_pieces,
    hints=("Loop while something of the stranger's prompt is left: `now, stranger = "
           "stranger[:piece], stranger[piece:]`.",
           "`logits` has one row for each request: row 0 gives your next token, which is the next "
           "step's input. Only after the last piece does row 1 mean anything."),
    solution="""def read_in_pieces(model, cache, mine, stranger, piece):
    written = []
    while stranger:
        now, stranger = stranger[:piece], stranger[piece:]
        batch = cache.batch([1, len(now)])
        logits = model(torch.tensor([mine, *now]), batch, cache)
        cache.commit(batch)
        mine = int(logits[0].argmax())
        written.append(mine)
    return written, int(logits[1].argmax())""",
)


# --- 6.6, 6.7 ------------------------------------------------------------------------------

WHY_PERCENTILES = Exercise(
    id="6.6", kind="think", title="The mean was fine",
    prompt="A service promises 20 tokens a second, and its mean time per output token is well "
           "under 50 ms. Users complain that answers freeze. Name a cause that this chapter has "
           "shown, and the number to watch instead.",
    solution="Every now and then a long prompt shares a step with running streams, and the step "
             "takes as long as the prompt's reading. Over an answer of 500 tokens one gap of two "
             "seconds raises TPOT by 4 ms only, so the mean hides it.\n\nWatch the gaps "
             "themselves, by their 99th percentile and their largest, over all requests. Even that "
             "is gentle: 1 gap in 500 lies above the 99th percentile of its own answer, and does "
             "not move it. A user notices the *longest* gap of the answer.",
)

TWO_CHIPS = Exercise(
    id="6.7", kind="think", title="Two chips for two phases",
    prompt="One vendor sells its newest accelerator as two chips, one for each phase (`P-HW15` in "
           "the claims register): one with 144 GB at 4 TB/s, the other with 128 GB at about 1.6 "
           "TB/s. Which is for prefill, and why can it do with the slower memory? When would a "
           "single kind of chip serve better?",
    solution="The slower memory is for **prefill**. Reading a prompt computes a thousand rows for "
             "each fetch of the weights, so it stands far to the right of the ridge: a faster "
             "memory would idle, and what it costs would be wasted.\n\n"
             "**Decode** stands to the left of the ridge, and every TB/s shortens its step.\n\n"
             "A single kind is better where the mix changes: on a morning of long prompts the "
             "decode chips cannot help well, and at night, when little is read, the prefill chips "
             "would write slowly. Two kinds also need the notes to be sent from one to the "
             "other, which chapter 12 builds.",
)

CHAPTER = Chapter(
    6, "Two clocks: prefill and decode",
    [CLOCKS, RIDGE, GOODPUT, LARGEST_BATCH, IN_PIECES, WHY_PERCENTILES, TWO_CHIPS],
    given="import torch",
)
