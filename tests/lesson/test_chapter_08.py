"""Chapter 08: its drawings say what they were given, its block map is a real pool's run."""

import random
import re

import pytest
import torch
from notebooks import Notebook, refusals

from minimodel.cache.blocks import BlockPool
from minimodel.cache.paged import PagedCache
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.lesson import chapter_08
from minimodel.lesson.chapter_08 import Moment
from minimodel.lesson.exercises import chapter_08 as exercises
from minimodel.lesson.exercises.engine import judge

NOTEBOOK = Notebook("08_paged_memory", torch=torch, random=random, BlockPool=BlockPool)
run, verdict = NOTEBOOK.run, refusals(exercises)


# --- the notebook's own code ---------------------------------------------------------------


def test_the_hand_built_allocator_is_the_shipped_one():
    assert "2,000 calls" in NOTEBOOK.cells["agree-pool"]
    run("blocks", "agree-pool")


def test_the_comparison_finds_an_allocator_that_forgets_a_decrement():
    Blocks = run("blocks")["Blocks"]

    class Forgetful(Blocks):
        def give_back(self, table):
            super().give_back(table[1:] if self.count[table[0]] > 1 else table)

    with pytest.raises(AssertionError):
        run("agree-pool", Blocks=Forgetful)


def test_the_allocator_hands_out_what_came_back():
    assert run("blocks", "take-and-give")["c"] == [0, 1, 2, 5]


