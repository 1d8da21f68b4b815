"""Live cells in a real kernel: every button is clicked, and what appears is read."""

import ast
import queue
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbformat.v4 import new_code_cell, new_notebook

from minimodel.lesson import live

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
START_S, RUN_S = 120, 120
# what ipywidgets 7.7.1, Colab's, has too; `Stack` for one came later
IN_COLAB = {"Button", "Checkbox", "Dropdown", "IntSlider", "Layout", "Output", "Text", "Textarea",
            "VBox"}

pytestmark = pytest.mark.timeout(300)


class Kernel:
    """A running kernel, seen as a notebook sees it: cells go in, outputs and widgets come out."""

    def __init__(self, client):
        self.client, self.widgets = client, {}      # widgets: id -> all that it has said of itself

    def run(self, source: str) -> str:
        """Execute a cell; what it showed, as text."""
        return self._replies(self.client.execute(source))

    def send(self, widget: str, data: dict) -> str:
        """What a front end sends when a reader moves a widget; what is shown in reply."""
        message = self.client.session.msg("comm_msg", {"comm_id": widget, "data": data})
        self.client.shell_channel.send(message)
        return self._replies(message["header"]["msg_id"])

    def click(self, label: str) -> str:
        return self.send(self.find(label), {"method": "custom", "content": {"event": "click"}})

    def set(self, label: str, value, trait: str = "value") -> None:
        self.send(self.find(label), {"method": "update", "state": {trait: value}})

    def find(self, label: str) -> str:
        """The newest widget with this label."""
        found = [widget for widget, states in self.widgets.items()
                 if states[0].get("description") == label]
        assert found, f"no widget is called {label!r}"
        return found[-1]

    def buttons(self) -> list[str]:
        return [states[0]["description"] for states in self.widgets.values()
                if states[0].get("_model_name") == "ButtonModel"]

    def _replies(self, request: str) -> str:
        shown, deadline = [], time.monotonic() + RUN_S
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return "\n".join(shown)
            shown += self._take(message["msg_type"], message["content"])
        pytest.fail(f"the kernel did not finish within {RUN_S} s")

    def _take(self, kind: str, content: dict) -> list[str]:
        if kind == "comm_open":
            self.widgets[content["comm_id"]] = [content["data"]["state"]]
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.widgets[content["comm_id"]].append(content["data"]["state"])
        elif kind == "stream":
            return [content["text"]]
        elif kind in ("display_data", "execute_result"):
            return [content["data"]["text/plain"], content["data"].get("text/html", "")]
        elif kind == "error":
            return ["error: " + content["evalue"]]
        return []


@contextmanager
def kernel(folder: Path):
    manager, client = start_new_kernel(startup_timeout=START_S, kernel_name="python3", cwd=folder)
    try:
        running = Kernel(client)
        running.run(f"import sys; sys.path.insert(0, {str(ROOT)!r})")
        yield running
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with kernel(tmp_path_factory.mktemp("live")) as kernel_:
        yield kernel_


CELL = """
from minimodel.lesson.live import choice, text, tick, try_it, whole
calls = []
def shout(words, times, mark, loud):
    calls.append(words)
    if not words:
        raise ValueError("the text is empty: type a letter at least")
    print((words.upper() if loud else words) * times + mark)
    return len(words) / (times - 7)
try_it(shout, words=text("Words", "abc"), times=whole("Times", 1, 9, 3),
       mark=choice("Mark", ["!", "?"], "?"), loud=tick("Loud"), button="Shout")
"""


# --- one panel -----------------------------------------------------------------------------


def test_a_click_runs_the_function_once_with_what_was_typed(running):
    running.run(CELL)
    assert "abcabcabc?" in running.click("Shout")
    running.set("Words", "xy")
    running.set("Times", 2)
    running.set("Mark", 0, trait="index")
    running.set("Loud", True)
    shown = running.click("Shout")
    assert "XYXY!" in shown and "-0.4" in shown
    assert running.run("print(calls)") == "['abc', 'xy']\n"


def test_the_button_rests_while_it_works(running):
    running.run(CELL)
    button = running.find("Shout")
    running.click("Shout")
    said = [state.get("disabled") for state in running.widgets[button][1:] if "disabled" in state]
    assert said == [True, False]
    words = [state["description"] for state in running.widgets[button] if "description" in state]
    assert words == ["Shout", live.BUSY, "Shout"]


