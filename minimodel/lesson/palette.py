"""The book's colours, named once, by what they mean.

A meaning keeps its colour through the whole book: in plots, drawings,
interactives and the pages' style sheet. The hues come from Okabe and Ito
("Color Universal Design", 2008), moved just enough that

* every mark has a contrast of at least 3:1 with the page, in light and in dark;
* every text colour has at least 4.5:1 (WCAG 2.2, criteria 1.4.11 and 1.4.3);
* any two meanings stay apart for readers who see no red, no green or no blue.

`python -m minimodel.lesson.palette` prints the style sheet.
"""

import re
from dataclasses import dataclass

MARK_CONTRAST = 3.0
TEXT_CONTRAST = 4.5

DARK_PAGES = (
    'html[data-theme="dark"]',                  # the book
    'html[theme="dark"]',                       # Colab
    'body[data-jp-theme-light="false"]',        # JupyterLab
    "body.vscode-dark",                         # Visual Studio Code
)
UNTHEMED_PAGE = "html:not([data-theme]):not([theme]):not(:has(body[data-jp-theme-light]))"


@dataclass(frozen=True)
class Colour:
    """One meaning and its two values, `#rrggbb`, for light and for dark pages."""

    name: str
    meaning: str
    light: str
    dark: str

    @property
    def light_text(self) -> str:
        """The light value, darkened where needed until words written in it can be read."""
        return readable(self.light, toward=INK_LIGHT, paper=PAPER_LIGHT)

    @property
    def dark_text(self) -> str:
        """The dark value, brightened where needed until words written in it can be read."""
        return readable(self.dark, toward=INK_DARK, paper=PAPER_DARK)

    @property
    def light_inside(self) -> str:
        """For words inside a box of the light value."""
        return clearest("#ffffff", "#000000", on=self.light)

    @property
    def dark_inside(self) -> str:
        """For words inside a box of the dark value."""
        return clearest("#ffffff", "#000000", on=self.dark)


INK_LIGHT, INK_DARK = "#1f2328", "#e6e9ee"
PAPER_LIGHT, PAPER_DARK = "#ffffff", "#14171c"

_MEANINGS = (
    Colour("prefill", "reading the prompt", "#2b6ab1", "#488ff9"),
    Colour("decode", "writing the answer", "#d27119", "#f5ba47"),
    Colour("notes", "the KV cache", "#279863", "#59d8a4"),
    Colour("hit", "found in a cache", "#1f99f1", "#b4d7fa"),
    Colour("miss", "not found, computed again", "#cf2c0d", "#f48122"),
    Colour("disk", "kept on disk", "#97467e", "#c696cc"),
    Colour("expert", "an expert of the model", "#6e6c38", "#fbea72"),
    Colour("waste", "reserved or idle, of use to nobody", "#8e949e", "#828992"),
    Colour("failure", "something that broke", "#7e112c", "#f1435e"),
)
_SURFACES = (
    Colour("ink", "text and axes", INK_LIGHT, INK_DARK),
    Colour("muted", "captions and remarks", "#5b6472", "#a7b0bd"),
    Colour("grid", "grid lines and quiet borders", "#d5dae1", "#39414d"),
    Colour("paper", "the page itself", PAPER_LIGHT, PAPER_DARK),
)
MEANINGS = tuple(colour.name for colour in _MEANINGS)
COLOURS = {colour.name: colour for colour in _MEANINGS + _SURFACES}


def colour(name: str) -> Colour:
    """The colour of a meaning; a name that has none raises and lists those that exist."""
    try:
        return COLOURS[name]
    except KeyError:
        known = ", ".join(COLOURS)
        raise ValueError(f"no colour is called {name!r}; the book's are: {known}") from None


def var(name: str) -> str:
    """A mark's colour for CSS or SVG: follows the page's theme, light where it has none."""
    if colour(name).name == "ink":
        return "currentColor"
    return f"var(--ss-{name},{COLOURS[name].light})"


def text_var(name: str) -> str:
    """The colour for words about a meaning, readable in both themes."""
    if name not in MEANINGS:
        return var(name)
    return f"var(--ss-{name}-text,{COLOURS[name].light_text})"


def inside_var(name: str) -> str:
    """The colour for words inside a box of that colour, readable in both themes."""
    return f"var(--ss-{name}-inside,{colour(name).light_inside})"


# --- contrast ------------------------------------------------------------------------------


def channels(value: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of `#rrggbb`."""
    red, green, blue = (int(value[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def luminance(value: str) -> float:
    """Relative luminance of `#rrggbb`, 0 (black) to 1 (white), as WCAG 2.2 defines it."""
    shares = [channel / 255 for channel in channels(value)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 (the same) to 21 (black on white), after WCAG 2.2."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def readable(value: str, toward: str, paper: str) -> str:
    """`value` mixed with just as much of `toward` as words on `paper` need."""
    for percent in range(0, 101, 2):
        mixed = _mix(value, toward, percent / 100)
        if contrast(mixed, paper) >= TEXT_CONTRAST:
            return mixed
    raise ValueError(f"{toward} itself cannot be read on {paper}")


def clearest(*choices: str, on: str) -> str:
    """The one of some colours that stands out most. Black or white always reaches 4.5:1."""
    return max(choices, key=lambda choice: contrast(choice, on))


def _mix(one: str, other: str, share: float) -> str:
    pairs = zip(channels(one), channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


# --- style sheets --------------------------------------------------------------------------


def variables(theme: str) -> dict[str, str]:
    """Every CSS variable of a theme, `light` or `dark`, with its value."""
    values = {f"--ss-{name}": getattr(c, theme) for name, c in COLOURS.items()}
    for name in MEANINGS:
        values[f"--ss-{name}-text"] = getattr(COLOURS[name], f"{theme}_text")
        values[f"--ss-{name}-inside"] = getattr(COLOURS[name], f"{theme}_inside")
    return values


def css() -> str:
    """The style sheet of a page: light by default, dark where the page or the system asks."""
    light, dark = _declarations("light"), _declarations("dark")
    return (
        f":root{{{light}}}\n{','.join(DARK_PAGES)}{{{dark}}}\n"
        f"@media (prefers-color-scheme: dark){{{UNTHEMED_PAGE}{{{dark}}}}}\n"
    )


def css_for(markup: str) -> str:
    """Only the variables that `markup` uses, for an output that must stand alone in a notebook.

    The system's own preference is left out here: a notebook and a slide are
    light or dark by their own setting, which an output cannot always see.
    """
    used = set(re.findall(r"var\((--ss-[a-z-]+)", markup)) & set(variables("light"))
    if not used:
        return ""
    light, dark = _declarations("light", used), _declarations("dark", used)
    return f":root{{{light}}}{','.join(DARK_PAGES)}{{{dark}}}"


def _declarations(theme: str, used: set[str] | None = None) -> str:
    values = variables(theme)
    return ";".join(f"{name}:{values[name]}" for name in values if used is None or name in used)


def themed(svg: str) -> str:
    """Replace the palette's light values in drawn markup by variables that follow the theme."""
    names = {}
    for name in MEANINGS:
        names[COLOURS[name].light_text] = text_var(name)
    for name in COLOURS:
        names[COLOURS[name].light] = var(name)
    # a value that already stands inside var(...) follows a comma and is left alone
    pattern = "(?<!,)(" + "|".join(names) + r")\b"
    return re.sub(pattern, lambda hit: names[hit[0].lower()], svg, flags=re.IGNORECASE)


if __name__ == "__main__":
    print(css(), end="")
