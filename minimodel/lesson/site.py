"""Where the book lives: as in `_config.yml`, and a test checks that both agree."""

REPOSITORY = "https://github.com/ORG/second-send"
BRANCH = "main"


def source_url(path: str, first_line: int, last_line: int) -> str:
    """Address of some lines of a file in the repository; `path` is relative to its top."""
    return f"{REPOSITORY}/blob/{BRANCH}/{path}#L{first_line}-L{last_line}"
