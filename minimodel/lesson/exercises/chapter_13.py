"""The exercises of chapter 13. No two numbers of a task are equal, so a swapped pair fails."""

import math
from functools import partial

import torch

from minimodel.cluster.balance import place_experts
from minimodel.lesson.exercises.common import pair_in, random_numbers, tensor_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    NotAnAnswer,
    Verdict,
    function_in,
    right,
    wrong,
)

# --- 13.1 ----------------------------------------------------------------------------------


def check_width(answer: object) -> Verdict:
    gigabytes, rows = pair_in(answer)
    if math.isclose(gigabytes, 30, rel_tol=0.01) and math.isclose(rows, 7.29, rel_tol=0.01):
        return wrong("The other way round: first the bytes, then the rows.")
    if math.isclose(gigabytes, 87.48, rel_tol=0.01):
        return wrong("That is the whole model's experts: each chip holds one part in twelve.")
    if math.isclose(gigabytes, 0.27, rel_tol=0.01):
        return wrong("Those are the experts of one layer; there are 27 layers.")
    if not math.isclose(gigabytes, 7.29, rel_tol=0.01):
        return wrong("27 layers, 108 / 12 experts of each on a chip, 30 MB an expert.")
    if math.isclose(rows, 2.5, rel_tol=0.01):
        return wrong("With the 45 tokens of one chip, yes. But an expert serves the tokens of all "
                     "twelve.")
    if not math.isclose(rows, 30, rel_tol=0.01):
        return wrong("12 chips bring 45 tokens each, every token chooses 6 of 108 experts.")
    return right("7.29 GB and 30 rows. On 36 chips: 2.43 GB and 90 rows, though no chip has a "
                 "request more.")


WIDTH = Exercise(
    id="13.1", kind="check", title="Width on paper",
    prompt="A model has 27 layers of 108 experts, of which a token chooses 6; an expert takes "
           "30 MB. Twelve chips share them, with 45 requests on each chip, and every expert is "
           "wanted in every step. How many GB of expert weights does a chip read in a step, and "
           "how many rows share an expert?",
    starter="answer = (..., ...)   # (GB, rows)",
    check=check_width,
    hints=("Equation 13.1, with every expert touched: layers times experts over chips times bytes.",
           "Rows: all tokens of the group, times 6, over 108."),
    solution="answer = (27 * 108 / 12 * 30e6 / 1e9, 12 * 45 * 6 / 108)",
)

# --- 13.2 ----------------------------------------------------------------------------------


def check_wire(answer: object) -> Verdict:
    megabytes, milliseconds = pair_in(answer)
    if math.isclose(megabytes, 53.76, rel_tol=0.01):
        return wrong("Of eight ranks, one is the token's own: an eighth of the rows stays at home.")
    if math.isclose(megabytes, 376.32, rel_tol=0.01):
        return wrong("That is what all eight send together; one rank was asked for.")
    if math.isclose(megabytes, 1.68, rel_tol=0.01):
        return wrong("That is one layer; each of the 28 sends as much.")
    if math.isclose(megabytes, 15.68, rel_tol=0.01):
        return wrong("Those are the rows on their way out, of a byte a number. They come back, "
                     "with two bytes a number.")
    if not math.isclose(megabytes, 47.04, rel_tol=0.01):
        return wrong("40 tokens, 7 of 8 times 4 experts, 4,000 numbers, three bytes a number for "
                     "both ways together, 28 layers.")
    if not math.isclose(milliseconds, 47.04 / 60, rel_tol=0.01):
        return wrong("The megabytes over 60,000 MB/s, in milliseconds.")
    return right("47 MB and 0.78 ms, when nothing else happens on the wire and messages cost "
                 "nothing to start.")


WIRE = Exercise(
    id="13.2", kind="check", title="Rows on the wire",
    prompt="Eight ranks, 40 tokens on each; a token's row has 4,000 numbers and goes to 4 experts "
           "that lie anywhere with equal chance. Out it travels with one byte a number, back with "
           "two. How many MB does a rank send for a step of 28 layers, and how many milliseconds "
           "is that at 60 GB/s?",
    starter="answer = (..., ...)   # (MB, ms)",
    check=check_wire,
    hints=("Of a token's four rows, half a row stays at home: 4 x (1 - 1/8) travel.",
           "40 tokens x 3.5 rows x 4,000 numbers x 3 bytes, 28 times."),
    solution="megabytes = 40 * 4 * (1 - 1 / 8) * 4000 * 3 * 28 / 1e6\n"
             "answer = (megabytes, megabytes / 60)",
)

# --- 13.3 ----------------------------------------------------------------------------------


def _combined(back, order, weights):
    tokens = order // weights.shape[1]
    weighted = back * weights.flatten()[order, None]
    return torch.zeros(len(weights), back.shape[1], dtype=back.dtype).index_add(0, tokens, weighted)


close = partial(torch.allclose, rtol=1e-4, atol=1e-5)       # sums in any order


