"""Progress, timing, and how little an import brings along."""

import subprocess
import sys

import pytest

from minimodel.lesson import progress
from minimodel.lesson.progress import track
from minimodel.lesson.timing import seconds


def test_track_changes_nothing_and_is_quiet_where_nobody_watches(capfd):
    assert list(track(range(5), "working")) == [0, 1, 2, 3, 4]
    assert list(track((x for x in "ab"), "working", total=2)) == ["a", "b"]
    assert capfd.readouterr() == ("", "")


def test_track_shows_a_bar_on_a_terminal_unless_told_to_be_quiet(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(track(range(3), "working")) == [0, 1, 2]
    assert "working" in capfd.readouterr().err
    monkeypatch.setenv(progress.QUIET, "1")
    assert list(track(range(3), "working")) == [0, 1, 2]
    assert capfd.readouterr().err == ""


def test_seconds_is_the_best_of_its_runs():
    ticks = iter([0.0, 5.0, 10.0, 12.0, 20.0, 29.0])
    calls = []
    assert seconds(lambda: calls.append(1), repeat=3, clock=lambda: next(ticks)) == 2.0
    assert len(calls) == 3


def test_seconds_needs_a_run():
    with pytest.raises(ValueError, match="repeat=0"):
        seconds(lambda: None, repeat=0)


@pytest.mark.parametrize("module", ["practice", "stepper", "facts", "palette", "draw", "source",
                                    "progress", "timing", "exercises.engine"])
def test_imports_are_light(module):
    code = (
        f"import sys, minimodel.lesson.{module}\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'IPython', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'brings {heavy}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
