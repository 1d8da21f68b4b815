"""The exercises of chapter 03. Odd sizes everywhere, so that a transposed answer fails."""

import torch

from minimodel.config import ModelConfig
from minimodel.lesson.exercises.common import pair_in, random_numbers, tensor_in
from minimodel.lesson.exercises.engine import (
    Chapter,
    Exercise,
    Verdict,
    function_in,
    number_in,
    right,
    wrong,
)
from minimodel.model.moe import Experts, dense_experts

# --- 3.1 -------------------------------------------------------------------------------


def check_parameters(answer: object) -> Verdict:
    stored, met = pair_in(answer)
    one, gate = 3 * 90 * 14, 11 * 90
    if (met, stored) == (12 * one + gate, 4 * one + gate):
        return wrong("The other way round: first what is stored, then what a token meets.")
    if stored == 11 * one + gate or met == 3 * one + gate:
        return wrong("The shared expert is missing: it is stored like the others, and every token "
                     "meets it.")
    if stored == 12 * one or met == 4 * one:
        return wrong("The gate is missing: a row of 90 numbers for each of the 11 experts. Every "
                     "token meets all of it, or it could not choose.")
    if stored == 12 * 2 * 90 * 14 + gate:
        return wrong("SwiGLU has three matrices: gates, candidates, and the way back.")
    if stored != 12 * one + gate:
        return wrong(f"{stored:,.0f} is not what is stored. Twelve networks of three matrices, 90 "
                     "times 14 each, and the gate.")
    if met != 4 * one + gate:
        return wrong("What is stored is right. A token meets its 3 experts, the shared one, and "
                     f"the whole gate; {met:,.0f} is not that.")
    return right(f"{stored:,.0f} and {met:,.0f}: a token meets 35 %. With 110 experts instead of "
                 "11 it would still meet four, of a layer nearly ten times as large (and the "
                 "larger gate).")


PARAMETERS = Exercise(
    id="3.1",
    kind="check",
    title="Stored, and met",
    prompt="An expert layer has rows of 90 numbers, 11 experts of inner width 14, one shared "
    "expert of the same width, and lets a token visit 3. How many parameters does it store, and "
    "how many does a token meet? Count the gate, not its bias. Answer with two numbers.",
    starter="answer = (..., ...)   # (stored, met by a token)",
    check=check_parameters,
    hints=(
        "One expert has three matrices of 90 times 14 numbers.",
        "The gate has a row of 90 numbers for each of the 11 experts, and a token is compared with "
        "all of them.",
    ),
    solution="""one_expert = 3 * 90 * 14
gate = 11 * 90
stored = (11 + 1) * one_expert + gate
met = (3 + 1) * one_expert + gate
answer = (stored, met)""",
)


# --- 3.2 -------------------------------------------------------------------------------


def check_gate(answer: object) -> Verdict:
    gate, k = function_in(answer), 3
    x, weight = random_numbers(13, 10, seed=31), random_numbers(7, 10, seed=32)
    bias = torch.tensor([0.4, -0.3, 0.0, 0.2, -0.1, 0.3, -0.5], dtype=torch.float64)
    found = gate(x.clone(), weight.clone(), bias.clone(), k)
    if not isinstance(found, tuple | list) or len(found) != 2:
        return wrong("Return two tensors: the weights and the chosen experts.")
    weights = tensor_in(found[0], (13, k), "The weights").double()
    chosen = tensor_in(found[1], (13, k), "The chosen experts")
    if chosen.is_floating_point():
        return wrong("The chosen experts should be whole numbers, and come second: first the "
                     "weights, then the experts.")
    chosen = chosen.long()
    scores = (x @ weight.T).sigmoid()
    expected = (scores + bias).topk(k).indices
    if not torch.equal(chosen.sort().values, expected.sort().values):
        bare = scores.topk(k).indices
        if torch.equal(chosen.sort().values, bare.sort().values):
            return wrong("The choice ignores the bias: then nothing balances the experts.")
        return wrong("The wrong experts are chosen: the k with the largest score plus bias.")
    bare = scores.gather(1, chosen)
    if torch.allclose(weights, bare, atol=1e-6):
        return wrong("The choice is right. The weights still have to be divided by their sum, row "
                     "by row.")
    biased = (scores + bias).gather(1, chosen)
    if torch.allclose(weights, biased / biased.sum(1, keepdim=True), atol=1e-6):
        return wrong("The choice is right, but the bias takes part in the weights too. It was "
                     "moved to balance the load; what an expert's work counts is not its business.")
    if not torch.allclose(weights, bare / bare.sum(1, keepdim=True), atol=1e-6):
        return wrong("The choice is right, the weights are not: the bare scores of the chosen "
                     "experts, each row divided by its own sum.")
    return right("Chosen with the bias, weighed without it. The wrong version would have answered "
                 "most questions as well: only its numbers give it away.")


