"""The handoff between real processes: the same tokens, whoever dies or hangs in the middle.

Each test has a deadline of its own; `launch` leaves no process behind (see test_launch.py).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from minimodel.cluster.launch import WorkerError, launch
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling

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


# --- started by torchrun ------------------------------------------------------------------------

TEXT = "The code of the red door is 4821.\nQ: What is the code of the red door?\n"
IN_A_NET_OF_ITS_OWN = ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "--",
                       "bash", str(SCRIPT.with_name("two_hosts.sh"))]


def run_by(torchrun, tmp_path, **environment):
    """Let a torchrun command start the module; what rank 0 printed, and all that was an error."""
    (tmp_path / "prompt").write_text(TEXT)
    process = subprocess.Popen(
        [*torchrun, "-m", "minimodel.cluster.split", "--prompt-file", tmp_path / "prompt",
         "--max-tokens", "11"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment}, start_new_session=True)
    try:
        out, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)          # nothing is left, whatever happened
        process.wait()
    assert process.returncode == 0, errors
    return json.loads(out), errors


def test_torchrun_starts_the_same_code(tmp_path, answer_of_one_engine):
    """Rank 0 prints the answer that one engine gives."""
    found, _ = run_by(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend",
         "c10d", "--rdzv-endpoint", "127.0.0.1:0"], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert found["read_by"] == 1
    assert found["answer"] == answer_of_one_engine


def test_two_hosts(tmp_path, answer_of_one_engine):
    """Two network namespaces, which share nothing but a cable: the blocks go over it."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs `unshare` (util-linux) and `ip` (iproute2)")
    tried = subprocess.run(IN_A_NET_OF_ITS_OWN, capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"this machine lays no virtual cable: {tried.stderr.strip()}")
    found, errors = run_by(
        [*IN_A_NET_OF_ITS_OWN, sys.executable, "--nnodes", "2", "--nproc-per-node", "1",
         "--rdzv-backend", "static", "--master-addr", "10.77.0.1", "--master-port", "29500"],
        tmp_path)
    assert found["read_by"] == 1
    assert found["answer"] == answer_of_one_engine
    num_bytes = int(errors.rpartition("bytes over the cable: ")[2].split()[0])
    assert num_bytes > len(TEXT) // 16 * 32_768                 # all full blocks of the toy


@pytest.fixture(scope="module")
def answer_of_one_engine():
    from minimodel.cache.paged import PagedCache
    from minimodel.model import checkpoint
    from minimodel.tokenizer import decode_bytes, encode
    model = checkpoint.load(checkpoint.TOY)
    engine = Engine(model, PagedCache(model.config, 40))
    [tokens] = engine.generate([encode(TEXT.encode())], Sampling(max_tokens=11))
    return decode_bytes(tokens).decode()
