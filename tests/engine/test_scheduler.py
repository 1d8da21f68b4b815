"""The scheduler, without a model: who gets what, and some thousand random steps.

`World` plays the model. It writes each planned token into the slot that its block table names,
and reads back all tokens before it: what two requests write into one slot, and what a copy or
a preemption loses, shows as a wrong token.
"""

from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import pytest

from minimodel.cache.blocks import BlockPool
from minimodel.engine.request import Request, Sampling, State
from minimodel.engine.scheduler import Limits, Scheduler

STOP = 0


class World:
    """A scheduler, a memory of tokens, and "chance" that depends on name and place alone."""

    def __init__(self, num_blocks=10, block_size=4, **limits):
        self.pool = BlockPool(num_blocks, block_size)
        self.memory = {}                            # of a block: its tokens by slot
        self.scheduler = Scheduler(self.pool, Limits(**{"spare_blocks": 0, **limits}), self.copy)
        self.requests = []
        self.shares, self.kinds = [], []            # of the latest step, as they were planned
        self.now_s = 0.0

    def copy(self, source, target):
        self.memory[target] = dict(self.memory[source])

    def add(self, prompt_size, max_tokens=5, **options):
        number = len(self.requests)
        request = Request(f"r{number}", tuple(range(100 * number, 100 * number + prompt_size)),
                          Sampling(max_tokens=max_tokens, stop_ids=[STOP]), **options)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def forward(self, plan):
        """Write and read the plan's tokens; what is sampled where work ends."""
        written = set()
        for work in plan.work:
            request, end = work.request, work.computed + work.num_tokens
            places = [(request.table[i // self.pool.block_size], i % self.pool.block_size)
                      for i in range(end)]
            new = places[work.computed:]
            assert not written & set(new), "two requests write to one slot"
            written |= set(new)
            for (block, slot), token in zip(new, request.tokens(work.computed, end), strict=True):
                self.memory.setdefault(block, {})[slot] = token
            read = [self.memory[block][slot] for block, slot in places]
            assert read == request.tokens(0, end), f"{request.id} reads foreign notes"
        return {work.request.id: next_tokens(work.request) for work in plan.work if work.ends}

    def step(self):
        plan = self.scheduler.plan()
        self.scheduler.check()
        self.shares, self.kinds = shares(plan), [work.kind for work in plan.work]
        self.now_s += 1.0
        finished = self.scheduler.commit(plan, self.forward(plan), self.now_s)
        self.scheduler.check()
        return plan, finished

    def run(self, most_steps=500):
        """Until nobody is left: the shares of each step."""
        steps = []
        while not self.scheduler.is_idle:
            self.step()
            steps.append(self.shares)
            assert len(steps) < most_steps, "somebody waits for ever"
        return steps


def next_tokens(request):
    names = [request.id, *(f"{request.id}/{i}" for i in range(1, request.num_answers))]
    return [token_of(name, len(request.output)) for name in names]


def token_of(name, place):
    """Never the stop token, except in names that end in an odd digit, from place 2 on."""
    token = crc32(f"{name}/{place}".encode()) % 11
    return token if name[-1] in "13579" and place > 1 else token or 7


def answer_of(name, max_tokens):
    """What a request of this name must write, whatever happens to it."""
    tokens = []
    while len(tokens) < max_tokens and STOP not in tokens:
        tokens.append(token_of(name, len(tokens)))
    return tokens


def shares(plan):
    """(request, computed, new tokens, whether a token is sampled) of each."""
    return [(work.request.id, work.computed, work.num_tokens, work.ends) for work in plan.work]


# --- the budget ---------------------------------------------------------------------------------

def test_the_budget_goes_to_those_who_run_first_then_to_those_who_wait():
    world = World(max_tokens_per_step=10)
    for size in (7, 5, 4):
        world.add(size)
    plan, _ = world.step()
    assert world.shares == [("r0", 0, 7, True), ("r1", 0, 3, False)]
    assert [request.id for request in plan.admitted] == ["r0", "r1"]
    world.step()
    assert world.shares == [("r0", 7, 1, True), ("r1", 3, 2, True), ("r2", 0, 4, True)]
    assert world.kinds == ["decode", "prefill", "prefill"]
    world.step()
    assert world.shares == [("r0", 8, 1, True), ("r1", 5, 1, True), ("r2", 4, 1, True)]
    assert world.kinds == ["decode"] * 3


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 11, 12])
def test_a_prompt_is_read_in_chunks_of_the_budget(budget):
    world = World(max_tokens_per_step=budget)
    request = world.add(11, max_tokens=1)
    chunks = [share for step in world.run() for share in step]
    assert chunks == [("r0", first, min(budget, 11 - first), first + budget >= 11)
                      for first in range(0, 11, budget)]
    assert request.output == answer_of("r0", 1)
    assert request.token_times_s == [float(len(chunks))]


