"""Keep outputs, counters and editors' leftovers out of the chapters in git; cell ids stay.

    python book/tools/clean_notebooks.py           clean them
    python book/tools/clean_notebooks.py --check   say which are not clean, and change nothing
"""

import subprocess
import sys

from places import CHAPTERS

COMMAND = ["-m", "nbstripout", "--keep-id",
           "--extra-keys", "metadata.widgets metadata.language_info.version"]


def main() -> int:
    notebooks = sorted(str(path) for path in CHAPTERS.glob("*.ipynb"))
    checking = "--check" in sys.argv[1:]
    extra = ["--verify"] if checking else []
    rc = subprocess.call([sys.executable, *COMMAND, *extra, *notebooks]) if notebooks else 0
    if checking:
        print("chapters carry outputs: run python book/tools/clean_notebooks.py" if rc
              else f"{len(notebooks)} chapter notebooks are free of outputs")
    return rc


if __name__ == "__main__":
    sys.exit(main())
