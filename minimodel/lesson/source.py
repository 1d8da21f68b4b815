"""Show the real source of the package inside a chapter, with a link to its lines."""

import inspect
import textwrap
from pathlib import Path
from types import ModuleType

import minimodel
from minimodel.lesson import palette
from minimodel.lesson.markup import Fragment, escape
from minimodel.lesson.site import source_url

# token class of Pygments -> meaning; `:where` weighs nothing, so a page's own theme wins
_TOKENS = {
    "prefill": ("k", "kc", "kd", "kn", "kr", "kt", "ow"),
    "notes": ("s", "s1", "s2", "sa", "sb", "sd", "se", "si"),
    "muted": ("c", "c1", "ch", "cm"),
    "disk": ("nf", "nc", "nd", "fm"),
    "decode": ("m", "mf", "mi", "mh", "bp", "nb"),
}
_CSS = (
    ".ss-source{margin:.6rem 0}.ss-source figcaption{font-size:.85em;margin:.2rem 0;"
    "color:var(--ss-muted,#5b6472)}.ss-source figcaption a{color:inherit}"
    ":where(.ss-source pre){overflow-x:auto;line-height:1.5;margin:0;padding:.7rem .9rem;"
    "border:1px solid var(--ss-grid,#d5dae1);border-radius:8px;background:none;color:inherit;"
    "font-size:.86em;tab-size:4}"
    ".ss-source code{background:none;border:0;padding:0;color:inherit;font-size:inherit;"
    "white-space:pre}"
) + "".join(
    ",".join(f":where(.ss-source .{token})" for token in tokens)
    + f"{{color:{palette.text_var(meaning)}}}"
    for meaning, tokens in _TOKENS.items()
)


def show(thing: object, *names: str) -> Fragment:
    """The source of a function, class or module; with names, of those parts of it.

    `show(blocks)`, `show(blocks, "BlockPool")`, `show(BlockPool, "admit", "release")`.
    Something without Python source raises `ValueError` and says so.
    """
    parts = [_part(thing, name) for name in names] if names else [thing]
    listings = [_listing(part) for part in parts]
    return Fragment(
        "".join(listing.html for listing in listings),
        "\n\n".join(listing.text for listing in listings),
    )


def highlight(code: str, caption_html: str = "") -> str:
    """Python source as HTML: the page's own code colours, or the book's where it has none."""
    from pygments import highlight as colour_tokens
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    # nowrap: the box around the code is ours; a scrolling box must be reachable by keyboard
    spans = colour_tokens(code.strip("\n"), PythonLexer(), HtmlFormatter(nowrap=True)).rstrip()
    caption = f"<figcaption>{caption_html}</figcaption>" if caption_html else ""
    return (
        f'<style>{palette.css_for(_CSS)}{_CSS}</style><figure class="ss-source">{caption}'
        f'<div class="highlight"><pre tabindex="0"><code>{spans}</code></pre></div></figure>'
    )


def _part(thing: object, name: str) -> object:
    part = thing
    for step in name.split("."):
        try:
            part = getattr(part, step)
        except AttributeError:
            owner = getattr(thing, "__name__", repr(thing))
            raise ValueError(f"{owner} has no part called {name!r}") from None
    return part


def _listing(thing: object) -> Fragment:
    thing = inspect.unwrap(thing.fget if isinstance(thing, property) else thing)
    code, first = _source_of(thing)
    last = first + code.rstrip("\n").count("\n")
    path = _path_in_package(thing)
    if path is None:
        place, caption = "defined in this notebook", "defined in this notebook"
    else:
        place = f"{path}, lines {first} to {last}"
        caption = f'<a href="{escape(source_url(path, first, last))}">{escape(place)}</a>'
    code = textwrap.dedent(code)
    return Fragment(highlight(code, caption), f"# {place}\n{code.rstrip()}")


def _source_of(thing: object) -> tuple[str, int]:
    """The source and the number of its first line."""
    try:
        lines, first = inspect.getsourcelines(thing)
    except (TypeError, OSError):
        raise ValueError(
            f"{thing!r} has no Python source to show: give a function, a class or a module"
        ) from None
    return "".join(lines), first if not isinstance(thing, ModuleType) else 1


def _path_in_package(thing: object) -> str | None:
    """The file relative to the top of the repository, or None outside the package."""
    package = Path(minimodel.__path__[0]).resolve()
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    if not path.is_relative_to(package):
        return None
    return path.relative_to(package.parent).as_posix()
