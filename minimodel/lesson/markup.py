"""What a cell hands to the page: HTML for notebooks and the site, plain text elsewhere."""

import hashlib
import html
import re
import sys

_INLINE = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"\*([^*\s][^*]*)\*"), r"<em>\1</em>"),
)


class Fragment:
    """Something to show: `html` where the reader sees pages, `text` in a terminal."""

    def __init__(self, html: str, text: str):
        self.html, self.text = html, text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/html": self.html, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text


def present(fragment: Fragment) -> None:
    """Show a fragment now: as a cell's output in a notebook, as printed text elsewhere."""
    if not in_notebook():
        print(fragment.text)
        return
    from IPython.display import display

    display(fragment)


def in_notebook() -> bool:
    """Whether a notebook kernel runs this code (Jupyter, Colab, a book's build)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


def escape(value: object) -> str:
    """Any value as text that is safe inside HTML and SVG, in attributes too."""
    return html.escape(str(value), quote=True)


def require_alt(alt: str, what: str) -> str:
    """The alternative text, trimmed; raises where there is none, since it is never optional."""
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(
            f"alt={alt!r}: a {what} needs alternative text; "
            "say in a sentence what a sighted reader learns from it"
        )
    return " ".join(alt.split())


def fingerprint(markup: str) -> str:
    """A short id that depends on the content alone, so that builds are reproducible."""
    return "ss" + hashlib.sha256(markup.encode()).hexdigest()[:10]


def prose(text: str) -> str:
    """Paragraphs, `code`, **strong** and *emphasis*: all the markup that a task needs."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "".join(f"<p>{_inline(paragraph)}</p>" for paragraph in paragraphs)


def _inline(text: str) -> str:
    # code is set aside first, so that a * inside it stays a *
    pieces = re.split(r"(`[^`]+`)", escape(text).replace("\n", " "))
    return "".join(_decorate(piece) for piece in pieces)


def _decorate(piece: str) -> str:
    rules = _INLINE[:1] if piece.startswith("`") else _INLINE[1:]
    for pattern, replacement in rules:
        piece = pattern.sub(replacement, piece)
    return piece


def folded(summary: str, content_html: str, css_class: str) -> str:
    """Content behind a line that the reader opens, alive on a static page."""
    return (
        f'<details class="{css_class}"><summary>{escape(summary)}</summary>{content_html}</details>'
    )
