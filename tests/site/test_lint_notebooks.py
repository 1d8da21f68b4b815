"""The notebook lint finds each fault it promises, names the cell, and passes what is good."""

import sys

import lint_notebooks
import nbformat
import pytest
from lint_notebooks import faults, setups_differ, typed_numbers
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HIDDEN = {"tags": ["hide-input"]}


def notebook(*cells, **metadata):
    """A sound chapter, with more cells at its end."""
    made = new_notebook(metadata=metadata)
    made.cells = [
        new_markdown_cell("# Notes\n\n![The rows shrink](rows.svg)", id="title"),
        new_code_cell("import os", id="setup", metadata=HIDDEN),
        new_code_cell("from minimodel.lesson import chapter_05 as drawing\n"
                      "from matplotlib import pyplot as plt", id="imports"),
        *cells]
    return made


def code(source: str, id: str = "try-it", **more):
    return new_code_cell(source, id=id, **more)


def prose(source: str):
    return new_markdown_cell(source, id="remark")


def test_a_sound_chapter_has_no_fault():
    sound = notebook(code("rows = 5\ndrawing.figure(rows)"), code("x" * 72, id="p-50"),
                     code("\n".join(["x = 1"] * 25), id="long-but-fine"),
                     code("drawing.figure(5).show()", id="figure", metadata=HIDDEN),
                     prose("`/tmp/x` is /tmpfile; see https://example.org/home/x"))
    assert [fault for fault in faults(sound) if "remark" not in fault] == []


@pytest.mark.parametrize(("cell", "complaint"), [
    (code("1", outputs=[nbformat.v4.new_output("stream", text="1")]), "'try-it' carries outputs"),
    (code("1", execution_count=3), "'try-it' carries outputs"),
    (code("1", id="imports"), "'imports' is used 2 times"),
    (code("1", id="a1b2c3d4"), "'a1b2c3d4' says nothing"),
    (code("1", id="7"), "'7' says nothing"),
    (code("1", id="Try_It"), "'Try_It' says nothing"),
    (code("1", id="x" * 41), "says nothing"),
    (code("open('/tmp/notes.txt')"), "names a path of one machine, /tmp/"),
    (prose("It is in /home/ann/book."), "names a path of one machine, /home/"),
    (prose(r"It is in C:\Users"), "names a path of one machine"),
    (code("x = 1\n" + "y" * 73), "line 2 has 73 characters: at most 72"),
    (code("\n".join(["x = 1"] * 26)), "has 26 lines: at most 25"),
    (prose("![ ](rows.svg)"), "'remark' has an image without alternative text"),
    (prose('<img src="rows.svg">'), "an image without alternative text"),
    (prose('<img src="rows.svg" alt="">'), "an image without alternative text"),
    (code("drawing.figure(5)"), "'try-it' only draws: tag it hide-input"),
    (code("# the rows\nplt.plot([1])\nplt.show();"), "'try-it' only draws"),
    (code("drawing.steps(\n    4,\n).show()"), "'try-it' only draws"),
])
def test_each_fault_is_found_and_named(cell, complaint):
    found = faults(notebook(cell))
    assert len(found) == 1 and complaint in found[0]


@pytest.mark.parametrize("source", [
    "figure = drawing.figure(5)", "print(5)\ndrawing.figure(5)", "%matplotlib inline",
    "check('5.1', 3)", "", "drawing"])
def test_what_does_more_than_draw_may_be_seen(source):
    assert faults(notebook(code(source))) == []


LIVE = "from minimodel.lesson.live import try_it\ntry_it(lambda prompt: prompt, prompt=os)"
SHOWS = {"second_send": {"shows": "4821"}}
SKIPPED = {"tags": ["skip-execution"]}


def test_a_live_cell_is_skipped_alone_and_says_what_it_shows():
    sound = code("import os\n" + LIVE, metadata={**SKIPPED, **SHOWS})
    assert faults(notebook(sound)) == []
    drawn = code(LIVE.replace("=os", "=plt"), metadata={**SKIPPED, **SHOWS})
    assert faults(notebook(drawn)) == []            # the cell 'imports' has brought plt


