"""Chapter 10: its keys are the shipped ones, its drawings say what they were given."""

import copy
import hashlib
import json
import random
import re
import shutil
import subprocess

import pytest
import torch
from notebooks import Notebook, refusals

from minimodel.cache import keys
from minimodel.cache.blocks import BlockPool, BlockTable
from minimodel.cache.paged import PagedCache
from minimodel.engine.engine import Engine, usage
from minimodel.engine.generate import generate_with_cache
from minimodel.engine.request import Sampling
from minimodel.lesson import chapter_10
from minimodel.lesson.exercises import chapter_10 as exercises
from minimodel.lesson.exercises.engine import judge
from minimodel.lesson.town import RED_DOOR, TOWN
from minimodel.model.batch import Batch
from minimodel.simulate.replay import Hits, without_limit
from minimodel.tokenizer import END, decode, encode

ROOT = keys.root_key("ab" * 32)
NOTEBOOK = Notebook("10_prefix_cache", torch=torch, random=random, hashlib=hashlib, keys=keys,
                    BlockPool=BlockPool, BlockTable=BlockTable, Batch=Batch, PagedCache=PagedCache,
                    END=END, decode=decode, encode=encode, SIZE=16, root=ROOT, drawing=chapter_10,
                    TOWN=TOWN, RED_DOOR=RED_DOOR)
run, verdict = NOTEBOOK.run, refusals(exercises)


# --- the notebook's own code ---------------------------------------------------------------


def test_the_hand_built_names_are_the_shipped_keys():
    assert "the same keys" in NOTEBOOK.cells["agree"]
    run("names", "agree", fingerprint_of=lambda model: "cd" * 32, model=None)


def test_the_comparison_finds_names_that_forget_what_came_before():
    forgetful = run("names")["name_after"]
    spoiled = NOTEBOOK.cells["names"].replace("before + numbers", "numbers")
    assert spoiled != NOTEBOOK.cells["names"]
    names = run()
    exec(spoiled, names)
    assert names["name_after"](b"a", [1]) != forgetful(b"a", [1])
    with pytest.raises(AssertionError):
        run("agree", names=names["names"], fingerprint_of=lambda model: "cd" * 32, model=None)


@pytest.fixture(scope="module")
def odd(make_model):
    return make_model(dtype=torch.float32)


def test_the_dictionary_of_chains_gives_the_slow_answer(odd):
    """A small model: hits, and the same tokens as without any memory."""
    names, found = run("names", model=odd, config=odd.config), NOTEBOOK.cells
    read, write = found["two-readings"], found["patchwork"]
    exec(read[read.index("def read"):read.index("typo =")], names)
    exec(write[write.index("def write"):], names)
    exec(found["memory"], names)
    rng = random.Random(10)
    opening = rng.choices(range(200), k=37)
    found = []
    for _ in range(5):
        tokens = [*opening, *rng.choices(range(200), k=rng.randint(1, 9))]
        hits, answer = names["send_by_hand"](tokens)
        found.append(hits)
        assert answer == generate_with_cache(odd, tokens, 50, stop_ids={END})
    assert found[0] == 0 and set(found[1:]) == {32}


def test_tree_and_chain_find_the_same_blocks():
    run("radix-node", "radix-match", "radix-agree", rng=random.Random(10))


def test_a_tree_that_does_not_split_is_found_out():
    with pytest.raises((AssertionError, IndexError, KeyError)):
        found = NOTEBOOK.cells
        spoiled = found["radix-match"].replace("{tail.run[0]: tail}", "{}")
        names = run("radix-node", rng=random.Random(10))
        exec(spoiled, names)
        exec(found["radix-agree"], names)


def test_leaf_first_keeps_what_root_first_loses():
    names = run("root-first", "eviction-outcome", copy=copy)
    for pools in names["moments"].values():
        for pool in pools:
            pool.check()


