"""A progress bar for long work, which leaves nothing behind on a built page."""

import os
import sys
from collections.abc import Iterable, Iterator

from minimodel.lesson.markup import in_notebook

QUIET = "MINIMODEL_QUIET"       # set by whatever builds the book: pages keep no half-drawn bars


def track(iterable: Iterable, label: str, total: int | None = None) -> Iterator:
    """Go through `iterable` while a bar shows how far it is; `total` where it has no length.

    The bar disappears when the work is done. There is none where `MINIMODEL_QUIET`
    is set, and none where a script's error output is not a terminal.
    """
    if not _someone_watches():
        return iter(iterable)
    if in_notebook():
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    return iter(tqdm(iterable, desc=label, total=total, leave=False))


def _someone_watches() -> bool:
    if os.environ.get(QUIET):
        return False
    return in_notebook() or sys.stderr.isatty()
