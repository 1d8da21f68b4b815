"""Build the site: fetch assets, execute the chapters, render with Jupyter Book, strictly.

Everything that is rendered is first laid out in `_build/src` (pages, executed chapters, a derived
configuration), so that no stray file of the repository can reach the book. Rendering is skipped
when that tree is the one that the finished site was made from.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import yaml
from address import pages_url, repository_url
from facts_pages import pages as facts_pages
from places import (
    BUILD,
    CHAPTERS,
    EXECUTED,
    HTML,
    LOCK,
    ROOT,
    SITE,
    SOURCE,
    STATIC,
    digest,
    files_under,
    forget,
    mirror,
    write_if_changed,
)
from run_notebooks import budget_from_environment, run_all
from vendor import vendor

PALETTE = STATIC / "css/palette.css"


def write_palette() -> None:
    """Write the colours that carry meaning as CSS variables; the package names them, once."""
    done = subprocess.run([sys.executable, "-m", "minimodel.lesson.palette"], cwd=ROOT,
                          capture_output=True, check=False)
    if done.returncode or b"--ss-notes" not in done.stdout:
        raise SystemExit("python -m minimodel.lesson.palette printed no palette:\n"
                         + done.stderr.decode(errors="replace"))
    write_if_changed(PALETTE, done.stdout)


def derived_config() -> bytes:
    """`_config.yml` as the build uses it: notebooks are not run again, addresses are filled in."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    site = pages_url(repository_url())
    config["execute"]["execute_notebooks"] = "off"
    config["html"]["baseurl"] = site
    config["sphinx"]["config"]["ogp_site_url"] = site
    config["sphinx"]["local_extensions"]["fact_role"] = str(ROOT / "book/tools")
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode()


def book_files() -> dict[str, bytes]:
    """The pages around the chapters and the stubs, by their place in the rendered tree."""
    pages = [path for path in files_under(ROOT / "book")
             if path.relative_to(ROOT / "book").parts[0] != "tools"]
    stubs = sorted(CHAPTERS.glob("*.md"))
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in [*pages, *stubs]}


def lay_out(jobs: int) -> bool:
    """Fill `_build/src`; False where a chapter has a fault (all faults are already printed)."""
    chapters = sorted(CHAPTERS.glob("*.ipynb"))
    results = run_all(chapters, EXECUTED, jobs, budget_from_environment())
    if any(result.faults for result in results):
        return False
    executed = {f"chapters/{result.name}": result.text.encode() for result in results}
    mirror({**book_files(), **facts_pages(), **executed, "_config.yml": derived_config()}, SOURCE)
    return True


def render() -> int:
    """Run Jupyter Book over `_build/src`; warnings are errors. Returns its exit status."""
    return subprocess.call(
        [Path(sys.executable).with_name("jupyter-book"), "build", ".", "--toc", "book/_toc.yml",
         "--path-output", str(SITE), "-W", "-n", "--keep-going", "-q"],
        cwd=SOURCE, stdout=subprocess.DEVNULL)


def render_if_changed() -> int:
    """Render unless the finished site was made from this very tree; returns the exit status."""
    stamp, static_stamp = BUILD / "rendered", BUILD / "static"
    tree = digest([*files_under(SOURCE)], SOURCE) + digest([LOCK])
    if stamp.exists() and stamp.read_text() == tree and (HTML / "index.html").exists():
        print("nothing changed since the last rendering")
        return 0
    stamp.unlink(missing_ok=True)
    static = digest(files_under(STATIC))
    if not static_stamp.exists() or static_stamp.read_text() != static:
        forget(HTML)            # Sphinx does not copy style sheets again by itself
    rc = render()
    if rc:
        forget(SITE)            # a later run would not repeat the warnings of unchanged pages
        return rc
    static_stamp.write_text(static)
    stamp.write_text(tree)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the site of the book.")
    parser.add_argument("--jobs", type=int, default=2, help="chapters executed at a time")
    parser.add_argument("--fresh", action="store_true", help="render all pages again")
    asked = parser.parse_args()
    started = time.monotonic()
    if asked.fresh:
        forget(SITE)
    vendor()
    write_palette()
    if not lay_out(asked.jobs):
        print("The book was not rendered: mend the chapters above first.", file=sys.stderr)
        return 1
    rc = render_if_changed()
    if rc:
        print("The book was not rendered: mend the warnings above first.", file=sys.stderr)
        return rc
    shown = Path(HTML / "index.html").relative_to(ROOT)
    print(f"The book is at {shown} ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
