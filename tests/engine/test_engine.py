"""The engine: answers, streams, records that add up, and what is left when something fails."""

from collections import defaultdict
from itertools import count, pairwise

import pytest
import torch

from minimodel.cache.paged import PagedCache
from minimodel.engine.engine import Engine, usage
from minimodel.engine.generate import generate_without_cache
from minimodel.engine.request import Sampling, State
from minimodel.engine.scheduler import Limits
from minimodel.pricing import Usage

PROMPTS = [[40, 3, 200, 7, 7], list(range(60, 77)), [9, 8, 7]]
SEVEN = Sampling(max_tokens=7, stop_ids=())
BY_CHANCE = Sampling(max_tokens=7, stop_ids=(), temperature=1.3, seed=20)


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(seed=5)


@pytest.fixture(scope="module")
def answers(model):
    return [generate_without_cache(model, prompt, 7, stop_ids=()) for prompt in PROMPTS]


def make_engine(model, num_blocks=20, block_size=5, reuse=True, **limits):
    """The clock counts how often it was asked."""
    ticks = count(1)
    return Engine(model, PagedCache(model.config, num_blocks, block_size, dtype=torch.float64),
                  Limits(**limits) if limits else None, clock=lambda: float(next(ticks)),
                  reuse=reuse)


def assert_nothing_is_left(engine):
    engine.check()
    assert engine.requests == {}
    stats = engine.stats()
    assert (stats["waiting"], stats["running"], stats["held"]) == (0, 0, 0)


# --- answers ------------------------------------------------------------------------------------

def test_generate_gives_the_answers_in_the_order_of_the_prompts(model, answers):
    engine = make_engine(model)
    assert engine.generate(PROMPTS, SEVEN) == answers
    assert_nothing_is_left(engine)
    assert engine.generate([], SEVEN) == []


def test_the_same_engine_serves_one_after_another(model, answers):
    """Blocks are used again, still full of older notes."""
    engine = make_engine(model, num_blocks=5)
    for prompt, answer in [*zip(PROMPTS, answers, strict=True)] * 2:
        assert engine.generate([prompt], SEVEN) == [answer]
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("place", [0, 3])
def test_a_stop_token_ends_the_answer_and_belongs_to_it(model, answers, place):
    stop = answers[0][place]
    engine = make_engine(model)
    request = engine.submit(PROMPTS[0], Sampling(max_tokens=7, stop_ids=[stop]))
    engine.run()
    assert request.output == answers[0][:answers[0].index(stop) + 1]
    assert request.reason == "stop"


def test_prompts_may_be_tensors_and_become_numbers(model, answers):
    engine = make_engine(model)
    request = engine.submit(torch.tensor(PROMPTS[0]), SEVEN)
    assert request.prompt == tuple(PROMPTS[0])
    assert {type(token) for token in request.prompt} == {int}
    engine.run()
    assert request.output == answers[0]


def test_without_a_model_s_work_there_is_no_step(model):
    engine = make_engine(model)
    assert engine.step() is None
    assert not engine.records


# --- streams ------------------------------------------------------------------------------------

def test_a_stream_yields_each_token_as_it_is_written(model, answers):
    engine = make_engine(model, max_tokens_per_step=3)
    steps_by_then = []
    for token, expected in zip(engine.stream(PROMPTS[0], SEVEN), answers[0], strict=True):
        assert token == expected
        steps_by_then.append(len(engine.records))
    assert steps_by_then == [2, 3, 4, 5, 6, 7, 8]       # the prompt of 5 tokens takes two steps
    assert_nothing_is_left(engine)


def test_who_stops_listening_aborts_and_others_go_on(model, answers):
    engine = make_engine(model)
    other = engine.submit(PROMPTS[1], SEVEN)
    stream = engine.stream(PROMPTS[0], SEVEN)
    assert [next(stream), next(stream)] == answers[0][:2]
    held = engine.stats()["held"]
    stream.close()
    engine.check()
    assert engine.stats()["held"] == held - 2           # 5 tokens of prompt and one of answer
    engine.run()
    assert other.output == answers[1]
    assert_nothing_is_left(engine)


