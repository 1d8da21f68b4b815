"""Colours can be seen, read and told apart, in both themes."""

import re
import subprocess
import sys
from itertools import combinations

import pytest

from minimodel.lesson import palette

# Machado, Oliveira and Fernandes (2009), severity 1.0: linear RGB as each kind of eye sees it
EYES = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                 (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                (0.004733, 0.691367, 0.303900)),
}
PAPER = {"light": palette.PAPER_LIGHT, "dark": palette.PAPER_DARK}
themes = pytest.mark.parametrize("theme", PAPER)


def test_contrast_is_that_of_wcag():
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#123456", "#123456") == 1
    # the well-known grey that just passes for text on white
    assert palette.contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


@themes
@pytest.mark.parametrize("name", palette.MEANINGS)
def test_a_meaning_can_be_seen_and_read(name, theme):
    colour = palette.COLOURS[name]
    mark, words = getattr(colour, theme), getattr(colour, f"{theme}_text")
    assert palette.contrast(mark, PAPER[theme]) >= 3.0
    assert palette.contrast(words, PAPER[theme]) >= 4.5
    assert palette.contrast(getattr(colour, f"{theme}_inside"), mark) >= 4.5


@themes
@pytest.mark.parametrize("name", ["ink", "muted"])
def test_text_can_be_read(name, theme):
    assert palette.contrast(getattr(palette.COLOURS[name], theme), PAPER[theme]) >= 4.5


@themes
@pytest.mark.parametrize("eye", EYES)
def test_meanings_stay_apart_for_every_eye(eye, theme):
    seen = {name: _as_seen(getattr(palette.COLOURS[name], theme), EYES[eye])
            for name in palette.MEANINGS}
    nearest = min(combinations(seen, 2), key=lambda pair: _distance(*(seen[p] for p in pair)))
    assert _distance(*(seen[name] for name in nearest)) > 0.06, nearest


def _as_seen(value, eye):
    """Oklab coordinates of a colour after an eye's matrix."""
    linear = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4)
              for c in palette.channels(value)]
    r, g, b = (min(1, max(0, sum(w * c for w, c in zip(row, linear, strict=True)))) for row in eye)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def _distance(one, other):
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5


def test_no_two_light_values_are_the_same():
    # drawn figures are themed by value, so a value must name one colour
    marks = [colour.light for colour in palette.COLOURS.values()]
    assert len(set(marks)) == len(marks)
    for name in palette.MEANINGS:
        others = [c.light for c in palette.COLOURS.values() if c.name != name]
        assert palette.COLOURS[name].light_text not in others


def test_the_module_prints_the_style_sheet():
    run = [sys.executable, "-m", "minimodel.lesson.palette"]
    printed = subprocess.run(run, capture_output=True, text=True, check=True)
    assert printed.stdout == palette.css()
    assert printed.stderr == ""
    root, dark = (re.search(pattern + r"[^{]*\{([^}]*)\}", printed.stdout)[1]
                  for pattern in (":root", 'html\\[data-theme="dark"\\]'))
    names = [set(re.findall(r"--ss-[a-z-]+", block)) for block in (root, dark)]
    assert names[0] == names[1]
    assert {f"--ss-{name}" for name in palette.MEANINGS} <= names[0]
    assert "@media (prefers-color-scheme: dark)" in printed.stdout


def test_an_output_carries_only_the_variables_it_uses():
    css = palette.css_for(f"fill:{palette.var('hit')};stroke:var(--other)")
    assert set(re.findall(r"--ss-[a-z-]+", css)) == {"--ss-hit"}
    assert palette.css_for("no colour at all") == ""


def test_drawn_values_become_variables_once():
    hit = palette.COLOURS["hit"].light
    once = palette.themed(f"stroke: {hit}; fill: {palette.COLOURS['ink'].light.upper()}")
    assert once == f"stroke: var(--ss-hit,{hit}); fill: currentColor"
    assert palette.themed(once) == once
    assert palette.themed(f"fill: {hit}00") == f"fill: {hit}00"     # another colour, left alone


def test_an_unknown_meaning_names_those_that_exist():
    with pytest.raises(ValueError, match=r"'cash'.*prefill, decode, notes"):
        palette.var("cash")
