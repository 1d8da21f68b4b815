"""Check the form of the chapters: what would trip a reader in Colab, on a phone or on a slide.

    python book/tools/lint_notebooks.py [NOTEBOOK ...]      default: all of chapters/

Faults (exit status 1):
- outputs or counts in git; cell ids that are not unique and readable (`off-by-one`, not `a1b2c3`)
- a path of somebody's machine
- code lines over 72 characters (a phone scrolls them), code cells over 25 lines (one idea a cell)
- a first code cell that is not the setup cell, or not the same one in all chapters
- images without alternative text
- a cell that only draws and is not tagged `hide-input`
- a live cell (one that calls `try_it`) that is not tagged `skip-execution`, that needs more than
  the cell 'imports', or whose metadata do not say what its first click shows, for the test that
  clicks: "second_send": {"shows": "4821"}

Warnings (exit status 0): numbers with a unit, typed into the prose, that the claims register does
not have. An outside number belongs into the register and is printed by `fact`; one of the chapter's
own is best printed by a cell. Where prose needs it all the same, the notebook's metadata allows it:

    "second_send": {"own_numbers": ["52 GB"]}
"""

import argparse
import ast
import builtins
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
from places import CHAPTERS, ROOT

sys.path.insert(0, str(ROOT))
from minimodel.lesson.facts import load

MAX_COLUMNS, MAX_LINES, MAX_ID = 72, 25, 40
READABLE_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
RANDOM_ID = re.compile(r"(?=[0-9a-f]*[0-9])[0-9a-f]{8,}(-[0-9a-f]+)*")      # what editors make up
MACHINE_PATH = re.compile(r"(?<![\w./:])(/(work|tmp|home|root|Users|mnt|content)/|[A-Z]:\\)")
IMAGE_WITHOUT_ALT = re.compile(r"!\[\s*\]\(|<img\b(?![^>]*\balt\s*=\s*[\"'][^\"'\s])[^>]*>")
DRAWING_MODULE = re.compile(r"minimodel\.lesson\.(chapter_\d+|figures|stepper|draw)|matplotlib.*")
# code, formulas, and where links lead to
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|\$\$.*?\$\$|(?<!\\)\$[^$\n]*(?<!\\)\$|\]\([^)]*\)",
                       re.DOTALL)
UNITS = (r"TB/s|GB/s|TiB/s|GiB/s|Gb/s|[kKMGTP]B|[KMGT]iB|B/token|TFLOPS|PFLOPS|GPUs?|tokens?/s|"
         r"ms|µs|%|dollars?")
QUANTITY = re.compile(rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)\s?({UNITS})(?![\w/])|"
                      r"\\?\$\s?(\d[\d,]*(?:\.\d+)?)")
ONE = {"dollars": "$", "dollar": "$", "GPUs": "GPU", "tokens/s": "token/s", None: "$"}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def read(path: Path):
    """A notebook as it stands: `nbformat.read` would give new ids to cells that share one."""
    return nbformat.v4.reads(path.read_text(encoding="utf-8"))


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


# --- faults: each takes a notebook and yields sentences --------------------------------------


def outputs(notebook) -> Iterator[str]:
    for cell in code_cells(notebook):
        if cell.outputs or cell.execution_count is not None:
            yield f"cell '{cell.id}' carries outputs: run python book/tools/clean_notebooks.py"


def ids(notebook) -> Iterator[str]:
    for id, times in Counter(cell.get("id", "") for cell in notebook.cells).items():
        if times > 1:
            yield f"cell id '{id}' is used {times} times: give each cell its own"
        if not READABLE_ID.fullmatch(id) or RANDOM_ID.fullmatch(id) or len(id) > MAX_ID:
            yield f"cell id '{id}' says nothing: use a few small words, as in off-by-one"


def machine_paths(notebook) -> Iterator[str]:
    for cell in notebook.cells:
        if found := MACHINE_PATH.search(cell.source):
            yield f"cell '{cell.id}' names a path of one machine, {found[0]}"


def sizes(notebook) -> Iterator[str]:
    for cell in code_cells(notebook):
        lines = cell.source.splitlines()
        if len(lines) > MAX_LINES:
            yield f"cell '{cell.id}' has {len(lines)} lines: at most {MAX_LINES}, so split it"
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                yield (f"cell '{cell.id}' line {number} has {len(line)} characters: at most "
                       f"{MAX_COLUMNS}, or a phone scrolls it")


def setup_first(notebook) -> Iterator[str]:
    code = code_cells(notebook)
    if not code or code[0].id != "setup":
        yield "the first code cell is not 'setup': copy that, with its id, from another chapter"
    elif "hide-input" not in code[0].metadata.get("tags", []):
        yield "cell 'setup' is not tagged hide-input"


def alternative_text(notebook) -> Iterator[str]:
    for cell in prose_cells(notebook):
        if IMAGE_WITHOUT_ALT.search(cell.source):
            yield f"cell '{cell.id}' has an image without alternative text: say what it teaches"


def folded_drawings(notebook) -> Iterator[str]:
    names = drawing_names(notebook)
    for cell in code_cells(notebook):
        if only_draws(cell.source, names) and "hide-input" not in cell.metadata.get("tags", []):
            yield f"cell '{cell.id}' only draws: tag it hide-input"


