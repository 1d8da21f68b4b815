"""Chapter 09: its clocks and crowds are what they say, its drawings show what was recorded."""

import re
from itertools import count

import pytest
import torch

from minimodel.engine.metrics import percentile
from minimodel.engine.request import Request, Sampling
from minimodel.engine.scheduler import Limits, Scheduler
from minimodel.engine.steps import Share, StepRecord
from minimodel.lesson import chapter_09
from minimodel.lesson.chapter_09 import ProcessClock, Run, TickClock, Visitor
from minimodel.lesson.exercises.chapter_09 import CHAPTER, hand_out
from minimodel.lesson.exercises.engine import judge
from minimodel.lesson.town import TOWN
from minimodel.simulate import cost, hardware
from minimodel.tokenizer import decode


def on_ticks(make_model, visitors, batch=None, ridge=7, **limits):
    model = make_model(dtype=torch.float32)
    clock = TickClock(model, ridge)
    return chapter_09.serve(chapter_09.make_engine(model, clock, 40, **limits), clock, visitors,
                            batch)


def visitor(at, size, max_tokens):
    return Visitor(at, [40 + i % 50 for i in range(size)], max_tokens)


def recorded(number, started, ended, *shares, preempted=(), finished=(), waiting=0, held=3):
    return StepRecord(number, started, ended, tuple(Share(*share) for share in shares), preempted,
                      finished, waiting, held)


def request(name, prompt_size, arrived, times):
    made = Request(name, tuple(range(prompt_size)), arrived_s=arrived)
    made.output, made.token_times_s = [5] * len(times), list(times)
    return made


@pytest.fixture
def short_run():
    """A reads 5 and writes 3; B comes at 1, is sent back once, and reads again."""
    records = [
        recorded(0, 0.0, 2.0, ("0", "prefill", 0, 5), waiting=1),
        recorded(1, 2.0, 3.0, ("0", "decode", 5, 1), ("1", "prefill", 0, 4), held=5),
        recorded(2, 3.0, 4.0, ("0", "decode", 6, 1), preempted=("1",), finished=("0",), waiting=1),
        recorded(3, 4.0, 6.0, ("1", "prefill", 0, 5), finished=("1",), held=0)]
    return Run([request("0", 5, 0.0, [2.0, 3.0, 4.0]), request("1", 4, 1.0, [3.0, 6.0])], records)


# --- clocks --------------------------------------------------------------------------------


def test_a_step_takes_a_tick_at_least_and_more_beyond_the_ridge(make_model):
    run = on_ticks(make_model, [visitor(0.0, 21, 3)])
    lasted = [record.ended_s - record.started_s for record in run.records]
    assert lasted == [3.0, 1.0, 1.0]                        # 21 rows at 7 a tick, then one each
    run = on_ticks(make_model, [visitor(0.0, 21, 3)], max_tokens_per_step=5)
    assert [record.ended_s for record in run.records] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_idle_time_is_skipped_and_nobody_is_early(make_model):
    run = on_ticks(make_model, [visitor(0.0, 3, 2), visitor(50.5, 4, 1)])
    assert [record.started_s for record in run.records] == [0.0, 1.0, 50.5]
    assert [r.arrived_s for r in run.requests] == [0.0, 50.5]


def test_the_process_clock_counts_in_its_unit_and_can_skip(monkeypatch):
    seconds = count(10, 3)
    monkeypatch.setattr(chapter_09.time, "process_time", lambda: next(seconds))
    clock = ProcessClock(unit_s=2.0)                        # starts at 10
    assert clock() == 1.5                                   # 13
    clock.skip_to(20.0)                                     # 16: 3 of 20
    assert clock() == pytest.approx(17 + 4.5)               # 19
    clock.skip_to(5.0)
    assert clock() > 20


# --- crowds --------------------------------------------------------------------------------


def test_visitors_are_the_same_every_time_and_in_order():
    crowd = chapter_09.visitors(17)
    assert crowd == chapter_09.visitors(17) != chapter_09.visitors(17, seed=10)
    assert [v.at for v in crowd] == sorted(v.at for v in crowd)
    assert [i for i, v in enumerate(crowd) if len(v.prompt) > 1000] == [5, 13]
    assert all(4 <= v.max_tokens <= 60 for v in crowd)


