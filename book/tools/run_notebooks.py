"""Execute the chapters, each in a fresh kernel, a few at a time; git keeps them without outputs.

The life of a chapter here:
1. Its *key* is a digest of its code cells, all files of the package, the lock file, this runner and
   the Python version. Outputs kept under that key in `_build/executed` are used again.
2. Otherwise it runs top to bottom in an empty folder, with one thread and no network in mind.
   Cells tagged `skip-execution` wait for a reader's kernel: they get a note that says so.
3. It is *judged*: an unexpected exception, anything on stderr, too much time or too much memory is
   a fault. One chapter's faults never stop the others.
4. A good run is stored under its key, and the notebook with its outputs goes to the build's tree.

Edits of prose change no key: outputs are merged, cell id by cell id, into the current text.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from places import BUILD, CHAPTERS, EXECUTED, LOCK, PACKAGE, SOURCE, digest, files_under

BUDGET_VARIABLE = "SECOND_SEND_NOTEBOOK_SECONDS"
BUDGET_S = 90.0                 # what a reader on two cores is promised
BUDGET_BYTES = 2 * 2**30        # resident memory of the kernel, at its peak

# Lines that may stand on stderr, and why. They are taken off the page; anything else is a fault.
ALLOWED_STDERR = (
    (r"\s*(.*: *)?\d+%\|.*\|.*", "tqdm draws its progress bar on stderr"),
    (r"\s*\d+it \[.*\]", "tqdm's bar where the total is not known"),
)

SKIP = "skip-execution"         # nbclient passes such cells by
SKIPPED = ("This cell waits for a kernel. Open the chapter in Colab, Binder or JupyterLab "
           "(the rocket at the top of the page) and run it there.")

KERNEL_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",               # waiting threads sleep
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",      # no word about frozen modules
    "HF_HUB_OFFLINE": "1",                      # a chapter fetches nothing
    "MINIMODEL_QUIET": "1",                     # no half-drawn progress bars on pages
    "PIP_NO_INDEX": "1",
    "IPYTHONDIR": str(BUILD / "ipython"),       # nobody's personal start-up files
}


@dataclass
class Result:
    """What became of one notebook: its text with outputs, or the faults found."""

    name: str
    how: str                                    # "ran" or "cached"
    seconds: float = 0.0
    peak_bytes: int = 0
    text: str | None = None
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        memory = f"{self.peak_bytes / 2**20:6.0f} MB" if self.peak_bytes else ""
        verdict = "FAILED" if self.faults else self.how
        return f"{verdict:7}{self.name:32}{self.seconds:6.1f} s  {memory}".rstrip()


def package_digest() -> str:
    """A digest of all that decides outputs besides the notebook itself."""
    shared = digest([*files_under(PACKAGE), LOCK, Path(__file__)])
    return f"{shared} {sys.version_info.major}.{sys.version_info.minor}"


def key_of(notebook, shared: str) -> str:
    """The name under which the outputs of these code cells are kept."""
    code = [[cell.source, cell.metadata.get("tags", [])] for cell in code_cells(notebook)]
    return hashlib.sha256(f"{shared}{json.dumps(code)}".encode()).hexdigest()[:20]


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def note_skipped(notebook) -> None:
    """Say on the page, under each cell that was not run, where it runs."""
    for cell in code_cells(notebook):
        if SKIP in cell.metadata.get("tags", []):
            words = {"text/html": f'<p class="ss-caption">{SKIPPED}</p>', "text/plain": SKIPPED}
            cell.outputs = [nbformat.v4.new_output("display_data", data=words)]


def with_outputs_of(notebook, executed):
    """The current text of `notebook` with the outputs of an earlier run of the same code."""
    for cell, done in zip(code_cells(notebook), code_cells(executed), strict=True):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count
    for name in ("widgets", "language_info"):
        if name in executed.metadata:
            notebook.metadata[name] = executed.metadata[name]
    return notebook


def plain(text: str) -> str:
    """Text without the colour codes that IPython puts into tracebacks."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def traceback_of(cell) -> str:
    """The traceback a cell left behind, indented for the terminal."""
    for output in cell.outputs:
        if output.output_type == "error":
            return textwrap.indent(plain("\n".join(output.traceback)), "    ")
    return "    (the kernel left no traceback)"


def take_allowed_stderr(cell) -> list[str]:
    """Remove what may stand on stderr from a cell's outputs; return the lines that may not."""
    bad, kept = [], []
    for output in cell.outputs:
        if output.output_type != "stream" or output.name != "stderr":
            kept.append(output)
            continue
        lines = [line for line in re.split(r"[\r\n]+", plain(output.text)) if line.strip()]
        bad += [line for line in lines
                if not any(re.fullmatch(pattern, line) for pattern, _ in ALLOWED_STDERR)]
    cell.outputs = kept
    return bad


