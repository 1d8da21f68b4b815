"""Chapter 10: its drawings of keys, hits and evictions, and two prompts to type."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from ..cache.blocks import BlockPool
from ..cache.keys import chain, most_hits, root_key
from ..model.corpus import Fact
from ..simulate.replay import Hits
from ..simulate.traces import (
    AGENT,
    CHAT,
    HOUR_S,
    ONE_OFF,
    TraceRequest,
    Traffic,
    synthesise,
)
from ..tokenizer import START, decode, encode
from . import draw, facts
from .charts import Size, compare_sizes
from .draw import WIDTH
from .explorable import Choice, Explorable, Numbers, Slider, Spans, Text
from .figures import Figure, direct_label, figure, finding, key, measured, modelled
from .stepper import Stepper
from .town import RED_DOOR, TOWN

# --- prompts -------------------------------------------------------------------------------

FINGERPRINT = hashlib.sha256(b"a model to draw with").hexdigest()


def ask(num_lines: int, fact: Fact = RED_DOOR) -> str:
    """The town notebook's first lines, and a question."""
    return replace(TOWN, lines=TOWN.lines[:num_lines]).ask(fact)


def long_prompt(num_tokens: int) -> list[int]:
    """So many tokens of the town's lines, over and over."""
    body = "".join(TOWN.lines)
    return encode(body * (num_tokens // len(body) + 1))[:num_tokens]


# --- what a note depends on ----------------------------------------------------------------


def difference_drawing(differences: Sequence[Sequence[float]], changed: int) -> draw.Drawing:
    """How far the notes of two prompts are apart: a line a layer, a box a block of tokens.

    differences  [layers][blocks], the largest difference of any number in there; 0 where equal
    changed      the block that holds the one byte in which the prompts differ
    """
    left, row = 62, 24
    width = (WIDTH - left) / len(differences[0])
    boxes = [_difference(left + block * width, 28 + layer * row, width, value)
             for layer, line in enumerate(differences) for block, value in enumerate(line)]
    names = [draw.text(0, 37 + layer * row, f"layer {layer + 1}", size=12)
             for layer in range(len(differences))]
    bottom, x = 28 + row * len(differences), left + (changed + 0.5) * width
    deep = [line[changed + 1:] for line in differences[1:]]
    return draw.svg(
        WIDTH, bottom + 46,
        f"Two prompts of {len(differences[0])} blocks differ in one byte of block {changed}. "
        f"Before it all notes are equal, in every layer. In layer 1 only block {changed} differs; "
        f"in the layers above, {sum(value > 0 for line in deep for value in line)} of the "
        f"{sum(map(len, deep))} later blocks do.",
        draw.text(0, 8, "One byte changes all later notes, except in layer 1", bold=True),
        *names, *boxes, draw.arrow(x, bottom + 16, x, bottom + 3, "ink"),
        draw.text(x + 8, bottom + 14, f"the byte, in block {changed}", size=12),
        draw.legend(bottom + 36, [("hit", "equal"), ("miss", "not equal (stronger: further)")]))


def _difference(x: float, y: float, width: float, value: float) -> str:
    if value == 0:
        return draw.shade(x, y, width - 1, 18, "hit", 0.85)
    strength = 0.25 + 0.75 * min(1, max(0, (math.log10(value) + 6) / 7))     # from 1e-6 to 10
    return draw.shade(x, y, width - 1, 18, "miss", strength)


# --- a chain of keys -----------------------------------------------------------------------


def chain_drawing(first: str, second: str, block_size: int = 16) -> draw.Drawing:
    """Two prompts above each other, every block with its key, each key made from the one before."""
    root = root_key(FINGERPRINT)
    known = chain(root, encode(first), block_size)
    other = chain(root, encode(second), block_size)
    same = sum(1 for a, b in zip(known, other, strict=False) if a == b)
    twins = sum(1 for a, b in list(_blocks_of(first, second, block_size))[same:] if a == b)
    return draw.svg(
        WIDTH, 238,
        f"Two prompts of {len(known)} blocks, each with a key made from the key before and the "
        f"block's tokens. Keys equal from the start: {same}. From the first block that differs on, "
        f"all keys differ, also where the text is the same again (blocks like that: {twins}).",
        draw.text(0, 8, "Where two texts part, all later names differ", bold=True),
        *_chained(30, first, known, ["notes"] * len(known), root, block_size),
        *_chained(132, second, other, ["hit" if a == b else "miss" for a, b in
                                       zip_longest(other, known[:len(other)])], root, block_size),
        draw.legend(228, [("notes", "known"), ("hit", "found"), ("miss", "not found")]))


def _blocks_of(first: str, second: str, size: int):
    one, two = encode(first), encode(second)
    for at in range(0, min(len(one), len(two)) - size + 1, size):
        yield one[at:at + size], two[at:at + size]


def _chained(y: float, text: str, keys: Sequence[bytes], meanings: Sequence[str], root: bytes,
             size: int):
    tokens, wide = encode(text), (WIDTH - 58) / len(keys)
    yield draw.text(0, y + 58, "root", size=12) + draw.text(0, y + 74, root.hex()[:6], size=12)
    for i, (name, meaning) in enumerate(zip(keys, meanings, strict=True)):
        x = 58 + i * wide
        words = "".join(draw.marks(_words(tokens[i * size:(i + 1) * size])))
        half = -(-len(words) // 2)
        yield draw.rect(x, y, wide - 12, 40, meaning, filled=False)
        yield draw.text(x + 6, y + 12, words[:half], size=12)
        yield draw.text(x + 6, y + 28, words[half:], size=12)
        yield draw.arrow(x + wide / 2 - 6, y + 42, x + wide / 2 - 6, y + 56, meaning)
        yield draw.arrow(x - 12 if i else 44, y + 68, x + 8, y + 68, meaning)
        yield draw.text(x + 14, y + 68, name.hex()[:6], meaning, size=13, bold=True)


def _words(tokens: Sequence[int]) -> str:
    """A block's bytes as text; a mark where the start token stands."""
    return ("▸" if START in tokens else "") + decode(tokens)


# --- hits and misses, request by request ---------------------------------------------------


def piles_drawing(title: str, rows: Sequence[tuple[str, int, int]], alt: str) -> draw.Drawing:
    """A bar a request: the tokens it found, then those it computed. rows: (name, hits, misses)."""
    longest = max(hits + misses for _, hits, misses in rows)
    scale, pieces = (WIDTH - 90) / longest, []
    for i, (name, hits, misses) in enumerate(rows):
        y = 26 + 24 * i
        pieces += [draw.text(0, y + 8, name, size=12),
                   draw.rect(90, y, max(0, hits * scale - 1), 16, "hit", radius=1) if hits else "",
                   draw.rect(90 + hits * scale, y, max(2, misses * scale - 1), 16, "miss",
                             radius=1),
                   _count(90 + hits * scale, misses * scale, y + 8, misses)]
    bottom = 26 + 24 * len(rows) + 12
    return draw.svg(WIDTH, bottom + 10, alt, draw.text(0, 8, title, bold=True), *pieces,
                    draw.legend(bottom, [("hit", "tokens found"), ("miss", "computed (number)")],
                                step=130))


def _count(x: float, width: float, y: float, misses: int) -> str:
    """The number of computed tokens: before a short bar, inside a long one."""
    if width > 46:
        return _inside(x + width / 2, y, f"{misses:,}")
    return _inside(x - 5, y, f"{misses:,}", anchor="end", on="hit") if x > 140 else draw.text(
        x + width + 6, y, f"{misses:,}", size=12)


def _inside(x: float, y: float, words: str, anchor: str = "middle", on: str = "miss") -> str:
    colour = draw.palette.inside_var(on)
    return (f'<text x="{x:.1f}" y="{y + 4.2:.1f}" text-anchor="{anchor}" '
            f'style="fill:{colour};font-size:12px;font-weight:650">{words}</text>')


# --- the second send -----------------------------------------------------------------------


def second_send_figure(lengths: Sequence[int], computed: Mapping[str, Sequence[int]],
                       seconds: Mapping[str, Sequence[float]]) -> Figure:
    """Tokens computed and time to first token of two sends, against the prompt's length."""
    fig, (upper, lower) = figure(5, 5.6, rows=2)
    for ax, series in ((upper, computed), (lower, {name: [1000 * s for s in column]
                                                   for name, column in seconds.items()})):
        for (name, column), meaning in zip(series.items(), ("miss", "hit"), strict=True):
            measured(ax, lengths, column, meaning, name)
            direct_label(ax, lengths[-2], column[-2], name, meaning, dx=0,
                         dy=13 if meaning == "hit" else -15)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
        ax.minorticks_off()
    upper.set(ylabel="tokens computed", ylim=(0.4, 2.5 * lengths[-1]))
    lower.set(ylabel="time to first token, ms", xlabel="tokens of the prompt")
    first, second = (column[-1] for column in seconds.values())
    finding(upper, "The second send computes one token, however long the prompt")
    finding(lower, f"At {lengths[-1]:,} tokens its first token comes {first / second:.0f} times "
                   "earlier")
    key(upper, "measured", loc="center left")
    return Figure(fig, "Tokens computed and time to first token against the prompt's length: the "
                       "first send computes all tokens and takes ever longer, the second computes "
                       f"one. At {lengths[-1]:,} tokens the first takes {first / second:.0f} times "
                       "as long.")


# --- eviction ------------------------------------------------------------------------------


def eviction_steps(pools: Mapping[str, Sequence[BlockPool]], keys: Sequence[bytes]) -> Stepper:
    """One chain in two pools, as others take block after block.

    pools  for each order of release, the pool at every moment (a copy of it)
    """
    moments = list(zip(*pools.values(), strict=True))
    found = [[len(pool.lookup(keys)) for pool in moment] for moment in moments]
    return Stepper(
        [_eviction_frame(list(pools), moment, keys) for moment in moments],
        [f"{taken} blocks taken: " + ", ".join(
            f"{name} {count} found" for name, count in zip(pools, counts, strict=True))
         for taken, counts in enumerate(found)],
        "blocks taken by others",
        "Where a chain's last block is evicted first, every block that is left can still be found; "
        "where its first goes first, nothing can be found any more, although it is still there.")


def _eviction_frame(names: Sequence[str], pools: Sequence[BlockPool],
                    keys: Sequence[bytes]) -> draw.Drawing:
    pieces, wide = [], WIDTH / len(keys)
    for row, (name, pool) in enumerate(zip(names, pools, strict=True)):
        y, found = 8 + 96 * row, len(pool.lookup(keys))
        pieces.append(draw.text(0, y, f"{name}: {found} of {len(keys)} found", bold=True))
        for place, name_of_block in enumerate(keys):
            here = name_of_block in pool.block_of
            box = place * wide, y + 16, wide - 5, 34
            pieces += [draw.rect(*box, "hit") if place < found else
                       draw.shade(*box, "waste", 0.3, edge="waste") if here else
                       draw.rect(*box, "grid", filled=False),
                       _label(place, place * wide + wide / 2 - 2, y + 33, place < found, here)]
        order = [place for block in pool.free if (place := _place(pool, block, keys)) is not None]
        pieces.append(draw.text(0, y + 66, "next to go: " + (" ".join(map(str, order)) or "nobody"),
                                "muted", size=12))
    return draw.svg(WIDTH, 208, f"{len(keys)} blocks of one prompt in two pools: " + "; ".join(
        f"{name}, {len(pool.lookup(keys))} found" for name, pool in zip(names, pools, strict=True)),
        *pieces, draw.legend(198, [("hit", "can be found"), ("waste", "there, but lost")]))


def _label(place: int, x: float, y: float, found: bool, here: bool) -> str:
    if found:
        return _inside(x, y, str(place), on="hit")
    return draw.text(x, y, place if here else "×", "ink" if here else "muted", anchor="middle")


def _place(pool: BlockPool, block: int, keys: Sequence[bytes]) -> int | None:
    """Which block of the chain lies here, if one does."""
    name = pool.key_of.get(block)
    return keys.index(name) if name in keys else None


# --- a trace -------------------------------------------------------------------------------


def busy_hour(seed: int = 10) -> list[TraceRequest]:
    """An hour of made-up traffic: chats, a few agents, single questions. All are assumptions."""
    kinds = (replace(CHAT, sessions_per_day=40_000), replace(AGENT, sessions_per_day=1_200),
             replace(ONE_OFF, sessions_per_day=40_000))
    return synthesise(Traffic(days=HOUR_S / 86_400, kinds=kinds, day_rhythm=0), seed)


def capacity_figure(capacities: Sequence[int], hits: Sequence[Hits], ceiling: Hits) -> Figure:
    """Hit rate against the memory of the cache, in tokens; modelled on a made-up trace."""
    fig, ax = figure(5, 3.5)
    rates = [100 * found.by_token for found in hits]
    millions = [capacity / 1e6 for capacity in capacities]
    modelled(ax, millions, [100 * ceiling.by_token] * len(millions), "waste", "no limit")
    modelled(ax, millions, rates, "hit", "hit rate")
    direct_label(ax, millions[-1], 100 * ceiling.by_token, "keep everything", "waste", dx=-1,
                 dy=11)
    near = next(i for i, rate in enumerate(rates) if rate > 0.97 * 100 * ceiling.by_token)
    direct_label(ax, millions[near], rates[near], f"{rates[near]:.0f} %", "hit", dx=8, dy=-12)
    direct_label(ax, millions[0], rates[0], f"{rates[0]:.0f} %", "hit", dx=8, dy=-6)
    ax.set_xscale("log", base=2)
    ax.set_xticks(millions[::2], [f"{million:g}" for million in millions[::2]])
    ax.minorticks_off()
    ax.set(xlabel="room for notes, million tokens", ylabel="% of prompt tokens found",
           ylim=(0, 100))
    finding(ax, f"{millions[near]:g} million tokens of room find nearly all that could be found")
    key(ax, "modelled", loc="lower right")
    return Figure(fig, "Hit rate in tokens against the room of the cache, modelled on a made-up "
                       "hour: " + "; ".join(f"{million:g} million tokens: {rate:.0f} %"
                                            for million, rate in zip(millions, rates, strict=True))
                  + f". Keeping everything would find {100 * ceiling.by_token:.0f} %.")


def rates_figure(ours: float) -> Figure:
    """Hit rates of services, as reported, and the ceiling of the made-up hour, as modelled."""
    chat, agent, made_up = (float(rate) for rate in facts.find("P-MC06").value.split("/"))
    day = facts.find("P-OI03").number
    fig, ax = compare_sizes([
        Size(f"Kimi, chat: {chat:.0f} %", chat, "hit"),
        Size(f"DeepSeek, a day of 2025: {day:.1f} %", day, "hit"),
        Size(f"Kimi, tools and agents: {agent:.0f} %", agent, "hit"),
        Size(f"Mooncake's made-up trace: {made_up:.0f} %", made_up, "hit"),
        Size(f"our made-up hour: {100 * ours:.0f} %", 100 * ours, "hit", "modelled"),
    ], "", (1, 100), f"Reported hit rates lie between {chat:.0f} and {made_up:.0f} %", height=3.6)
    ax.set_xscale("linear")
    ax.set(xlim=(0, 100), xlabel="% of prompt tokens found")
    key(ax, "modelled", "reported", loc="lower left")
    return Figure(fig, f"Reported hit rates: {chat:.0f} % and {agent:.0f} % of two traces of Kimi, "
                       f"{made_up:.0f} % of a made-up one, all without a limit; {day:.1f} % on one "
                       f"day of DeepSeek. Modelled here without a limit: {100 * ours:.0f} %.")


# --- two prompts to type -------------------------------------------------------------------

SAME_TENANT, OTHER_TENANT = "Ada", "Bo"
_NOTE = ("The code of the red door is 4821.\nThe owner of lamp 42 is Mira.\n"
         "The phone of Tomo is 417-902.\n")


def two_prompts(first: str, second: str, size: int, tenant: str) -> dict:
    """Ada has sent the first prompt; somebody sends the second. What is found of it?"""
    tokens = encode(first), encode(second)
    roots = [root_key(FINGERPRINT, name.encode()) for name in (SAME_TENANT, tenant)]
    keys = [chain(root, each, size) for root, each in zip(roots, tokens, strict=True)]
    total, known = len(tokens[1]), set(keys[0])
    same = next((i for i, name in enumerate(keys[1]) if name not in known), len(keys[1]))
    found = min(same, most_hits(total, size))
    alike = next((i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b),
                 min(map(len, tokens)))
    meanings = [_became(i, found, same, len(keys[1])) for i in range(-(-total // size))]
    return {
        "first_blocks": [[text, "notes" if i < len(keys[0]) else None]
                         for i, text in enumerate(_cut(tokens[0], size))],
        "first_keys": [[_short(roots[0]), None], *([_short(name), "notes"] for name in keys[0])],
        "second_blocks": [list(pair) for pair in zip(_cut(tokens[1], size), meanings,
                                                     strict=True)],
        "second_keys": [[_short(roots[1]), None], *([_short(name), meanings[i]]
                                                    for i, name in enumerate(keys[1]))],
        "total": total, "alike": alike, "found": found, "found_tokens": found * size,
        "computed": total - found * size}


def _became(place: int, found: int, same: int, full: int) -> str | None:
    """What became of a block: found, known but computed again, not found, or not full."""
    return "hit" if place < found else "notes" if place < same else "miss" if place < full else None


def _short(name: bytes) -> str:
    return name.hex()[:6]


def _cut(tokens: Sequence[int], size: int) -> list[str]:
    return [_words(tokens[at:at + size]).replace("\n", "↵") for at in range(0, len(tokens), size)]


def prompts_to_type() -> Explorable:
    return Explorable(
        alt="Two prompts share notes up to the last full block before the first difference; "
            "another block size moves that border, another tenant removes it",
        twin=two_prompts, compute=Path(__file__).with_name("chapter_10_keys.js"),
        data={"fingerprint": FINGERPRINT, "seed": "second-send", "start": START},
        controls=[
            Text("first", "Ada has sent", _NOTE + "Q: red door?", rows=4),
            Text("second", "then comes", _NOTE.replace("Mira", "Pola") + "Q: whose lamp?", rows=4,
                 more=[_NOTE + "Q: red door?", _NOTE + "Q: lamp 42?", "x" * 63]),
            Slider("size", "tokens in a block", [1, 2, 4, 8, 16, 32, 64], start=16),
            Choice("tenant", "from", {SAME_TENANT: "Ada again", OTHER_TENANT: "another tenant"},
                   start=SAME_TENANT)],
        says="Blocks found: {found}. Of {total} tokens, hits: {found_tokens}, computed: "
             "{computed}. Tokens alike from the start: {alike}.",
        names={"first_blocks": "blocks of the first", "first_keys": "their keys",
               "second_blocks": "blocks of the second", "second_keys": "keys of the second",
               "total": "tokens of the second", "alike": "tokens alike from the start",
               "found": "blocks found", "found_tokens": "tokens found",
               "computed": "tokens computed"},
        picture=[
            Numbers([("{alike}", "tokens alike from the start"),
                     ("{found_tokens}", "tokens found (hits)"),
                     ("{computed}", "tokens computed (misses)")]),
            Spans("The texts in blocks (▸ is the start token)",
                  [("first_blocks", "first"), ("second_blocks", "second")],
                  {"notes": "known from the first", "hit": "found", "miss": "not found"}),
            Spans("The root, and the key of every full block (6 of 64 digits)",
                  [("first_keys", "first"), ("second_keys", "second")],
                  {"notes": "known (in the second: and yet computed)", "hit": "found",
                   "miss": "not found"})])
