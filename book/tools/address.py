"""The repository's address: stated once, in `_config.yml`, and copied to where it is read.

    python book/tools/address.py                                     check that all places agree
    python book/tools/address.py https://github.com/NAME/REPOSITORY  move the book to a new address

The site's own address (base URL, sitemap, share tags) is worked out while building. What is read
without a build (README, first cells of the chapters, the landing page's link to a hosted notebook,
the package and its metadata) carries it as text, and this tool writes it there.
"""

import re
import sys
from pathlib import Path

import yaml
from places import ROOT

CONFIG = ROOT / "_config.yml"


def repository_url(config: Path = CONFIG) -> str:
    """The one stated address, without a slash at its end."""
    return yaml.safe_load(config.read_text(encoding="utf-8"))["repository"]["url"].rstrip("/")


def slug_of(url: str) -> str:
    """`OWNER/NAME` of a GitHub address; raises ValueError for any other address."""
    match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?", url)
    if match is None:
        raise ValueError(f"{url!r} is no repository address: give https://github.com/OWNER/NAME")
    return match[1]


def pages_url(url: str) -> str:
    """Where GitHub Pages serves the site of a repository."""
    owner, name = slug_of(url).split("/")
    return f"https://{owner.lower()}.github.io/{name}/"


def carriers(root: Path = ROOT) -> list[Path]:
    """The files that carry the address as text."""
    return [root / "README.md", root / "pyproject.toml", root / "book/index.md",
            root / "minimodel/lesson/site.py", *sorted((root / "chapters").glob("*.ipynb"))]


def disagreements(root: Path = ROOT) -> list[str]:
    """What does not carry the stated address: one sentence for each file."""
    slug = slug_of(repository_url(root / "_config.yml"))
    return [f"{path.relative_to(root)} does not name {slug}: run python book/tools/address.py URL"
            for path in carriers(root) if slug not in path.read_text(encoding="utf-8")]


def move(url: str, root: Path = ROOT) -> None:
    """Replace the stated address everywhere."""
    config = root / "_config.yml"
    old, new = slug_of(repository_url(config)), slug_of(url)
    for path in [config, *carriers(root)]:
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def main() -> int:
    if len(sys.argv) > 1:
        try:
            move(sys.argv[1])
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    faults = disagreements()
    print("\n".join(faults) or f"all places agree on {repository_url()}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