def test_errors_are_a_sentence_and_the_button_works_again(running):
    running.run(CELL)
    running.set("Words", "")
    shown = running.click("Shout")
    assert "That cannot be done: the text is empty: type a letter at least" in shown
    running.set("Words", "<b>")
    running.set("Times", 7)
    shown = running.click("Shout")
    assert "The code of this cell failed (ZeroDivisionError: float division by zero" in shown or (
        "The code of this cell failed (ZeroDivisionError: division by zero" in shown)
    assert "Traceback" not in shown and "error:" not in shown
    running.set("Times", 8)
    assert "<b><b>" in running.click("Shout")


def test_a_cell_run_twice_has_one_handler_each(running):
    running.run(CELL)
    running.run(CELL)
    assert running.click("Shout").count("abcabcabc?") == 1
    assert running.run("print(len(calls))") == "1\n"


def test_without_ipywidgets_a_sentence_says_what_to_do(running):
    shown = running.run(
        "import importlib.util as u\nkept = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'ipywidgets' else kept(name, *more)\n"
        + CELL + "\nu.find_spec = kept")
    assert live.NEEDS_WIDGETS in shown and "error:" not in shown


def test_outside_a_notebook_it_says_where_it_works(capsys):
    live.try_it(print, prompt=live.text("Prompt"))
    assert capsys.readouterr().out == live.NEEDS_NOTEBOOK + "\n"


@pytest.mark.parametrize(("make", "said"), [
    (lambda: live.try_it(print), "needs a field"),
    (lambda: live.text("a", rows=0), "rows=0"),
    (lambda: live.whole("a", 1, 5, 6), "start=6"),
    (lambda: live.choice("a", ["x"], "y"), "start='y'"),
])
def test_bad_fields_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_only_widgets_that_colab_has_are_used():
    source = ast.parse(Path(live.__file__).read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name) and node.value.id in ("widgets", "ipywidgets")}
    assert used and used <= IN_COLAB


def test_importing_it_needs_no_ipywidgets():
    assert "import ipywidgets" not in Path(live.__file__).read_text().split("def ")[0]


# --- the chapters' live cells --------------------------------------------------------------


def is_live(cell) -> bool:
    return cell.cell_type == "code" and "try_it(" in cell.source


def click_all(notebook, running: Kernel) -> list[str]:
    """Run each live cell after the imports alone, click its button; what is not as it should be."""
    faults = []
    running.run("\n".join(c.source for c in notebook.cells if c.get("id") == "imports"))
    for cell in filter(is_live, notebook.cells):
        known = len(running.buttons())
        told = running.run(cell.source)
        new = running.buttons()[known:]
        shown = running.click(new[-1]) if new else told
        if cell.metadata["second_send"]["shows"] not in shown:
            faults.append(f"{cell.id}: {shown}")
    return faults


def with_live_cells() -> list[Path]:
    return [path for path in sorted(CHAPTERS.glob("*.ipynb"))
            if any(map(is_live, nbformat.read(path, as_version=4).cells))]


@pytest.mark.parametrize("path", with_live_cells() or [None],
                         ids=lambda path: path.stem if path else "none")
def test_the_live_cells_of_a_chapter_answer(path, tmp_path):
    if path is None:
        pytest.skip("no chapter has a live cell yet")
    with kernel(tmp_path) as running:
        assert click_all(nbformat.read(path, as_version=4), running) == []


def test_a_live_cell_that_answers_wrongly_is_found(running):
    """The check above can fail: on a cell that shows something else, and on one that breaks."""
    def cell(id, source, shows):
        return new_code_cell(source, id=id, metadata={"second_send": {"shows": shows}})

    made = new_notebook(cells=[
        cell("imports", "from minimodel.lesson.live import text, try_it", ""),
        cell("good", "try_it(lambda p: print(p * 2), p=text('P', 'ab'))", "abab"),
        cell("wrong", "try_it(lambda p: print(p), p=text('P', 'ab'))", "abab"),
        cell("broken", "try_it(lambda p: nothing, p=text('P', 'ab'))", "abab"),
        cell("no-panel", "try_it(nothing, p=text('P', 'ab'))", "abab")])
    faults = click_all(made, running)
    assert [fault.split(":")[0] for fault in faults] == ["wrong", "broken", "no-panel"]
    assert "NameError" in faults[1] and "NameError" not in faults[0]
