"""Experts on 1, 2 and 4 ranks: the same logits and tokens, counted traffic, ranks without work."""

import importlib.util
from pathlib import Path

import pytest

from minimodel.cluster.balance import in_order
from minimodel.cluster.experts import shard
from minimodel.cluster.launch import WorkerError, launch
from minimodel.engine.generate import generate_without_cache

WORKERS = Path(__file__).with_name("experts_workers.py")
spec = importlib.util.spec_from_file_location("experts_workers", WORKERS)
workers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workers)

EXPERT_BYTES = 3 * workers.CONFIG.hidden_size * workers.CONFIG.expert_size * 8
pytestmark = pytest.mark.timeout(250)


def run(name, ranks, redundant=0):
    return launch(f"{WORKERS}:{name}", ranks, redundant, deadline_s=200)


@pytest.mark.parametrize(("ranks", "redundant"), [(1, 0), (2, 0), (4, 0), (4, 4)])
def test_logits_are_those_of_an_undivided_model(ranks, redundant):
    found = run("one_forward", ranks, redundant)
    assert max(rank["far"] for rank in found) < 1e-11
    assert {tuple(rank["slots"]) for rank in found} == {((8 + redundant) // ranks,) * 2}
    for layer in range(2):
        pairs = 3 * sum(rank["rows"][layer] for rank in found)
        traffic = [rank["traffic"][layer] for rank in found]
        assert sum(one["rows_run"] for one in traffic) == pairs     # each pair exactly once
        for rank, one in zip(found, traffic, strict=True):
            assert one["expert_bytes"] <= rank["slots"][layer] * EXPERT_BYTES
            if ranks == 1:
                assert one["rows_sent"] == one["bytes_sent"] == 0
        sent = sum(one["rows_sent"] for one in traffic)
        assert sent % 2 == 0                    # there, and back
        assert ranks == 1 or 0 < sent <= 2 * pairs


@pytest.mark.parametrize(("ranks", "redundant"), [(2, 0), (4, 4)])
def test_engines_that_step_together_write_the_same_tokens(ranks, redundant):
    model = workers.make_model()
    found = run("generate", ranks, redundant)
    assert len({num_steps for _, num_steps in found}) == 1
    for rank, (answers, _) in enumerate(found):
        assert answers == [generate_without_cache(model, prompt, 6, stop_ids=())
                           for prompt in workers.prompts_of(rank)]


def test_single_tokens_of_many_ranks_use_different_copies():
    """Each rank counts its tokens from its own number on."""
    assert run("rows_of_one_expert", 2) == [2, 2]


def test_a_placement_for_another_group_is_refused():
    with pytest.raises(WorkerError, match="a placement for 2 ranks in a group of 1"):
        run("fail", 1)


@pytest.mark.parametrize("placements", [
    [in_order(8, 1)], [in_order(8, 1)] * 3, [in_order(4, 1)] * 2])
def test_placements_of_another_model_are_refused(placements):
    with pytest.raises(ValueError, match="2 expert layers of 8 experts: give one placement for"):
        shard(workers.make_model(), placements)
