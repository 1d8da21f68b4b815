"""Where things are, and the few file operations that several tools share."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
PACKAGE = ROOT / "minimodel"
LOCK = ROOT / "requirements.lock"
STATIC = ROOT / "book/_static"

BUILD = ROOT / "_build"
SOURCE = BUILD / "src"                  # the tree that Jupyter Book renders
EXECUTED = BUILD / "executed"           # outputs of notebooks, by key
SITE = BUILD / "site"
HTML = SITE / "_build/html"             # the finished site


def files_under(folder: Path) -> list[Path]:
    """All files below `folder` in a fixed order, without Python's bytecode."""
    return sorted(path for path in folder.rglob("*")
                  if path.is_file() and "__pycache__" not in path.parts)


def digest(paths: Iterable[Path], base: Path = ROOT) -> str:
    """One sha256 over the names (relative to `base`) and the contents of files."""
    total = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(base).as_posix()} {content}\n".encode())
    return total.hexdigest()


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file only where its content differs: Sphinx reads again what looks newer."""
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def mirror(wanted: dict[str, bytes], folder: Path) -> None:
    """Make `folder` hold exactly the files of `wanted` (relative name to content)."""
    for path in files_under(folder):
        if path.relative_to(folder).as_posix() not in wanted:
            path.unlink()
    for name, content in wanted.items():
        write_if_changed(folder / name, content)


def forget(folder: Path) -> None:
    """Remove a folder and all below it; one that is not there is fine."""
    shutil.rmtree(folder, ignore_errors=True)
