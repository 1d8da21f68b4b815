"""Chapter 02: its drawings show the numbers they are given."""

import math
import re

import pytest
import torch

from minimodel.config import ModelConfig
from minimodel.lesson import chapter_02, facts
from minimodel.model.attention import rotary_angles

ODD = ModelConfig(hidden_size=36, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10)


# --- drawings ------------------------------------------------------------------------------


def test_the_machine_names_the_models_sizes():
    drawing = chapter_02.machine(ODD)
    assert "a row of 36 numbers for each" in drawing
    assert "3 layers, one after another" in drawing
    assert "264 tokens" in drawing.alt


def test_a_clocks_hand_stands_at_the_models_angle():
    positions, pairs = (0, 3, 17), (0, 2, 4)
    drawing = chapter_02.clocks(ODD, positions, pairs)
    hands = re.findall(r'<line x1="(.*?)" y1="(.*?)" x2="(.*?)" y2="(.*?)"', drawing)
    cos, sin = rotary_angles(torch.tensor(positions), ODD, torch.float32)
    expected = [(cos[row, pair], sin[row, pair]) for row in range(3) for pair in pairs]
    assert len(hands) == len(expected)
    for hand, (x, y) in zip(hands, expected, strict=True):
        x1, y1, x2, y2 = map(float, hand)
        assert (x2 - x1) / 17.2 == pytest.approx(float(x), abs=0.002)
        assert (y1 - y2) / 17.2 == pytest.approx(float(y), abs=0.002)


def test_a_pattern_shows_the_weights_and_greys_the_future():
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    drawing = chapter_02.pattern("a b", weights)
    shades = re.findall(r"fill:var\(--ss-(\w+),#\w+\);fill-opacity:(\d\.\d\d)", drawing)
    assert [name for name, _ in shades] == [
        "grid" if column > row else "prefill" for row in range(4) for column in range(4)]
    seen = [float(shade) for name, shade in shades if name == "prefill"]
    assert seen == pytest.approx(weights[~future].tolist(), abs=0.006)
    assert "␣" in drawing


def test_a_pattern_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"shape \[3, 3\] do not fit 4 tokens"):
        chapter_02.pattern("a b", torch.ones(3, 3))


def one_look(place: int, count: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(place), count).float()


def test_the_looks_step_through_layers_and_heads():
    text = "ab 4\ncd"
    count = len(text) + 1
    looks = torch.stack([torch.stack([one_look(2 * layer + head, count) for head in range(3)])
                         for layer in range(2)])
    stepper = chapter_02.looks_stepper(text, looks, wanted=4)
    assert stepper.labels == [
        "layer 0, head 0: ‘^’ 100 %", "layer 0, head 1: ‘a’ 100 %", "layer 0, head 2: ‘b’ 100 %",
        "layer 1, head 0: ‘b’ 100 %", "layer 1, head 1: ‘␣’ 100 %", "layer 1, head 2: ‘4’ 100 %"]
    assert "the ‘4’ in the notebook" in stepper.alt
    for frame in stepper.frames:
        assert ">^ab␣4↵</text>" in frame and ">cd</text>" in frame
        assert frame.count(f"fill-opacity:{chapter_02.STRONGEST:.2f}") == 1     # the byte looked at
        assert frame.count("fill-opacity:1.00") == 1            # the one head that looks at the 4


def test_faint_looks_are_left_out():
    looks = torch.tensor([[[0.01, 0.96, 0.03], [0.3, 0.3, 0.4]]])
    stepper = chapter_02.looks_stepper("xy", looks, wanted=1)
    assert stepper.labels == ["layer 0, head 0: ‘x’ 96 %, ‘y’ 3 %",
                              "layer 0, head 1: ‘y’ 40 %, ‘^’ 30 %, ‘x’ 30 %"]


def test_looks_that_do_not_fit_the_text_are_refused():
    with pytest.raises(ValueError, match="5 weights do not fit the start token and 3 bytes"):
        chapter_02.looks_stepper("abc", torch.ones(2, 3, 5), wanted=1)


def test_the_guesses_name_the_best_token_of_each_depth():
    chances = torch.full((3, 264), 0.001)
    chances[0, ord(" ")], chances[1, 258], chances[2, ord("7")] = 0.5, 0.6, 0.7
    shown = chapter_02.guesses_figure(ord("7"), chances)
    assert shown.table["depth"] == ["embedding", "after layer 0", "after layer 1"]
    assert shown.table["best guess"] == ["‘ ’", "token 258", "‘7’"]
    assert shown.table["chance of the right byte, %"] == pytest.approx([0.1, 0.1, 70])
    assert "after layer 1 70.0 %" in shown.alt


def test_the_cost_figure_keeps_counted_and_measured_apart():
    shown = chapter_02.cost_figure([8, 16], [1e6, 2e6], [3e6, 3e6], [4e-5, 2e-5])
    kinds = dict(zip(shown.table["series"], shown.table["kind"], strict=True))
    assert kinds == {"looking back, million operations": "modelled",
                     "all the rest, million operations": "modelled",
                     "time, microseconds": "measured"}
    assert shown.table["y"][-2:] == pytest.approx([40, 20])


def test_the_sizes_are_the_registers():
    rows = {name: (ours, theirs) for name, ours, theirs in chapter_02.sizes(ODD)}
    assert rows["layers"] == (3, facts.find("P-V304").number)
    assert rows["numbers in a row"] == (36, facts.find("P-V310").number)
    assert rows["parameters a token meets"] == (ODD.num_active_parameters(), 37e9)
    assert chapter_02.sizes_figure(ODD).table["toy"] == [ours for ours, _ in rows.values()]