def test_streams_of_one_engine_do_not_disturb_each_other(model, answers):
    engine = make_engine(model)
    streams = [engine.stream(prompt, SEVEN) for prompt in PROMPTS]
    assert [list(answer) for answer in zip(*zip(*streams, strict=True), strict=True)] == answers
    assert_nothing_is_left(engine)


def test_a_stream_that_another_aborts_ends(model, answers):
    engine = make_engine(model)
    stream = engine.stream(PROMPTS[0], SEVEN)
    assert next(stream) == answers[0][0]
    engine.step()                                       # somebody else's
    engine.abort(next(iter(engine.requests)))
    assert list(stream) == answers[0][1:2]
    assert_nothing_is_left(engine)


# --- what cannot be served ----------------------------------------------------------------------

def test_a_rejected_request_comes_back_finished(model):
    engine = make_engine(model, num_blocks=40)
    for prompt, max_tokens, reason in (([], 3, "the prompt is empty"),
                                       ([1] * 95, 3, "95 tokens of prompt and 3 of answer go "
                                                     "beyond the context of 97")):
        request = engine.submit(prompt, Sampling(max_tokens=max_tokens))
        assert request.state is State.FINISHED
        assert request.reason.startswith(f"rejected: {reason}")
    assert_nothing_is_left(engine)
    assert engine.step() is None


def test_no_limits_reach_beyond_the_model_s_context(model):
    engine = make_engine(model, num_blocks=40, context=8_192, max_running=3)
    assert engine.submit([1] * 95, Sampling(max_tokens=3)).state is State.FINISHED
    assert make_engine(model, context=50).submit([1] * 49, SEVEN).state is State.FINISHED
    assert engine.submit([1] * 95, Sampling(max_tokens=2)).state is State.WAITING


@pytest.mark.parametrize(("prompt", "options", "error", "message"), [
    ([1, 271], {}, ValueError, "token id 271 is outside the vocabulary of 271: make prompts with"),
    ([-1], {}, ValueError, "token id -1 is outside"),
    ([1, 2.5], {}, TypeError, "float"),
    ([1], {"num_answers": 0}, ValueError, "num_answers=0 must be at least 1")])
def test_what_is_no_request_is_refused(model, prompt, options, error, message):
    engine = make_engine(model)
    with pytest.raises(error, match=message):
        engine.submit(prompt, SEVEN, **options)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("bad", [[], [300], [1] * 120])
def test_one_bad_prompt_of_several_leaves_none_behind(model, bad):
    engine = make_engine(model)
    with pytest.raises(ValueError, match=r"empty|outside the vocabulary|beyond the context"):
        engine.generate([PROMPTS[0], bad, PROMPTS[1]], SEVEN)
    assert_nothing_is_left(engine)
    assert engine.step() is None
    with pytest.raises(ValueError, match=r"empty|outside the vocabulary|beyond the context"):
        list(engine.stream(bad, SEVEN))


# --- records ------------------------------------------------------------------------------------

def intervals(engine):
    """Of each request: the (first, last) tokens computed in its steps, in order."""
    computed = defaultdict(list)
    for record in engine.records:
        for share in record.shares:
            computed[share.request_id].append((share.computed, share.computed + share.num_tokens))
    return computed


@pytest.mark.parametrize("budget", [1, 4, 5, 6, 100])
def test_without_preemption_every_token_is_computed_exactly_once(model, answers, budget):
    engine = make_engine(model, max_tokens_per_step=budget)
    assert engine.generate(PROMPTS, SEVEN) == answers
    computed = intervals(engine)
    assert len(computed) == len(PROMPTS)
    for request_id, prompt in zip("012", PROMPTS, strict=True):
        assert computed[request_id][0][0] == 0
        assert all(one[1] == following[0] for one, following in pairwise(computed[request_id]))
        assert computed[request_id][-1][1] == len(prompt) + 7 - 1
    assert max(record.num_tokens for record in engine.records) <= budget
    assert [record.number for record in engine.records] == list(range(len(engine.records)))
    assert sorted(sum((record.finished for record in engine.records), ())) == ["0", "1", "2"]
    assert engine.records[-1].blocks_held == engine.records[-1].num_waiting == 0