GATE = Exercise(
    id="3.2",
    kind="code",
    title="A bias that meddles",
    prompt="This gate looks right, and a model with it answers almost as before. Mend it: `x` is "
    "[tokens, numbers], `weight` [experts, numbers], `bias` [experts]; return the weights and the "
    "chosen experts, both [tokens, k].",
    starter="""def gate(x, weight, bias, k):
    scores = (x @ weight.T).sigmoid() + bias
    weights, chosen = scores.topk(k)
    return weights / weights.sum(1, keepdim=True), chosen""",
    answer="gate",
    check=check_gate,
    hints=(
        "Here the bias is inside `scores`. Where is it allowed to take part?",
        "Take only the indices from `topk`; `scores.gather(1, chosen)` picks the bare scores.",
    ),
    solution="""def gate(x, weight, bias, k):
    scores = (x @ weight.T).sigmoid()
    chosen = (scores + bias).topk(k).indices
    weights = scores.gather(1, chosen)
    return weights / weights.sum(1, keepdim=True), chosen""",
)


# --- 3.3 -------------------------------------------------------------------------------


def check_touched(answer: object) -> Verdict:
    value, true = number_in(answer), 60 * (1 - (1 - 4 / 60) ** 25)
    if abs(value - true) < 0.6:
        return right("About 49 of 60. The 25 tokens make 100 visits; some experts get several, a "
                     "few get none. One token alone reads 4 experts from memory, 25 together "
                     "read 49, two for each token: the fuller the step, the cheaper each one.")
    if value in (100, 60):
        return wrong("25 tokens make 100 visits, but several can go to one expert, and by chance "
                     "some get none.")
    if value == 4:
        return wrong("Four is right for one token. Others choose other experts.")
    if abs(value - 60 * (1 - 4 / 60) ** 25) < 0.6:
        return wrong("That is how many experts *nobody* chose.")
    return wrong(f"{value:g} is not it. How likely is it that one certain expert is chosen by none "
                 "of the 25 tokens?")


TOUCHED = Exercise(
    id="3.3",
    kind="check",
    title="How many experts does a step touch?",
    prompt="A layer has 60 experts and a token visits 4 of them, any four with equal chance. A "
    "step computes 25 tokens. How many different experts does it touch on average? Half an expert "
    "more or less does not matter.",
    starter="answer = ...",
    check=check_touched,
    hints=(
        "One token leaves out a certain expert with probability 1 - 4/60.",
        "All 25 leave it out with that to the power of 25. There are 60 such experts.",
    ),
    solution="answer = 60 * (1 - (1 - 4 / 60) ** 25)",
)


# --- 3.4 -------------------------------------------------------------------------------


