"""Chapter 03: its drawings show the numbers they are given, its notebook holds its exercises."""

import re

import pytest
import torch
from notebooks import Notebook

from minimodel.config import ModelConfig
from minimodel.lesson import chapter_03, facts
from minimodel.lesson.exercises.chapter_03 import CHAPTER
from minimodel.lesson.exercises.common import ODD, odd_model, random_tokens
from minimodel.lesson.exercises.engine import judge
from minimodel.model import checkpoint
from minimodel.model.batch import Batch
from minimodel.model.moe import MoE
from minimodel.tokenizer import encode

NOTEBOOK = Notebook("03_experts")
needs_toy = pytest.mark.skipif(not (checkpoint.TOY / "config.json").exists(),
                               reason="the trained toy is not in minimodel/data/toy")


# --- listening at the gates ------------------------------------------------------------------


def test_routes_are_what_the_gates_answer_for_every_row():
    model, ids = odd_model(3), random_tokens(13, seed=3)
    weights, chosen = chapter_03.routes(model, ids)
    assert weights.shape == chosen.shape == (ODD.num_moe_layers, 13, 2)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 13).double())
    rows = []
    model.moe_layers()[-1].register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0]))
    with torch.no_grad():
        model(torch.tensor(ids), Batch([13], wanted=range(13)))
        assert torch.equal(model.moe_layers()[-1].gate(rows[0])[1], chosen[-1])


def test_routes_stop_listening_when_the_model_fails():
    model = odd_model(3)
    with pytest.raises(IndexError):
        chapter_03.routes(model, [ODD.vocab_size + 5])
    assert not any(layer.gate._forward_hooks for layer in model.moe_layers())


@pytest.mark.parametrize("ids", [[], None])
def test_routes_refuse_what_has_nothing_to_hear(ids):
    model = odd_model(3) if ids == [] else odd_model(3, ModelConfig(num_layers=1))
    with pytest.raises(ValueError, match="a model with expert layers and at least one token"):
        chapter_03.routes(model, ids or [])


def test_every_printable_byte_is_of_one_class():
    text = "".join(map(chr, range(32, 127))) + "\n"
    tokens = torch.tensor(encode(text, start=False))
    times = sum(chapter_03.is_of(tokens, name).int() for name in chapter_03.BYTE_CLASSES)
    assert times.tolist() == [1] * len(text)
    assert [i for i, hit in enumerate(chapter_03.is_of(torch.tensor([257, 52, 97]), "digits"))
            if hit] == [1]


# --- drawings ------------------------------------------------------------------------------------


def test_the_layers_picture_fills_the_experts_that_run():
    config = ModelConfig(num_experts=11, experts_per_token=3)
    drawing = chapter_03.layer_picture(config, "x", [9, 0, 4], [0.61, 0.25, 0.14])
    assert "11 experts; run: 9 (61%), 0 (25%), 4 (14%)" in drawing
    filled = re.findall(r"fill:var\(--ss-expert-inside[^>]*>(\d+)</text>", drawing)
    resting = re.findall(r"fill:var\(--ss-muted[^>]*>(\d+)</text>", drawing)
    assert filled == ["0", "4", "9"]
    assert resting == ["1", "2", "3", "5", "6", "7", "8", "10"]


def test_a_map_is_as_strong_as_the_shares_and_names_the_favourite():
    groups = {"odd": torch.tensor([[0.1, 0.7, 0.2], [0.3, 0.3, 0.4]]),
              "even": torch.tensor([[0.5, 0.25, 0.25], [0.05, 0.9, 0.05]])}
    stepper = chapter_03.visits_stepper(groups, "kind of number")
    assert stepper.labels == ["layer 1: 70% of odd visit expert 1",
                              "layer 2: 90% of even visit expert 1"]
    shades = [[float(s) for s in re.findall(r"fill-opacity:(\d\.\d\d)", frame)]
              for frame in stepper.frames]
    assert shades == [[0.1, 0.7, 0.2, 0.5, 0.25, 0.25], [0.3, 0.3, 0.4, 0.05, 0.9, 0.05]]
    assert ">2: 40%</text>" in stepper.frames[1]


def test_a_text_is_coloured_where_an_expert_reads_it():
    weights = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [1.0, 0.0]]])
    chosen = torch.tensor([[[2, 0], [1, 2], [0, 1], [2, 1], [1, 0]]])
    stepper = chapter_03.expert_stepper("ab\n4 ", chapter_03.Routes(weights, chosen), 4, layer=1)
    assert [label[:8] for label in stepper.labels] == [f"expert {e}" for e in (1, 0, 2, 3)]
    assert stepper.labels[2] == "expert 2 of layer 1: 3 of 5 bytes, most often a b 4"
    assert stepper.labels[3] == "expert 3 of layer 1: 0 of 5 bytes, most often none"
    strengths = [float(s) for s in re.findall(r"fill-opacity:(\d\.\d\d)", stepper.frames[2])]
    assert strengths == pytest.approx([0.1 + 0.3 * w for w in (0.9, 0.4, 0.8)], abs=0.006)
    assert ">ab↵</text>" in stepper.frames[0] and ">4␣</text>" in stepper.frames[0]