@pytest.mark.parametrize(("source", "metadata", "complaint"), [
    ("import os\n" + LIVE, SHOWS, "'try-it' is live: tag it skip-execution"),
    ("import os\n" + LIVE, SKIPPED, "'try-it' is live: say in its metadata what"),
    (LIVE, {**SKIPPED, **SHOWS}, "'try-it' is live but needs os: import"),
    ("from minimodel.lesson import live\nlive.try_it(print)", SKIPPED,
     "'try-it' is live: say in its metadata what"),
])
def test_faults_of_live_cells_are_found(source, metadata, complaint):
    found = faults(notebook(code(source, metadata=metadata)))
    assert len(found) == 1 and complaint in found[0]


def test_the_first_code_cell_is_the_setup():
    late = notebook()
    late.cells.insert(0, code("import torch", id="early"))
    assert "first code cell is not 'setup'" in faults(late)[0]
    assert "first code cell is not 'setup'" in faults(new_notebook(cells=[prose("text")]))[0]
    plain = notebook()
    del plain.cells[1].metadata["tags"]
    assert faults(plain) == ["cell 'setup' is not tagged hide-input"]


def test_a_setup_of_its_own_is_named():
    other = notebook()
    other.cells[1].source = "import os, sys"
    chapters = {"01.ipynb": notebook(), "02.ipynb": other, "03.ipynb": notebook()}
    assert [text.split(":")[0] for text in setups_differ(chapters)] == ["02.ipynb"]
    assert setups_differ({"01.ipynb": notebook()}) == []


@pytest.mark.parametrize(("text", "warned"), [
    ("An H100 has 81 GB.", "81 GB"), ("An H100 has 80 GB.", None),
    ("It was 4.75 % more.", "4.75 %"),
    ("A drive reads 14 GB/s.", None), (r"It costs \$7.31 an hour.", r"\$7.31"),
    (r"It costs \$6.03 an hour.", None), ("6.03 dollars", None), ("It took 128 GPUs.", None),
    ("It took 129 GPUs.", "129 GPUs"), ("79,000 tokens/s", "79,000 tokens/s"),
    ("73,700 tokens/s", None), ("There are 81 tokens and 3 chapters.", None), ("`81 GB`", None),
    ("$81 GB$ and $x_{81}$", None), ("See [this](81%20GB).", None), ("52 GB\n\n52 GB", "52 GB"),
])
def test_typed_numbers_are_compared_with_the_register(text, warned):
    warnings = list(typed_numbers(notebook(prose(text))))
    assert len(warnings) == (warned is not None)
    if warned:
        assert f"cell 'remark' says {warned}, which" in warnings[0]


def test_the_metadata_allows_a_chapters_own_numbers():
    own = notebook(prose("That is 52 GB, or 53 GB."), second_send={"own_numbers": ["52 GB"]})
    assert [text.split("says ")[1][:5] for text in typed_numbers(own)] == ["53 GB"]


def test_shared_ids_are_seen_in_a_file(tmp_path):
    """The usual reader would mend them silently."""
    path = tmp_path / "twins.ipynb"
    path.write_text(nbformat.v4.writes(notebook(code("1", id="imports"))))
    assert faults(lint_notebooks.read(path)) == [
        "cell id 'imports' is used 2 times: give each cell its own"]


def test_faults_fail_and_warnings_do_not(tmp_path, monkeypatch, capsys):
    path = tmp_path / "01_a.ipynb"
    monkeypatch.setattr(sys, "argv", ["lint", str(path)])
    nbformat.write(notebook(prose("It has 81 GB.")), path)
    assert lint_notebooks.main() == 0
    assert "01_a.ipynb: warning: cell 'remark' says 81 GB" in capsys.readouterr().out
    nbformat.write(notebook(code("y" * 80)), path)
    assert lint_notebooks.main() == 1
    assert capsys.readouterr().out.endswith("1 chapter notebooks, 1 faults, 0 warnings\n")