def execute(notebook, budget_s: float) -> list[str]:
    """Run all cells in place, in a fresh kernel and an empty folder; return the faults met."""
    started, current = time.monotonic(), {"cell": None}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, kernel_name="python3", record_timing=False, coalesce_streams=True,
            extra_arguments=["--IPKernelApp.log_level=40"],     # errors only on the terminal
            timeout_func=lambda cell: max(1, round(budget_s - (time.monotonic() - started))),
            on_cell_start=lambda cell, cell_index: current.update(cell=cell),
            resources={"metadata": {"path": folder}})
        try:
            client.execute()
        except CellExecutionError:
            cell = current["cell"]
            return [f"cell '{cell.id}' raised\n{traceback_of(cell)}"]
        except CellTimeoutError:
            return [f"cell '{current['cell'].id}' was stopped: {over_budget(budget_s)}"]
        except DeadKernelError:
            return [f"the kernel died in cell '{current['cell'].id}' (out of memory?)"]
    return [f"cell '{cell.id}' wrote to stderr, which a page must not show:\n"
            + textwrap.indent("\n".join(bad), "    ")
            for cell in code_cells(notebook) if (bad := take_allowed_stderr(cell))]


def over_budget(budget_s: float) -> str:
    return (f"a chapter may take {budget_s:.0f} s in all; shorten it, or on a slow machine set "
            f"{BUDGET_VARIABLE} to more")


def peak_child_bytes() -> int:
    """The largest resident memory of a finished child: the kernel, in a worker of its own."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run(path: Path, cache: Path, shared: str, budget_s: float) -> Result:
    """Give one notebook its outputs, from the cache or by running it; its faults do not raise."""
    started = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    kept = cache / f"{path.stem}-{key_of(notebook, shared)}.ipynb"
    if kept.exists():
        notebook = with_outputs_of(notebook, nbformat.read(kept, as_version=4))
        return Result(path.name, "cached", time.monotonic() - started,
                      text=nbformat.writes(notebook))
    os.environ.update(KERNEL_ENVIRONMENT)
    Path(KERNEL_ENVIRONMENT["IPYTHONDIR"]).mkdir(parents=True, exist_ok=True)
    faults = execute(notebook, budget_s)
    seconds = time.monotonic() - started
    result = Result(path.name, "ran", seconds, peak_child_bytes(), faults=faults)
    if not faults and result.seconds > budget_s:
        faults.append(f"it took {result.seconds:.0f} s: {over_budget(budget_s)}")
    if result.peak_bytes > BUDGET_BYTES:
        faults.append(f"its kernel held {result.peak_bytes / 2**30:.1f} GB, over the 2 GB that "
                      "readers are promised: use smaller tensors, or delete them when done")
    if not faults:
        note_skipped(notebook)
        result.text = nbformat.writes(notebook)
        keep(kept, path.stem, result.text)
    return result


def keep(kept: Path, stem: str, text: str) -> None:
    """Store an executed notebook, and forget what earlier versions of it left."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    for old in kept.parent.glob(f"{stem}-*.ipynb"):
        old.unlink()
    unfinished = kept.with_suffix(".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(kept)


def run_all(paths: list[Path], cache: Path, jobs: int, budget_s: float) -> list[Result]:
    """Run notebooks, `jobs` at a time, reporting each; results in the order of `paths`."""
    task = partial(run, cache=cache, shared=package_digest(), budget_s=budget_s)
    spawn = multiprocessing.get_context("spawn")
    # A new worker for each notebook, so that the memory measured is of its kernel alone.
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        results = []
        for result in pool.map(task, paths):
            print(result.line(), flush=True)
            for fault in result.faults:
                print(f"  {result.name}: {fault}", file=sys.stderr, flush=True)
            results.append(result)
    return results


def budget_from_environment() -> float:
    """Seconds a chapter may take; raises SystemExit for a value that is no positive number."""
    text = os.environ.get(BUDGET_VARIABLE, str(BUDGET_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise SystemExit(f"{BUDGET_VARIABLE}={text!r} must be seconds, above 0, such as 180")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute notebooks in fresh kernels.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of chapters/")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--out", type=Path, default=SOURCE / "chapters")
    parser.add_argument("--cache", type=Path, default=EXECUTED)
    asked = parser.parse_args()
    paths = asked.notebooks or sorted(CHAPTERS.glob("*.ipynb"))
    results = run_all(paths, asked.cache, asked.jobs, budget_from_environment())
    asked.out.mkdir(parents=True, exist_ok=True)
    for result in results:
        if result.text is not None:
            (asked.out / result.name).write_text(result.text, encoding="utf-8")
    return 1 if any(result.faults for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