class CountingExperts(Experts):
    """Experts that write down how often each of them ran."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.runs: list[int] = []

    def run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(int(expert))
        return super().run(expert, x)


def check_sorted(answer: object) -> Verdict:
    run = function_in(answer)
    for tokens, top_k, seed in ((13, 3, 1), (1, 2, 2), (17, 1, 3)):
        torch.manual_seed(seed)
        experts = CountingExperts(ModelConfig(hidden_size=10, num_experts=7, expert_size=6,
                                              experts_per_token=top_k)).double()
        x, weights = random_numbers(tokens, 10, seed=seed), random_numbers(tokens, top_k, seed=9)
        chosen = torch.stack([torch.randperm(6)[:top_k] for _ in range(tokens)])  # 6: never chosen
        with torch.no_grad():
            expected = dense_experts(x, chosen, weights, experts)
            experts.runs.clear()
            found = tensor_in(run(x, chosen, weights, experts), (tokens, 10), "The result").double()
        if not torch.allclose(found, expected):
            return wrong(f"With {tokens} tokens that visit {top_k} of 7 experts the rows differ "
                         "from those of `dense_experts`. Which weight belongs to which sorted "
                         "pair?")
        if len(experts.runs) != len(set(experts.runs)):
            return wrong("The rows are right, but an expert ran more than once: group first.")
        if 6 in experts.runs:
            return wrong("The rows are right, but an expert ran that nobody had chosen.")
    return right("The same rows as the slow way, each expert run once, and only those chosen. The "
                 "weights have to travel with their pairs: in the first version every pair was "
                 "weighed as if it had never moved.")


SORTED = Exercise(
    id="3.4",
    kind="code",
    title="Pairs on the move",
    prompt="This sort-and-group runs without complaint and returns wrong rows. Mend it. `x` is "
    "[tokens, numbers], `chosen` and `weights` are [tokens, k]; `experts.run(e, rows)` runs one "
    "expert. Let each chosen expert run once, and no other at all.",
    starter="""def grouped(x, chosen, weights, experts):
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    tokens = order // chosen.shape[1]
    out, first = torch.zeros_like(x), 0
    for e, count in enumerate(pairs.bincount().tolist()):
        mine = slice(first, first + count)
        if count:
            done = experts.run(e, x[tokens[mine]])
            done = done * weights.flatten()[mine, None]
            out.index_add_(0, tokens[mine], done)
        first += count
    return out""",
    answer="grouped",
    check=check_sorted,
    hints=(
        "`tokens` is in sorted order. Are the weights?",
        "`order` says where each sorted pair stood before: `weights.flatten()[order]`.",
    ),
    solution="""def grouped(x, chosen, weights, experts):
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    tokens = order // chosen.shape[1]
    moved = weights.flatten()[order]
    out, first = torch.zeros_like(x), 0
    for e, count in enumerate(pairs.bincount().tolist()):
        mine = slice(first, first + count)
        if count:
            done = experts.run(e, x[tokens[mine]])
            done = done * moved[mine, None]
            out.index_add_(0, tokens[mine], done)
        first += count
    return out""",
)


# --- 3.5 -------------------------------------------------------------------------------


def check_balance(answer: object) -> Verdict:
    move = function_in(answer)
    bias = torch.tensor([0.1, -0.2, 0.05, 0.0, 0.05], dtype=torch.float64)
    counts = torch.tensor([44, 12, 20, 10, 14])         # the mean is 20, the median is not
    found = tensor_in(move(bias.clone(), counts, 0.01), (5,), "The new bias")
    moved = found - bias
    if torch.equal(moved.sign(), (counts - 20).double().sign()):
        return wrong("The wrong way: the busiest expert, with 44 tokens, is raised and will be "
                     "chosen even more.")
    if moved.abs().max() > 0.011:
        return wrong("The direction is right, the step is not: each bias moves by `rate`, however "
                     "far the expert is from the mean. Small steps keep the training calm.")
    if moved[2].abs() > 1e-9:
        return wrong("An expert with exactly the mean load, here the one with 20, stays where it "
                     "is.")
    expected = torch.tensor([-0.01, 0.01, 0.0, 0.01, 0.01], dtype=torch.float64)
    if not torch.allclose(moved, expected):
        return wrong("For counts of 44, 12, 20, 10 and 14 the biases should move by -0.01, 0.01, "
                     f"0, 0.01 and 0.01; yours move by {[round(m, 4) for m in moved.tolist()]}.")
    if not evens_out(move):
        return wrong("One step is right, but over 400 steps the loads do not even out.")
    return right("Over 400 steps it brought seven very unequal experts to within a fifth of the "
                 "mean. No gradient is involved, so nothing pulls the model away from its task.")


def evens_out(move) -> bool:
    """Whether 400 steps of the reader's rule balance a gate that strongly prefers some experts."""
    likes = torch.linspace(-0.2, 0.2, 7, dtype=torch.float64)
    bias = torch.zeros(7, dtype=torch.float64)
    for step in range(400):
        scores = (random_numbers(210, 7, seed=step) * 0.5 + 4 * likes).sigmoid()
        counts = (scores + bias).topk(2).indices.flatten().bincount(minlength=7)
        if step < 399:
            bias = move(bias, counts, 0.01)
    return bool(counts.max() / counts.double().mean() < 1.5)


BALANCE = Exercise(
    id="3.5",
    kind="code",
    title="Keep them busy",
    prompt="Write the rule that trained the bias: after a step, every expert chosen less often "
    "than the mean is raised by `rate`, every one chosen more often is lowered by it. `bias` and "
    "`counts` are [experts]; return the new bias.",
    starter="""def move_bias(bias, counts, rate):
    above = counts - counts.float().mean()
    return bias + rate * above""",
    answer="move_bias",
    check=check_balance,
    hints=(
        "An expert that is chosen too often must become *less* likely to be chosen.",
        "`sign()` makes -1, 0 or 1 of any number.",
    ),
    solution="""def move_bias(bias, counts, rate):
    above = counts - counts.float().mean()
    return bias - rate * above.sign()""",
)


# --- 3.6 -------------------------------------------------------------------------------


def check_pace(answer: object) -> Verdict:
    value, loads = number_in(answer), (90, 30, 60, 20, 40)
    mean = sum(loads) / len(loads)
    if abs(value - max(loads) / mean) < 0.01:
        return right("90 against a mean of 48: the step takes 1.875 times as long as with equal "
                     "loads, and the other four workers wait for more than half of it, on average.")
    if abs(value - (max(loads) / mean - 1)) < 0.01:
        return wrong("That is how much time is added, as a part of the even step. How many times "
                     "as long is the whole step?")
    if abs(value - max(loads) / min(loads)) < 0.01:
        return wrong("Fullest by emptiest is not what the step waits for: with equal loads each "
                     "worker would have the mean.")
    if abs(value - mean / max(loads)) < 0.01:
        return wrong("The other way round: the uneven step, measured by the even one.")
    return wrong(f"{value:g} is not it. How many rows does the slowest worker compute, and how "
                 "many would each compute if they were spread evenly?")