def test_no_step_exceeds_the_budget_and_none_is_empty():
    world = World(num_blocks=14, max_tokens_per_step=6)
    for size in (9, 2, 13, 5, 1):
        world.add(size, max_tokens=7)
    for step in world.run():
        sizes = [num_tokens for _, _, num_tokens, _ in step]
        assert sizes
        assert min(sizes) >= 1
        assert sum(sizes) <= 6


# --- admission ----------------------------------------------------------------------------------

def test_first_come_first_served_even_where_a_later_one_would_fit():
    world = World()                                 # 10 blocks of 4
    world.add(25)
    world.add(20)
    world.add(3)
    plan, _ = world.step()
    assert [request.id for request in plan.admitted] == ["r0"]
    assert [request.id for request in world.scheduler.waiting] == ["r1", "r2"]


@pytest.mark.parametrize(("spare_blocks", "admitted"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_a_few_blocks_are_spared_for_those_that_run(spare_blocks, admitted):
    world = World(spare_blocks=spare_blocks)
    world.add(12)
    world.step()                                    # 3 of 10 blocks held; the next step takes one
    world.add(20)                                   # 5 blocks of the 6 that are then left
    plan, _ = world.step()
    assert len(plan.admitted) == admitted


def test_nothing_is_spared_where_nobody_runs():
    world = World(spare_blocks=3)
    world.add(40, max_tokens=1)
    world.step()
    assert world.shares == [("r0", 0, 40, True)]


def test_all_blocks_of_a_prompt_are_taken_at_once_however_small_its_chunks():
    world = World(max_tokens_per_step=3)
    request = world.add(13)
    world.step()
    assert (len(request.table), request.computed) == (4, 3)


def test_no_more_run_than_may():
    world = World(num_blocks=30, max_running=3)
    for _ in range(5):
        world.add(4, max_tokens=3)
    assert max(map(len, world.run())) == 3


def test_answers_that_are_still_to_start_count_as_running():
    """Two that will fork into four each, admitted while both still read their prompts."""
    world = World(num_blocks=60, max_running=5, max_tokens_per_step=3)
    for _ in range(2):
        world.add(7, num_answers=4)
    most = 0
    while not world.scheduler.is_idle:
        world.step()
        most = max(most, len(world.scheduler.running))
    assert most == 4


# --- rejection ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("prompt_size", "options", "reason"), [
    (0, {}, "rejected: the prompt is empty; give at least one token"),
    (28, {"max_tokens": 6}, "rejected: 28 tokens of prompt and 6 of answer go beyond the context "
                            "of 33; shorten either"),
    (20, {"max_tokens": 10}, "rejected: it may need notes for 29 tokens and all 7 blocks together "
                             "hold 28; shorten it or give the cache more blocks"),
    (3, {"num_answers": 6}, "rejected: 6 answers at a time are over the limit of 5 running "
                            "requests; ask for fewer"),
])
def test_what_can_never_be_served_is_rejected_with_the_reason(prompt_size, options, reason):
    world = World(num_blocks=7, max_running=5, context=33)
    request = world.add(prompt_size, **options)
    assert (request.state, request.reason) == (State.FINISHED, reason)
    assert world.scheduler.is_idle
    world.scheduler.check()


@pytest.mark.parametrize(("prompt_size", "options"), [
    (19, {"max_tokens": 10}), (28, {"max_tokens": 1}), (1, {"max_tokens": 28}),
    (3, {"num_answers": 5})])
def test_what_just_fits_is_served(prompt_size, options):
    world = World(num_blocks=7, max_running=5, context=29)
    request = world.add(prompt_size, **options)
    world.run()
    assert request.output == answer_of("r0", options.get("max_tokens", 5))
    assert [answer.reason for answer in request.answers] == ["length"] * len(request.answers)


@pytest.mark.parametrize(("name", "value"), [("max_tokens_per_step", 0), ("max_running", 0),
                                             ("spare_blocks", -1), ("context", 0)])
def test_impossible_limits_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be at least {value + 1}"):
        Limits(**{name: value})


def test_a_request_is_added_once():
    world = World()
    request = world.add(3)
    with pytest.raises(ValueError, match="r0 is waiting and cannot become waiting"):
        world.scheduler.add(request)
    assert len(world.scheduler.waiting) == 1


