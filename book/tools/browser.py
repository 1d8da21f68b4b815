"""The built site in a real browser: find or install Chromium, serve the site, open pages.

Run as a program, it makes sure that a browser is there, or stops and names the remedy.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from places import HTML, ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
WIDTHS = {"wide": 1280, "narrow": 390}
THEMES = ("light", "dark")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]


def playwright_chromium() -> Path | None:
    """Playwright's own Chromium, where it was downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = Path(playwright.chromium.executable_path)
    return path if path.exists() else None


def system_chromium() -> Path | None:
    """The browser that CHROMIUM names, else the system's; SystemExit where the name is wrong."""
    named = os.environ.get("CHROMIUM")
    if named:
        found = shutil.which(named)
        if found is None:
            raise SystemExit(f"CHROMIUM={named!r} is no program: name a Chromium, or unset it")
        return Path(found)
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return Path(found) if found else MAC if MAC.exists() else None


def find_chromium() -> Path | None:
    return system_chromium() or playwright_chromium()


def install_chromium() -> None:
    """Get a Chromium: from apt where one is root, else Playwright's download."""
    if shutil.which("apt-get") and os.geteuid() == 0:
        print("Installing Chromium with apt ...", flush=True)
        quiet = {"stdout": subprocess.DEVNULL,
                 "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update"], check=False, **quiet)
        done = subprocess.run(["apt-get", "install", "-y", "chromium"], check=False, **quiet)
        if done.returncode == 0 and system_chromium():
            return
    print("Fetching Playwright's Chromium ...", flush=True)
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


def need_chromium() -> Path:
    """A browser's path, installing one where there is none; raises SystemExit with the remedy."""
    if find_chromium() is None:
        install_chromium()
    path = find_chromium()
    if path is None:
        raise SystemExit("No browser for the site's tests, and none could be installed: install "
                         "Chromium or Chrome, or set CHROMIUM to the path of one.")
    return path


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files; says nothing."""

    def log_message(self, *args) -> None:
        pass


@contextmanager
def serve(folder: Path = HTML) -> Iterator[str]:
    """Serve a folder on a free loopback port; gives the address, without a slash at its end."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def chromium() -> Iterator:
    """A running headless browser, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=need_chromium(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def context(browser, width: str, theme: str):
    """A browser context as wide as a desk or a phone, with the page's theme set."""
    made = browser.new_context(viewport={"width": WIDTHS[width], "height": 900}, color_scheme=theme,
                               reduced_motion="reduce")
    made.add_init_script(f"localStorage.setItem('mode', '{theme}');"
                         f"localStorage.setItem('theme', '{theme}')")
    return made


def pages(html: Path = HTML) -> list[str]:
    """All pages of the built book, without suffix: `book/index`, `chapters/05_kv_cache` ..."""
    return [path.relative_to(html).with_suffix("").as_posix()
            for folder in ("book", "chapters") for path in sorted((html / folder).rglob("*.html"))]


if __name__ == "__main__":
    found = need_chromium()
    print(f"browser: {found.relative_to(ROOT) if found.is_relative_to(ROOT) else found}")
