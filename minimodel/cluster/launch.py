"""Start worker processes on this machine, and end them, whatever happens.

    results = launch(work, 2, "an argument", deadline_s=60)

calls `work(world, "an argument")` in two new processes, which have joined one group of
`torch.distributed`: `world.rank` is 0 in one and 1 in the other. What each returns comes back,
in order of rank. If one raises, or dies, or the deadline passes, all are killed, and the error
says what the child last printed.

The processes get what `torchrun` would give them: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
So a function written for `launch` runs on several hosts, too, started by torchrun:

    with connected() as world:
        work(world, "an argument")

The life of a child: started as a new Python, with quiet threads set before torch is loaded; loads
the function (by its module or file; one from a notebook's cell by its source, so that one must
import what it needs itself); joins the group; works; leaves its result in a file. Where ranks
meet is a store in the parent, so no rank's death takes it away. A child whose parent is gone
ends itself.
"""

import importlib
import importlib.util
import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

LOOPBACK = "127.0.0.1"
TAIL = 3_000                    # characters of a child's output that an error shows
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class WorkerError(RuntimeError):
    """A worker process raised, or died, or was not done in time."""


@dataclass(frozen=True)
class World:
    """Who a process is in its group."""

    rank: int
    size: int


@contextmanager
def connected(timeout_s: float = 60.0) -> Iterator[World]:
    """Join the group that the environment describes: that of `launch`, or of torchrun.

    Messages travel by gloo; tensors on GPUs, where there are any, by nccl.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend(), timeout=timedelta(seconds=timeout_s))
    try:
        dist.all_reduce(torch.zeros(1))         # who left while others still join would stop them
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        if dist.is_initialized():               # a member of a group may have left it
            dist.destroy_process_group()


def backend() -> str:
    """What carries the messages of this machine's processes."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def launch(work: Callable | str, num_workers: int, *arguments, deadline_s: float = 60.0,
           may_die: Collection[int] = ()) -> list:
    """What `work(world, *arguments)` returns in each of some new processes.

    `work` is a function, or names one: "package.module:function" or "file.py:function". Ranks
    in `may_die` may be killed without an error; their result is None. Raises WorkerError for
    everything else.
    """
    with Workers(work, num_workers, *arguments) as workers:
        return workers.wait(deadline_s, may_die)


class Workers:
    """Running worker processes. Leaving the `with` block kills those that are left."""

    def __init__(self, work: Callable | str, num_workers: int, *arguments):
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be at least 1")
        self.num_workers = num_workers
        self.job = pickle.dumps((sys.path, reference(work), arguments))
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Workers":
        if LOADING:                     # or each worker would start workers, without end
            raise RuntimeError(f"{LOADING[-1]} starts workers as soon as it is loaded, and they "
                               'load it, too: start them under `if __name__ == "__main__":`')
        from torch.distributed import TCPStore

        self.directory = tempfile.TemporaryDirectory(prefix="workers-")
        self.folder = Path(self.directory.name)
        try:
            (self.folder / "job").write_bytes(self.job)
            self.store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            for rank in range(self.num_workers):
                self.processes.append(self._start(rank))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        """Nothing is left: no process (nor what it started), no file, no open port."""
        for process in self.processes:
            kill(process)
        self.store = None
        self.directory.cleanup()

    def _start(self, rank: int) -> subprocess.Popen:
        environment = {
            **os.environ, **QUIET, "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.num_workers), "LOCAL_WORLD_SIZE": str(self.num_workers),
            "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",     # the store is ours; rank 0 makes none
            "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with (self.folder / f"{rank}.output").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import child; child()", self.folder],
                env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output,
                start_new_session=True)

    def kill(self, rank: int) -> None:
        """Kill one worker, without a word. Its connections are closed, so the others hear of it."""
        kill(self.processes[rank])

    def hang(self, rank: int) -> None:
        """Stop one worker without ending it: it is there, and does nothing any more. The others
        see what they would see of a machine without power: nothing."""
        os.killpg(self.processes[rank].pid, signal.SIGSTOP)

    def is_alive(self, rank: int) -> bool:
        """Whether the process is there; a hanging one is."""
        return self.processes[rank].poll() is None

    def wait(self, deadline_s: float = 60.0, may_die: Collection[int] = ()) -> list:
        """The results, by rank, when all are done. Raises WorkerError as `launch` does."""
        ends_at = time.monotonic() + deadline_s
        while (running := [rank for rank, process in enumerate(self.processes)
                           if process.poll() is None]):
            self.require_alive(may_die)
            if time.monotonic() > ends_at:
                raise WorkerError(f"after {deadline_s:g} s, worker {running[0]} of "
                                  f"{self.num_workers} was still at work"
                                  f"{self._tail(running[0])}")
            time.sleep(0.01)
        self.require_alive(may_die)
        return [self._result(rank) for rank in range(self.num_workers)]

    def require_alive(self, may_die: Collection[int] = ()) -> None:
        """Raise WorkerError for a worker that failed: of several, the first, in whose wake the
        others often fail."""
        failed = [rank for rank, process in enumerate(self.processes)
                  if process.poll() not in (None, 0) and rank not in may_die]
        if failed:
            time.sleep(0.1)
            rank = min(failed, key=self._failed_at)
            status = self.processes[rank].returncode
            how = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
            raise WorkerError(f"worker {rank} of {self.num_workers} {how}{self._tail(rank)}")

    def _failed_at(self, rank: int) -> int:
        """When it said that it failed. One that was killed could not say it, and comes first."""
        path = self.folder / f"{rank}.failed"
        return int(path.read_text()) if path.exists() else 0

    def _result(self, rank: int):
        path = self.folder / f"{rank}.result"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def _output(self, rank: int) -> Path:
        return self.folder / f"{rank}.output"

    def output(self, rank: int) -> str:
        """What a worker has printed so far, errors included."""
        return self._output(rank).read_text(errors="replace")

    def _tail(self, rank: int) -> str:
        output = self.output(rank).strip()
        return f":\n{output[-TAIL:]}" if output else ", and had printed nothing"