# --- preemption ---------------------------------------------------------------------------------

def test_the_last_admitted_gives_way_and_waits_in_front():
    world = World(num_blocks=6)
    for size in (8, 8, 8):                          # all blocks; the next token needs another
        world.add(size)
    world.step()
    late = world.add(2)
    plan, _ = world.step()
    assert [request.id for request in plan.preempted] == ["r2"]
    assert world.shares == [("r0", 8, 1, True), ("r1", 8, 1, True)]
    assert plan.admitted == []                      # nobody is invited in such a step
    preempted = world.requests[2]
    assert list(world.scheduler.waiting) == [preempted, late]
    assert (preempted.computed, preempted.table, preempted.num_preempted) == (0, None, 1)
    assert preempted.output == answer_of("r2", 1)   # what it has written it keeps
    world.run()
    assert [request.output for request in world.requests] == [
        answer_of(request.id, 5) for request in world.requests]


def test_several_preempted_at_once_keep_their_order():
    """The first takes the third's only block; the second finds none and gives way as well."""
    world = World(num_blocks=4, block_size=1)
    for size in (2, 1, 1):
        world.add(size, max_tokens=3)
    world.step()
    plan, _ = world.step()
    assert [request.id for request in plan.preempted] == ["r2", "r1"]
    assert [request.id for request in world.scheduler.waiting] == ["r1", "r2"]
    world.run()
    assert [request.output for request in world.requests] == [
        answer_of(request.id, 3) for request in world.requests]


def test_who_asked_gives_way_where_it_was_admitted_last():
    world = World(num_blocks=4)
    world.add(6)
    world.add(8)
    world.step()                                    # 2 and 2 blocks; only the second is full
    plan, _ = world.step()
    assert [request.id for request in plan.preempted] == ["r1"]
    assert world.shares == [("r0", 6, 1, True)]


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
def test_g20_preempted_by_recompute_loses_and_doubles_no_token(num_outputs):
    """A preempted request comes back with tokens missing, or written twice."""
    first = 4 if num_outputs else 2                 # one block a token, so that each step counts
    world = World(num_blocks=first + 6 + 2 * max(num_outputs - 1, 0) + (not num_outputs),
                  block_size=1, max_tokens_per_step=first if not num_outputs else 99)
    world.add(first, max_tokens=5)
    victim = world.add(6, max_tokens=5 if num_outputs else 3)
    outputs_then = []
    while not world.scheduler.is_idle:
        plan, _ = world.step()
        outputs_then += [len(request.output) for request in plan.preempted]
    assert outputs_then[0] == num_outputs
    assert victim.output == answer_of("r1", victim.sampling.max_tokens)
    assert victim.token_times_s == sorted(set(victim.token_times_s))


def test_g10_who_comes_back_needs_blocks_for_its_answer_too():
    """A preempted request is admitted by the count of its prompt: its table is too short."""
    world = World(num_blocks=6)
    for size in (8, 8, 8):
        world.add(size)
    victim = world.requests[2]
    world.step()
    world.step()
    assert victim.state is State.WAITING
    while victim.state is State.WAITING:
        world.step()
    assert victim.num_preempted == 1
    assert len(victim.table) == 3                   # 8 tokens of prompt and one of answer
    assert victim.computed == 9


def test_g21_nobody_is_sent_back_and_forth():
    """A resumed request gets its first chunk, is preempted again, and so on for ever."""
    world = World(num_blocks=11, max_tokens_per_step=3, spare_blocks=1)
    for _ in range(4):
        world.add(17, max_tokens=12)                # 7 blocks in the end
    world.run(most_steps=200)
    assert 1 <= world.scheduler.num_preempted <= 6
    assert all(request.reason in ("length", "stop") for request in world.requests)


# --- abort --------------------------------------------------------------------------------------

def waiting(world, request):
    pass


def in_the_middle_of_its_prompt(world, request):
    world.step()
    assert 0 < request.computed < len(request.prompt)


def writing(world, request):
    while len(request.output) < 2:
        world.step()


def preempted(world, request):
    world.step()
    world.scheduler._preempt(request, world.scheduler.plan())


def loading(world, request):
    request.table = world.pool.admit([], 3)
    request.move(State.LOADING)


def held(world, request):
    writing(world, request)
    request.move(State.HELD)


@pytest.mark.parametrize("reach", [waiting, in_the_middle_of_its_prompt, writing, preempted,
                                   loading, held])
