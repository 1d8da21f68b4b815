"""Worker processes: what they are given, what comes back, and that none is left behind.

Each test has a deadline of its own, and ends by looking for the processes it started.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimodel.cluster.launch import WorkerError, Workers, launch, reference, resolve

SCRIPT = Path(__file__).with_name("launch_workers.py")
pytestmark = pytest.mark.timeout(100)


def is_gone(pid):
    """Whether a process has ended (one that nobody has waited for yet has, too)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_until_gone(pids, seconds=10.0):
    ends_at = time.monotonic() + seconds
    while not all(map(is_gone, pids)):
        assert time.monotonic() < ends_at, "a process was left behind"
        time.sleep(0.02)


def pids_in(folder, number):
    ends_at = time.monotonic() + 60
    while True:
        lines = [path.read_text().split() for path in Path(folder).iterdir()]
        if sum(len(line) == 2 for line in lines) == number:
            return [int(pid) for line in lines for pid in line]
        assert time.monotonic() < ends_at, "the workers never started"
        time.sleep(0.02)


def test_workers_form_one_group_with_quiet_threads():
    results = launch(f"{SCRIPT}:add_up", 3, 1, 20, 300, deadline_s=60)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert {(result["size"], result["total"], result["threads"], result["policy"])
            for result in results} == {(3, 321.0, 1, "PASSIVE")}
    pids = {result["pid"] for result in results}
    assert len(pids) == 3
    wait_until_gone(pids)


def test_one_worker_s_error_is_shown_and_ends_them_all():
    workers = Workers(f"{SCRIPT}:raise_one", 2, 1)
    with pytest.raises(WorkerError) as error, workers:
        workers.wait(60)
    assert "worker 1 of 2 ended with 1" in str(error.value)
    assert "about to fail" in str(error.value)
    assert "ZeroDivisionError: rank 1 divides" in str(error.value)
    wait_until_gone([process.pid for process in workers.processes])


def test_one_that_dies_without_a_word():
    with pytest.raises(WorkerError, match="worker 0 of 2 was killed by signal 9"):
        launch(f"{SCRIPT}:die", 2, 0)


def test_one_that_may_die():
    assert launch(f"{SCRIPT}:die", 2, 0, may_die={0}) == [None, "alive"]


def test_after_the_deadline_all_are_killed_with_what_they_started(tmp_path):
    workers = Workers(f"{SCRIPT}:hang", 2, str(tmp_path))
    with workers:
        pids = pids_in(tmp_path, 2)
        assert not any(map(is_gone, pids))
        with pytest.raises(WorkerError, match=r"after 0\.3 s, worker 0 of 2 was still at work"):
            workers.wait(0.3)
    assert len(pids) == 4
    wait_until_gone(pids)
    assert not workers.folder.exists()


def test_workers_end_when_their_parent_is_killed(tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    (ids := tmp_path / "ids").mkdir()
    parent = subprocess.Popen([sys.executable, str(SCRIPT), str(ids)],
                              env={**os.environ, "TMPDIR": str(temporary)})
    try:
        pids = pids_in(ids, 2)
        workers, theirs = pids[::2], pids[1::2]
        parent.send_signal(signal.SIGKILL)
        wait_until_gone(workers)
        for pid in theirs:                  # nobody else ends these: they were never ours
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(theirs)
        assert list(temporary.iterdir()) == []
    finally:
        parent.kill()
        parent.wait()


def test_a_function_is_found_by_its_module_its_file_or_its_source():
    assert reference("os.path:join") == ("module", "os.path", "join")
    assert resolve(*reference("os.path:join")) is os.path.join
    assert reference(launch)[:2] == ("module", "minimodel.cluster.launch")
    add_up = resolve(*reference(f"{SCRIPT}:add_up"))
    assert add_up.__doc__ == "All ranks add what each has."
    assert reference(add_up) == ("file", str(SCRIPT), "add_up")
    assert resolve("source", "def seven(world):\n    return 7", "seven")(None) == 7


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="num_workers=0 must be at least 1"):
        Workers(f"{SCRIPT}:die", 0)
    with pytest.raises(ValueError, match=r"'os\.path' names no function"):
        launch("os.path", 1)
    with pytest.raises(ValueError, match="define it at the top"):
        launch(lambda world: None, 1)
