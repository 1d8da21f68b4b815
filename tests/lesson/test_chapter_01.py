"""Chapter 01: its drawings say what they were given, its explorable agrees with the engine."""

import re
from dataclasses import replace
from datetime import date

import pytest
import torch
from notebooks import CHAPTERS, Notebook, refusals

from minimodel.cache.paged import PagedCache
from minimodel.cache.store import DiskStore
from minimodel.engine.engine import Engine, fingerprint_of, usage
from minimodel.engine.request import Sampling
from minimodel.lesson import chapter_01, chapter_01_map, facts, palette
from minimodel.lesson.chapter_01_map import FLOORS, Map, Trip, Yours
from minimodel.lesson.exercises import chapter_01 as exercises
from minimodel.lesson.exercises.engine import judge
from minimodel.lesson.town import RED_DOOR, TOWN
from minimodel.pricing import PRICE_LISTS, Usage, bill, bill_ratio, input_ratio, price_list
from minimodel.tokenizer import encode

NOTEBOOK = Notebook("01_the_second_send")
verdict = refusals(exercises)
PRICES = price_list("deepseek-flash", date(2026, 11, 2)).prices


# --- the idea and the strips -----------------------------------------------------------------


def test_the_first_picture_has_the_prices_of_the_register():
    drawn = chapter_01.two_times()
    for claim in ("P-PR03", "P-PR01"):
        assert f">{facts.find(claim).value} dollars a million prompt tokens<" in drawn
    read = re.escape(palette.var("prefill"))
    assert len(re.findall(rf'r="2.6" style="fill:{read}"', drawn)) == 60 + 1


def counted(drawing: str) -> dict[str, int]:
    """Cells of a drawing of strips by colour, the legend's aside."""
    strips = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="16" rx="1" '
                        r'style="fill:var\(--ss-(\w+)', drawing)
    legend = max(float(y) for _, y, _ in strips)
    kinds = [kind for _, y, kind in strips if float(y) < legend]
    return {kind: kinds.count(kind) for kind in set(kinds)}


def test_a_strip_has_a_cell_a_block():
    drawn = chapter_01.strips({"one": Usage(0, 37, 5), "two": Usage(32, 9, 5, 16)})
    # 37 tokens: 3 blocks computed. 41: one from memory, one from disk, one computed.
    assert counted(drawn) == {"miss": 3 + 1, "hit": 1, "disk": 1, "decode": 2}
    assert "one: 37 of 37 tokens computed" in drawn.alt
    assert "two: 9 of 41 tokens computed" in drawn.alt


def test_a_legend_names_what_is_drawn_and_nothing_else():
    drawn = chapter_01.strips({"one": Usage(0, 37, 5)})
    assert ">computed<" in drawn and ">answer<" in drawn
    assert ">remembered<" not in drawn and ">from disk<" not in drawn


