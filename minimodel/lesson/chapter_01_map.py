"""The map of the machine in chapter 01: five floors, a room a chapter, a rail a send.

From the door down to the model: the deeper a send must go, the longer it takes. A room says what
the reader's own run has to say about it. Drawn in two widths, for a page and for a phone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ..pricing import Prices, Usage, advertised_ratio, bill_ratio
from . import draw, palette
from .markup import escape, fingerprint

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..engine.request import Request

BLOCK = 16          # tokens

@dataclass(frozen=True)
class Room:
    """A chapter's place in the machine. `wide`: it takes two places of its floor."""

    page: str
    title: str
    wide: bool = False

    @property
    def number(self) -> int:
        return int(self.page[:2])


@dataclass(frozen=True)
class Floor:
    title: str
    meaning: str
    rooms: tuple[Room, ...]


FLOORS = (
    Floor("At the door", "muted", (
        Room("16_the_bill", "The bill"), Room("15_router", "Which copy?"),
        Room("09_continuous_batching", "The batch"), Room("06_two_clocks", "Two clocks"))),
    Floor("Notes in memory", "notes", (
        Room("05_kv_cache", "KV cache"), Room("10_prefix_cache", "Same opening"),
        Room("08_paged_memory", "Paged memory"), Room("07_smaller_notes", "Smaller notes"))),
    Floor("Notes that outlive a machine", "disk", (
        Room("11_disk_store", "Notes on disk", wide=True), Room("12_handoff", "Handoff"),
        Room("14_failed_chip", "A dead chip"))),
    Floor("The model", "prefill", (
        Room("02_transformer", "Transformer"), Room("03_experts", "Experts"),
        Room("04_training", "Training"), Room("13_expert_parallelism", "Many chips"))),
    Floor("Larger than any machine here", "muted", (
        Room("17_cluster_on_paper", "On paper", wide=True),
        Room("18_to_production", "In production", wide=True))),
)


@dataclass(frozen=True)
class Yours:
    """What a run puts into a room: a few words, and what kind of number they hold."""

    words: str
    kind: str = "measured"      # or modelled, reported, or none
    blocks: int = 0             # drawn as so many squares, if there is room for them


@dataclass(frozen=True)
class Trip:
    """One send on the map: how it is called, how long it took, and the floor it turned at."""

    name: str
    seconds: float
    floor: int                  # place in FLOORS; 3 is the model
    meaning: str


_MODEL = 3
_GAP, _HEAD, _TALL = 7, 24, 52          # between rooms; a floor's title; a room's height