def test_who_reads_side_by_side_may_leave_an_orphan():
    """The one gap in leaf first that the chapter names: a leaf that hangs on another's copy."""
    pool = BlockPool(6)
    early, late = pool.admit([], 2), pool.admit([], 3)
    pool.publish(early, list("ab"), 2)
    pool.publish(late, list("abc"), 3)
    for table in (early, late):
        pool.release(table)
    while "a" in pool.block_of:
        pool.admit([], 1)
    assert set(pool.block_of) == {"c"} and pool.lookup("abc") == []


def test_the_unpinned_pool_is_caught_by_its_own_books():
    pool = run("unpinned")["Unpinned"](7)
    known = pool.admit([], 4)
    pool.publish(known, list("abcd"), 4)
    pool.release(known)
    stranger = pool.admit([], 3)
    pool.publish(stranger, list("xyz"), 3)
    pool.release(stranger)
    pool.admit(pool.lookup("abcd"), 2)
    with pytest.raises(AssertionError, match="names a block twice"):
        pool.check()


def test_the_guess_ends_where_a_block_ends():
    """Bo's probe: four full blocks and the code's last digit at the end of the fifth."""
    assert TOWN.value_span(RED_DOOR).stop == 80
    beginning = TOWN.text[:TOWN.value_span(RED_DOOR).start - 1]
    probe = encode(beginning + RED_DOOR.value + ".")
    prompt = encode(TOWN.ask(RED_DOOR))
    assert keys.chain(ROOT, probe, 16) == keys.chain(ROOT, prompt, 16)[:5]
    assert keys.most_hits(len(probe), 16) == 5


def test_a_clock_on_top_changes_the_first_block():
    code = NOTEBOOK.cells["clock"]
    names = run()
    exec(code[:code.index("bills =")], names)
    on_top, at_end = ([keys.chain(ROOT, names["with_clock"](minute, top), 16)
                       for minute in (17, 18)] for top in (True, False))
    assert on_top[0][0] != on_top[1][0]
    same = sum(a == b for a, b in zip(*at_end, strict=True))
    assert same == (1 + len(TOWN.text) + len("It is 10:1")) // 16


def test_an_engine_finds_what_the_chapter_counts(odd):
    engine = Engine(odd, PagedCache(odd.config, num_blocks=20))
    for length, computed in ((48, 16), (49, 1), (50, 2)):
        tokens = [length + i for i in range(length)]
        counts = []
        for _ in range(2):
            request = engine.submit(tokens, Sampling(1))
            engine.run()
            counts.append(usage(request).miss_tokens)
        assert counts == [length, computed]


# --- prompts and the trace -----------------------------------------------------------------


def test_long_prompts_have_the_length_asked_for_and_begin_alike():
    for length in (1, 257, 1_025, 4_097):
        assert len(chapter_10.long_prompt(length)) == length
    assert chapter_10.long_prompt(300) == chapter_10.long_prompt(2_000)[:300]


def test_the_hour_is_an_hour_and_always_the_same():
    trace = chapter_10.busy_hour()
    assert trace[-1].arrival_s <= 3_600 and len(trace) > 3_000
    assert trace == chapter_10.busy_hour() != chapter_10.busy_hour(seed=11)
    assert 0.5 < without_limit(trace).by_token < 0.95


# --- drawings ------------------------------------------------------------------------------


def test_notes_are_told_apart_by_region():
    shown = chapter_10.difference_drawing([[0, 2.0, 0], [0, 3.0, 1e-3], [0, 1.0, 0]], changed=1)
    assert "differ in one byte of block 1" in shown.alt
    assert "1 of the 2 later blocks" in shown.alt
    assert shown.count("--ss-hit") >= 5


def test_a_chain_is_drawn_with_its_real_keys():
    first = "Tomo has a red door, lamps and a kite. He is so."
    second = first.replace("door", "boot")
    shown = chapter_10.chain_drawing(first, second)
    root = keys.root_key(chapter_10.FINGERPRINT)
    one, two = (keys.chain(root, encode(text), 16) for text in (first, second))
    assert len(one) == 3 and [a == b for a, b in zip(one, two, strict=True)] == [
        True, False, False]
    for name in (*one, *two, root):
        assert f">{name.hex()[:6]}<" in shown
    assert "Keys equal from the start: 1." in shown.alt and "blocks like that: 1" in shown.alt