@pytest.mark.parametrize("name", ["one", "after a restart"])
def test_no_strip_leaves_the_drawing(name):
    drawn = chapter_01.strips({name: Usage(0, 1_025, 37), "other": Usage(1_008, 30, 37)})
    ends = [float(x) + float(width) for x, width in
            re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="16"', drawn)]
    assert max(ends) <= chapter_01.WIDTH


# --- plots -----------------------------------------------------------------------------------


def test_ratios_are_modelled_and_the_list_is_reported():
    shown = chapter_01.ratio_figure(PRICES, short=37, long=1_000)
    kinds = dict(zip(shown.table["series"], shown.table["kind"], strict=True))
    assert {name for name, kind in kinds.items() if kind == "reported"} == {"by the list: 50"}
    assert set(kinds.values()) == {"modelled", "reported"}
    assert {"bill, answer of 37", "of 1,000"} < set(kinds)
    last = 16 * 2**13
    assert f"{input_ratio(Usage(last, 1, 0), PRICES):.1f} and" in shown.alt
    for answer in (37, 1_000):
        assert f" {bill_ratio(Usage(last, 1, answer), PRICES):.1f} " in shown.alt


def test_the_three_ratios_of_the_text():
    agent = Usage(99_000, 1_000, 1_000)
    assert f"{PRICES.miss / PRICES.hit:.0f}" == "50"
    assert f"{input_ratio(agent, PRICES):.1f}" == "33.6"
    assert f"{bill_ratio(agent, PRICES):.1f}" == "14.9"
    assert "Fifty, 34, 15" in NOTEBOOK.cells["ratios-meaning"]


def test_times_are_measured():
    shown = chapter_01.times_figure([129, 257, 513, 4_097], [0.01, 0.02, 0.05, 0.6],
                                    [0.002, 0.002, 0.003, 0.006], [0.003, 0.004, 0.005, 0.012])
    assert set(shown.table["kind"]) == {"measured"}
    assert "100 times shorter from memory and 50 times shorter from disk" in shown.alt


def test_every_price_list_is_shown_as_reported():
    shown = chapter_01.lists_figure()
    assert len(shown.table["list"]) == len(PRICE_LISTS)
    assert set(shown.table["times"]) >= {"10", "50", "120", "30"}
    for claims in shown.table["claims"]:
        for claim in claims.split(", "):
            facts.find(claim)


# --- the map ---------------------------------------------------------------------------------


YOURS = {number: Yours(f"words {number}") for number in range(2, 19)}
TRIPS = [Trip("first send", 0.5, 3, "miss"), Trip("second send", 0.004, 1, "hit"),
         Trip("third send", 1.25, 2, "disk")]


def test_the_map_has_a_room_for_every_later_chapter():
    rooms = [room for floor in FLOORS for room in floor.rooms]
    assert sorted(room.number for room in rooms) == list(range(2, 19))
    pages = {path.stem for path in CHAPTERS.iterdir()}
    assert {room.page for room in rooms} <= pages


def test_a_deeper_send_has_a_longer_rail():
    drawn = Map(TRIPS, YOURS)
    for svg in (drawn.wide, drawn.tall):
        ends = [float(end) for end in re.findall(r'd="M[\d.]+ [\d.]+V([\d.]+)" [^>]*width:7', svg)]
        first, second, third = ends
        assert second < third < first
        for number in range(2, 19):
            assert svg.count(f">words {number}<") == 1
    assert "second send: down to notes in memory, 4 ms to the first token" in drawn.alt
    assert "third send: down to notes that outlive a machine, 1.25 s" in drawn.alt


def test_nothing_of_the_map_stands_outside_it():
    for svg, width in ((Map(TRIPS, YOURS).wide, 720), (Map(TRIPS, YOURS).tall, 364)):
        boxes = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"',
                           svg)
        height = float(re.search(r'viewBox="-1 -1 [\d.]+ ([\d.]+)"', svg)[1])
        assert len(boxes) > 40
        assert all(float(x) + float(w) <= width + 0.1 and float(y) + float(h) <= height
                   for x, y, w, h in boxes)


def test_links_wait_for_a_page_that_has_the_other_chapters():
    shown = Map(TRIPS, YOURS)._repr_html_()
    assert 'data-page="05_kv_cache"' in shown
    assert "<a href" not in shown           # in a notebook they would lead nowhere
    assert "content_root" in shown


def test_a_map_that_lacks_words_is_refused():
    with pytest.raises(ValueError, match=r"chapters \[7, 12\]"):
        Map(TRIPS, {n: words for n, words in YOURS.items() if n not in (7, 12)})


def test_the_map_shows_what_a_run_has_counted(make_model, tmp_path):
    model = make_model(dtype=torch.float32, vocab_size=264)
    prompt = encode("The code of the red door is 4821. " * 2)[:49]

    def start() -> Engine:
        store = DiskStore(tmp_path, fingerprint_of(model), min_free_bytes=0)
        return Engine(model, PagedCache(model.config, num_blocks=9), store=store)

    def send(engine: Engine):
        request = engine.submit(prompt, Sampling(max_tokens=7, stop_ids=()))
        engine.run()
        return request

    engine = start()
    first, second, third = send(engine), send(engine), send(start())
    shown = chapter_01.machine_map(model.config, first, second, third,
                                   [0.5, 0.004, 0.0125], 2_345_678, PRICES)
    for words in ("3 of 3 blocks found", "49 tokens, then 1", "2.3 MB, 3 blocks read back",
                  "7 steps to answer", "restart: 1 token", "100,000 tokens: 14.9 times cheaper",
                  "one public list: 50 times", "3 of 7 for a token"):
        assert f">{words}<" in shown.wide, words
    assert ">12.5 ms<" in shown.wide and ">500 ms<" in shown.wide
    assert "first send, 49 computed" in shown.alt and "second send, 1 computed" in shown.alt
    assert shown.wide.count("stroke-dasharray:5 4") == 2        # modelled: the bill, on paper


