"""A figure that computes while the reader tunes or types, without a kernel.

    controls  ->  compute, a pure JavaScript function  ->  outputs  ->  pictures

`compute` has a *twin*, a Python function of the same inputs and outputs. Python calls the twin
once, for the page's first picture, which stays where scripts are off; a test in a browser
compares the two functions on a grid of inputs (`tries` of each control) and the two drawings.

    Explorable(
        alt="Twice the layers, twice the bytes", twin=note_bytes,
        compute="({layers}) => ({bytes: 128 * layers})",
        controls=[Slider("layers", "layers", range(1, 65), start=4)],
        says="{layers} layers: {bytes} bytes a token.",
        picture=[Bars("Bytes a token", [Bar("bytes", "your model", "notes")], unit="B")])

Like the stepper, each output carries its own style and script, and asks no host for anything.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minimodel.lesson import palette, pictures
from minimodel.lesson.markup import escape, fingerprint, folded, require_alt
from minimodel.lesson.pictures import Axis, Bar, Bars, Line, Lines, Numbers, Spans, fill, plain

__all__ = ["Axis", "Bar", "Bars", "Checkbox", "Choice", "Explorable", "Line", "Lines", "Number",
           "Numbers", "Slider", "Spans", "Text"]

RUNTIME, STYLE = Path(__file__).with_suffix(".js"), Path(__file__).with_suffix(".css")
TEXTS = ("", "naïve — 42 €", "日本語 🙂")     # tried in every text field: none, then 2 to 4 bytes
_SIZES = {"width": pictures.WIDTH, "row": pictures.BAR_ROW, "barTop": pictures.BAR_TOP,
          "bar": pictures.BAR, "left": pictures.LEFT, "right": pictures.RIGHT,
          "top": pictures.TOP, "bottom": pictures.BOTTOM, "height": pictures.HEIGHT,
          "most": pictures.MAX_MARKS, "advance": pictures.ADVANCE}
_KINDS = {"measured": "solid: measured", "modelled": "dashed and hollow: modelled",
          "reported": "diamond: reported by a source"}


# --- controls: each has a key (its name in the function), a label and a start ------------------


@dataclass(frozen=True)
class Slider:
    """Chooses among values in order, evenly spaced or not: powers of two make a log slider."""

    key: str
    label: str
    values: Sequence
    start: object
    unit: str = ""

    def __post_init__(self):
        object.__setattr__(self, "values", list(self.values))
        _require_start(self, self.values)

    def tries(self) -> list:
        last = len(self.values) - 1
        picked = {0, last // 3, last // 2, 2 * last // 3, last, self.values.index(self.start)}
        return [self.values[i] for i in sorted(picked)]


@dataclass(frozen=True)
class Number:
    """A number to type, from low to high in steps."""

    key: str
    label: str
    low: float
    high: float
    start: float
    step: float = 1

    def __post_init__(self):
        if not self.low <= self.start <= self.high:
            raise ValueError(f"start={self.start} of {self.key!r} is not from {self.low} "
                             f"to {self.high}: start within the limits")

    @property
    def rule(self) -> str:
        """What a reader is told who types something else."""
        return f"give a number from {self.low:,} to {self.high:,}, in steps of {self.step:,}"

    def tries(self) -> list:
        middle = self.low + self.step * round((self.high - self.low) / self.step / 2)
        return sorted({self.low, min(self.low + self.step, self.high), middle, self.start,
                       self.high})


@dataclass(frozen=True)
class Choice:
    """One of some options: a list, or {value: label}."""

    key: str
    label: str
    options: Sequence | Mapping
    start: object

    def __post_init__(self):
        _require_start(self, list(self.options))
        pairs = self.options.items() if isinstance(self.options, Mapping) else (
            (option, str(option)) for option in self.options)
        object.__setattr__(self, "options", [[option, label] for option, label in pairs])

    def tries(self) -> list:
        return [option for option, _ in self.options]


@dataclass(frozen=True)
class Checkbox:
    """On or off."""

    key: str
    label: str
    start: bool = False

    def tries(self) -> list:
        return [False, True]


@dataclass(frozen=True)
class Text:
    """A text to type. `more` are texts that a test should try besides start, none and odd ones."""

    key: str
    label: str
    start: str
    more: Sequence[str] = ()
    rows: int = 1
    limit: int = 2000

    def __post_init__(self):
        if self.rows == 1 and any("\n" in text for text in (self.start, *self.more)):
            raise ValueError(f"{self.key!r} starts with several lines but has one row: give it "
                             "rows=3, or the browser drops the line breaks")

    def tries(self) -> list:
        return list(dict.fromkeys([self.start, *self.more, *TEXTS]))


def _require_start(control, values: list) -> None:
    if control.start not in values:
        raise ValueError(f"start={control.start!r} of {control.key!r} is none of {values}")


# --- the figure --------------------------------------------------------------------------------


class Explorable:
    """A figure with controls; the module's docstring says how its parts play together.

    alt       what a reader learns by moving the controls; never empty
    twin      the Python function: control keys as keyword arguments, a dict of outputs back;
              it raises ValueError, and `compute` throws, where inputs cannot be computed
    compute   the same as one JavaScript function (inputs, data) => outputs: source or file
    says      a sentence with {names}, read out whenever it changes
    data      the second argument of `compute`: anything JSON can hold
    names     {output: how the table calls it}; by default its own name
    """

    def __init__(self, *, alt: str, twin: Callable[..., dict], compute: str | Path,
                 controls: Sequence, picture: Sequence, says: str, data: object = None,
                 names: Mapping[str, str] | None = None):
        self.alt, self.twin, self.says = require_alt(alt, "explorable"), twin, says
        source = compute.read_text(encoding="utf-8") if isinstance(compute, Path) else compute
        self.compute = source.strip().removesuffix(";")
        self.controls, self.picture, self.data = list(controls), list(picture), data
        self.start = {control.key: control.start for control in self.controls}
        if len(self.start) < max(1, len(self.controls)):
            raise ValueError(f"{len(self.controls)} controls, {len(self.start)} keys: an "
                             "explorable needs a control at least, and each one its own key")
        if "</script" in self.compute.lower():
            raise ValueError("compute must not hold '</script': it would end the page's script")
        labels = {control.key: control.label for control in self.controls}
        self.names = {**labels, **(names or {})}

    def values(self, **changes) -> dict:
        """Inputs (the starts, but for `changes`) and the twin's outputs, by name."""
        inputs = {**self.start, **changes}
        return {**inputs, **self.twin(**inputs)}

    def drawn(self, **changes) -> str:
        """The pictures as markup: what `explorable.js` draws for the same inputs."""
        values = self.values(**changes)
        return "".join(part.html(values) for part in self.picture)

    def _repr_html_(self) -> str:
        values = self.values()
        body = (
            '<div class="ss-panel" hidden></div>'
            f'<output class="ss-says" aria-live="polite">{escape(fill(self.says, values))}</output>'
            f'<div class="ss-picture">{self.drawn()}</div>{self._kinds()}{self._table(values)}')
        call = f"{_json(self._spec())},\n{self.compute}"
        name = fingerprint(body + call + self.alt)
        style = f"<style>{palette.css_for(_style() + body + call)}{_style()}</style>"
        twin = f"{self.twin.__module__}:{self.twin.__qualname__}"
        return (
            f'{style}<figure class="ss-explorable" id="{name}" aria-label="{escape(self.alt)}" '
            f'data-twin="{escape(twin)}">{body}</figure>'
            f'<script>document.querySelectorAll("#{name}").forEach(root => ({_runtime()})(root,'
            f"{call}))</script>")

    def __repr__(self) -> str:
        return f"[interactive figure: {self.alt} ({fill(self.says, self.values())})]"

    def _spec(self) -> dict:
        """All that the script needs, besides `compute`."""
        controls = [{"kind": type(control).__name__.lower(), "rule": getattr(control, "rule", ""),
                     **vars(control), "tries": control.tries()} for control in self.controls]
        return {"controls": controls, "start": self.start, "data": self.data, "says": self.says,
                "names": self.names, "picture": [part.spec() for part in self.picture],
                "sizes": _SIZES}

    def _kinds(self) -> str:
        """What the styles of marks mean, for those that are drawn."""
        used = {kind for part in self.picture for kind in part.kinds}
        words = " · ".join(words for kind, words in _KINDS.items() if kind in used)
        return f'<p class="ss-kinds">{words}</p>' if words else ""

    def _table(self, values: Mapping) -> str:
        rows = "".join(f'<tr><th scope="row">{escape(self.names.get(name, name))}</th>'
                       f"<td>{escape(plain(item))}</td></tr>" for name, item in values.items())
        return folded("The numbers behind this figure", f"<table><tbody>{rows}</tbody></table>",
                      "ss-data")


@cache
def _runtime() -> str:
    """The script without its comments and indentation, which no reader's browser needs."""
    source = RUNTIME.read_text(encoding="utf-8")
    return re.sub(r"(?m)^\s*//.*\n|\s+// .*$|^\s+", "", source).strip()


@cache
def _style() -> str:
    return re.sub(r"/\*.*?\*/|\n", "", STYLE.read_text(encoding="utf-8"))


def _json(spec: dict) -> str:
    """JSON that may stand inside a script element."""
    try:
        return json.dumps(spec, ensure_ascii=False, allow_nan=False).replace("<", r"\u003c")
    except (TypeError, ValueError) as error:
        raise ValueError(f"data and starts must be what JSON can hold: {error}") from None