def test_a_record_says_what_happened_in_its_step(model):
    engine = make_engine(model, max_tokens_per_step=7)
    for prompt in PROMPTS:
        engine.submit(prompt, SEVEN)
    first, second = engine.step(), engine.step()
    assert [(share.request_id, share.kind, share.computed, share.num_tokens)
            for share in first.shares] == [("0", "prefill", 0, 5), ("1", "prefill", 0, 2)]
    assert [(share.request_id, share.kind, share.computed, share.num_tokens)
            for share in second.shares] == [("0", "decode", 5, 1), ("1", "prefill", 2, 6)]
    assert (first.num_waiting, first.blocks_held) == (1, 1 + 4)
    assert (second.num_waiting, second.blocks_held) == (1, 2 + 4)
    assert first.preempted == first.finished == ()


def test_after_a_preemption_all_is_computed_again_and_the_record_says_so(model, answers):
    """Without reuse, that is: with it, what is left of its own blocks is found."""
    engine = make_engine(model, num_blocks=6, spare_blocks=0,   # 1 and 4 blocks, 2 and 5 at last
                         reuse=False)
    assert engine.generate(PROMPTS[:2], SEVEN) == answers[:2]
    assert sum(len(record.preempted) for record in engine.records) == engine.stats()["preempted"]
    again = [first for first, _ in intervals(engine)["1"]].count(0)
    assert again == 1 + engine.stats()["preempted"] == 2


def test_usage_counts_prompt_and_answer(model):
    engine = make_engine(model)
    request = engine.submit(PROMPTS[1], SEVEN)
    engine.run()
    assert usage(request) == Usage(hit_tokens=0, miss_tokens=17, output_tokens=7)


def test_time_is_what_the_clock_says(model):
    engine = make_engine(model, max_tokens_per_step=3)
    request = engine.submit(PROMPTS[0], Sampling(max_tokens=2, stop_ids=()))
    engine.run()
    # A step asks three times: when it starts, when tokens are there, when all is counted.
    assert request.arrived_s == 1.0
    assert [(record.started_s, record.ended_s) for record in engine.records] == [
        (2.0, 4.0), (5.0, 7.0), (8.0, 10.0)]
    assert request.token_times_s == [6.0, 9.0]


# --- several answers ----------------------------------------------------------------------------

@pytest.mark.parametrize("num_blocks", [6, 9, 30])
def test_answers_to_one_prompt_are_those_of_requests_with_their_seeds(model, num_blocks):
    """Copy on write: the prompt's last block is half full, and each answer goes on in its own."""
    engine = make_engine(model, num_blocks, spare_blocks=0)
    copies = []
    engine.scheduler.copy = lambda *pair: (copies.append(pair), engine.cache.copy(*pair))
    request = engine.submit(PROMPTS[1], BY_CHANCE, num_answers=3)
    engine.run()
    alone = [make_engine(model).generate([PROMPTS[1]], BY_CHANCE.of_answer(i))[0]
             for i in range(3)]
    assert len({tuple(answer) for answer in alone}) == 3
    assert [answer.output for answer in request.answers] == alone
    assert copies
    assert_nothing_is_left(engine)


def test_answers_compute_their_prompt_once(model):
    engine = make_engine(model, 30)
    engine.submit(PROMPTS[1], BY_CHANCE, num_answers=3)
    engine.run()
    assert intervals(engine)["0"][0] == (0, 17)
    assert [intervals(engine)[f"0/{i}"][0] for i in (1, 2)] == [(17, 18)] * 2
    assert sum(record.num_tokens for record in engine.records) == 17 + 3 * 6


