"""Pictures of pages for people who look: wide and narrow, light and dark.

    python book/tools/shots.py book/index chapters/05_kv_cache    those pages, into _build/shots
    python book/tools/shots.py --out pictures                     all pages
"""

import argparse
from pathlib import Path

from browser import THEMES, WIDTHS, chromium, context, pages, serve
from places import BUILD, HTML


def shoot(names: list[str], out: Path) -> None:
    """Write NAME-WIDTH-THEME.png for each page into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with serve() as address, chromium() as browser:
        for width in WIDTHS:
            for theme in THEMES:
                page = context(browser, width, theme).new_page()
                for name in names:
                    page.goto(f"{address}/{name}.html", wait_until="networkidle")
                    page.evaluate("document.fonts.ready")
                    file = out / f"{name.replace('/', '-')}-{width}-{theme}.png"
                    page.screenshot(path=file, full_page=True)
                    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take pictures of pages of the built site.")
    parser.add_argument("pages", nargs="*", help="such as book/index; default: all")
    parser.add_argument("--out", type=Path, default=BUILD / "shots")
    asked = parser.parse_args()
    if not HTML.exists():
        raise SystemExit("there is no built site: run `make book` first")
    known = pages()
    for name in asked.pages:
        if name not in known:
            raise SystemExit(f"no page {name!r}; there are: {', '.join(known)}")
    shoot(asked.pages or known, asked.out)


if __name__ == "__main__":
    main()