# --- two prompts -----------------------------------------------------------------------------


def sent(**changes) -> dict:
    start = {"first": "", "second": "", "clock": "none", "answer": 37, "prices": "flash"}
    return chapter_01.compare(**{**start, **changes})


PAIRS = [("x" * 31, "x" * 31), ("x" * 32, "x" * 32), ("x" * 40, "x" * 70), ("x" * 70, "x" * 40),
         ("", "x" * 20), ("x" * 20, ""), ("a" * 20 + "b" * 50, "a" * 20 + "c" + "b" * 49),
         ("naïve — 42 €\n" * 4, "naïve — 43 €\n" * 4)]


@pytest.mark.parametrize("clock", ["none", "top", "end"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_engine_finds_what_the_explorable_says(make_model, first, second, clock):
    model = make_model(dtype=torch.float32, vocab_size=264, context=256)
    engine = Engine(model, PagedCache(model.config, num_blocks=40))
    for minute, prompt in ((41, first), (42, second)):
        text = chapter_01._with_clock(prompt, clock, minute)
        request = engine.submit(encode(text), Sampling(max_tokens=1))
        engine.run()
    said = sent(first=first, second=second, clock=clock)
    assert usage(request) == Usage(said["hits"], said["misses"], 1)


@pytest.mark.parametrize("prices", ["flash", "pro", "old"])
def test_costs_are_those_of_a_million_bills(prices):
    first, second = "x" * 100 + "one", "x" * 100 + "another"
    said = sent(first=first, second=second, prices=prices, answer=11)
    found = Usage(said["hits"], said["misses"], 11)
    listed = chapter_01._LISTS[prices][0].prices
    assert said["cost"] == pytest.approx(float(bill(found, listed).total * 10**6))
    assert said["full"] == pytest.approx(float(bill(found.all_missed(), listed).total * 10**6))
    assert said["times"] == pytest.approx(float(bill_ratio(found, listed)))


def test_the_place_of_the_first_difference_is_told():
    assert sent(first="abc", second="abd")["where"] == "They first differ at byte 3."
    assert sent(first="abc", second="abc")["where"] == "The two are equal."
    assert sent(first="abc", second="ab")["where"] == "One is the beginning of the other."
    assert sent(first="abc", second="abc", clock="top")["where"] == "They first differ at byte 11."


def test_blocks_hold_the_whole_text_and_change_their_colour_where_they_should():
    page = "Town notebook\nThe code of the red door is 4821.\n"
    said = sent(first=page + "Q: A?\n", second=page + "Q: B?\n")
    for key, text in (("first_blocks", page + "Q: A?\n"), ("second_blocks", page + "Q: B?\n")):
        assert "".join(piece for piece, _ in said[key]) == "▸" + text
        assert all(len(piece.encode()) <= 18 for piece, _ in said[key])     # ▸ has three bytes
    tokens = {}
    for piece, meaning in said["second_blocks"]:
        tokens[meaning] = tokens.get(meaning, 0) + len(piece)
    assert tokens == {"hit": 48, "waste": 4, "miss": 3}
    assert said["hits"] == 48


def test_of_a_long_prompt_the_blocks_around_the_parting_are_shown():
    said = sent(first="y" * 1_500, second="y" * 700 + "x" * 800)
    assert said["hits"] == 43 * 16
    for key, last in (("first_blocks", None), ("second_blocks", "miss")):
        kinds = [meaning for _, meaning in said[key]]
        assert kinds[:6] == kinds[7:13] == ["hit"] * 6 and kinds[6] is None
        assert [text for text, _ in said[key]].count(" … ") == 2
        assert said[key][-1] == [" … ", None] and kinds[-2] == last
        assert len(said[key]) < 60


def test_prompts_as_programs_have_them_fit():
    first, second = chapter_01.two_prompts().controls[:2]
    assert first.limit == second.limit >= 10_000


def test_a_clock_before_the_last_line_leaves_the_page_alone():
    assert chapter_01._with_clock("a\nb\nq\n\n", "end", 41) == "a\nb\nIt is 09:41.\nq\n\n"
    assert chapter_01._with_clock("q", "end", 42) == "It is 09:42.\nq"
    assert chapter_01._with_clock("a\nq", "top", 42) == "It is 09:42.\na\nq"


def test_the_explorable_starts_with_a_part_of_the_page_in_common():
    values = chapter_01.two_prompts().values()
    assert 0 < values["hits"] < values["hits"] + values["misses"]
    assert values["times"] > 1.5
    assert chapter_01.two_prompts().values(clock="top")["hits"] == 0


# --- the notebook ----------------------------------------------------------------------------


def test_the_prompt_fills_whole_blocks_and_one_token():
    prompt = encode(TOWN.ask(RED_DOOR))
    assert len(prompt) == 64 * 16 + 1
    said = NOTEBOOK.cells["first-meaning"]
    assert "64 blocks" in said and "1,024 bytes" in said


def test_the_folder_is_removed_when_it_is_no_longer_needed():
    users = [id for id, source in NOTEBOOK.cells.items()
             if re.search(r"\bstart\(\)|\bfolder[.,)]|\bvictim\b", source)]
    assert "temporary.cleanup()" in NOTEBOOK.cells["machine-map"]
    assert list(NOTEBOOK.cells).index("machine-map") > max(map(list(NOTEBOOK.cells).index, users))


def test_the_changed_letter_is_the_last_of_the_second_block():
    prompt = TOWN.ask(RED_DOOR)
    changed = prompt.replace("hare", "mare")
    pairs = zip(encode(prompt), encode(changed), strict=True)
    assert [place for place, (a, b) in enumerate(pairs) if a != b] == [2 * 16 - 1]
    assert '"hare", "mare"' in NOTEBOOK.cells["names"]


# --- exercises: wrong answers are told why -----------------------------------------------------


def test_near_misses_get_their_own_sentence():
    assert "other way round" in verdict("1.1", (16, 624))
    assert "last token is always computed" in verdict("1.1", (640, 0))
    assert "only whole blocks" in verdict("1.1", (639, 1))
    assert "together 640" in verdict("1.1", (624, 17))
    assert "one remembered token" in verdict("1.2", 50)
    assert "input alone" in verdict("1.2", 49.76)
    assert "Upside down" in verdict("1.2", 0.0927)
    assert judge(exercises.CHAPTER["1.2"], 10.8)


def equal_from_the_start(first, second, size=16):
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


def test_hits_that_are_almost_right_are_told_what_is_missing():
    assert "Only whole blocks" in verdict("1.3", equal_from_the_start)
    assert "after the first difference" in verdict(         # the starter
        "1.3", lambda a, b, size=16: sum(x == y for x, y in zip(a, b, strict=False)))
    assert "last token of the second prompt" in verdict(
        "1.3", lambda a, b, size=16: equal_from_the_start(a, b) // size * size)
    assert "after the first difference" in verdict(
        "1.3", lambda a, b, size=16: max(0, min(
            sum(x == y for x, y in zip(a, b, strict=False)), len(b) - 1)) // size * size)
    assert "returns nothing" in verdict("1.3", lambda a, b, size=16: None)
    assert "Every whole block before" in verdict("1.3", lambda a, b, size=16: 0)
    assert "number" in verdict("1.3", lambda a, b, size=16: "many")


def test_orders_that_are_almost_right_are_told_what_is_missing():
    def backwards(parts):
        return "".join(text for text, _ in sorted(parts, key=lambda part: part[1])[::-1])

    def shuffled(parts):
        return "".join(text for text, _ in sorted(parts, key=lambda part: (part[1], part[0])))

    assert "other way round" in verdict("1.4", backwards)
    assert "keep their order" in verdict("1.4", shuffled)
    assert "stands before one" in verdict("1.4", lambda parts: "".join(t for t, _ in parts))
    assert "is missing" in verdict("1.4", lambda parts: "".join(t for t, _ in parts[1:]))
    assert "one text" in verdict("1.4", lambda parts: [t for t, _ in parts])


def test_a_floor_is_as_high_as_its_rooms_need():
    notes = FLOORS[1]
    assert chapter_01_map._floor_height(notes, 4) < chapter_01_map._floor_height(notes, 2)
    alone = replace(notes, rooms=notes.rooms[:1])
    assert chapter_01_map._floor_height(alone, 2) == chapter_01_map._floor_height(notes, 4)