PACE = Exercise(
    id="3.6",
    kind="check",
    title="The fullest sets the pace",
    prompt="Five experts sit on five equal workers. In one step they get 90, 30, 60, 20 and 40 "
    "rows, and the step ends when the last worker is done. How many times as long does it take "
    "as it would if the same rows were spread evenly?",
    starter="answer = ...",
    check=check_pace,
    hints=(
        "240 rows on five workers: how many each, if spread evenly?",
        "The step ends with its slowest worker, the one with 90 rows.",
    ),
    solution="loads = [90, 30, 60, 20, 40]\nanswer = max(loads) / (sum(loads) / len(loads))",
)


# --- 3.7 -------------------------------------------------------------------------------


def check_visits(answer: object) -> Verdict:
    visits = function_in(answer)
    generator = torch.Generator().manual_seed(37)
    chosen = torch.stack([torch.randperm(9, generator=generator)[:3] for _ in range(40)])
    members = torch.rand(40, generator=generator) < 0.3
    found = tensor_in(visits(chosen, members, 11), (11,), "The shares").double()
    picked = chosen[members].flatten().bincount(minlength=11).double()
    expected = picked / int(members.sum())
    if torch.allclose(found, chosen.flatten().bincount(minlength=11).double() / 40):
        return wrong("That counts all tokens. Only the members of the group are asked for.")
    if torch.allclose(found, picked / picked.sum()):
        return wrong("Your shares add up to one. A token visits 3 experts, so the shares *of the "
                     "tokens* add up to 3: divide by the number of tokens, not of visits.")
    if torch.allclose(found, picked / 40):
        return wrong("The visits are right. Divide by the number of tokens in the group, not of "
                     "all tokens.")
    if not torch.allclose(found, expected):
        return wrong("For each expert: how many tokens of the group visit it, divided by how many "
                     "tokens the group has.")
    return right("With such a function any group can be asked about: the letters after a space, "
                 "the digits of phone numbers, the words that the model gets wrong.")


VISITS = Exercise(
    id="3.7",
    kind="code",
    title="Ask a group of your own",
    prompt="Mend `visits_of(chosen, members, num_experts)`: `chosen` is [tokens, k], `members` a "
    "truth value for each token. Return, for each expert, the share of the group's tokens that "
    "visit it. (Then try it in the chapter: do letters after a space go where other letters go?)",
    starter="""def visits_of(chosen, members, num_experts):
    counts = chosen.flatten().bincount(minlength=num_experts)
    return counts / len(chosen)""",
    answer="visits_of",
    check=check_visits,
    hints=(
        "`chosen[members]` keeps the group's rows only.",
        "Divide by the number of tokens in the group: `members.sum()`.",
    ),
    solution="""def visits_of(chosen, members, num_experts):
    group = chosen[members]
    counts = group.flatten().bincount(minlength=num_experts)
    return counts / len(group)""",
)


# --- 3.8 -------------------------------------------------------------------------------

FROZEN_GATE = Exercise(
    id="3.8",
    kind="think",
    title="What if the gate had always been random?",
    prompt="A random gate ruined the trained toy. Suppose a model is *trained* with such a gate "
    "from the first step, random and never changed. Would it be just as bad? What would it lose?",
    solution="**It would do far better than the toy in this chapter.** The harm came from a "
    "change: experts that had learned to serve one kind of row were handed another. With a gate "
    "that is random but *fixed*, similar rows still meet the same expert from the first step to "
    "the last, and the expert learns to serve whatever it gets.\n\nPeople have trained such "
    "models. *Hash Layers* (Roller and others, 2021) assigns each token to an expert by a fixed "
    "table and competes with learned gates of its time; with a table that spreads tokens evenly, "
    "balance is free as well.\n\n**What it loses** is the choice. A learned gate can send rows "
    "that need the same treatment to the same expert, use the context rather than the byte, and "
    "weigh the experts by how well they fit. And a random gate on *rows* has a trouble of its own: "
    "rows change while the model learns, so what an expert gets drifts under its feet.",
)

CHAPTER = Chapter(
    3,
    "Many experts, few per token",
    [PARAMETERS, GATE, TOUCHED, SORTED, BALANCE, PACE, VISITS, FROZEN_GATE],
    given="import torch",
)