def test_a_prompt_has_the_first_lines_and_the_question():
    text = decode(chapter_09.ask(2, TOWN.facts[1]))
    assert text.endswith(TOWN.facts[1].question) and TOWN.lines[1] in text
    assert TOWN.lines[2] not in text


# --- serving -------------------------------------------------------------------------------


def test_static_batches_wait_for_their_last(make_model):
    crowd = [visitor(0.0, 3, most) for most in (2, 9, 4, 5)]
    static = on_ticks(make_model, crowd, batch=2)
    assert len(static.records) == 9 + 5
    assert {s.request_id for s in static.records[8].shares} == {"1"}
    assert {s.request_id for s in static.records[9].shares} == {"2", "3"}
    continuous = on_ticks(make_model, crowd, max_running=2)
    assert len(continuous.records) == 11                    # 2, 4 and 5 in one slot after another
    assert continuous.num_rows == static.num_rows == 4 * 3 + (2 + 9 + 4 + 5) - 4


def test_everyone_gets_the_tokens_asked_for_and_time_counts_from_the_arrival(make_model):
    crowd = [visitor(0.0, 6, 11), visitor(2.5, 30, 3), visitor(2.5, 4, 8)]
    run = on_ticks(make_model, crowd, batch=1)
    assert [len(r.output) for r in run.requests] == [11, 3, 8]
    assert run.requests[2].arrived_s == 2.5
    waits = [r.token_times_s[0] - r.arrived_s for r in run.requests]
    assert run.ttft(100) == max(waits) == waits[2]
    assert run.throughput == pytest.approx(22 / run.records[-1].ended_s)
    gaps = [b - a for r in run.requests for a, b in zip(r.token_times_s, r.token_times_s[1:],
                                                        strict=False)]
    assert run.gap(75) == percentile(gaps, 75)


def test_another_scheduler_takes_the_place_of_the_first(make_model):
    class Counting(Scheduler):
        plans = 0

        def plan(self):
            Counting.plans += 1
            return super().plan()

    run = on_ticks(make_model, [visitor(0.0, 5, 4)], scheduler=Counting)
    assert Counting.plans == len(run.records) + 0 == 4


def test_visitors_that_cannot_be_served_are_refused(make_model):
    with pytest.raises(ValueError, match="order of their arrival"):
        on_ticks(make_model, [visitor(2.0, 5, 4), visitor(1.0, 5, 4)])
    with pytest.raises(ValueError, match="batch=0 serves nobody"):
        on_ticks(make_model, [visitor(0.0, 5, 4)], batch=0)
    with pytest.raises(ValueError, match=r"visitor at 3\.5 is rejected: 700 tokens"):
        on_ticks(make_model, [visitor(0.0, 5, 4), visitor(3.5, 700, 4)])


def test_a_scheduler_that_serves_nobody_does_not_hang(make_model):
    class Shut(Scheduler):
        def _admit(self, request):
            return False

    with pytest.raises(RuntimeError, match="1 requests wait and none"):
        on_ticks(make_model, [visitor(0.0, 5, 4), visitor(9.0, 5, 4)], scheduler=Shut)


def test_the_hollow_toy_has_the_same_steps(make_model):
    crowd = [visitor(0.0, 13, 6), visitor(1.0, 29, 5), visitor(3.0, 8, 9)]
    real = make_model(dtype=torch.float32)
    runs = []
    for model in (real, chapter_09.hollow(real.config)):
        clock = TickClock(model, 7)
        engine = chapter_09.make_engine(model, clock, 9, max_tokens_per_step=11)
        runs.append([r.shares for r in chapter_09.serve(engine, clock, crowd).records])
    assert runs[0] == runs[1]


# --- drawings ------------------------------------------------------------------------------


def boxes(drawing, height):
    """x and width of all boxes of a height."""
    return [(float(x), float(w)) for x, w in re.findall(
        rf'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="{height}" rx="1"', drawing)]