def test_g18_abort_frees_everything_in_every_state(reach):
    """Abort frees a slot by a second way: freed twice, and the server exits."""
    world = World(max_tokens_per_step=4)
    other, request = world.add(3), world.add(9)
    reach(world, request)
    world.scheduler.abort(request)
    assert (request.state, request.reason, request.table) == (State.FINISHED, "aborted", None)
    world.scheduler.check()
    world.scheduler.abort(request)                  # once more changes nothing
    world.scheduler.check()
    world.run()
    assert other.output == answer_of("r0", 5)
    assert world.scheduler.stats()["held"] == 0


def test_abort_before_it_came_and_after_it_went():
    world = World()
    new = Request("n", (1, 2), Sampling(max_tokens=3))
    world.scheduler.abort(new)
    assert (new.state, new.reason) == (State.FINISHED, "aborted")
    with pytest.raises(ValueError, match="n is finished and cannot become waiting"):
        world.scheduler.add(new)
    done = world.add(3)
    world.run()
    world.scheduler.abort(done)
    assert done.reason == "length"
    world.scheduler.check()


def test_a_finished_request_keeps_its_reason_when_it_is_offered_again():
    world = World()
    new = Request("n", ())
    world.scheduler.abort(new)
    with pytest.raises(ValueError, match="n is finished"):
        world.scheduler.add(new)
    assert new.reason == "aborted"


def test_who_is_aborted_between_plan_and_commit_is_passed_over():
    world = World()
    leaving, staying = world.add(5), world.add(3)
    plan = world.scheduler.plan()
    sampled = world.forward(plan)
    world.scheduler.abort(leaving)
    assert world.scheduler.commit(plan, sampled, 1.0) == []
    assert (leaving.output, leaving.computed) == ([], 0)
    assert (staying.output, staying.computed) == (answer_of("r1", 1), 3)
    world.scheduler.check()


# --- plan and commit ----------------------------------------------------------------------------

def test_a_plan_that_never_commits_can_be_planned_again():
    world = World(max_tokens_per_step=9)
    world.add(7)
    world.add(6)
    lost = world.scheduler.plan()
    held = world.scheduler.stats()["held"]
    again = world.scheduler.plan()
    assert shares(again) == shares(lost)
    assert again.admitted == []                     # they run already
    assert world.scheduler.stats()["held"] == held
    world.run()
    assert [request.output for request in world.requests] == [answer_of("r0", 5),
                                                              answer_of("r1", 5)]


def test_a_plan_is_committed_once():
    world = World()
    request = world.add(6)
    plan = world.scheduler.plan()
    sampled = world.forward(plan)
    world.scheduler.commit(plan, sampled, 1.0)
    with pytest.raises(ValueError, match="r0 was planned at 0 tokens and has computed 6: commit "
                                         "each plan once"):
        world.scheduler.commit(plan, sampled, 2.0)
    assert (request.computed, request.output) == (6, answer_of("r0", 1))


def test_commit_says_who_finished():
    world = World()
    short, long = world.add(3, max_tokens=1), world.add(3, max_tokens=2)
    assert world.step()[1] == [short]
    assert world.step()[1] == [long]
    plan, finished = world.step()
    assert (plan.work, finished) == ([], [])        # an empty plan is no error


# --- several answers ----------------------------------------------------------------------------

@pytest.mark.parametrize("num_blocks", [5, 6, 8, 40])
def test_answers_share_the_prompt_and_own_what_they_write(num_blocks):
    """In a small pool some of them are preempted, and read prompt and answer again, alone."""
    world = World(num_blocks)
    request = world.add(10, max_tokens=9, num_answers=4)    # 5 blocks each in the end, 3 at first
    world.step()
    assert [answer.id for answer in request.answers] == ["r0", "r0/1", "r0/2", "r0/3"]
    assert world.scheduler.running == request.answers       # the later ones give way first
    assert world.scheduler.stats()["held"] == 3
    assert world.scheduler.stats()["shared"] == 3
    world.run()
    assert [answer.output for answer in request.answers] == [
        answer_of(answer.id, 9) for answer in request.answers]
    assert (world.scheduler.num_preempted == 0) == (num_blocks == 40)
    assert world.scheduler.stats()["held"] == 0


# --- fairness -----------------------------------------------------------------------------------

def test_a_large_request_is_not_overtaken_for_ever():
    """Small ones keep coming. Whoever waits is served before all who came later."""
    world = World(num_blocks=12, max_running=4)
    for _ in range(4):
        world.add(7)
    world.step()
    large = world.add(40)
    before = world.requests[:4]
    while large.state is State.WAITING:
        world.add(3)
        assert all(later.state is State.WAITING for later in world.requests[5:])
        assert len(world.requests) < 60
        world.step()
    assert all(request.state is State.FINISHED for request in before)


