"""The handoff between real processes: the same tokens, whoever dies or hangs in the middle.

Each test has a deadline of its own; `launch` leaves no process behind (see test_launch.py).
"""

from pathlib import Path

import pytest

from minimodel.cluster.launch import WorkerError, launch

SCRIPT = Path(__file__).with_name("split_workers.py")
DEADLINE_S = 120
pytestmark = pytest.mark.timeout(DEADLINE_S + 30)


def run(work, num_workers, *arguments, may_die=()):
    return launch(f"{SCRIPT}:{work}", num_workers, *arguments, deadline_s=DEADLINE_S,
                  may_die=may_die)


@pytest.mark.parametrize("by_layer", [False, True])
def test_g57_two_processes_write_the_tokens_of_one(by_layer):
    decode, prefill = run("answer_all", 2, by_layer)
    assert decode["same"] == [True] * 11
    assert decode["read_there"] == 11
    blocks = 1 + 1 + 1 + 2 + 2 + 3 + 5          # the last two prompts came twice, and were here
    assert decode["pulled"] in (blocks * (4 if by_layer else 1),
                                (blocks + 8) * (4 if by_layer else 1))
    assert prefill["acked"] == prefill["granted"] == 11
    assert (decode["held"], prefill["held"]) == (0, 0)


def test_g50_prefill_workers_die_and_nothing_is_lost():
    decode, *others = run("prefill_workers_die", 4, may_die={1, 2, 3})
    assert others == [None] * 3
    assert decode["same"] == [True] * 3
    assert decode["read_here"] == 1             # the others had given a ticket
    assert decode["failed"] == 2
    assert decode["held"] == 0


def test_g50_a_prefill_worker_hangs_and_nobody_waits_for_it():
    decode, prefill = run("prefill_worker_hangs", 2)
    assert decode["same"] == [True]
    assert decode["failed"] == 1
    assert prefill["granted"] == 1
    assert (decode["held"], prefill["held"]) == (0, 0)


@pytest.mark.parametrize("kind", ["Read", "Ack"])
def test_g50_the_decode_worker_dies_and_its_blocks_are_let_go(kind):
    decode, prefill = run("decode_worker_dies", 2, kind, may_die={0})
    assert decode is None
    assert prefill["held_when_lost"] == 6
    assert prefill["held"] == 0
    assert prefill["expired"] == 1


def test_g55_two_models_are_noticed_when_they_connect():
    with pytest.raises(WorkerError, match=r"HandoffError: the notes are of fingerprint"):
        run("two_models", 2)
