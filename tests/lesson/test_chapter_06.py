"""Chapter 06: its drawings say what they were given, its roofline is the cost model's."""

import re
import statistics
from itertools import pairwise

import pytest
import torch
from notebooks import Notebook

from minimodel.cache.dense import DenseCache
from minimodel.config import ModelConfig
from minimodel.engine.metrics import RequestTimes
from minimodel.lesson import chapter_06, facts
from minimodel.lesson.exercises.chapter_06 import CHAPTER
from minimodel.lesson.exercises.engine import judge
from minimodel.simulate import cost, hardware

NOTEBOOK = Notebook("06_two_clocks")
HERE = "this machine: 94.5 GFLOP/s, 27.0 GB/s"


# --- measuring -----------------------------------------------------------------------------


def test_operations_are_counted_and_done():
    x, found = torch.ones(3, 5), []

    def three():
        found.append((x + x) * 2 @ torch.ones(5, 7))

    assert chapter_06.count_operations(lambda: None) == 0
    assert chapter_06.count_operations(three) == 4          # the ones are made, too
    assert torch.equal(found[0], torch.full((3, 7), 20.0))


def test_a_hollow_toy_hands_out_as_many_operations(make_model):
    counts = []
    for sizes in ({}, {"hidden_size": 12, "head_dim": 2, "dense_size": 4, "expert_size": 2}):
        model = make_model(dtype=torch.float32, **sizes)
        cache = DenseCache(model.config, 20)
        batch = cache.batch([1])
        counts.append(chapter_06.count_operations(
            lambda m=model, c=cache, b=batch: m(torch.tensor([65]), b, c)))
    assert counts[0] == counts[1] > 100


# --- drawings ------------------------------------------------------------------------------


def test_arrivals_have_a_box_a_token_in_proportion():
    drawing = chapter_06.arrivals(RequestTimes(10.0, (16.0, 17.0, 19.0, 20.0)))
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="26"', drawing)]
    assert len(widths) == 4
    scale = (chapter_06.WIDTH - 2) / 10
    assert widths[0] == pytest.approx(6 * scale - 1, abs=0.02)
    assert widths[1:] == pytest.approx([g * scale - 1.5 for g in (1, 2, 1)], abs=0.02)
    assert "60% of the whole answer's time, as long as 6 of the 3 gaps" in drawing.alt


def test_gaps_are_shown_in_usual_gaps_and_the_silence_is_named():
    shown = chapter_06.gaps_figure([0.2, 0.2, 0.1, 0.3], [0.2, 0.2, 4.0, 0.4])
    assert shown.table["y"] == pytest.approx([1, 1, 0.5, 1.5, 1, 1, 20, 2])
    assert set(shown.table["kind"]) == {"measured"}
    assert "gap 3 is 20 times as long" in shown.alt


def test_the_roof_figure_keeps_bound_and_measurement_apart():
    toy = {"prefill": (300.0, 40e9), "decode": (1.0, 2e9)}
    shown = chapter_06.roof_figure({"4-byte": 90e9, "2-byte": 200e9}, 30e9, toy,
                                   ([1, 2, 4], [10e9, 20e9, 50e9], "2-byte"))
    kinds = dict(zip(shown.table["series"], shown.table["kind"], strict=True))
    assert kinds == {"roof, 4-byte": "modelled", "roof, 2-byte": "modelled",
                     "large matrix, 2-byte": "measured", "toy, prefill": "measured",
                     "toy, decode": "measured"}
    assert "20 times the FLOP/s of its decode" in shown.alt
    assert "decode stays 15 times under the roof" in shown.alt     # 30 of 30 GB/s x 1, over 2


def test_rows_are_shown_in_times_of_one_row():
    rows = [1, 2, 4, 8, 16, 32, 64]
    shown = chapter_06.rows_figure(rows, [2, 2, 3, 4, 8, 16, 30], [1, 1, 1, 2, 4, 8, 16])
    found = list(zip(shown.table["series"], shown.table["kind"], shown.table["y"], strict=True))
    assert ("measured", "measured", 15) in found
    assert ("the roofline's bound", "modelled", 8) in found
    assert "16 rows take 4.0 times as long as one" in shown.fig.axes[0].get_title("left")
    assert "The bound is flat up to 4 rows" in shown.alt
    assert "4 rows take 1.5 times as long as one, and 64 rows 15 times" in shown.alt


def test_the_toys_batches_are_relative_to_one_alone():
    shown = chapter_06.toy_batch_figure([1, 2, 4], {500: [2, 3, 6], 10: [1, 1, 2]})
    found = list(zip(*shown.table.values(), strict=True))
    assert ("500 tokens of notes each", "measured", 2 / 6, 4 * 2 / 6) in found
    assert ("10 tokens of notes each", "measured", 1 / 2, 2.0) in found
    assert "10 tokens of notes each, 4 streams write 2 times as much as one, each at 50%" in (
        shown.alt)


def test_v3_is_modelled_and_the_service_reported():
    table = chapter_06.v3_batch_figure().table
    found = list(zip(*table.values(), strict=True))
    assert {(s, k) for s, k, _, _ in found if k == "reported"} == {("reported, 2025", "reported")}
    service = next((x, y) for _, kind, x, y in found if kind == "reported")
    low, high = map(int, facts.find("P-OI06").value.split("-"))
    assert low < service[0] < high and service[1] == facts.find("P-OI08").number / 8
    at_128 = next((x, y) for s, k, x, y in found if k == "modelled" and s.startswith("4,989")
                  and y == pytest.approx(6490, rel=1e-3))
    assert at_128[0] == pytest.approx(51, abs=0.5)