def test_piles_show_the_tokens_that_were_computed():
    shown = chapter_10.piles_drawing("Visits", [("Ada", 0, 1_025), ("Bo", 992, 33)], "a, b")
    assert ">1,025<" in shown and ">33<" in shown and ">Ada<" in shown
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="16"', shown)]
    assert widths[1] / widths[0] == pytest.approx(992 / 1_025, abs=0.01)


def test_the_second_send_is_measured():
    shown = chapter_10.second_send_figure(
        [257, 513], {"first send": [257, 513], "second send": [1, 1]},
        {"first send": [0.1, 0.6], "second send": [0.01, 0.02]})
    assert set(shown.table["kind"]) == {"measured"}
    assert "the first takes 30 times as long" in shown.alt
    assert ("second send", 513, 20) in list(zip(
        shown.table["series"], *list(shown.table.values())[2:], strict=True))


def test_capacity_and_rates_keep_the_kinds_apart():
    found = [Hits(tokens=100, hit_tokens=hits) for hits in (32, 61, 70)]
    shown = chapter_10.capacity_figure([125_000, 250_000, 500_000], found,
                                       Hits(tokens=100, hit_tokens=71))
    assert set(shown.table["kind"]) == {"modelled"}
    assert "0.5 million tokens of room find nearly all" in " ".join(
        shown.fig.axes[0].get_title("left").split())
    rates = chapter_10.rates_figure(0.74)
    kinds = {}
    for kind, x in zip(rates.table["kind"], list(rates.table.values())[2], strict=True):
        kinds.setdefault(kind, []).append(round(x, 1))
    assert kinds == {"reported": [66, 59, 56.3, 40], "modelled": [74]}


def test_the_eviction_is_stepped_through():
    chain = keys.chain(ROOT, list(range(48)), 16)
    pools = []
    for taken in range(3):
        pool = BlockPool(3)
        table = pool.admit([], 3)
        pool.publish(table, chain, 3)
        pool.release(table)
        if taken:
            pool.admit([], taken)
        pools.append(pool)
    shown = chapter_10.eviction_steps({"leaf first": pools}, chain)
    assert shown.labels[2] == "2 blocks taken: leaf first 1 found"
    assert "next to go: 2 1 0" in shown.frames[0]


# --- two prompts to type -------------------------------------------------------------------


def test_typed_prompts_match_up_to_the_last_full_block():
    note = "x" * 40
    found = chapter_10.two_prompts(note + "a", note + "b", 16, "Ada")
    assert (found["total"], found["alike"], found["found"]) == (42, 41, 2)
    assert found["computed"] == 10
    assert [meaning for _, meaning in found["second_blocks"]] == ["hit", "hit", None]
    assert [key for key, _ in found["first_keys"]] == [key for key, _ in found["second_keys"]]
    assert found["second_keys"][0][1] is None                       # the root


def test_the_last_block_of_an_equal_prompt_is_known_and_computed():
    found = chapter_10.two_prompts("x" * 47, "x" * 47, 16, "Ada")
    assert [meaning for _, meaning in found["second_keys"][1:]] == ["hit", "hit", "notes"]
    assert found["computed"] == 16


def test_another_tenant_finds_nothing():
    found = chapter_10.two_prompts("x" * 70, "x" * 70, 8, "Bo")
    assert found["alike"] == 71 and found["found"] == 0
    assert not {k for k, _ in found["first_keys"]} & {k for k, _ in found["second_keys"]}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run JavaScript")