def test_the_timeline_has_a_box_a_share_as_wide_as_its_step(short_run):
    drawing = chapter_09.timeline(short_run, "A title")
    scale = (chapter_09.WIDTH - chapter_09.LEFT - 2) / 6
    found = boxes(drawing, 14)
    assert len(found) == sum(len(record.shares) for record in short_run.records)
    assert found[0] == (pytest.approx(chapter_09.LEFT + 0.75),
                        pytest.approx(2 * scale - 1.5, abs=0.01))
    assert found[-1][0] == pytest.approx(chapter_09.LEFT + 4 * scale + 0.75, abs=0.01)
    assert drawing.count("×") == 1
    assert "2 requests, 4 steps, done after 6" in drawing.alt and "lasts 3.0" in drawing.alt
    assert "A reads from 0, writes from 2 to 4; B reads from 2, writes from 3 to 6." in drawing.alt


def test_the_timeline_keeps_the_scale_of_another(short_run):
    half = chapter_09.timeline(short_run, "A title", until=12.0)
    full = chapter_09.timeline(short_run, "A title")
    assert boxes(full, 14)[0][1] + 1.5 == pytest.approx(2 * (boxes(half, 14)[0][1] + 1.5), abs=0.03)


def test_who_writes_in_a_long_step_waits_for_most_of_it(short_run):
    """In the last step, B is written to for two ticks of which one is the wait for the other."""
    long = recorded(3, 4.0, 6.0, ("1", "decode", 5, 1), finished=("1",), held=0)
    drawing = chapter_09.timeline(Run(short_run.requests, [*short_run.records[:3], long]), "T")
    scale = (chapter_09.WIDTH - chapter_09.LEFT - 2) / 6
    assert boxes(drawing, 14)[-1] == (pytest.approx(chapter_09.LEFT + 5 * scale + 0.75, abs=0.01),
                                      pytest.approx(scale - 1.5, abs=0.01))
    assert drawing.count("fill-opacity:0.25") == 1


def test_scrubbing_shows_each_record(short_run):
    stepper = chapter_09.scrub(short_run, Limits(max_tokens_per_step=9), num_blocks=6)
    assert stepper.labels == [
        f"step {number} of 4: {writes} write, {reads} tokens of prompts are read{more}"
        for number, writes, reads, more in ((1, 0, 5, ""), (2, 1, 4, ""),
                                            (3, 1, 0, "; B sent back"), (4, 0, 5, ""))]
    for frame, words in zip(stepper.frames, (
            ("Budget: 5 of 9", "reads 5", "not here yet"), ("reads 4", "5 of 6 held"),
            ("writes (last)", "sent back", "1 wait"), ("done", "reads 5 (last)")), strict=True):
        assert all(each in frame for each in words)


def test_what_a_request_holds_without_a_share(short_run):
    first, second = short_run.requests
    held = [[chapter_09._computed_before(short_run, r, record) for record in short_run.records]
            for r in (first, second)]
    assert held == [[5, 6, 0, 0], [0, 4, 0, 0]]


def test_figures_say_what_they_were_given(short_run):
    runs = {8: short_run, 64: short_run}
    table = chapter_09.budget_figure([8, 64], runs, short_run).table
    rows = list(zip(*table.values(), strict=True))
    assert ("throughput", "modelled", 64, 1.0) in rows
    assert ("p99 gap", "modelled", 8, short_run.gap(99)) in rows
    real = chapter_09.real_figure(["static", "other"], [short_run, short_run]).table
    assert set(real["kind"]) == {"measured"} and real["y"][:2] == [4, 4]
    thrash = chapter_09.thrash_figure(["fit", "eager"], [short_run, short_run], 8)
    assert thrash.table["y"] == [16, 16] and "that need 8" in thrash.alt
    waits = {"first": [3, 3], "shortest": [4, 40], "aging": [3, 5]}
    starved = chapter_09.starved_figure([10, 20], waits)
    assert "shortest 4 to 40 ticks" in starved.alt
    assert set(starved.table["kind"]) == {"modelled"}


