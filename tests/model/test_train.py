"""Training: it learns, it stops and goes on as if it had not, and it balances its experts."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from minimodel.config import ModelConfig
from minimodel.model import checkpoint, train
from minimodel.model.train import (
    SHARED,
    GateLoads,
    Muon,
    Recipe,
    Stage,
    StopOnSignal,
    Trainer,
    take_over,
)
from minimodel.model.transformer import Transformer

TINY = Recipe(
    config=ModelConfig(hidden_size=20, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=12,
                       dense_size=34, num_experts=5, experts_per_token=2, expert_size=14,
                       context=512),
    stages=(Stage(40, 5, 120, mix={"sums": 1.0, "records": 0.5}), Stage(64, 7, 128, rate_to=0.1)),
    seed=3, warmup_steps=4, position_span=300, bfloat16=False)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def stop_after(steps):
    """A `should_stop` that lets that many steps pass."""
    left = iter(range(steps))
    return lambda: next(left, None) is None


def test_the_loss_falls():
    recipe = replace(TINY, stages=(Stage(48, 60, 192, mix={"sums": 1.0}),), warmup_steps=5)
    trainer = Trainer(recipe)
    losses = [trainer.step()["loss"] for _ in range(60)]
    assert losses[0] == pytest.approx(5.6, abs=0.5)            # a guess among 264
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]


def test_a_step_in_bfloat16_keeps_the_weights_in_float32():
    trainer = Trainer(replace(TINY, bfloat16=True))
    before = weights(trainer.model)
    measured = trainer.step()
    assert measured["loss"] == pytest.approx(5.6, abs=0.5)
    for name, tensor in trainer.model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
        assert not torch.equal(tensor, before[name]), f"{name} did not move"


@pytest.mark.parametrize("stops", [[3, 1], [5, 6], [0, 11]])
def test_a_run_that_was_stopped_ends_as_if_it_had_not(tmp_path, stops):
    whole = train.train(TINY, tmp_path / "whole", report_every=2, progress=lambda _: None)
    cut = tmp_path / "cut"
    for steps in stops:
        assert train.train(TINY, cut, report_every=2, progress=lambda _: None,
                           should_stop=stop_after(steps)) is None
    resumed = train.train(TINY, cut, report_every=2, progress=lambda _: None)
    assert not resumed.training
    assert_equal(weights(whole), weights(resumed))
    for folder in (tmp_path / "whole", cut):
        assert [line["step"] for line in train.read_log(folder)] == [2, 4, 6, 8, 10, 12]


def test_a_finished_run_is_handed_back_without_a_step(tmp_path):
    first = train.train(TINY, tmp_path, progress=lambda _: None)
    reports = []
    again = train.train(TINY, tmp_path, progress=reports.append)
    assert reports == []
    assert_equal(weights(first), weights(again))


def test_a_run_leaves_nothing_hanging_on_the_model(tmp_path):
    model = train.train(TINY, tmp_path, progress=lambda _: None)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_log_counts_tokens_and_averages(tmp_path):
    lines = []
    train.train(TINY, tmp_path, report_every=5, progress=lines.append)
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert [line["tokens"] for line in lines] == [5 * 120, 600 + 5 * 128, 600 + 7 * 128]
    assert [line["length"] for line in lines] == [40, 64, 64]
    assert lines == train.read_log(tmp_path)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


# --- runs that break -----------------------------------------------------------------------

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from minimodel.config import ModelConfig
from minimodel.model import train
from minimodel.model.train import Recipe, Stage
recipe = {recipe!r}
plain = train.write_whole
def write_whole(path, write):
    def half(partial):
        write(partial)
        if path.name == {name!r} and (path.parent / "resume.pt").exists():
            os.truncate(partial, partial.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    plain(path, half)
train.write_whole = write_whole
torch.set_num_threads(1)
train.train(recipe, Path(sys.argv[1]), report_every=1, save_every=2)
"""


@pytest.mark.parametrize("name", ["resume.pt", "log.jsonl"])
def test_a_run_killed_while_saving_goes_on_from_its_last_state(tmp_path, name):
    child = subprocess.run([sys.executable, "-c", KILLED.format(recipe=TINY, name=name), tmp_path],
                           capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert train.read_state(tmp_path / "resume.pt")["num_done"] == 2
    resumed = train.train(TINY, tmp_path, report_every=1, progress=lambda _: None)
    whole = train.train(TINY, tmp_path / "whole", progress=lambda _: None)
    assert_equal(weights(resumed), weights(whole))
    assert [line["step"] for line in train.read_log(tmp_path)] == list(range(1, 13))


def test_the_run_of_another_recipe_is_refused(tmp_path):
    train.train(TINY, tmp_path, progress=lambda _: None, should_stop=stop_after(2))
    before = (tmp_path / "resume.pt").read_bytes()
    with pytest.raises(ValueError, match=r"recipe \(muon_rate, seed differs\): give another"):
        train.train(replace(TINY, seed=4, muon_rate=0.1), tmp_path, progress=lambda _: None)
    assert (tmp_path / "resume.pt").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 half an archive"])
def test_a_state_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "resume.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read the saved run .*resume\.pt.* Remove it to"):
        train.train(TINY, tmp_path, progress=lambda _: None)