def live_cells(notebook) -> Iterator[str]:
    imported = {name for cell in code_cells(notebook) if cell.id == "imports"
                for name in bound(cell.source)}
    for cell in code_cells(notebook):
        if not is_live(cell):
            continue
        if "skip-execution" not in cell.metadata.get("tags", []):
            yield f"cell '{cell.id}' is live: tag it skip-execution, for pages have no kernel"
        if not cell.metadata.get("second_send", {}).get("shows"):
            yield (f"cell '{cell.id}' is live: say in its metadata what its first click shows, as "
                   'in "second_send": {"shows": "4821"}')
        if missing := used(cell.source) - bound(cell.source) - imported:
            yield (f"cell '{cell.id}' is live but needs {', '.join(sorted(missing))}: import or "
                   "make that in the cell itself, or import it in the cell 'imports'")


CHECKS = (outputs, ids, machine_paths, sizes, setup_first, alternative_text, folded_drawings,
          live_cells)


def tree(source: str) -> ast.Module | None:
    """A cell's syntax tree; None where it uses magics or is no Python (ruff speaks of that)."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def is_live(cell) -> bool:
    """Whether a code cell shows fields and a button, by `try_it` of lesson/live.py."""
    return cell.cell_type == "code" and any(
        "try_it" in (getattr(node, "id", None), getattr(node, "attr", None))
        for node in ast.walk(tree(cell.source) or ast.Module([], [])))


def used(source: str) -> set[str]:
    """The names that a cell reads, builtins aside."""
    return {node.id for node in ast.walk(tree(source) or ast.Module([], []))
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id)}


def bound(source: str) -> set[str]:
    """The names that a cell makes: by importing, assigning, defining, or as arguments."""
    names = set()
    for node in ast.walk(tree(source) or ast.Module([], [])):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[0])
    return names


def drawing_names(notebook) -> set[str]:
    """What a notebook calls the modules and functions that draw."""
    names = set()
    for node in (node for cell in code_cells(notebook) if (parsed := tree(cell.source))
                 for node in ast.walk(parsed)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname or alias.name.split(".")[-1] for alias in node.names
                      if DRAWING_MODULE.match(f"{inside}{alias.name}")}
    return names


def only_draws(source: str, names: set[str]) -> bool:
    """Whether every statement of a cell calls something that draws, and keeps no result."""
    parsed = tree(source)
    return parsed is not None and bool(parsed.body) and all(
        isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
        and root(line.value) in names for line in parsed.body)


def root(node: ast.expr) -> str:
    """The name that a chain of calls and attributes starts with: `a` of a.b(1).c(2)."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


# --- warnings ----------------------------------------------------------------------------------


def value_of(text: str) -> float:
    return float(text.replace(",", ""))


def quantities(text: str) -> dict[str, tuple[float, str]]:
    """What numbers with a unit a text has: as written, and as number and one name of the unit."""
    return {" ".join(hit[0].split()): (value_of(hit[1] or hit[3]), ONE.get(hit[2], hit[2]))
            for hit in QUANTITY.finditer(text)}


@cache
def registered() -> frozenset[tuple[float, str]]:
    """Every number with a unit that stands in a claim: in its value, or anywhere in its words."""
    known = set()
    for claim in load().values():
        units = {ONE.get(unit, unit) for unit in re.findall(UNITS, claim.amount)}
        known |= {(value_of(number), unit) for number in NUMBER.findall(claim.value)
                  for unit in units}
        words = f"{claim.amount}; {claim.quantity}; {claim.context}; {claim.note}"
        known |= set(quantities(words).values())
    return frozenset(known)


def typed_numbers(notebook) -> Iterator[str]:
    """Quantities in the prose that neither the register has nor the metadata allows."""
    allowed = notebook.metadata.get("second_send", {}).get("own_numbers", [])
    for cell in prose_cells(notebook):
        for written, quantity in quantities(NOT_PROSE.sub(" ", cell.source)).items():
            if quantity not in registered() and written not in allowed:
                yield (f"cell '{cell.id}' says {written}, which the register does not have: print "
                       "it in a cell, add it to the register, or allow it in own_numbers")


# --- all together ------------------------------------------------------------------------------


def faults(notebook) -> list[str]:
    """All faults of one notebook."""
    return [fault for check in CHECKS for fault in check(notebook)]


def setups_differ(notebooks: dict[str, object]) -> list[str]:
    """Names of notebooks whose setup cell differs from the one that most have."""
    setups = {name: code_cells(notebook)[0].source for name, notebook in notebooks.items()
              if code_cells(notebook)}
    if not setups:
        return []
    [(usual, _)] = Counter(setups.values()).most_common(1)
    return [f"{name}: the setup cell differs from the other chapters': copy theirs"
            for name, source in setups.items() if source != usual]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the form of the chapters.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of chapters/")
    paths = parser.parse_args().notebooks or sorted(CHAPTERS.glob("*.ipynb"))
    notebooks = {path.name: read(path) for path in paths}
    found = [f"{name}: {fault}" for name, notebook in notebooks.items()
             for fault in faults(notebook)] + setups_differ(notebooks)
    warnings = [f"{name}: warning: {text}" for name, notebook in notebooks.items()
                for text in typed_numbers(notebook)]
    print("\n".join([*found, *warnings,
                     f"{len(notebooks)} chapter notebooks, {len(found)} faults, "
                     f"{len(warnings)} warnings"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