# --- the model of a large machine ----------------------------------------------------------


def test_a_chunk_is_free_until_the_arithmetic_takes_longer():
    work, chip = cost.V3_DECODE, hardware.H800
    for batch in (32, 128):
        free = chapter_09.largest_free_chunk(batch)
        least = work.step_bytes(batch, 4_989) / chip.bandwidth_bytes_per_s
        assert free % 16 == 0 and free > 0
        assert chapter_09.v3_step_s(batch, free) == pytest.approx(least)
        flops = work.step_flops(batch, 4_989) + (free + 16) * work.flops_per_token
        assert chapter_09.v3_step_s(batch, free + 16) == pytest.approx(
            flops / chip.flops_per_s("fp8"))
    assert chapter_09.largest_free_chunk(128) != chapter_09.largest_free_chunk(32)


# --- the exercises' own answers ------------------------------------------------------------


def test_shares_go_in_order_and_within_both_limits():
    assert hand_out([1, 50, 1, 20, 9], budget=30, chunk=13) == [1, 13, 1, 13, 2]
    assert hand_out([40, 1], budget=13, chunk=13) == [13, 0]


def test_shares_may_come_as_a_tuple_and_must_be_numbers():
    assert judge(CHAPTER["9.3"], lambda *given: tuple(hand_out(*given))).passed
    assert not judge(CHAPTER["9.3"], lambda *given: ["a"] * len(given[0])).passed


def send_back(job, running, waiting, pool, *, front=True, release=True, reset=True, keep=True,
              crowd=True, prompt=True, who=None, others=True):
    job = job if who is None else running[who]
    for other in [] if others else [each for each in running if each is not job]:
        pool.release(other.table)
    running.remove(job)
    if not crowd:
        waiting.clear()
    if release:
        pool.release(job.table)
        job.table = None
    job.computed = 0 if reset else job.computed
    job.output = job.output if keep else []
    job.prompt = job.prompt if prompt else job.prompt + job.output
    (waiting.appendleft if front else waiting.append)(job)


@pytest.mark.parametrize(("fault", "words"), [
    ({"front": False}, "behind a newcomer"), ({"release": False}, "were not released"),
    ({"reset": False}, "still counts 24 tokens"), ({"keep": False}, "these tokens already"),
    ({"crowd": False}, "whoever waited before"), ({"prompt": False}, "so the prompt stays"),
    ({"who": -1}, "second one was to be sent back"), ({"others": False}, "no others")])
def test_each_way_to_send_back_wrongly_is_named(fault, words):
    verdict = judge(CHAPTER["9.4"], lambda *given: send_back(*given, **fault))
    assert not verdict.passed and words in verdict.message


@pytest.mark.parametrize(("id", "answer", "words"), [
    ("9.1", (87, 52), "if work could be split evenly"), ("9.1", (103, 62), "up to two of them"),
    ("9.2", 8, "nine requests take one token"), ("9.2", 9, "What about the rest"),
    ("9.5", (500, 499), "prompt alone is not enough"), ("9.5", (541, 541), "no notes yet"),
    ("9.7", 500, "is the budget"), ("9.7", 260, "among the first 200")])
def test_a_likely_mistake_is_met_with_its_reason(id, answer, words):
    verdict = judge(CHAPTER[id], answer)
    assert not verdict.passed and words in verdict.message


@pytest.mark.parametrize("wrongly", [
    lambda waiting, served: max(range(len(waiting)), key=lambda i: -served.get(waiting[i], 0) + i),
    lambda waiting, served: min(range(len(waiting)), key=lambda i: served.get(waiting[i], 99)),
    lambda waiting, served: len(waiting) - 1])
def test_other_orders_are_not_fair_to_customers(wrongly):
    assert not judge(CHAPTER["9.6"], wrongly).passed


def test_sampling_of_visitors_never_stops_early(make_model):
    engine = chapter_09.make_engine(make_model(dtype=torch.float32), lambda: 0.0, 20)
    made = engine.submit([5, 6], Sampling(17, stop_ids=()))
    engine.run()
    assert len(made.output) == 17