def machine_map(config: "ModelConfig", first: "Request", second: "Request", third: "Request",
                waits: Sequence[float], num_bytes: int, prices: Prices) -> "Map":
    """The map with one run's numbers: a first send, one from memory, one from disk.

    waits      seconds to the first token of the three
    num_bytes  of the files that the first send left behind
    """
    n, written = len(first.prompt), len(second.output)
    paid = Usage(second.num_found, n - second.num_found, written)
    agent = Usage(hit_tokens=99_000, miss_tokens=1_000, output_tokens=1_000)
    each = median(b - a for a, b in pairwise(second.token_times_s))
    blocks, found = n // BLOCK, paid.hit_tokens // BLOCK
    page = n * config.kv_bytes_per_token()
    return Map([
        Trip(f"first send, {n - first.num_found:,} computed", waits[0], _MODEL, "miss"),
        Trip(f"second send, {paid.miss_tokens:,} computed", waits[1], 1, "hit"),
        Trip(f"after a restart, {n - third.num_found:,} computed", waits[2], 2, "disk"),
    ], {
        2: Yours(f"{n:,} tokens, then {paid.miss_tokens:,}"),
        3: Yours(f"{config.experts_per_token} of {config.num_experts} for a token"),
        4: Yours(f"{config.num_parameters() / 1e6:.2f} M weights"),
        5: Yours(f"{config.kv_bytes_per_token():,} bytes a token"),
        6: Yours(f"{_ms(waits[1])}, then {1e3 * each:.2g} each"),
        7: Yours(f"{page / 1e6:.1f} MB for this page"),
        8: Yours(f"{blocks} blocks of {BLOCK}"),
        9: Yours(f"{written} steps to answer"),
        10: Yours(f"{found} of {blocks} blocks found"),
        11: Yours(f"{num_bytes / 1e6:.1f} MB, {third.num_loaded // BLOCK} blocks read back",
                  blocks=third.num_loaded // BLOCK),
        12: Yours("here: one machine", "none"), 13: Yours("here: one machine", "none"),
        15: Yours("here: one copy", "none"),
        14: Yours(f"restart: {n - third.num_found:,} token"),
        16: Yours(f"{bill_ratio(paid, prices):.1f} times cheaper", "modelled"),
        17: Yours(f"100,000 tokens: {bill_ratio(agent, prices):.1f} times cheaper", "modelled"),
        18: Yours(f"one public list: {float(advertised_ratio(prices)):g} times", "reported"),
    })


class Map:
    """The map in two widths, one for a page and one for a phone; the page's style picks."""

    def __init__(self, trips: Sequence[Trip], yours: Mapping[int, Yours]):
        missing = {room.number for floor in FLOORS for room in floor.rooms} - set(yours)
        if missing:
            raise ValueError(f"the map needs a word for chapters {sorted(missing)}")
        self.alt = ("A map of the machine, in five floors; the deeper a send must go, the longer "
                    "it takes. " + " ".join(
                        f"{trip.name}: down to {FLOORS[trip.floor].title.lower()}, "
                        f"{_ms(trip.seconds)} to the first token." for trip in trips))
        self.wide = _map_svg(trips, yours, width=720, columns=4, rail=27, alt=self.alt)
        self.tall = _map_svg(trips, yours, width=364, columns=2, rail=17, alt=self.alt)

    def _repr_html_(self) -> str:
        body = (f'<div class="ss-map-wide">{self.wide}</div>'
                f'<div class="ss-map-tall">{self.tall}</div>')
        name = fingerprint(body)
        return (f"<style>{palette.css_for(body + _MAP_CSS)}{_MAP_CSS}</style>"
                f'<figure class="ss-section" id="{name}">{body}</figure>'
                f"<script>{_MAP_JS % name}</script>")

    def __repr__(self) -> str:
        return f"[drawing: {self.alt}]"


_LINK = "color:inherit;text-decoration:none"
_MAP_CSS = (
    ".ss-section{margin:.8rem 0}.ss-section svg{display:block;width:100%;height:auto;"
    "color:inherit;font-family:var(--ss-font,system-ui),sans-serif}"
    ".ss-map-wide svg{max-width:720px}.ss-map-tall svg{max-width:364px}.ss-map-tall{display:none}"
    "@media(max-width:640px){.ss-map-wide{display:none}.ss-map-tall{display:block}}"
    ".ss-section a[href]:hover rect,.ss-section a[href]:focus-visible rect{stroke-width:2.5}"
)
# The pages of other chapters lie beside this one in the book alone, not in a notebook.
_MAP_JS = """document.querySelectorAll("#%s a").forEach(function(a){
var root=document.documentElement.dataset.content_root;
if(root!==undefined)a.setAttribute("href",root+"chapters/"+a.dataset.page+".html")})"""


def _map_svg(trips: Sequence[Trip], yours: Mapping[int, Yours], width: float, columns: int,
             rail: float, alt: str) -> str:
    """One width of the map: a line of words for each send, then the floors, with rails beside."""
    left = 3 * rail + 14
    top = 24 * len(trips) + 14
    places, y = [], top
    for floor in FLOORS:
        places.append((y, _floor_height(floor, columns)))
        y += places[-1][1] + 10
    pieces = [_floor(floor, place, yours, width, left, columns)
              for floor, place in zip(FLOORS, places, strict=True)]
    rails = [_rail(trip, i, 8 + rail * (i + 0.5), places) for i, trip in enumerate(trips)]
    heads = [_head(trip, i, 12 + 24 * i, left) for i, trip in enumerate(trips)]
    bottom = y + 8
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2:g} {y + 20:g}" '
            f'role="group" aria-label="{escape(alt)}">'
            + "".join(pieces + rails + heads) + _kinds_legend(bottom) + "</svg>")