def test_the_browser_makes_the_same_keys(tmp_path):
    """The JavaScript twin against the Python one: sha256 of texts of many lengths."""
    shown = chapter_10.prompts_to_type()
    tries = [{"first": text * 3, "second": text * 3 + "!", "size": size, "tenant": tenant}
             for text in ("", "x" * 19, "naïve — 42 €", "日本語 🙂", TOWN.text[:200])
             for size in (1, 7, 16) for tenant in ("Ada", "Bo")]
    script = tmp_path / "twin.js"
    given = json.dumps([tries, shown.data])
    script.write_text(f"const f = {shown.compute};\nconst [tries, data] = {given};"
                      "\nconsole.log(JSON.stringify(tries.map(inputs => f(inputs, data))));",
                      encoding="utf-8")
    found = subprocess.run(["node", script], capture_output=True, text=True, check=True,
                           encoding="utf-8")
    assert json.loads(found.stdout) == [chapter_10.two_prompts(**inputs) for inputs in tries]


# --- exercises: wrong answers are told why ----------------------------------------------------


def test_near_misses_get_their_own_sentence():
    assert "other way round" in verdict("10.1", (138, 312))
    assert "single tokens" in verdict("10.1", (317, 133))
    assert "Five more" in verdict("10.1", (312, 133))
    assert "0 rows" in verdict("10.2", (12, 0))
    assert "shares" in verdict("10.2", (1, 12)) or "share its block" in verdict("10.2", (1, 12))
    assert "40 " not in verdict("10.6", (10_000, 40))
    assert "four" in verdict("10.6", (200, 10))


def test_a_walk_over_gaps_and_one_without_a_last_token_are_told():
    assert "behind a gap" in verdict("10.3", lambda chain, known, n, size: size * min(
        sum(key in known for key in chain), (n - 1) // size))

    def greedy(chain, known, n, size):
        return size * next((i for i, key in enumerate(chain) if key not in known), len(chain))

    assert "last token must be left out" in verdict("10.3", greedy)
    assert "found whole or not at all" in verdict("10.3", lambda *asked: min(
        greedy(*asked), asked[2] - 1))
    assert "blocks" in verdict("10.3", lambda *asked: greedy(*asked) // asked[3] if (
        asked[2] - 1) // asked[3] >= greedy(*asked) // asked[3] else 0)


@pytest.mark.parametrize(("name_after", "told"), [
    (lambda before, tokens: hashlib.sha256(bytes(t % 256 for t in tokens)).digest(), "same name"),
    (lambda before, tokens: hashlib.sha256(repr(tuple(tokens)).encode()).digest(), "two different"),
    (lambda before, tokens: before + repr(tuple(tokens)).encode(), "grow with the text"),
    (lambda before, tokens: random.randbytes(32), "another name"),
    (lambda before, tokens: str(tokens), "bytes here"),
    (lambda before, tokens: hashlib.sha256(repr((before, tokens)).encode()).digest()[:4], "chance"),
])
def test_names_that_can_be_confused_are_told(name_after, told):
    assert told in verdict("10.4", name_after)


def test_a_separator_between_the_numbers_will_do():
    def name_after(before, tokens):
        written = before.hex() + "," + ",".join(map(str, tokens))
        return hashlib.sha256(written.encode()).digest()

    assert judge(exercises.CHAPTER["10.4"], name_after)
    assert judge(exercises.CHAPTER["10.4"], lambda before, tokens: hashlib.sha256(
        before + repr(tokens).encode()).digest())


@pytest.mark.parametrize(("give_back", "told"), [
    (lambda table, free, has_key: free + table[::-1], "in front"),
    (lambda table, free, has_key: [b for b in table if b not in has_key] + free
     + [b for b in table if b in has_key], "last should be taken first"),
    (lambda table, free, has_key: table[::-1] + free, "unused for longer"),
    (lambda table, free, has_key: free, "in it once"),
])
def test_a_wrong_order_of_eviction_is_told(give_back, told):
    assert told in verdict("10.5", give_back)


def test_blocks_without_a_key_may_stand_in_any_order():
    def give_back(table, free, has_key):
        alike = [*free, *reversed(table)]
        return ([block for block in alike if block not in has_key]
                + [block for block in alike if block in has_key])

    assert judge(exercises.CHAPTER["10.5"], give_back)
