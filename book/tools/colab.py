"""Run the chapters with the versions that Colab has installed, in an environment of their own.

1. `.venv-colab` gets Colab's versions of the packages that a chapter meets there.
2. The chapters' own first cell installs the book's package into it. Not one version that was there
   before may change: on Colab that would break what the reader has, or ask for a restart.
3. All chapters run in it (run_notebooks.py), as they do for the site.

Needs only Python and a package index. Nothing here is rendered, and no output is kept.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from places import BUILD, CHAPTERS, LOCK, ROOT, files_under, forget, mirror

VERSIONS = ROOT / "requirements-colab.txt"
VENV = ROOT / ".venv-colab"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
WORK = BUILD / "colab"
PACKAGE = "second-send"
MET = {"torch", "numpy", "safetensors", "tqdm", "matplotlib", "ipywidgets", "ipython",
       "ipykernel", "jupyter-client", "nbclient", "nbformat", "pip"}
# `numpy==2.1.3`, and `torch @ https://.../torch-2.11.0%2Bcpu-cp313-...whl`
PINNED = re.compile(r"(?P<name>[\w.-]+)(==| @ .*/[\w.]+-)(?P<version>\d[\d.]*)")


def pins(listed: str) -> dict[str, str]:
    """The versions of the packages in `MET` that a list in pip's freeze format names."""
    found = {match["name"].lower().replace("_", "-"): match["version"].rstrip(".")
             for line in listed.splitlines() if (match := PINNED.match(line))}
    if missing := MET - found.keys():
        raise SystemExit(f"the list of Colab's versions lacks {', '.join(sorted(missing))}: "
                         "take the whole pip-freeze.txt, or add a line for each")
    return {name: found[name] for name in sorted(MET)}


def run(*command: str | Path, **settings) -> None:
    """A command in the environment; whatever fails there ends this run."""
    subprocess.run([BIN / "python", *command], check=True, **settings)


def set_up(wanted: dict[str, str]) -> None:
    """The environment with these versions, made afresh unless it is the one we have."""
    stamp, pinned = VENV / "pinned.txt", [f"{name}=={at}" for name, at in wanted.items()]
    if not stamp.exists() or stamp.read_text().split() != pinned:
        print(f"Setting up {VENV.name}: {', '.join(pinned)} (takes minutes) ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        run("-m", "pip", "install", "--quiet", *pinned)
        stamp.write_text("\n".join(pinned))
    run("-m", "pip", "uninstall", "--quiet", "--yes", PACKAGE, stderr=subprocess.DEVNULL)


def installed() -> dict[str, str]:
    """All that is installed in the environment, with versions."""
    listed = subprocess.run([BIN / "python", "-m", "pip", "list", "--format=json"], check=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    return {package["name"]: package["version"] for package in json.loads(listed)}


def first_cell() -> str:
    """The cell that installs the package where it is missing; every chapter has the same."""
    notebook = json.loads(min(CHAPTERS.glob("*.ipynb")).read_text(encoding="utf-8"))
    return next("".join(cell["source"]) for cell in notebook["cells"] if cell["id"] == "setup")


def install_as_a_reader_does() -> None:
    """Run the first cell, on a copy of the package; refuse changes to what was there."""
    files = [*files_under(ROOT / "minimodel"), *ROOT.glob("LICENSE*"),
             ROOT / "pyproject.toml", ROOT / "README.md"]
    copy, before = WORK / "package", installed()
    mirror({path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}, copy)
    run("-c", first_cell(), env={**os.environ, "SECOND_SEND_SOURCE": str(copy)}, cwd=WORK)
    after = installed()
    changed = [f"{name} {at} -> {after.get(name, 'gone')}" for name, at in before.items()
               if after.get(name) != at]
    if changed or PACKAGE not in after:
        raise SystemExit(f"Installing {PACKAGE} changed what was there: {changed or 'not at all'}. "
                         "Lower a floor in pyproject.toml.")
    print(f"installed {PACKAGE} {after[PACKAGE]}; {len(before)} packages kept their versions")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the chapters with Colab's versions.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of chapters/")
    parser.add_argument("--versions", type=Path, default=VERSIONS, help="a list in freeze format")
    parser.add_argument("--torch-of-colab", action="store_true",
                        help="take torch's version from that list, not from requirements.lock")
    parser.add_argument("--jobs", default="2", help="chapters executed at a time")
    asked = parser.parse_args()
    wanted = pins(asked.versions.read_text(encoding="utf-8"))
    if not asked.torch_of_colab:
        wanted["torch"] = re.search(r"^torch==([\d.]+)", LOCK.read_text(), re.MULTILINE)[1]
    set_up(wanted)
    forget(WORK)
    install_as_a_reader_does()
    return subprocess.call([BIN / "python", Path(__file__).with_name("run_notebooks.py"),
                            *asked.notebooks, "--jobs", asked.jobs,
                            "--out", WORK / "chapters", "--cache", WORK / "executed"])


if __name__ == "__main__":
    sys.exit(main())