def _floor_height(floor: Floor, columns: int) -> float:
    slots = sum(1 + room.wide for room in floor.rooms)
    rows = -(-slots // columns)
    return _HEAD + rows * (_TALL + _GAP) + 4


def _floor(floor: Floor, place: tuple[float, float], yours: Mapping[int, Yours], width: float,
           left: float, columns: int) -> str:
    y, height = place
    size = (width - left - _GAP * columns) / columns
    pieces = [f'<rect x="0" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" '
              f'style="fill:{palette.var(floor.meaning)};fill-opacity:.13"/>',
              draw.text(left, y + 14, floor.title, bold=True)]
    slot = 0
    for room in floor.rooms:
        row, column = divmod(slot, columns)
        wide = size * 2 + _GAP if room.wide else size
        pieces.append(_room(room, left + column * (size + _GAP), y + _HEAD + row * (_TALL + _GAP),
                            wide, floor.meaning, yours[room.number]))
        slot += 1 + room.wide
    return "".join(pieces)


def _room(room: Room, x: float, y: float, width: float, meaning: str, yours: Yours) -> str:
    """A chapter: its number in a pill, its title, and what this run has to say about it."""
    dashes = ";stroke-dasharray:5 4" if yours.kind == "modelled" else ""
    edge, words_x = palette.var(meaning), x + 9
    mark = ""
    if yours.kind == "reported":
        mark, words_x = diamond(x + 14, y + 37), x + 24
    return (
        f'<a data-page="{room.page}" style="{_LINK}">'
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_TALL}" rx="7" '
        f'style="fill:{palette.var("paper")};stroke:{edge};stroke-width:1.3{dashes}"/>'
        f'<rect x="{x + 7:.1f}" y="{y + 7:g}" width="25" height="17" rx="8.5" '
        f'style="fill:{edge}"/>'
        f'<text x="{x + 19.5:.1f}" y="{y + 19.5:g}" text-anchor="middle" style="font-size:11.5px;'
        f'font-weight:700;fill:{_inside(meaning)}">{room.number:02}</text> '
        + draw.text(x + 37, y + 15.5, room.title, bold=True, size=12.5)
        + " " + mark + draw.text(words_x, y + 37, yours.words,
                           "muted" if yours.kind == "none" else "ink", size=12)
        + _squares(x + width - 9, y + 9, min(yours.blocks, 96), meaning) + "</a>")


def _inside(meaning: str) -> str:
    """For a number in a pill; floors without a meaning of their own have the page's colour."""
    return palette.var("paper") if meaning == "muted" else palette.inside_var(meaning)


def _squares(right: float, y: float, count: int, meaning: str) -> str:
    """Blocks as small squares, in rows of 16 that end at `right`."""
    return "".join(
        f'<rect x="{right - 80 + 5 * (i % 16):.1f}" y="{y + 5 * (i // 16):g}" width="4" height="4" '
        f'rx="0.8" style="fill:{palette.var(meaning)}"/>' for i in range(count))


def _rail(trip: Trip, i: int, x: float, places: Sequence[tuple]) -> str:
    """A send's way down: thick as far as its prompt had to go, then a thread for one token."""
    colour = palette.var(trip.meaning)
    start = places[0][0] - 6
    at = places[trip.floor][0] + places[trip.floor][1] / 2
    deep = places[_MODEL][0] + places[_MODEL][1] / 2
    thread = "" if trip.floor == _MODEL else (
        f'<path d="M{x:g} {at:g}V{deep:g}" style="fill:none;stroke:{colour};stroke-width:1.6"/>'
        f'<circle cx="{x:g}" cy="{deep:g}" r="3" style="fill:{colour}"/>')
    return (f'<path d="M{x:g} {start:g}V{at:g}" style="fill:none;stroke:{colour};stroke-width:7;'
            f'stroke-linecap:round"/>{thread}'
            f'<circle cx="{x:g}" cy="{at:g}" r="7.5" style="fill:{palette.var("paper")};'
            f'stroke:{colour};stroke-width:3.5"/>' + _badge(x, start - 3, i, trip.meaning))


def _badge(x: float, y: float, i: int, meaning: str) -> str:
    return (f'<circle cx="{x:g}" cy="{y:g}" r="8" style="fill:{palette.var(meaning)}"/>'
            f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle" style="font-size:11.5px;'
            f'font-weight:700;fill:{palette.inside_var(meaning)}">{i + 1}</text>')


def _head(trip: Trip, i: int, y: float, left: float) -> str:
    """A send in words: its badge, its time to the first token, its name."""
    return (_badge(left + 8, y - 2, i, trip.meaning)
            + draw.text(left + 84, y - 2, _ms(trip.seconds), trip.meaning, anchor="end", bold=True)
            + draw.text(left + 93, y - 2, trip.name))


def _kinds_legend(y: float) -> str:
    """What the edges of rooms, and the diamond, say about their numbers."""
    return (_key(1, y) + draw.text(26, y, "your machine", size=12)
            + _key(124, y, ";stroke-dasharray:4 3") + draw.text(149, y, "modelled", size=12)
            + diamond(231, y) + draw.text(243, y, "reported", size=12))


def _key(x: float, y: float, dashes: str = "") -> str:
    return (f'<rect x="{x:g}" y="{y - 5:g}" width="18" height="11" rx="3" '
            f'style="fill:none;stroke:{palette.var("ink")};stroke-width:1.3{dashes}"/>')


def diamond(x: float, y: float) -> str:
    """The mark of a number that a source reports."""
    return f'<path d="M{x:g} {y - 5:g}l5 5l-5 5l-5 -5z" style="fill:{palette.var("ink")}"/>'


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