def test_with_a_budget_of_one_everyone_is_served_in_order():
    world = World(max_tokens_per_step=1)
    for _ in range(4):
        world.add(3, max_tokens=4)
    order = []
    while not world.scheduler.is_idle:
        order += [request.id for request in world.step()[1]]
    assert order == ["r0", "r1", "r2", "r3"]


# --- check finds damage -------------------------------------------------------------------------

@pytest.mark.parametrize("damage", [
    lambda world, a, b: world.scheduler.running.append(a),
    lambda world, a, b: world.scheduler.waiting.append(a),
    lambda world, a, b: world.scheduler.running.remove(a),
    lambda world, a, b: setattr(a, "table", b.table),
    lambda world, a, b: setattr(a, "computed", 7),
    lambda world, a, b: world.pool.admit([], 1),
    lambda world, a, b: world.pool.release(a.table)])
def test_check_finds_the_damage(damage):
    world = World(max_running=2)
    a, b = world.add(3), world.add(6)
    world.step()
    damage(world, a, b)
    with pytest.raises(AssertionError):
        world.scheduler.check()


# --- random steps -------------------------------------------------------------------------------

@dataclass
class Driver:
    """Submits, aborts, loses plans, commits; checks everything after each."""

    world: World
    rng: Random
    computed: dict = field(default_factory=dict)    # of a request: tokens counted by commits
    lost_plans: int = 0

    def act(self):
        self.world.scheduler.check()
        roll, scheduler = self.rng.random(), self.world.scheduler
        if roll < 0.25:
            self.world.add(self.rng.randint(0, 30), self.rng.randint(1, 20),
                           num_answers=self.rng.choice([1, 1, 1, 2, 3]))
        elif roll < 0.3 and self.world.requests:
            scheduler.abort(self.rng.choice(self.everyone()))
        else:
            self.step()

    def everyone(self):
        return [answer for request in self.world.requests for answer in request.answers]

    def step(self):
        scheduler, limits = self.world.scheduler, self.world.scheduler.limits
        plan = scheduler.plan()
        scheduler.check()
        assert plan.num_tokens <= limits.max_tokens_per_step
        assert bool(plan.work) == (not scheduler.is_idle)
        sampled = self.world.forward(plan)
        if self.rng.random() < 0.1:
            self.lost_plans += 1                    # the model failed
            return
        if plan.work and self.rng.random() < 0.1:
            scheduler.abort(self.rng.choice(plan.work).request)
        going_on = [work for work in plan.work if work.request.state is State.RUNNING]
        scheduler.commit(plan, sampled, self.world.now_s)
        for work in going_on:
            self.computed[work.request] = self.computed.get(work.request, 0) + work.num_tokens
        if any(work.request.state is State.RUNNING for work in plan.work):
            with pytest.raises(ValueError, match="commit each plan once"):
                scheduler.commit(plan, sampled, self.world.now_s)


@pytest.mark.parametrize(("seed", "limits"), [
    (1, {}), (2, {"max_tokens_per_step": 5}), (3, {"max_running": 3, "spare_blocks": 2}),
    (4, {"block_size": 1, "num_blocks": 51}), (5, {"max_tokens_per_step": 1, "num_blocks": 40})])
def test_random_lives(seed, limits):
    world = World(**{"num_blocks": 13, "max_tokens_per_step": 40, "max_running": 9, **limits})
    driver = Driver(world, Random(seed))
    for _ in range(1_000):
        driver.act()
    while not world.scheduler.is_idle:
        driver.step()
        assert world.now_s < 1e6
    world.scheduler.check()
    stats = world.scheduler.stats()
    assert (stats["waiting"], stats["running"], stats["held"], stats["shared"]) == (0, 0, 0, 0)
    assert stats["free"] == stats["blocks"]
    assert stats["preempted"] == sum(request.num_preempted for request in driver.everyone())
    reasons = {request.reason.split(":")[0] for request in driver.everyone()}
    assert reasons == {"stop", "length", "aborted", "rejected"}
    assert driver.lost_plans > 20
    for request in driver.everyone():
        expected = answer_of(request.id, request.sampling.max_tokens)
        assert request.output == expected[:len(request.output)]
        assert request.reason not in ("stop", "length") or request.output == expected
        if request.reason in ("stop", "length") and not request.num_preempted:
            forked_at = len(request.prompt) if "/" in request.id else 0
            assert driver.computed.get(request, 0) == request.total - 1 - forked_at
