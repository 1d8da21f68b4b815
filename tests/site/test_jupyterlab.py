"""JupyterLab itself: a notebook is opened in it and run, and all that is interactive moves.

A server of its own on loopback, with a fresh token and its own folders, ended by its process id.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import browser as site_browser
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import TimeoutError

ROOT = Path(__file__).resolve().parents[2]
JUPYTER = Path(sys.executable).with_name("jupyter-lab")
START_S = 120
DEADLINE_MS, ACTION_MS = 120_000, 30_000        # the first for a first kernel on a busy machine
CELLS = {
    "imports": "import sys\nsys.path[:0] = [{root!r}, {here!r}]\n"
               "from example_explorables import note_counter, openings\n"
               "from minimodel.lesson import draw\n"
               "from minimodel.lesson.live import text, try_it\n"
               "from minimodel.lesson.stepper import Stepper",
    "stepper": "Stepper([draw.svg(200, 60, f'{{n}} cells', draw.slots(0, 0, n, 5))\n"
               "         for n in range(4)], ['none', 'one', 'two', 'three'],\n"
               "        'cells used', 'Cells fill up')",
    "explorable": "note_counter()",
    "typed": "openings()",
    "live": "def shout(words):\n    if not words:\n        raise ValueError('type a letter')\n"
            "    print(words.upper() * 2)\n"
            "try_it(shout, words=text('Words', 'abc'), button='Shout')",
}

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(not JUPYTER.exists(), reason="jupyterlab is not installed"),
]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_notebook(path: Path) -> None:
    names = {"root": str(ROOT), "here": str(Path(__file__).parent)}
    cells = [new_markdown_cell("# Everything that moves", id="title")]
    cells += [new_code_cell(source.format(**names), id=id) for id, source in CELLS.items()]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def write_settings(folder: Path) -> None:
    """No question about news: it would lie over the notebook."""
    path = folder / "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    path.parent.mkdir(parents=True)
    path.write_text('{"fetchNews": "false", "checkForUpdates": false}')


@contextmanager
def jupyter_lab(folder: Path):
    """A server over `folder`; gives its address and its token, and ends it afterwards."""
    port, token = free_port(), secrets.token_hex(16)
    homes = {name: folder.parent / name.lower() for name in
             ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR",
              "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "HOME")}
    for home in homes.values():
        home.mkdir(exist_ok=True)
    command = [str(JUPYTER), "--no-browser", "--ip=127.0.0.1", f"--port={port}",
               "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
               f"--ServerApp.root_dir={folder}", "--LabApp.news_url=None",
               "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    write_settings(homes["JUPYTERLAB_SETTINGS_DIR"])
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    log = folder.parent / "server.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(command, env={**os.environ, **map_str(homes)}, stdout=stream,
                                  stderr=subprocess.STDOUT, cwd=folder)
    try:
        wait_for(f"http://127.0.0.1:{port}/api?token={token}", server, log)
        yield f"http://127.0.0.1:{port}", token
    finally:
        server.terminate()      # it ends its kernels too
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)


def map_str(paths: dict) -> dict:
    return {name: str(path) for name, path in paths.items()}


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"jupyter lab did not start within {START_S} s:\n{log.read_text()[-2000:]}",
                pytrace=False)


def run_all(page) -> None:
    """Run every cell. What is asked before a kernel listens is lost, so ask until it runs."""
    page.wait_for_selector("text=/\\| Idle/")
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while time.monotonic() < deadline:
        page.click("text=Run >> nth=0")
        page.click("text=Run All Cells >> nth=0")
        with suppress(TimeoutError):
            page.wait_for_selector(".jp-InputPrompt >> text=/\\[[*\\d]+\\]/", timeout=5000)
            break
    page.wait_for_selector("button:has-text('Shout')", state="attached")


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The notebook, open in JupyterLab, all its cells run."""
    folder = tmp_path_factory.mktemp("lab") / "notebooks"
    folder.mkdir()
    write_notebook(folder / "moves.ipynb")
    with jupyter_lab(folder) as (address, token):
        context = site_browser.context(browser, "wide", "light")
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        page.foreign, page.errors = [], []
        page.on("request", lambda request: page.foreign.append(request.url) if not
                request.url.startswith((address, "data:", "blob:", "ws://127.0.0.1")) else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto(f"{address}/lab/tree/moves.ipynb?token={token}&reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        run_all(page)
        page.set_default_timeout(ACTION_MS)
        yield page
        context.close()
    shutil.rmtree(folder.parent, ignore_errors=True)


def test_the_stepper_moves(page):
    """Arrow keys too, which JupyterLab would take to walk through the cells."""
    figure = page.locator("figure.ss-stepper")
    slider, output = figure.locator("input"), figure.locator("output")
    slider.focus()
    slider.press("ArrowRight")
    assert output.inner_text() == "one"
    figure.locator("button").last.click()
    assert output.inner_text() == "two"
    assert figure.locator(".ss-frame:not([hidden])").count() == 1


def picture(figure) -> str:
    return figure.locator(".ss-picture").inner_html()


@pytest.mark.parametrize(("control", "keys"), [
    ("input[type=range]", ["ArrowRight"]), ("input[type=range]", ["Home"]),
    ("select", ["End"]), ("select", ["ArrowUp"]), ("input[type=checkbox]", ["Space"]),
    ("input[type=number]", ["ControlOrMeta+a", "7"]), ("input[type=number]", ["ArrowUp"]),
])
def test_keys_move_the_explorable_and_nothing_else(page, control, keys):
    figure = page.locator("figure.ss-explorable").first
    before, box = picture(figure), figure.locator(control)
    active = page.locator(".jp-Notebook .jp-Cell.jp-mod-active")
    box.focus()
    chosen = active.element_handle()
    for key in keys:
        box.press(key)
    assert picture(figure) != before
    assert page.locator(".jp-Cell").count() == len(CELLS) + 1
    assert active.evaluate("(cell, chosen) => cell === chosen", chosen)
    assert box.evaluate("box => box === document.activeElement")


def test_the_mouse_moves_the_explorable(page):
    figure = page.locator("figure.ss-explorable").first
    before, slider = picture(figure), figure.locator("input[type=range]")
    width = slider.bounding_box()["width"]
    slider.click(position={"x": width / 2, "y": 15})
    middle = picture(figure)
    slider.click(position={"x": width - 4, "y": 15})
    assert len({before, middle, picture(figure)}) == 3
    ticked = picture(figure)
    figure.locator("input[type=checkbox]").click()
    assert picture(figure) != ticked


def test_letters_typed_are_text_and_no_commands(page):
    """a, b, dd and x would add, delete or cut cells in command mode."""
    figure = page.locator("figure.ss-explorable").last
    box = figure.locator("textarea").first
    box.click()
    box.press("ControlOrMeta+a")
    box.press_sequentially("abxdd 00 zz")
    assert figure.locator(".ss-spans").first.inner_text().endswith("abxdd 00 zz")
    assert page.locator(".jp-Cell").count() == len(CELLS) + 1


def test_the_live_cell_answers(page):
    cell = page.locator(".jp-CodeCell").last
    output = cell.locator(".jp-OutputArea .jp-OutputArea")
    words = cell.get_by_label("Words")
    cell.get_by_role("button", name="Shout").click()
    output.get_by_text("ABCABC").wait_for()
    words.fill("xyz")
    cell.get_by_role("button", name="Shout").click()
    output.get_by_text("XYZXYZ").wait_for()
    assert output.get_by_text("ABCABC").count() == 0
    words.fill("")
    cell.get_by_role("button", name="Shout").click()
    output.get_by_text("That cannot be done: type a letter").wait_for()
    assert cell.get_by_role("button", name="Shout").is_enabled()


def test_nothing_failed_and_no_other_host_was_asked(page):
    assert page.foreign == [] and page.errors == []