@pytest.mark.parametrize("size", [3, 16, 50])
def test_the_workload_is_counted_from_the_pool(size):
    serve, requests = run("serve")["serve"], [(7, 5), (20, 1), (3, 40), (11, 2)]
    pool = BlockPool(300, size)
    record = serve(requests, pool)
    assert pool.stats()["held"] == 0
    assert sum(count for count, _, _ in record) == sum(answer for _, answer in requests)
    assert sum(noted for _, noted, _ in record) == sum(
        prompt + written for prompt, answer in requests for written in range(answer))
    assert sum(held for _, _, held in record) == sum(
        -(-(prompt + written) // size) for prompt, answer in requests
        for written in range(answer))


def test_the_workload_keeps_the_promise_of_the_chapter():
    names = run("workload", "serve")
    count, noted, held = (sum(column) for column in zip(
        *names["serve"](names["requests"], BlockPool(4000, 16)), strict=True))
    assert 1 - noted / (16 * held) == pytest.approx(
        chapter_08.paged_waste(noted / count, 16), abs=0.002)
    assert 1 - noted / (16 * held) < 0.04 < 0.6 < 1 - noted / (2048 * count)


# --- equation and figures ------------------------------------------------------------------


def test_the_equation_gives_the_worked_examples():
    assert chapter_08.paged_waste(400, 16) == pytest.approx(0.0184, abs=1e-4)
    assert chapter_08.paged_waste(400, 128) == pytest.approx(0.137, abs=1e-3)
    assert chapter_08.paged_waste(12_035, 128) == pytest.approx(0.0052, abs=1e-4)
    assert chapter_08.paged_waste(400, 1) == 0


def test_reserved_strips_add_up():
    drawing = chapter_08.reserved_drawing([30, 10], [60, 20], capacity=200)
    assert "10% of them hold notes now, and 80% never will" in drawing.alt
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="16"', drawing)]
    assert widths == pytest.approx([chapter_08.WIDTH * share for share in
                                    (1, 0.3, 0.15, 1, 0.1, 0.05)])


def test_a_table_is_drawn_with_the_positions_of_its_blocks():
    drawing = chapter_08.table_drawing([7, 2, 11], 37, 16, 12)
    for words in ("0 to 15", "16 to 31", "32 to 36"):
        assert f">{words}<" in drawing
    assert drawing.count("<polygon") == 3


def test_memory_and_waste_show_measured_numbers():
    memory = chapter_08.memory_figure([3, 40, 30], [16, 48, 32], [100, 200, 100])
    assert set(memory.table["kind"]) == {"measured"}
    assert "200 are reserved, 48 are held in blocks, 40 hold notes" in memory.alt
    assert "takes 4 times" in memory.fig.axes[0].get_title("left")

    waste = chapter_08.waste_figure([4, 16, 64], [0.01, 0.02, 0.7], [0.01, 0.02, 0.5])
    found = list(zip(*waste.table.values(), strict=True))
    assert ("counted", "measured", 64, 70) in found
    assert ("equation 8.1", "modelled", 64, 50) in found
    assert "Blocks of 16 waste 2 %, reserving 70 %" in waste.fig.axes[0].get_title("left")


def test_the_detour_is_shown_in_times_of_the_dense_cache():
    shown = chapter_08.indirection_figure([1, 16, 64], {8: [3, 2, 1.5], 1: [1.4, 1.2, 1.1]})
    found = list(zip(*shown.table.values(), strict=True))
    assert ("1 request", "measured", 16, 1.2) in found
    assert ("8 requests", "measured", 1, 3) in found
    assert "1.2 times as long for one request and 2.0 times for 8" in shown.alt
    assert "at blocks of 1, 1.4 and 3.0 times" in shown.alt
    title = " ".join(shown.fig.axes[0].get_title("left").split())
    assert title == "8 requests: 3.0 times the dense step in blocks of 1, 2.0 in blocks of 16"


def test_scale_keeps_the_kinds_apart():
    shown = chapter_08.scale_figure(reserved=0.803, paged=0.018)
    kinds = {}
    for series, kind, x, _ in zip(*shown.table.values(), strict=True):
        kinds.setdefault(kind, []).append((series, round(x, 1)))
    assert sorted(x for _, x in kinds["measured"]) == [1.8, 80.3]
    assert sorted(x for _, x in kinds["reported"]) == [4, 61.8, 79.6]
    assert sorted(x for _, x in kinds["modelled"]) == [0.5, 13.7]


# --- the block map -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moments(make_model):
    model = make_model(dtype=torch.float32)
    engine = Engine(model, PagedCache(model.config, num_blocks=14, block_size=5))
    plain = Sampling(max_tokens=9, stop_ids=())
    drawn = Sampling(max_tokens=8, temperature=1.0, stop_ids=())
    found = chapter_08.record(engine, {
        0: {"prompt": range(12), "sampling": plain},
        2: {"prompt": range(8), "sampling": drawn, "num_answers": 2},
        7: {"prompt": range(40, 51), "sampling": plain}})
    engine.check()
    return found


def test_the_record_tells_all_that_happens_to_a_table(moments):
    told = [event for moment in moments for event in moment.events]
    for event in ("A arrives", "B arrives", "B2 shares B's blocks", "C arrives", "A ends",
                  "C ends"):
        assert told.count(event) == 1, event
    copies = [event for event in told if "copies" in event]
    assert len(copies) == 1                         # of two answers, the second is alone again
    grows = [event for event in told if event.startswith("A grows")]
    assert len(grows) == 1                          # 12 + 8 tokens in blocks of 5: from 3 to 4


def test_every_moment_accounts_for_every_block(moments):
    for moment in moments:
        held = {block for table in moment.tables.values() for block in table}
        assert sorted([*held, *moment.free]) == list(range(14))
        for name, table in moment.tables.items():
            assert (len(table) - 1) * 5 < moment.noted[name] <= len(table) * 5
    assert not moments[0].tables and not moments[-1].tables
    shared = [moment for moment in moments if any(
        len(moment.holders(block)) == 2 for block in range(14))]
    assert shared


def test_a_block_is_drawn_as_full_as_it_is():
    moment = Moment(4, {"A": (3, 0), "B": (3, 2)}, {"A": 8, "B": 6}, (1,), events=("A arrives",))
    assert [moment.written(block, 5) for block in range(4)] == [3, 0, 1, 5]
    assert moment.holders(3) == ["A", "B"]
    frame = chapter_08.map_frame(moment, Moment(0, {}, {}, (0, 1, 2, 3)), 5, 2)
    assert "3 of 4 blocks are held" in frame.alt
    assert ">A B<" in frame and "free, next first: 1" in frame


def test_the_map_has_a_frame_a_moment(moments):
    shown = chapter_08.block_map(moments, block_size=5)
    assert len(shown.frames) == len(moments)
    heights = {re.search(r'viewBox="[^"]*"', frame)[0] for frame in shown.frames}
    assert len(heights) == 1                        # nothing jumps as one steps through
    assert shown.labels[0] == "step 0: nobody is here, all blocks are free"


def test_a_request_that_could_never_be_served_is_refused(make_model):
    model = make_model(dtype=torch.float32)
    engine = Engine(model, PagedCache(model.config, num_blocks=2, block_size=5))
    with pytest.raises(ValueError, match="all 2 blocks together hold 10"):
        chapter_08.record(engine, {0: {"prompt": range(30)}})


def test_who_is_sent_away_does_not_end(make_model):
    model = make_model(dtype=torch.float32)
    engine = Engine(model, PagedCache(model.config, num_blocks=4, block_size=5),
                    Limits(spare_blocks=0))
    greedy = Sampling(max_tokens=8, stop_ids=())
    told = [event for moment in chapter_08.record(engine, {
        0: {"prompt": range(5), "sampling": greedy}, 1: {"prompt": range(4), "sampling": greedy},
    }) for event in moment.events]
    assert told.count("B is sent away") == engine.scheduler.num_preempted > 0
    assert told.count("B ends") == told.count("A ends") == 1


def test_a_run_without_requests_has_one_moment(make_model):
    model = make_model(dtype=torch.float32)
    engine = Engine(model, PagedCache(model.config, num_blocks=3, block_size=5))
    (only,) = chapter_08.record(engine, {})
    assert not only.tables and only.free == (0, 1, 2)


@pytest.mark.parametrize(("request_id", "name"), [("0", "A"), ("2", "C"), ("1/1", "B2")])
def test_requests_have_short_names(request_id, name):
    assert chapter_08.name_of(request_id) == name


# --- exercises: wrong answers are told why ----------------------------------------------------


def test_near_misses_get_their_own_sentence():
    assert "other way round" in verdict("8.1", (29, 4317))
    assert "number of blocks" in verdict("8.1", (4317, 116))
    assert "count from 0" in verdict("8.2", 161)
    assert "larger ones do" in verdict("8.6", 16)
    assert "even 34 would do" in verdict("8.6", 33)
    assert "returns nothing" in verdict("8.3", lambda table, past, new, size: None)
    assert "one number" in verdict("8.3", lambda table, past, new, size: [
        (table[p // size], p % size) for p in range(past, past + new)])


def run_solution(id: str):
    """What the solution of an exercise defines."""
    names, exercise = {}, exercises.CHAPTER[id]
    exec(exercise.solution, names)
    return names[exercise.answer]


def own_that_counts_late(table, place, count, free, copy):
    block = table[place]
    if count[block] > 1 and free:
        count[block] -= 1
        table[place] = free.pop(0)
        copy(table[place], block)           # the wrong way round
        count[table[place]] = 1
    return count[block] == 1


def test_a_copy_in_the_wrong_direction_is_told():
    assert "the source first" in verdict("8.4", own_that_counts_late)


@pytest.mark.parametrize(("spoil", "told"), [
    (lambda table, count, free: table.append(8), "only place 1"),
    (lambda table, count, free: count.__setitem__(4, 5), "only the counts of blocks 6 and"),
    (lambda table, count, free: free.clear(), "one block should leave the free list"),
])
def test_a_copy_that_changes_more_than_it_should_is_told(spoil, told):
    own = run_solution("8.4")

    def careless(table, place, count, free, copy):
        copied = count[table[place]] > 1 and free
        done = own(table, place, count, free, copy)
        if copied:
            spoil(table, count, free)
        return done

    assert told in verdict("8.4", careless)


def test_any_free_block_will_do():
    def own(table, place, count, free, copy):
        block = table[place]
        if count[block] == 1:
            return True
        if not free:
            return False
        table[place] = free.pop()           # the last, not the first
        count[table[place]] = 1
        copy(block, table[place])
        count[block] -= 1
        return True

    assert judge(exercises.CHAPTER["8.4"], own)