def test_abort_ends_all_answers_to_a_prompt(model):
    engine = make_engine(model, 30)
    request = engine.submit(PROMPTS[1], SEVEN, num_answers=3)
    engine.step()
    engine.step()
    engine.abort(request.id)
    assert [answer.reason for answer in request.answers] == ["aborted"] * 3
    assert_nothing_is_left(engine)


def test_answers_go_on_after_the_first_is_done(model):
    """The request is known, and can be aborted, until its last answer is."""
    engine = make_engine(model, 30)
    request = engine.submit(PROMPTS[1], SEVEN, num_answers=2)
    engine.step()
    engine.scheduler.abort(request)
    engine.step()
    engine.check()
    assert list(engine.requests) == [request.id]
    engine.abort(request.id)
    assert_nothing_is_left(engine)


# --- what goes wrong ----------------------------------------------------------------------------

def break_down_once(model, layer):
    """The model fails in the middle of its next step, after some layers have written notes."""
    def break_down(*_):
        hook.remove()
        raise RuntimeError("power cut")
    hook = model.layers[layer].mlp.register_forward_pre_hook(break_down)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_step_that_fails_is_planned_again_and_changes_no_token(model, answers, after):
    engine = make_engine(model, num_blocks=9, max_tokens_per_step=11, spare_blocks=0)
    requests = [engine.submit(prompt, SEVEN) for prompt in PROMPTS]
    for _ in range(after):
        engine.step()
    before = [(request.computed, len(request.output)) for request in requests]
    break_down_once(model, layer=2)
    with pytest.raises(RuntimeError, match="power cut"):
        engine.step()
    engine.check()
    assert [(request.computed, len(request.output)) for request in requests] == before
    assert len(engine.records) == after
    engine.run()
    assert [request.output for request in requests] == answers
    assert_nothing_is_left(engine)


def test_generate_that_fails_leaves_no_request_behind(model, answers):
    engine = make_engine(model)
    stranger = engine.submit(PROMPTS[2], SEVEN)
    break_down_once(model, layer=2)
    with pytest.raises(RuntimeError, match="power cut"):
        engine.generate(PROMPTS[:2], SEVEN)
    engine.check()
    assert list(engine.requests) == [stranger.id]
    assert engine.generate(PROMPTS[:2], SEVEN) == answers[:2]
    assert stranger.output == answers[2]


def test_abort_of_someone_unknown_or_gone_is_no_error(model):
    engine = make_engine(model)
    request = engine.submit(PROMPTS[0], SEVEN)
    engine.run()
    engine.abort(request.id)
    engine.abort("nobody")
    assert request.reason == "length"


def test_check_finds_someone_whom_nobody_submitted(model):
    engine = make_engine(model)
    engine.submit(PROMPTS[0], SEVEN)
    engine.check()
    engine.requests.clear()
    with pytest.raises(AssertionError, match="someone unknown"):
        engine.check()


# --- what does not fit together -----------------------------------------------------------------


@pytest.mark.parametrize(("changes", "dtype", "message"), [
    ({"num_kv_heads": 1}, torch.float64, "notes 4 layers of 56 numbers, the cache holds 4 of 28"),
    ({"kv_source_layers": (0, 0, 2, 2)}, torch.float64, "notes 4 layers .* the cache holds 2"),
    ({}, torch.float32, "computes in torch.float64 and the cache holds torch.float32"),
], ids=str)
def test_a_cache_for_another_model_is_refused_at_once(make_model, make_config, changes, dtype,
                                                      message):
    with pytest.raises(ValueError, match=message):
        Engine(make_model(), PagedCache(make_config(**changes), 8, dtype=dtype))


def test_old_records_make_room_for_new_ones(make_model):
    model = make_model()
    engine = Engine(model, PagedCache(model.config, 8, dtype=torch.float64), keep_records=3)
    engine.generate([[1, 2, 3]], Sampling(max_tokens=7, stop_ids=()))
    assert [record.number for record in engine.records] == [4, 5, 6]
    assert engine.stats()["steps"] == 7