def test_a_state_of_another_kind_is_named(tmp_path):
    torch.save([1, 2], tmp_path / "resume.pt")
    with pytest.raises(ValueError, match="cannot read the saved run"):
        train.train(TINY, tmp_path, progress=lambda _: None)


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_unwritable_folder_is_refused_before_the_first_step(tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot make the folder .*file.* Give a folder that you"):
        train.train(TINY, tmp_path / out, should_stop=lambda: pytest.fail("a step was near"))


def test_a_full_disk_is_reported_and_leaves_the_last_state(tmp_path, monkeypatch):
    train.train(TINY, tmp_path, progress=lambda _: None, should_stop=stop_after(2))
    before = (tmp_path / "resume.pt").read_bytes()

    def full(state, path):
        path.write_bytes(b"half")
        raise RuntimeError("no space left")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"cannot write .*resume\.pt: no space left. Give a folder"):
        train.train(TINY, tmp_path, progress=lambda _: None, should_stop=stop_after(1))
    assert (tmp_path / "resume.pt").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"resume.pt", "log.jsonl"}


def test_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopOnSignal() as should_stop:
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):      # a second time, and it is over
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- the pieces ----------------------------------------------------------------------------


def test_the_gates_biases_move_towards_balance():
    """The gate starts with one favourite; training of the bias alone shares the work out."""
    torch.manual_seed(0)
    model = Trainer(TINY).model
    gate, loads, x = model.moe_layers()[0].gate, GateLoads(model), torch.randn(200, 20)
    with torch.no_grad():
        gate.e_score_correction_bias[4] = 0.5
        seen = []
        for _ in range(120):
            gate(x)
            loads.balance(0.01)
            seen.append(loads.imbalance)
    assert seen[0] > 2.0
    assert max(seen[-20:]) < 1.3
    assert gate.e_score_correction_bias.mean().abs() < 1e-6


def test_one_step_of_balance_raises_the_idle_and_lowers_the_busy():
    model = Trainer(TINY).model
    loads, gate = GateLoads(model), model.moe_layers()[0].gate
    loads.counts[0] = torch.tensor([5.0, 0.0, 1.0, 2.0, 2.0])
    loads.balance(0.01)
    expected = torch.tensor([-0.01, 0.01, 0.01, 0.0, 0.0]) - 0.01 / 5
    torch.testing.assert_close(gate.e_score_correction_bias, expected)
    assert loads.imbalance == 2.5


def test_orthogonal_pushes_singular_values_towards_one():
    torch.manual_seed(0)
    for shape in [(11, 7), (7, 11), (3, 6, 9)]:
        values = torch.linalg.svdvals(train.orthogonal(torch.randn(shape)).float())
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_muon_takes_every_stacked_matrix_as_if_it_were_alone():
    torch.manual_seed(0)
    stacked = torch.nn.Parameter(torch.randn(3, 9, 4))
    single = [torch.nn.Parameter(matrix.clone()) for matrix in stacked.detach()]
    stacked.grad = torch.randn(3, 9, 4)
    for matrix, gradient in zip(single, stacked.grad, strict=True):
        matrix.grad = gradient.clone()
    for _ in range(2):
        Muon([stacked], lr=0.1).step()
        Muon(single, lr=0.1).step()
    torch.testing.assert_close(stacked.detach(), torch.stack([m.detach() for m in single]),
                               rtol=0, atol=1e-3)      # bfloat16 inside


def test_every_parameter_has_one_optimizer():
    trainer = Trainer(TINY)
    held = [weight for optimizer in trainer.optimizers for group in optimizer.param_groups
            for weight in group["params"]]
    assert len(held) == len({id(weight) for weight in held})
    assert {id(w) for w in held} == {id(w) for w in trainer.model.parameters()}
    by_muon = trainer.optimizers[1].param_groups[0]["params"]
    assert all(weight.dim() >= 2 for weight in by_muon)


