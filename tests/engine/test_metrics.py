"""Latencies from time stamps: the field's definitions, on hand-made times and on a real answer."""

import statistics
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.engine.metrics import Goals, RequestTimes, goodput, percentile, timed

ONE = RequestTimes(10.0, (13.0, 13.5, 14.5, 18.0))
TIMES = st.lists(st.floats(0, 1e3), min_size=1, max_size=30).map(sorted)


def test_the_latencies_of_one_request():
    assert ONE.ttft_s == 3.0
    assert ONE.gaps_s == (0.5, 1.0, 3.5)
    assert ONE.tpot_s == pytest.approx(5 / 3)
    assert ONE.end_to_end_s == 8.0


def test_an_answer_of_one_token_has_no_gap():
    single = RequestTimes(2.0, [7.0])
    assert single.gaps_s == () and single.tpot_s == 0.0
    assert single.ttft_s == single.end_to_end_s == 5.0


@given(TIMES)
def test_tpot_is_the_mean_gap_and_the_end_adds_up(times):
    request = RequestTimes(times[0], times)
    if request.gaps_s:
        assert request.tpot_s == pytest.approx(statistics.mean(request.gaps_s), abs=1e-9)
    whole = request.ttft_s + sum(request.gaps_s)
    assert request.end_to_end_s == pytest.approx(whole, abs=1e-9)


@pytest.mark.parametrize(("arrived", "tokens", "said"), [
    (1.0, (), "token_times_s is empty"),
    (5.0, (4.0,), "backwards, from 5.0 to 4.0"),
    (1.0, (2.0, 4.0, 3.0), "backwards, from 4.0 to 3.0"),
    (1.0, (2.0, float("nan")), "no finite number"),
    (1.0, (2.0, float("inf")), "no finite number"),
])
def test_impossible_times_are_refused(arrived, tokens, said):
    with pytest.raises(ValueError, match=said):
        RequestTimes(arrived, tokens)


def test_a_stream_is_timed_by_the_clock_it_is_given():
    ticks = count(100.0, 7.0)
    tokens, times = timed(lambda: iter([5, 3, 8]), clock=lambda: next(ticks))
    assert tokens == [5, 3, 8]
    assert times == RequestTimes(100.0, (107.0, 114.0, 121.0))


def test_what_starting_a_stream_takes_counts_into_its_first_token():
    now = [0.0]

    def start():
        now[0] += 4.0
        return tokens()

    def tokens():
        for pause in (1.0, 2.0):
            now[0] += pause
            yield 9

    assert timed(start, clock=lambda: now[0])[1] == RequestTimes(0.0, (5.0, 7.0))


# --- percentiles ---------------------------------------------------------------------------


@pytest.mark.parametrize(("percent", "value"), [
    (0, 1.0), (25, 2.0), (50, 3.0), (90, 7.2), (99, 8.82), (100, 9.0)])
def test_a_percentile_lies_between_its_neighbours(percent, value):
    assert percentile([9.0, 1.0, 4.5, 2.0, 3.0], percent) == pytest.approx(value)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_percentiles_of_nothing_are_refused():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percent=101 must be between 0 and 100"):
        percentile([1.0], 101)


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_a_failure_is_no_latency(odd):
    with pytest.raises(ValueError, match="not all finite"):
        percentile([1.0, odd, 3.0], 50)


# --- goodput -------------------------------------------------------------------------------


def test_goodput_counts_requests_that_meet_both_goals():
    goals = Goals(ttft_s=2.0, tpot_s=0.5)
    on_time = RequestTimes(0.0, (2.0, 2.5, 3.0))                # both, exactly
    late_start = RequestTimes(0.0, (2.1, 2.2, 2.3))
    slow = RequestTimes(0.0, (1.0, 1.6, 2.2))
    uneven = RequestTimes(0.0, (1.0, 1.9, 2.0))                 # one gap over, the mean is not
    single = RequestTimes(0.0, (1.0,))
    assert [goals.met_by(r) for r in (on_time, late_start, slow, uneven, single)] == [
        True, False, False, True, True]
    requests = [on_time, late_start, slow, uneven, single]
    assert goodput(requests, goals, duration_s=4.0) == pytest.approx(3 / 4)
    assert goodput([], goals, duration_s=4.0) == 0


@given(st.lists(TIMES.map(lambda times: RequestTimes(times[0], times)), max_size=8),
       st.floats(0.1, 100), st.floats(0.1, 100))
def test_goodput_never_exceeds_throughput_and_grows_with_the_goals(requests, ttft_s, tpot_s):
    found = goodput(requests, Goals(ttft_s, tpot_s), duration_s=5.0)
    assert found <= len(requests) / 5.0
    assert found <= goodput(requests, Goals(2 * ttft_s, tpot_s), duration_s=5.0)


def test_goals_and_durations_of_nothing_are_refused():
    with pytest.raises(ValueError, match="tpot_s=0 must be above 0 seconds"):
        Goals(1.0, 0)
    with pytest.raises(ValueError, match=r"duration_s=0\.0 must be above 0"):
        goodput([ONE], Goals(1.0, 1.0), duration_s=0.0)
    with pytest.raises(ValueError, match="duration_s=inf must be above 0 and finite"):
        goodput([ONE], Goals(1.0, 1.0), duration_s=float("inf"))


# --- on the model --------------------------------------------------------------------------


def test_the_tokens_of_a_timed_stream_are_the_streams(make_model):
    from minimodel.engine.generate import generate_with_cache, stream_with_cache
    model = make_model()
    prompt = [3, 250, 17, 4, 99]
    tokens, times = timed(lambda: stream_with_cache(model, prompt, 9, stop_ids=()))
    assert tokens == generate_with_cache(model, prompt, 9, stop_ids=())
    assert len(times.token_times_s) == 9 and times.ttft_s > 0 and times.tpot_s > 0


@pytest.mark.parametrize("module", ["engine.metrics", "simulate.cost", "simulate.hardware"])
def test_it_needs_no_tensors(module):
    code = (f"import sys, minimodel.{module}\n"
            "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
            "sys.exit(f'brings {heavy}' if heavy else 0)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