def test_no_batch_is_drawn_that_the_chip_cannot_hold():
    shown = chapter_06.v3_batch_figure()
    for context, largest in ((1_000, 512), (4_989, 128)):
        batches = [round(y / x) for s, _, x, y in zip(*shown.table.values(), strict=True)
                   if s.startswith(f"{context:,}")]
        assert max(batches) == largest
        assert cost.V3_DECODE.step_bytes(largest, context) <= hardware.H800.memory_bytes
    assert "3 times the reported speed" in shown.fig.axes[0].get_title("left").replace("\n", " ")
    assert "its 88 requests could each have had 64 tokens a second" in shown.alt


def test_cards_are_whole():
    table = chapter_06.cards_figure().table
    found = dict(zip(table["x"], table["y"], strict=True))
    assert found["RTX 5090"] == 18 and found["B200"] == 4
    assert set(table["kind"]) == {"modelled"}


# --- the roofline to play with -------------------------------------------------------------


def test_the_roofline_gives_the_worked_example():
    found = chapter_06.on_the_roof("H800", batch=128, context=4_989)
    assert found["per_chip"] == pytest.approx(6490, abs=1)
    assert found["per_user"] == pytest.approx(51, abs=0.5)
    assert found["ridge"] == pytest.approx(591, abs=0.5)
    assert found["waits"] == "memory" and found["fits"] == ""


@pytest.mark.parametrize("chip", [*chapter_06.MENU, HERE])
@pytest.mark.parametrize(("batch", "context"), [(1, 0), (32, 2_000), (1024, 50_000)])
def test_its_step_is_the_cost_models(chip, batch, context):
    found = chapter_06.on_the_roof(chip, batch, context)
    name, peak, bandwidth, _, work = chapter_06.chosen(chip)
    step = cost.step_seconds(work.step_bytes(batch, context), work.step_flops(batch, context),
                             bandwidth, peak or float("inf"))
    assert found["step_ms"] == pytest.approx(1e3 * step)
    assert found["name"] == name and found["per_chip"] == pytest.approx(batch / step)
    assert len(found["path_x"]) == len(found["path_y"]) == len(chapter_06.BATCHES)
    assert found["decode_y"] <= (peak or float("inf"))


def test_what_does_not_fit_is_said():
    assert "more than its 80 GB" in chapter_06.on_the_roof("H800", 1024, 4_989)["fits"]
    assert chapter_06.on_the_roof(HERE, 1024, 50_000)["fits"] == ""


def test_a_roof_that_nobody_verified_has_no_top():
    found = chapter_06.on_the_roof("RTX 5090", 1024, 0)
    assert found["ridge"] == "not known" and found["waits"] == "memory"
    assert len(found["roof_x"]) == 2
    with pytest.raises(hardware.UnknownNumberError):
        hardware.RTX_5090.flops_per_s("fp8")


def test_this_machine_is_given_in_words():
    assert chapter_06.rates_in(HERE) == (94.5e9, 27e9)
    found = chapter_06.on_the_roof(HERE, batch=3, context=42)
    toy = ModelConfig()
    expected = 3 * toy.flops(1, num_past=41) / (4 * toy.num_parameters() + 3 * 42 * 2048)
    assert found["intensity"] == pytest.approx(expected)


def test_the_explorable_offers_the_machine_as_measured():
    shown = chapter_06.roofline(peak=94.46e9, bandwidth=27.04e9)
    assert [HERE, "this machine, when this page was built"] in shown.controls[0].options
    assert "H800: a step fetches 21.6 GB and waits for memory." in repr(shown)
    assert "21.6 GB" in shown._repr_html_()


# --- the notebook --------------------------------------------------------------------------


def wrong_by(gap_of):
    """A goodput that takes `gap_of` the gaps in place of their mean."""
    def goodput(requests, ttft_goal, tpot_goal, seconds):
        return sum(times[0] - arrived <= ttft_goal and gap_of(gaps(times)) <= tpot_goal
                   for arrived, times in requests) / seconds

    def gaps(times):
        return [later - earlier for earlier, later in pairwise(times)] or [0]

    return goodput


def test_only_the_mean_of_the_gaps_is_tpot():
    exercise = CHAPTER["6.3"]
    assert judge(exercise, wrong_by(statistics.mean))
    assert "the mean gap, not the longest" in judge(exercise, wrong_by(max)).message
    assert not judge(exercise, wrong_by(statistics.median))
    in_floats = wrong_by(statistics.mean)
    assert judge(exercise, lambda *given: torch.tensor(in_floats(*given)))


def test_the_largest_batch_may_be_computed_in_gigabytes():
    assert judge(CHAPTER["6.4"], (80 - 30) / 0.4)
    assert "175 requests keep" in judge(CHAPTER["6.4"], (100 - 30) / 0.4).message


def test_an_answer_that_is_no_pair_is_told_so():
    assert "Return two things" in judge(CHAPTER["6.5"], lambda *given: [1, 2, 3]).message


def test_the_notebook_holds_every_exercise_as_its_file_has_it():
    found = NOTEBOOK.cells
    for exercise in CHAPTER.exercises.values():
        place = exercise.id.replace(".", "-")
        assert found[f"exercise-{place}"] == f'exercise("{exercise.id}")'
        if exercise.check:
            assert found[f"try-{place}"] == exercise.cell