def test_rates_follow_the_stages():
    recipe = replace(TINY, stages=(Stage(8, 10), Stage(9, 4, rate_from=0.8, rate_to=0.4)))
    rates = [recipe.at(step)[1] for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[10:] == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert [recipe.at(step)[0].length for step in (0, 9, 10, 13)] == [8, 8, 9, 9]
    with pytest.raises(ValueError, match="step 14 is past the recipe's last, 13"):
        recipe.at(14)


@pytest.mark.parametrize(("length", "span"), [(300, 4096), (256, 257), (255, 4096), (300, 300)])
def test_positions_rise_and_stay_within_the_span(length, span):
    rows = [train.gapped_positions(random.Random(seed), length, span) for seed in range(60)]
    plain = list(range(length))
    for row in rows:
        assert row[0] == 0
        assert len(row) == length
        assert all(one < other for one, other in pairwise(row))
        assert row[-1] < span
    gapped = sum(row != plain for row in rows)
    assert (15 < gapped < 45) if length == 300 and span == 4096 else (gapped == 0 or span == 257)


def test_rows_are_aligned():
    """The target of a place is the next id, and its weight is that next id's."""
    look_ups = train.draw_rows(replace(TINY, stages=(Stage(150, 1, 600, mix={"records": 1.0}),)), 0)
    values = look_ups.targets[look_ups.weights == 3.0]
    assert len(values) >= 16
    assert all(chr(token).isdigit() for token in values)
    rows = train.draw_rows(TINY, 6)
    assert rows.ids.shape == rows.targets.shape == rows.weights.shape == rows.positions.shape
    assert rows.ids.shape == (2, 64)
    assert torch.equal(rows.ids[:, 1:], rows.targets[:, :-1])
    again = train.draw_rows(TINY, 6)
    assert torch.equal(rows.ids, again.ids)
    assert torch.equal(rows.positions, again.positions)
    assert not torch.equal(rows.ids, train.draw_rows(TINY, 7).ids)


def test_recall_counts_whole_values():
    weight = torch.tensor([[0.5, 3.0, 3.0, 1.0, 3.0, 3.0, 3.0],
                           [3.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0]])
    targets = torch.arange(14).view(2, 7)
    rows = train.Rows(targets, targets, weight, targets)

    def recall(wrong):
        said = targets.clone()
        for place in wrong:
            said[place] += 1
        return train.recall_in(rows, torch.nn.functional.one_hot(said, 20).float())
    assert recall([]) == 1.0
    assert recall([(0, 0), (0, 3), (1, 1)]) == 1.0             # places that are no value
    assert recall([(0, 5)]) == 0.75
    assert recall([(0, 4), (0, 5), (0, 6)]) == 0.75
    assert recall([(0, 1), (1, 0)]) == 0.5
    nothing = replace(rows, weights=torch.ones(2, 7))
    assert train.recall_in(nothing, torch.zeros(2, 7, 20)) is None


def test_the_weighted_loss_is_the_plain_sum():
    trainer, rows = Trainer(TINY), train.draw_rows(TINY, 2)
    with torch.no_grad():
        loss, logits = train.weighted_loss(trainer.model, rows, bfloat16=False)
    share = logits.log_softmax(-1)
    total = sum(float(rows.weights[i, j]) * -float(share[i, j, rows.targets[i, j]])
                for i in range(logits.shape[0]) for j in range(logits.shape[1]))
    assert float(loss) == pytest.approx(total / float(rows.weights.sum()), rel=1e-5)


def test_the_fingerprint_covers_every_setting():
    json.loads(train.fingerprint(TINY))
    others = [replace(TINY, seed=4), replace(TINY, config=replace(TINY.config, rope_theta=5.0)),
              replace(TINY, stages=TINY.stages[:1]),
              replace(TINY, stages=(replace(TINY.stages[0], mix=None), TINY.stages[1]))]
    assert len({train.fingerprint(recipe) for recipe in (TINY, *others)}) == 5


# --- going on from a trained model -------------------------------------------------------------


def test_a_model_that_shares_notes_takes_over_all_it_has(make_config):
    older = Transformer(make_config())
    model = Transformer(make_config(kv_source_layers=(0, 1, 1, 1)))
    take_over(model, older)
    theirs = older.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in model.state_dict().items())
    assert len(model.state_dict()) == len(theirs) - 4           # two layers without keys and values


@pytest.mark.parametrize("changes", [{"dense_size": 39}, {"num_layers": 5}], ids=str)
def test_a_model_of_other_sizes_cannot_be_started_from(make_config, changes):
    with pytest.raises(ValueError, match=r"the model to start from has no .* of the same sizes"):
        take_over(Transformer(make_config(**changes)), Transformer(make_config()))


def test_the_recipe_for_shared_notes_begins_at_the_shipped_toy():
    trainer = Trainer(SHARED)
    toy = checkpoint.load().state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, toy[name]), name
