"""The notebook runner: what it reports, what it keeps, and that one fault stops no other."""

import nbformat
import pytest
import run_notebooks
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from run_notebooks import BUDGET_VARIABLE, budget_from_environment, run_all

pytestmark = pytest.mark.timeout(120)


def write(folder, name: str, *sources: str, prose: str = "text"):
    """A notebook with one Markdown cell and the given code cells: code-0, code-1 ..."""
    cells = [new_markdown_cell(prose, id="prose")]
    cells += [new_code_cell(source, id=f"code-{i}") for i, source in enumerate(sources)]
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def outputs(result) -> list:
    return nbformat.reads(result.text, as_version=4).cells[-1].outputs


def test_faults_are_named_and_stop_no_other_notebook(tmp_path, capsys):
    paths = [
        write(tmp_path, "a_raises", "print('fine')", "values = [1, 2]\nvalues[7]"),
        write(tmp_path, "b_warns", "import warnings\nwarnings.warn('an old function')"),
        write(tmp_path, "c_good",
              "import os\nprint(os.environ['OMP_WAIT_POLICY'], os.listdir('.'))"),
    ]
    raised, warned, good = run_all(paths, tmp_path / "cache", jobs=2, budget_s=60)
    assert raised.text is None and len(raised.faults) == 1
    assert "cell 'code-1' raised" in raised.faults[0]
    assert "values[7]" in raised.faults[0] and "IndexError" in raised.faults[0]
    assert "\x1b" not in raised.faults[0]
    assert warned.text is None and "an old function" in warned.faults[0]
    assert good.faults == [] and outputs(good)[0].text == "PASSIVE []\n"
    told = capsys.readouterr()
    assert "FAILED a_raises.ipynb" in told.out and "a_raises.ipynb: cell 'code-1'" in told.err


def test_time_is_bounded(tmp_path):
    path = write(tmp_path, "endless", "import time\ntime.sleep(60)")
    [result] = run_all([path], tmp_path / "cache", jobs=1, budget_s=2)
    assert result.text is None and result.seconds < 30
    assert "code-0" in result.faults[0] and BUDGET_VARIABLE in result.faults[0]


def test_a_progress_bar_is_allowed_and_taken_off_the_page(tmp_path):
    path = write(tmp_path, "bar",
                 "from tqdm import tqdm\nfor _ in tqdm(range(3), 'train'):\n    pass")
    [result] = run_all([path], tmp_path / "cache", jobs=1, budget_s=60)
    assert result.faults == [] and outputs(result) == []


def test_a_skipped_cell_does_not_run_and_says_where_it_does(tmp_path):
    path = write(tmp_path, "live", "print(2)", "raise SystemExit('no kernel is watched')")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[-1].metadata["tags"] = [run_notebooks.SKIP]
    nbformat.write(notebook, path)
    for how in ("ran", "cached"):
        [result] = run_all([path], tmp_path / "cache", jobs=1, budget_s=60)
        assert result.how == how and result.faults == []
        [note] = outputs(result)
        assert "waits for a kernel" in note.data["text/html"]
        assert "waits for a kernel" in note.data["text/plain"]


def test_outputs_are_used_again_until_what_decides_them_changes(tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def once(code: str, prose: str):
        [result] = run_all([write(tmp_path, "n", code, prose=prose)], cache, jobs=1, budget_s=60)
        return result

    assert once("print(2 + 3)", "before").how == "ran"
    again = once("print(2 + 3)", "after")
    assert again.how == "cached" and outputs(again)[0].text == "5\n" and "after" in again.text
    assert once("print(2 + 4)", "after").how == "ran"
    monkeypatch.setattr(run_notebooks, "package_digest", lambda: "another package")
    assert once("print(2 + 4)", "after").how == "ran"
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan"])
def test_a_senseless_budget_is_refused(monkeypatch, value):
    monkeypatch.setenv(BUDGET_VARIABLE, value)
    with pytest.raises(SystemExit, match=BUDGET_VARIABLE):
        budget_from_environment()