def kill(process: subprocess.Popen) -> None:
    """Kill a child and what it has started, and wait until it is gone."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)      # it leads a session of its own
        except ProcessLookupError:
            process.kill()
    process.wait()
    process.stdin.close()


# --- functions on their way to another process ---------------------------------------------------


def reference(work: Callable | str) -> tuple[str, str, str]:
    """How a child finds a function: ("module" or "file" or "source", where, its name)."""
    if isinstance(work, str):
        where, _, name = work.rpartition(":")
        if not where:
            raise ValueError(f'{work!r} names no function: write "package.module:function" or '
                             '"file.py:function"')
        return ("file" if where.endswith(".py") else "module"), where, name
    if work.__qualname__ != work.__name__:
        raise ValueError(f"{work.__qualname__} is inside of something else, where another process "
                         "cannot find it: define it at the top")
    file = inspect.getsourcefile(work)
    if (module := module_of(work, file)) is not None:
        return "module", module, work.__name__
    if file and Path(file).is_file() and "ipykernel" not in file:
        return "file", str(Path(file).resolve()), work.__name__
    return "source", textwrap.dedent(inspect.getsource(work)), work.__name__


def module_of(work: Callable, file: str | None) -> str | None:
    """The module of a function, if it is one of a package, also where `python -m` runs it."""
    module = sys.modules.get(work.__module__)
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.origin != file:
        return None
    package = sys.modules.get(spec.name.partition(".")[0])
    return spec.name if getattr(package, "__path__", None) and package.__file__ else None


LOADING: list[str] = []         # what a function is just being loaded from


def resolve(kind: str, where: str, name: str) -> Callable:
    """The function that a reference means. What is loaded for it must not start workers."""
    LOADING.append(where)
    try:
        return load(kind, where, name)
    finally:
        LOADING.pop()


def load(kind: str, where: str, name: str) -> Callable:
    if kind == "module":
        return getattr(importlib.import_module(where), name)
    if kind == "file":
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return getattr(module, name)
    space = {"__name__": "a_notebook_s_cell"}
    exec(compile(where, "<cell>", "exec"), space)
    return space[name]


def child() -> None:
    """What a worker process runs. Its exit status says whether there is a result."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    # Who fails says so while still in the group: the others fail when it has left.
    with last_words(folder, rank), connected() as world, last_words(folder, rank):
        path, found, arguments = pickle.loads((folder / "job").read_bytes())
        sys.path[:] = path
        save_result(folder / f"{rank}.result", resolve(*found)(world, *arguments))
    leave(0)


@contextmanager
def last_words(folder: Path, rank: int) -> Iterator[None]:
    """Whatever is raised inside is printed, with a note of when, and ends the process."""
    try:
        yield
    except BaseException:
        (folder / f"{rank}.failed").write_text(str(time.monotonic_ns()))
        traceback.print_exc()
        leave(1)


def leave(status: int) -> None:
    """End now: threads that still wait for a message do not keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def save_result(path: Path, result) -> None:
    """Under a temporary name first: a child that is killed now leaves no half of a result."""
    temporary = path.with_suffix(".temporary")
    temporary.write_bytes(pickle.dumps(result))
    temporary.replace(path)


def end_with_parent(folder: Path) -> None:
    """The parent holds the other end of standard input; when it is gone, reading ends."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
