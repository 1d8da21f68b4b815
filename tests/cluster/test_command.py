"""A cluster on the command line: new processes here, torchrun here, torchrun on two hosts.

Each test has a deadline of its own and leaves no process behind.
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

from minimodel.cache.paged import PagedCache
from minimodel.cluster import split, spread
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.model import checkpoint
from minimodel.tokenizer import decode_bytes, encode

DEADLINE_S = 120
pytestmark = pytest.mark.timeout(DEADLINE_S + 30)

TEXT = "The code of the red door is 4821.\nQ: What is the code of the red door?\n"
BLOCK_BYTES, ROW_BYTES = 32_768, 128 * 4        # of the toy: notes of 16 tokens, a token's vector
IN_A_NET_OF_ITS_OWN = ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "--",
                       "bash", str(Path(__file__).with_name("two_hosts.sh"))]


@pytest.fixture(scope="module")
def answer_of_one_engine():
    model = checkpoint.load(checkpoint.TOY)
    engine = Engine(model, PagedCache(model.config, 40))
    [tokens] = engine.generate([encode(TEXT.encode())], Sampling(max_tokens=11))
    return decode_bytes(tokens).decode()


@pytest.fixture
def prompt_file(tmp_path):
    (tmp_path / "prompt").write_text(TEXT)
    return tmp_path / "prompt"


def run_by(torchrun, module, prompt_file, **environment):
    """Let a torchrun command start a module; what rank 0 printed, and all that was an error."""
    process = subprocess.Popen(
        [*torchrun, "-m", module.__name__, "--prompt-file", prompt_file, "--max-tokens", "11"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment}, start_new_session=True)
    try:
        out, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)          # nothing is left, whatever happened
        process.wait()
    assert process.returncode == 0, errors
    return json.loads(out), errors


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_command_starts_processes_itself(prompt_file, num_workers, answer_of_one_engine,
                                             capsys):
    """Three ranks share 16 experts: two of them are there twice."""
    assert spread.main(["--prompt-file", str(prompt_file), "--max-tokens", "11",
                        "--workers", str(num_workers)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] == answer_of_one_engine
    assert (found["ranks"], found["reason"]) == (num_workers, "length")
    pairs = 2 * 2 * (len(encode(TEXT)) + 10)        # two experts a token, there and back
    *middle, last = found["rows_sent"]              # after the last notes, only wanted rows go on
    if num_workers == 1:
        assert {*middle, last} == {0}
    else:
        assert all(0.3 * pairs < rows < pairs for rows in middle)
        assert 0 < last <= 2 * 2 * 11


@pytest.mark.parametrize("module", [split, spread])
def test_torchrun_starts_the_same_code(module, prompt_file, answer_of_one_engine):
    """Rank 0 prints the answer that one engine gives."""
    found, _ = run_by(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend",
         "c10d", "--rdzv-endpoint", "127.0.0.1:0"], module, prompt_file, GLOO_SOCKET_IFNAME="lo")
    assert found["answer"] == answer_of_one_engine
    assert found.get("read_by", 1) == 1
    assert found.get("ranks", 2) == 2


@pytest.mark.parametrize("module", [split, spread])
def test_two_hosts(module, prompt_file, answer_of_one_engine):
    """Two network namespaces, which share nothing but a cable: blocks, or rows, go over it."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs `unshare` (util-linux) and `ip` (iproute2)")
    tried = subprocess.run(IN_A_NET_OF_ITS_OWN, capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"this machine lays no virtual cable: {tried.stderr.strip()}")
    found, errors = run_by(
        [*IN_A_NET_OF_ITS_OWN, sys.executable, "--nnodes", "2", "--nproc-per-node", "1",
         "--rdzv-backend", "static", "--master-addr", "10.77.0.1", "--master-port", "29500"],
        module, prompt_file)
    assert found["answer"] == answer_of_one_engine
    num_bytes = int(errors.rpartition("bytes over the cable: ")[2].split()[0])
    if module is split:
        assert found["read_by"] == 1
        assert num_bytes > len(TEXT) // 16 * BLOCK_BYTES            # all full blocks
    else:
        assert found["ranks"] == 2
        assert num_bytes > sum(found["rows_sent"]) / 2 * ROW_BYTES  # those that came back