def test_a_text_of_another_length_is_refused():
    heard = chapter_03.Routes(torch.ones(1, 3, 2), torch.ones(1, 3, 2).int())
    with pytest.raises(ValueError, match="3 tokens do not fit 2 bytes: leave the start token out"):
        chapter_03.expert_stepper("ab", heard, 4, layer=1)


@pytest.mark.parametrize("layer", [0, 2, -1])
def test_a_layer_without_experts_is_refused(layer):
    heard = chapter_03.Routes(torch.ones(1, 3, 2), torch.ones(1, 3, 2).int())
    with pytest.raises(ValueError, match=rf"no expert layer {layer}: choose 1 to 1"):
        chapter_03.expert_stepper("abc", heard, 4, layer)


def test_a_long_line_goes_on_below():
    text = "x" * 101
    heard = chapter_03.Routes(torch.ones(1, 101, 1), torch.zeros(1, 101, 1).int())
    frame = chapter_03.expert_stepper(text, heard, 2, layer=1).frames[0]
    lines = re.findall(r">(x+)</text>", frame)
    assert len(lines) == 3 and "".join(lines) == text
    right = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', frame)]
    assert len(right) == 101 and max(right) < chapter_03.WIDTH - 8


def test_the_ways_are_drawn_as_multiples_of_the_base():
    times = {"sorted": [2.0, 4.0], "loop over tokens": [2.0, 80.0], "loop over experts": [3.0, 6.0],
             "batched": [1.0, 6.0], "all experts": [4.0, 20.0]}
    drawn = chapter_03.ways_figure([1, 8], times | {"all experts": [0.2, 20.0]}, "sorted")
    assert drawn.fig.axes[0].get_ylim()[0] < 0.1         # the quickest is not cut off
    table = chapter_03.ways_figure([1, 8], times, "sorted").table
    found = {name: [y for series, y in zip(table["series"], table["y"], strict=True)
                    if series == name] for name in times}
    assert found == {"sorted": [1, 1], "loop over tokens": [1, 20], "loop over experts": [1.5, 1.5],
                     "batched": [0.5, 1.5], "all experts": [2, 5]}


def test_the_loads_are_sorted_and_the_mean_is_one():
    figure = chapter_03.loads_figure(torch.tensor([3.0, 5.0, 4.0]), torch.tensor([0.0, 1.0, 8.0]),
                                     layer=2)
    assert figure.table["y"] == pytest.approx([8 / 3, 1 / 3, 0, 1.25, 1.0, 0.75])
    assert "2.7 times without it" in figure.alt


# --- what was recorded ---------------------------------------------------------------------------


def test_the_recorded_runs_differ_in_the_bias_alone_and_say_what_the_chapter_says():
    runs = chapter_03.recorded_runs()
    assert set(runs) == {True, False}
    same = [{key: run[key] for key in ("recipe", "steps", "seed", "every", "date")}
            for run in runs.values()]
    assert same[0] == same[1]
    steps = [report["step"] for report in runs[True]["reports"]]
    assert steps == list(range(25, sum(runs[True]["steps"]) + 1, 25))
    for report in runs[True]["reports"] + runs[False]["reports"]:
        for layer in report["window"]:
            assert sum(layer) / len(layer) == pytest.approx(1, abs=0.002)
    busiest = {on: chapter_03.recorded_loads(run)[-1] for on, run in runs.items()}
    idlest = {on: chapter_03.recorded_loads(run, min)[-1] for on, run in runs.items()}
    assert busiest[True] < 1.5 < 2 < busiest[False]
    assert idlest[True] > 0.5 > 0.2 > idlest[False]
    assert runs[True]["date"] in chapter_03.recorded_figure(runs).caption


def test_the_recorded_parity_is_told_in_words():
    said = chapter_03.recorded_parity()
    assert re.search(r"^Recorded on 20\d\d-\d\d-\d\d, transformers \d", said)
    assert "the same experts for 100% of them" in said.replace("\n", " ")


# --- at scale ------------------------------------------------------------------------------------


def test_the_sizes_are_the_registers_and_the_toys():
    toy, v3, flash = chapter_03.models(ODD)
    assert (toy.total, toy.active) == (ODD.num_parameters(), ODD.num_active_parameters())
    assert (v3.total, v3.active) == (671e9, 37e9)
    assert (flash.total, flash.active) == (facts.find("S11").number, facts.find("S12").number)
    table = chapter_03.models_figure(ODD).table
    assert table["from"] == ["its sizes", "a source", "a source"]


# --- exercises -----------------------------------------------------------------------------------


