"""A request: which state may follow which, its arithmetic, and when an answer ends."""

from itertools import product

import pytest

from minimodel.cache.blocks import BlockTable
from minimodel.engine.request import Request, Sampling, State
from minimodel.tokenizer import END, STOP_IDS, TURN

# Written from the book's contract, not from the code.
ALLOWED = {
    ("new", "waiting"), ("waiting", "loading"), ("waiting", "running"), ("loading", "running"),
    ("loading", "waiting"), ("running", "waiting"), ("running", "held"),
    ("new", "finished"), ("waiting", "finished"), ("loading", "finished"), ("running", "finished"),
    ("held", "finished"),
}


def make(prompt=(1, 2, 3), output=(), **options):
    request = Request("seven", tuple(prompt), **options)
    request.output += output
    return request


@pytest.mark.parametrize(("old", "new"), [*product(State, State)], ids=lambda state: state.value)
def test_every_step_of_a_life_is_allowed_or_refused(old, new):
    request = make(state=old)
    if (old.value, new.value) in ALLOWED:
        request.move(new)
        assert request.state is new
    else:
        with pytest.raises(ValueError, match=f"request seven is {old.value} and cannot become "
                                             f"{new.value}"):
            request.move(new)
        assert request.state is old


def test_counts_of_a_life():
    request = make(range(5), sampling=Sampling(max_tokens=4))
    assert (request.total, request.remaining, request.longest) == (5, 5, 8)
    request.computed = 3
    assert (request.total, request.remaining) == (5, 2)
    assert not request.is_decoding
    request.computed = 5
    request.write(9, now_s=1.5)
    assert (request.total, request.remaining) == (6, 1)
    assert request.is_decoding
    request.computed = 0                            # preempted: it reads again, the answer too
    assert (request.total, request.remaining) == (6, 6)
    assert not request.is_decoding


def test_the_last_token_of_a_prompt_is_no_decode():
    request = make(range(5))
    request.computed = 4
    assert request.remaining == 1
    assert not request.is_decoding


def test_the_last_token_written_needs_no_notes():
    request = make(range(5), sampling=Sampling(max_tokens=4))
    while request.reason is None:
        request.computed = request.total
        request.write(9, now_s=0.0)
    assert request.computed == request.longest == request.total - 1


@pytest.mark.parametrize("output", [(), (70,), (70, 71, 72, 73)])
def test_tokens_are_those_of_prompt_and_answer_together(output):
    request = make((10, 11, 12), output)
    text = [10, 11, 12, *output]
    for first in range(len(text) + 1):
        for last in range(first, len(text) + 1):
            assert request.tokens(first, last) == text[first:last]


@pytest.mark.parametrize("stop", [END, TURN])
def test_a_stop_token_ends_the_answer_and_belongs_to_it(stop):
    request = make()
    for token in (65, stop):
        assert request.reason is None
        request.write(token, now_s=0.5)
    assert (request.reason, request.output) == ("stop", [65, stop])
    assert request.token_times_s == [0.5, 0.5]
    assert {END, TURN} == STOP_IDS


def test_a_stop_token_that_is_also_the_last_counts_as_stop():
    request = make(sampling=Sampling(max_tokens=1, stop_ids=[65]))
    request.write(65, now_s=0.0)
    assert request.reason == "stop"


def test_without_stop_tokens_length_ends_it():
    request = make(sampling=Sampling(max_tokens=3, stop_ids=()))
    for token in (END, TURN, END):
        assert request.reason is None
        request.write(token, now_s=0.0)
    assert request.reason == "length"


def test_a_fork_starts_where_its_origin_is_and_shares_nothing_that_grows():
    request = make(range(5), sampling=Sampling(seed=40, top_k=3), arrived_s=2.5,
                   state=State.RUNNING, num_answers=3)
    request.computed = 5
    twin = request.fork(2)
    assert (twin.id, twin.prompt, twin.computed, twin.state, twin.arrived_s) == (
        "seven/2", request.prompt, 5, State.RUNNING, 2.5)
    assert twin.sampling == Sampling(seed=42, top_k=3)
    assert twin.num_answers == 1
    assert request.answers == [request, twin]
    assert twin.answers == [twin]
    twin.write(9, now_s=3.0)
    assert (request.output, request.token_times_s) == ([], [])


def test_two_requests_are_never_equal():
    one, other = make(), make()
    assert one != other
    assert len({one, other}) == 2


def test_answers_seeds_count_up_and_the_rest_stays():
    sampling = Sampling(max_tokens=5, temperature=0.3, top_k=4, top_p=0.5, seed=7, stop_ids=[3])
    assert sampling.of_answer(0) == sampling
    assert sampling.of_answer(2) == Sampling(5, 0.3, 4, 0.5, 9, [3])


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("max_tokens", 0, "must be a whole number of at least 1"),
    ("max_tokens", -3, "must be a whole"), ("max_tokens", 2.5, "must be a whole number"),
    ("top_k", 1.5, "must be 0 .all tokens. or a whole number"),
    ("temperature", 0.001, "must be 0 .greedy. or at least 0.01"),
    ("temperature", -0.1, "must be 0 .greedy. or at least 0.01"),
    ("temperature", float("inf"), "must be 0"), ("temperature", float("nan"), "must be 0"),
    ("top_k", -1, "must be 0 .all tokens. or a whole number"),
    ("top_p", 0.0, "must be above 0 and at most 1"), ("top_p", 1.1, "must be above 0"),
    ("top_p", float("nan"), "must be above 0")])
def test_impossible_options_are_named(name, value, rule):
    with pytest.raises(ValueError, match=f"{name}={value} {rule}"):
        Sampling(**{name: value})


@pytest.mark.parametrize("damage", [
    {"computed": 4}, {"computed": -1},
    {"table": BlockTable([0])}, {"state": State.RUNNING}, {"state": State.HELD},
    {"reason": "stop"}, {"state": State.FINISHED}, {"token_times_s": [0.0]}], ids=str)
def test_check_finds_what_contradicts_itself(damage):
    request = make(state=State.WAITING)
    request.check()
    for name, value in damage.items():
        setattr(request, name, value)
    with pytest.raises(AssertionError):
        request.check()


def test_check_agrees_with_each_state():
    for state in State:
        has_table = state in (State.LOADING, State.RUNNING, State.HELD)
        make(state=state, table=BlockTable([0]) if has_table else None,
             reason="aborted" if state in (State.HELD, State.FINISHED) else None).check()