def check_combine(answer: object) -> Verdict:
    combine = function_in(answer)
    for tokens, k, hidden, seed in ((5, 2, 7, 1), (11, 3, 4, 2), (0, 2, 6, 3)):
        pairs = tokens * k
        order = torch.randperm(pairs, generator=torch.Generator().manual_seed(seed))
        back = random_numbers(pairs, hidden, seed=seed).float()     # as the chapter's rows are
        weights = random_numbers(tokens, k, seed=seed + 50).abs().float()
        found = tensor_in(combine(back.clone(), order.clone(), weights.clone()), (tokens, hidden),
                          f"What {tokens} tokens get back").to(back.dtype)
        expected = _combined(back, order, weights)
        if close(found, expected):
            continue
        in_place = torch.zeros(tokens, hidden, dtype=back.dtype)
        in_place[order // k] = back * weights.flatten()[order, None]
        if close(found, in_place):
            return wrong("`out[tokens] = ...` keeps only the last row that is written to a token; "
                         "the results of its other experts are lost, without an error. Add them "
                         "up: `index_add`.")
        if close(found, _combined(back, order, torch.ones_like(weights))):
            return wrong("The rows are where they belong, but each counts the same: the gate's "
                         "weights are missing.")
        if close(found, _combined(back / weights.flatten()[order, None]
                                  * weights.flatten()[:, None], order, weights)):
            return wrong("Row i of `back` is pair `order[i]`, so it takes the weight of that pair, "
                         "not the i-th weight.")
        return wrong(f"With {tokens} tokens and {k} experts each the sum is another. Row i of "
                     "`back` belongs to pair `order[i]`, and pair p to token p // k.")
    return right("Each result went home to its token with its weight, in whatever order it came; "
                 "and no tokens at all are no special case.")


COMBINE = Exercise(
    id="13.3", kind="code", title="Combine",
    prompt="Mend `combine(back, order, weights)`. Row i of `back` is what came back for pair "
           "`order[i]`; pair p is choice p % k of token p // k, and has the weight "
           "`weights[p // k, p % k]`. It returns one row for each token.",
    starter="""def combine(back, order, weights):
    tokens = order // weights.shape[1]
    out = torch.zeros(len(weights), back.shape[1], dtype=back.dtype)
    out[tokens] = back * weights.flatten()[order, None]
    return out""",
    check=check_combine, answer="combine",
    hints=("Two rows of `back` belong to one token. What does `out[[3, 3]] = ...` do?",
           "`out.index_add(0, tokens, rows)` adds every row where it belongs."),
    solution="""def combine(back, order, weights):
    tokens = order // weights.shape[1]
    out = torch.zeros(len(weights), back.shape[1], dtype=back.dtype)
    return out.index_add(0, tokens,
                         back * weights.flatten()[order, None])""",
)

# --- 13.4 ----------------------------------------------------------------------------------


def check_once(answer: object) -> Verdict:
    rows_to = function_in(answer)
    cases = [
        ([[0, 1], [2, 5], [5, 4]], [0, 0, 1, 1, 2, 2], 3, [1, 1, 2],
         "The first token's two experts both lie on rank 0: its row goes there once."),
        ([[0, 3, 4], [1, 2, 0]], [1, 1, 1, 0, 3], 4, [1, 2, 0, 1],
         "Nothing goes to rank 2, and that, too, must be said: one number for each rank."),
        ([], [0, 1, 1], 2, [0, 0], "A rank without tokens sends nothing to anybody: zeros, one for "
         "each rank."),
    ]
    for chosen, owner, num_ranks, expected, why in cases:
        found = rows_to([list(token) for token in chosen], list(owner), num_ranks)
        found = found.tolist() if hasattr(found, "tolist") else found      # of torch or numpy
        if not isinstance(found, list | tuple):
            raise NotAnAnswer("`rows_to` must return a list: the number of rows for each rank.")
        if list(found) != expected:
            return wrong(f"For the choices {chosen}, with experts on ranks {owner}, it gives "
                         f"{list(found)}, not {expected}. {why}")
    return right("This is a reason why DeepSeek-V3 lets a token choose experts on at most four "
                 "nodes: what counts on the slow wires is not how many experts it meets but how "
                 "many places.")


ONCE = Exercise(
    id="13.4", kind="code", title="Once is enough",
    prompt="A token whose two experts lie on one rank needs to travel there only once. Write "
           "`rows_to(chosen, owner, num_ranks)`: how many rows go to each rank if each token's row "
           "goes at most once to any rank. `chosen` has a list of experts for each token, "
           "`owner[e]` is the rank of expert e.",
    starter="""def rows_to(chosen, owner, num_ranks):
    rows = [0] * num_ranks
    for experts in chosen:
        for expert in experts:
            rows[owner[expert]] += 1
    return rows""",
    check=check_once, answer="rows_to",
    hints=("Which ranks does one token visit? A set forgets what is said twice.",),
    solution="""def rows_to(chosen, owner, num_ranks):
    rows = [0] * num_ranks
    for experts in chosen:
        for rank in {owner[expert] for expert in experts}:
            rows[rank] += 1
    return rows""",
)

# --- 13.5 ----------------------------------------------------------------------------------

LOADS = [70, 10, 30, 10]


def check_copies(answer: object) -> Verdict:
    before, after = pair_in(answer)
    if math.isclose(before, 80, rel_tol=0.01):
        return wrong("80 rows on the fuller rank; the mean is 60. Imbalance is the first over the "
                     "second.")
    if not math.isclose(before, 4 / 3, rel_tol=0.01):
        return wrong("In order: 70 + 10 on one rank, 30 + 10 on the other. The fuller over the "
                     "mean.")
    best = place_experts(LOADS, 2, redundant=2).imbalance(LOADS)
    if not math.isclose(after, best, rel_tol=0.01):
        return wrong("The first copy goes to the 70, which leaves 35 for each. The fullest is "
                     "still 35, so the second goes there, too: three times 23.3. Now pack, the "
                     "largest first, always onto the lighter rank with a free slot.")
    return right(f"1.33 and {best:.2f}: three copies of the hot expert at 23.3 each, two on one "
                 "rank and one beside the 30 on the other.")


COPIES = Exercise(
    id="13.5", kind="check", title="Copies by hand",
    prompt="Four experts got 70, 10, 30 and 10 rows. What is the imbalance on two ranks in order? "
           "And what is it with two more copies, given and packed by the chapter's greedy rules, "
           "three slots on each rank?",
    starter="answer = (..., ...)   # (in order, with two copies)",
    check=check_copies,
    hints=("Mean load of a rank: 120 / 2, before and after.",
           "`replicate`: whoever has the most load *for each copy* gets the next one.",
           "`pack`: 30, then the three of 23.3, then the tens."),
    solution="before = (70 + 10) / 60\n"
             "# 30 and 23.3 on one rank; 23.3 and 23.3 on the other; then\n"
             "# a ten on the lighter one (46.7), a ten where a slot is left\n"
             "after = (30 + 70 / 3 + 10) / 60\n"
             "answer = (before, after)",
)

# --- 13.6 ----------------------------------------------------------------------------------

SLICES = Exercise(
    id="13.6", kind="think", title="A slice of every expert",
    prompt="One could also cut every expert into P slices and give each rank a slice of all of "
           "them (*tensor parallelism*). No expert would ever be hot. Compare with whole experts "
           "on P ranks: bytes of weights that a rank reads, rows that it runs, what travels, and "
           "the size of the matrices.",
    solution="**Bytes**: the same, a P-th of what the step touches. **Rows**: every rank runs "
             "*all* rows of the group, each through a thin slice; with whole experts, a P-th of "
             "the rows through whole matrices. The operations are as many.\n\n"
             "**What travels**: with slices, every rank needs every row, and the partial results "
             "of all ranks must be added up for every row: each row goes to P - 1 others, however "
             "few experts it chose. With whole experts it goes to at most k. For 6 experts and 64 "
             "ranks that is a factor of ten.\n\n"
             "**Size**: slices get thin. A matrix 2,304 wide cut for 64 ranks is 36 wide, too thin "
             "for hardware that multiplies tiles of 64 or 128.\n\n"
             "Slices need no balancer, and a group of 2 or 4 fast neighbours uses them often; "
             "across many chips, whole experts travel less. Both can be combined.",
)

# --- 13.7 ----------------------------------------------------------------------------------

MOVE = Exercise(
    id="13.7", kind="think", title="How often to move",
    prompt="A balancer could place the experts anew after every step. Why does nobody do that? "
           "What decides how often it pays, and what must be true on all ranks at the moment of "
           "the change?",
    solution="**Cost**: an expert that moves is copied: for V4.1-Flash 18.8 MB for each layer it "
             "moves in, and meanwhile the links are also wanted by the rows. The counts of one "
             "step are small, too: with a few rows for each expert they are mostly chance, and "
             "the next step's chance is another.\n\n"
             "**What decides**: how fast the traffic changes (morning and evening, a large "
             "customer's batch), against how long moving takes. DeepSeek's report of V3 names "
             "about ten minutes. Loads are summed over a window long enough that chance "
             "evens out and short enough that yesterday's traffic is forgotten.\n\n"
             "**At the moment of the change** all ranks must switch between the same two steps: "
             "new map and new weights together. A rank that still sends by the old map gets "
             "results of other experts, and no error. So ranks count steps alike and move at an "
             "agreed number, and weights that are loaded later (a restart, an update) are put "
             "where the *current* map says.",
)

CHAPTER = Chapter(13, "Spreading the experts",
                  [WIDTH, WIRE, COMBINE, ONCE, COPIES, SLICES, MOVE], given="import torch")