def verdict(id, answer):
    return judge(CHAPTER[id], answer)


def test_a_gate_may_compute_in_32_bits_and_must_return_the_experts_second():
    def gate(x, weight, bias, k):
        scores = (x.float() @ weight.float().T).sigmoid()
        chosen = (scores + bias.float()).topk(k).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(1, keepdim=True), chosen

    assert verdict("3.2", gate)
    assert "come second" in verdict("3.2", lambda *inputs: gate(*inputs)[::-1]).message


def test_the_bias_rule_goes_by_the_mean_not_by_the_median():
    def by(middle):
        return lambda bias, counts, rate: bias - rate * (counts - middle(counts.float())).sign()

    assert verdict("3.5", by(torch.mean))
    assert "exactly the mean" in verdict("3.5", by(torch.median)).message


def test_the_pace_is_a_ratio_of_whole_steps():
    assert verdict("3.6", 1.875)
    assert "time is added" in verdict("3.6", 0.875).message
    assert "the other way round" in verdict("3.6", 48 / 90).message.lower()


# --- play ----------------------------------------------------------------------------------------


@needs_toy
def test_the_explorer_shows_what_the_gates_say():
    model, text = checkpoint.load(), chapter_03.SENTENCES["sums"]
    weights, chosen = chapter_03.routes(model, encode(text))
    place = text.index("7") + 1
    found = chapter_03.byte_experts("sums", 2, place)
    assert found["byte"] == "7" and found["length"] == len(text)
    best = weights[1, place].argmax()
    assert found["first"] == chosen[1, place, best]
    assert found["first_percent"] == round(100 * float(weights[1, place, best]))
    assert found["first_percent"] + found["second_percent"] == 100
    share = (chosen[1, 1:] == found["first"]).any(-1)
    assert found["others"] == int(share.sum()) - 1
    assert [meaning is not None for _, meaning in found["blocks"]] == share.tolist()
    assert found["blocks"][place - 1] == ["7", "prefill"]


@needs_toy
def test_the_explorer_stops_at_a_short_texts_end():
    last = chapter_03.byte_experts("code", 3, chapter_03.LONGEST)
    assert last == chapter_03.byte_experts("code", 3, len(chapter_03.SENTENCES["code"]))
    assert "data-twin" in chapter_03.byte_explorer()._repr_html_()


@needs_toy
@pytest.mark.parametrize(("text", "said"), [("", "plain text"), ("naïve", "plain text"),
                                            ("a\x00b", "plain text"), ("ab" * 251, "502 bytes")])
def test_texts_that_cannot_be_shown_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        chapter_03.show_experts(text)


@needs_toy
def test_a_readers_text_is_shown_expert_by_expert():
    stepper = chapter_03.show_experts("The code is 1907.", layer=2)
    assert len(stepper.frames) == checkpoint.load().config.num_experts
    assert all("of layer 2: " in label for label in stepper.labels)


# --- the notebook ----------------------------------------------------------------------------


def test_the_notebook_holds_every_exercise_as_its_file_has_it():
    found = NOTEBOOK.cells
    for exercise in CHAPTER.exercises.values():
        place = exercise.id.replace(".", "-")
        assert found[f"exercise-{place}"] == f'exercise("{exercise.id}")'
        if exercise.check:
            assert found[f"try-{place}"] == exercise.cell


def test_the_hand_built_layer_of_the_notebook_is_the_shipped_one():
    found, names = NOTEBOOK.cells, {"torch": torch, "F": torch.nn.functional}
    torch.manual_seed(3)
    layer = MoE(ODD).double()
    layer.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    names |= {"x": torch.randn(17, ODD.hidden_size, dtype=torch.float64), "layer": layer}
    with torch.no_grad():
        for id in ("run-expert", "by-token", "by-expert", "gate-by-hand"):
            source = found[id].split("\n\n\n")          # the definitions, not what follows them
            exec("\n\n".join(part for part in source if part.startswith("def ")), names)
        for run in ("by_token", "by_expert"):
            made = names["moe_by_hand"](names["x"], layer, names[run])
            torch.testing.assert_close(made, layer(names["x"]), rtol=0, atol=1e-6)


@needs_toy
def test_the_cell_that_waits_for_transformers_finds_the_same_logits(capsys):
    pytest.importorskip("transformers", minversion="5.0",
                        reason="transformers is not installed (pip install '.[dev]')")
    prompt = encode("Town notebook\nThe code of the red door is 4821.\nQ: Who?\n")
    names = {"torch": torch, "Batch": Batch, "checkpoint": checkpoint, "drawing": chapter_03,
             "model": checkpoint.load(), "prompt": prompt}
    with torch.inference_mode():
        exec(NOTEBOOK.cells["parity-here"], names)
    assert "100.0% of the best tokens the same" in capsys.readouterr().out
    torch.testing.assert_close(names["ours"], names["theirs"], rtol=1e-3, atol=1e-3)
