"""Chapter 04: its drawings show the numbers they are given, its records tell what it says."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch

from minimodel.engine.recall import Recall, ask
from minimodel.lesson import ages, chapter_04
from minimodel.lesson.exercises.chapter_04 import CHAPTER, with_value
from minimodel.lesson.exercises.common import ODD, odd_model
from minimodel.lesson.exercises.engine import judge
from minimodel.lesson.town import RED_DOOR, TOWN
from minimodel.model import checkpoint, train
from minimodel.model.corpus import Document
from minimodel.tokenizer import encode

NOTEBOOK = Path(__file__).parents[2] / "chapters/04_training.ipynb"
TINY = train.Recipe(ODD, (train.Stage(8, 30), train.Stage(24, 40)))


@pytest.fixture(scope="module")
def toy():
    return checkpoint.load()


# --- texts and weights -----------------------------------------------------------------------


def test_every_byte_stands_on_the_ground_of_its_weight():
    doc = Document().mark(257, 0.0).text("ab", 0.15).text("c", 1.0).value("42").text("!", 0.5)
    shown = chapter_04.weighted_texts({"one": doc}).html
    body = shown.split("<dt>one</dt>")[1]
    assert re.findall(r'<(\w+) class="ss-w(\d+)">(.*?)</', body) == [
        ("span", "0", "&lt;|start|&gt;"), ("span", "7", "ab"), ("span", "28", "c"),
        ("b", "42", "42"), ("span", "16", "!")]


def test_a_long_text_is_cut_at_a_line():
    doc = Document().text("one\ntwo\nthree\n", 1.0)
    assert ">one\ntwo</span> ...</dd>" in chapter_04.weighted_texts({"x": doc}, most=2).html
    assert " ...</dd>" not in chapter_04.weighted_texts({"x": doc}, most=3).html


def test_teacher_forcing_shifts_by_one_place():
    drawing = chapter_04.teacher_forcing("a7 c", [0, 0.2, 1])
    words = re.findall(r">([^<>]+)</text>", drawing)
    assert words == ["reads", "is asked", "weight", "a", "7", "0", "7", "␣", "0.2", "␣", "c", "1"]
    with pytest.raises(ValueError, match="2 weights do not fit 4 tokens: give one for each but "
                                         "the first, 3"):
        chapter_04.teacher_forcing("a7 c", [0, 1])


# --- runs ------------------------------------------------------------------------------------


def rows(count: int, start: int = 1) -> list[dict]:
    return [{"step": step, "length": 8, "loss": 7.0 - step / 10, "imbalance": 1.0,
             "recall": None if step <= 20 else step / 100}
            for step in range(start, start + count)]


def test_smoothing_leaves_out_steps_that_measured_nothing():
    steps, loss = chapter_04.smoothed(rows(35), "loss")
    assert steps == [10, 20, 30] and loss == pytest.approx([6.45, 5.45, 4.45])
    steps, recall = chapter_04.smoothed(rows(35), "recall")
    assert steps == [30] and recall == pytest.approx([0.255])


def test_a_run_is_told_as_far_as_it_came():
    assert chapter_04.run_words(rows(5)) == "After 5 steps."
    assert chapter_04.run_words(rows(35)) == (
        "After 35 steps the loss has gone from 6.45 to 4.45; of the values in its rows the model "
        "wrote 26 % whole.")
    shown = chapter_04.run_figure(rows(35), TINY)
    assert set(shown.table["kind"]) == {"measured"}
    assert shown.fig.axes[0].get_xlim() == (0, 70)


def test_a_run_that_has_not_recalled_claims_no_recall():
    early, later = (chapter_04.run_figure(rows(count), TINY).fig.axes[0] for count in (20, 35))
    assert "recalls nothing yet" in early.get_title(loc="left")
    assert "then the recall" in later.get_title(loc="left")


def test_the_live_plot_waits_between_drawings(monkeypatch, capsys):
    monkeypatch.delenv("MINIMODEL_QUIET", raising=False)
    monkeypatch.setattr(chapter_04, "in_notebook", lambda: True)
    now, drawn = iter([0.0, 1.0, 4.5, 4.6, 5.0, 9.0, 9.1]), []
    plot = chapter_04.LivePlot(TINY, every_s=4, clock=lambda: next(now))
    monkeypatch.setattr(plot, "_put", lambda figure: drawn.append(figure.alt))
    for count in (10, 20, 30, 40):
        plot.show(rows(count))
    assert [words.split(" the loss")[0] for words in drawn] == ["After 20 steps", "After 40 steps"]
    monkeypatch.setenv("MINIMODEL_QUIET", "1")
    plot.show(rows(50))                 # asks no clock: nobody watches
    assert len(drawn) == 2


def test_outside_a_notebook_the_last_plot_is_words(capsys):
    chapter_04.LivePlot(TINY).finish(rows(35))
    assert capsys.readouterr().out.startswith("[figure: After 35 steps the loss has gone")


def test_the_fall_is_the_steepest_by_share_and_not_by_difference():
    log = [{"step": s, "loss": loss} for s, loss in ((1, 9.0), (2, 5.0), (3, 4.0), (4, 1.0))]
    assert [line["step"] for line in chapter_04.steepest_fall(log)] == [3, 4]


def test_the_moment_is_read_from_the_log():
    lengths = [64] * 4 + [128] * 2 + [256] * 2
    log = [{"step": 50 * i, "length": length, "loss": 4.0 / 2 ** (i > 3),
            "recall": None if i < 5 else i / 20} for i, length in enumerate(lengths, 1)]
    shown = chapter_04.appears_figure(log)
    assert "fastest between steps 150 and 200" in shown.alt
    assert "rise from 25 % at step 250 to 40 % at step 400" in shown.alt
    assert "Recorded" in shown.caption
    assert [text.get_text() for text in shown.fig.axes[1].texts] == [
        " rows of 256 from here"]


def test_the_plan_shows_rates_between_the_recipes_ends():
    shown = chapter_04.schedule_figure(train.SHIPPED)
    assert set(shown.table["kind"]) == {"modelled"}
    rates = [y for name, y in zip(shown.table["series"], shown.table["y"], strict=True)
             if name == "rate"]
    assert max(rates) == 100 and rates[-1] < 2


# --- a model at some age ---------------------------------------------------------------------


def test_the_looks_at_all_places_add_up_to_one():
    model, tokens = odd_model(4), torch.tensor(encode("owner"))
    looks = torch.tensor([ages.looks_at(model, tokens, place)
                          for place in range(len(tokens))])
    assert looks.shape == (len(tokens), ODD.num_layers, ODD.num_heads)
    assert torch.allclose(looks.sum(0), torch.ones(3, 4), atol=0.004)


def test_an_age_has_a_chance_for_every_byte_of_the_answer(toy):
    age = ages.look_at(toy)
    assert age["answer"].startswith(ages.ANSWER)
    assert len(age["chances"]) == len(ages.ANSWER) and min(age["chances"]) > 0.3
    assert len(ages.look_at(odd_model(4).float())["looks"]) == ODD.num_layers


def test_one_forward_judges_as_writing_does(toy):
    wrong = RED_DOOR.__class__(RED_DOOR.kind, RED_DOOR.key, "0000")
    assert ages.recalls(toy, TOWN, RED_DOOR)
    assert f" {RED_DOOR.value}." in ask(toy, TOWN, RED_DOOR)
    assert not ages.recalls(toy, TOWN, wrong)
    assert not ages.recalls(odd_model(4).float(), ages.few_facts(), RED_DOOR)


def test_an_age_is_drawn_as_it_was_recorded():
    seen = [{"step": step, "copied": copied, "recalled": 0.0, "answer": f"\nA: {step}\ufffd\nrest",
             "chances": [0.25] * len(ages.ANSWER), "looks": [[0.0, 0.5], [1.0, 0.1]]}
            for step, copied in ((0, 0.1), (70, 0.9))]
    stepper = chapter_04.ages_stepper(seen)
    assert stepper.labels == ["step 0: it answers 'A: 0·'", "step 70: it answers 'A: 70·'"]
    assert "copied 90 %" in stepper.frames[1] and "layer 1" in stepper.frames[1]
    assert stepper.frames[1].count("fill-opacity:1.00") == 1        # the one head that looks


def test_only_a_loss_below_the_floor_is_called_cheating():
    honest, floor = [5.0 - i / 10 for i in range(15)], 3.26
    for last, words in ((0.4, "which no honest reader can reach"), (3.5, "falls to 3.50.")):
        cheat = [5.0 - (5.0 - last) * i / 14 for i in range(15)]
        shown = chapter_04.cheating_figure(honest, cheat, floor)
        assert words in shown.alt
        assert ("below what noise allows: the" in shown.fig.axes[0].get_title(loc="left")) == (
            last < floor)


# --- what was measured -----------------------------------------------------------------------


def test_recorded_recall_and_that_of_this_run_stand_apart():
    sweep = [{"facts": f, "bytes": b, "asked": 50, "right": r}
             for f, b, r in ((2, 900, 49), (5, 900, 45), (9, 900, 30), (5, 400, 47), (5, 1700, 44))]
    live = {(5, 900): Recall("", 7, 6)}
    table = chapter_04.recall_figure(sweep, live).table
    assert table["recorded, % right"] == pytest.approx([98, 90, 60, 94, 88])
    assert table["this run"] == ["", "6 of 7", "", "", ""]
    assert table["recorded, interval"][2] == "46% to 72%"


def test_the_records_are_of_the_small_recipe():
    log, seen = (chapter_04.recorded(f"training/small_{name}") for name in ("log", "ages"))
    last = log[-1]["step"]
    assert 1000 <= last <= train.SMALL.num_steps
    assert [line["step"] for line in log] == list(range(50, last + 1, 50))
    assert all(line["tokens"] == train.SMALL.tokens_before(line["step"]) for line in log)
    assert seen[0]["step"] == 0 and 1000 <= seen[-1]["step"] <= last
    assert {len(age["chances"]) for age in seen} == {len(ages.ANSWER)}
    layers = train.SMALL.config.num_layers
    assert {len(age["looks"]) for age in seen} == {layers}


def test_the_records_tell_what_the_chapter_says():
    seen = chapter_04.recorded("training/small_ages")
    copies = next(age["step"] for age in seen if age["copied"] > 0.5)
    recalls = next(age["step"] for age in seen if age["recalled"] > 0.3)
    assert copies < recalls
    sweep = {(line["facts"], line["bytes"]): line["right"] / line["asked"]
             for line in chapter_04.recorded("training/recall_sweep")}
    assert len(sweep) == 9
    lost_to_facts = sweep[2, 1000] - sweep[24, 1000]
    lost_to_length = sweep[8, 350] - sweep[8, 2800]             # eight times as long
    assert lost_to_facts > lost_to_length


def test_the_page_holds_the_exercises_as_they_are():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}
    for id, task in CHAPTER.exercises.items():
        name = id.replace(".", "-")
        assert cells[f"exercise-{name}"] == f'exercise("{id}")'
        assert task.check is None or cells[f"try-{name}"] == task.cell
    counts = itertools.groupby(sorted(task.kind for task in CHAPTER.exercises.values()))
    assert [kind for kind, _ in counts] == ["check", "code", "think"]


# --- answers: odd but right, and wrong in a way that a sentence can mend ----------------------


def verdict_on(id: str, answer) -> tuple[bool, str]:
    verdict = judge(CHAPTER[id], answer)
    return verdict.passed, verdict.message


def test_whole_values_may_be_averaged_in_float32():
    def whole(bytes_right, spans):
        return torch.stack([bytes_right[a:a + n].all() for a, n in spans]).float().mean()

    def by_byte(bytes_right, spans):
        return torch.cat([bytes_right[a:a + n] for a, n in spans]).float().mean()

    assert verdict_on("4.5", whole)[0]
    assert "share of right bytes" in verdict_on("4.5", by_byte)[1]
    assert "share of the five" in verdict_on("4.5", lambda b, s: 5 * whole(b, s))[1]


def test_a_loss_is_divided_by_the_weights_of_what_is_asked_for():
    def loss(divisor):
        def loss_of_text(logits, ids, weights):
            surprise = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            return (surprise * weights[1:]).sum() / divisor(weights)
        return loss_of_text

    assert verdict_on("4.2", loss(lambda weights: weights[1:].sum()))[0]
    assert "still counts the first token" in verdict_on("4.2", loss(lambda w: w.sum()))[1]


def mirror(weight: float, draw=None):
    def document(rng, length):
        text = "".join((draw or rng).choice("abcdefghij") for _ in range(length))
        return Document().text(text, 0.0).text("\n", 0.4).text(text[::-1], weight)
    return document


def test_a_mirror_counts_one_and_draws_from_its_own_rng():
    assert verdict_on("4.3", mirror(1.0))[0]
    assert "let each count one" in verdict_on("4.3", mirror(-2.0))[1]
    assert "draw with `rng` alone" in verdict_on("4.3", mirror(1.0, draw=random.Random(7)))[1]


def test_a_bias_pushed_by_the_difference_is_told_of_the_sign():
    def proportional(bias, counts, rate):
        return bias + rate * (counts.float().mean() - counts)

    def by_cases(bias, counts, rate):
        new = bias + torch.where(counts < counts.float().mean(), rate, -rate)
        return new - new.mean()

    assert "Only the sign" in verdict_on("4.4", proportional)[1]
    assert verdict_on("4.4", by_cases)[0]


def test_shares_in_percent_are_told_of_the_scale():
    assert "between 0 and 1" in verdict_on("4.6", (77, 96))[1]
    assert "low end first" in verdict_on("4.6", (0.96, 0.77))[1]
    assert verdict_on("4.6", [0.77, 0.96])[0]


def test_changed_answers_are_facts_in_any_order():
    def changed(ask, notebook, fact, value):
        other = with_value(notebook, fact, value)
        return {old for old, new in zip(notebook.facts, other.facts, strict=True)
                if ask(notebook, old) != ask(other, new)}

    assert verdict_on("4.7", changed)[0]
    keys = verdict_on("4.7", lambda *given: [fact.key for fact in changed(*given)])[1]
    assert "holds a str" in keys
