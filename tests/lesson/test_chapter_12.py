"""Chapter 12: its cells agree with the shipped handoff, its drawings say what they were given."""

import re

import pytest
from notebooks import Notebook, refusals

from minimodel.cluster import links
from minimodel.cluster.messages import Ack, Block, Read, pack
from minimodel.lesson import chapter_12
from minimodel.lesson.exercises import chapter_12 as exercises
from minimodel.lesson.exercises.engine import judge

NOTEBOOK = Notebook("12_handoff")
run, verdict = NOTEBOOK.run, refusals(exercises)


# --- the notebook's own code ---------------------------------------------------------------


def test_the_hand_built_lease_ends():
    Lease = run("lease")["Lease"]
    lease = Lease(3.0, lease_s=6, longest_s=20)
    assert lease.is_held(8.9) and not lease.is_held(9.0)
    lease.beat(4.0)                         # sooner than two thirds would bring more
    assert lease.until == 9.0
    lease.beat(8.0)
    assert lease.until == 12.0
    lease.beat(12.0)                        # too late
    assert not lease.is_held(12.0)


def test_no_beat_goes_beyond_the_longest_time():
    Lease = run("lease")["Lease"]
    lease = Lease(0.0, lease_s=6, longest_s=20)
    for now in range(40):
        lease.beat(now)
    assert lease.until == 20


def test_the_comparison_finds_a_lease_that_revives():
    """The notebook's check is one that can fail."""
    import random

    from minimodel.cache.paged import PagedCache
    from minimodel.cluster.handoff import PrefillWorker
    from minimodel.engine.engine import Engine
    from minimodel.model import checkpoint

    Lease = run("lease")["Lease"]

    class Revived(Lease):
        def beat(self, now):
            self.until = min(self.ends, max(self.until, now + 2 / 3 * self.lease_s))
    given = {"Engine": Engine, "PagedCache": PagedCache, "links": links, "random": random,
             "PrefillWorker": PrefillWorker, "model": checkpoint.load(),
             "prompt": list(range(40))}
    run("agree-lease", Lease=Lease, **given)
    with pytest.raises(AssertionError):
        run("agree-lease", Lease=Revived, **given)


# --- the load ------------------------------------------------------------------------------


def test_strangers_and_chats_share_no_block():
    prompts = [*chapter_12.chats().values(), *map(chapter_12.stranger, range(4))]
    assert len({tuple(prompt[:16]) for prompt in prompts[4:]}) == 4
    assert all(len(prompt) == 2_049 for prompt in prompts[4:])
    assert all(len(prompt) < 512 for prompt in prompts[:4])


class Writer:
    """Stands in for a request: each step writes a token."""

    def __init__(self):
        self.output = []


def test_strangers_come_by_tokens_written():
    served, came = [], {}

    def submit(prompt, sampling):
        served.append(Writer())
        came[len(served)] = len(served[0].output)
        return served[-1]

    def step():
        for writer in served:
            writer.output.append(0)
    names = chapter_12._drive({"chat 0": [1], "chat 2": [2]}, [1, 3], submit, step,
                              lambda: len(served[0].output) >= 50)
    assert [*names] == ["chat 0", "chat 2", "stranger 1", "stranger 3"]
    assert [*came.values()] == [0, 0, 15, 30]


RANKS = [
    {way: {"answers": {f"chat {rank}": [7, rank]}, "most_tokens": most + rank,
           "times": {f"chat {rank}": [1.0, 1.005 + 0.01 * rank, 1.5], "stranger 9": [0.0, 9.0]}}
     for way, most in (("together", 2_050), ("chunked", 255), ("split", 3))} for rank in (0, 1)]


def test_gaps_are_those_of_the_chats():
    assert chapter_12.gaps_ms(RANKS, "split") == pytest.approx([485, 495])
    assert chapter_12.first_gaps_ms(RANKS, "split") == pytest.approx([5, 15])
    assert chapter_12.answers(RANKS, "split") == {"chat 0": [7, 0], "chat 1": [7, 1]}


def test_the_finding_is_a_count():
    shown = chapter_12.gaps_figure(RANKS)
    title = " ".join(shown.fig.axes[0].get_title("left").split())
    assert "2,051 tokens together, 256 chunked, 4 split" in title
    assert set(shown.table["kind"]) == {"measured"}


# --- drawings ------------------------------------------------------------------------------


def test_messages_of_one_kind_become_one_arrow():
    network = links.Network(lambda: 0.0)
    p, d = network.link("p"), network.link("d")
    keys = (b"a" * 32, b"b" * 32, b"c" * 32)
    d.send("p", pack(Read("r", 0, "f", keys, (3, 5, 7))))
    for key in keys:
        p.send("d", pack(Block("r", 0, key, 0, 1, bytes(50))))
    d.send("p", pack(Ack("r", 0)))
    drawing = str(chapter_12.messages_drawing(network.log))
    assert re.search(r">Read: 3 blocks, please \(\d+ B\)<", drawing)
    assert re.search(r">3 x Block \(\d+ B\)<", drawing) and ">Ack (" in drawing
    assert drawing.count("<polygon") == 3


def test_overlap_is_drawn_to_the_formula():
    drawing = str(chapter_12.overlap_drawing(layers=5, load_s=2, compute_s=7))
    assert ">in turn: 45<" in drawing and ">overlapped: 37<" in drawing


def test_equation_12_1_gives_the_worked_examples():
    found = chapter_12.travel_ms(100_000)
    assert found["V4.1-Flash"] == pytest.approx(1.84, rel=0.01)
    assert found["DeepSeek-V3"] == pytest.approx(140.5, rel=0.01)
    assert found["Llama-405B"] == pytest.approx(1_032, rel=0.01)


def test_travel_keeps_measured_and_modelled_apart():
    shown = chapter_12.travel_figure(4_194_304, 0.123)
    kinds = [*shown.table["kind"]]
    assert kinds.count("modelled") == 3 and kinds.count("measured") == 1


# --- how many read -------------------------------------------------------------------------


def test_a_queue_leaves_no_more_than_the_service_rate():
    rates = [chapter_12.reads_per_chip(2_000, goal) for goal in (0.05, 0.1, 0.15, 1, 100)]
    assert rates[:2] == [0, 0] and rates == sorted(rates)
    assert rates[2] == pytest.approx(5)             # 0.1 s each, half full: waits 0.05 s
    assert rates[-1] == pytest.approx(10, rel=0.01)


def test_a_tighter_gap_leaves_fewer_side_by_side():
    assert chapter_12.writes_per_chip(500, 10) == 0
    assert chapter_12.writes_per_chip(500, 11) == pytest.approx(20 / 0.011 / 500)
    most = chapter_12.writes_per_chip(500, 20)
    assert most == chapter_12.writes_per_chip(500, 2_000) == pytest.approx(128 / 0.0164 / 500)


def test_goodput_is_the_smaller_limit():
    shown = chapter_12.ratio(5, 2_000, 500, 1, 15)
    assert shown["both"] == [min(pair) for pair in zip(shown["read"], shown["write"], strict=True)]
    assert shown["now"] == shown["both"][4] and shown["writers"] == 11
    assert shown["best"] == max(shown["both"]) == shown["both"][shown["best_readers"] - 1]


def test_long_prompts_want_readers_and_long_answers_writers():
    def best(prompt, answer):
        return chapter_12.ratio(1, prompt, answer, 1, 15)["best_readers"]
    assert best(8_000, 500) > best(2_000, 500) > best(2_000, 2_000)
    hopeless = chapter_12.ratio(8, 8_000, 500, 0.3, 15)
    assert hopeless["best"] == 0 and hopeless["share"] == "none"
    assert chapter_12.ratio(8, 2_000, 500, 1, 15)["share"] == "9 to 7"


# --- exercises: wrong answers are told why ----------------------------------------------------


def test_near_misses_get_their_own_sentence():
    assert "other way round" in verdict("12.1", (12, 57))
    assert "there already" in verdict("12.1", (62, 12))
    assert "fill no block" in verdict("12.1", (58, 12))
    assert "first token" in verdict("12.1", (57, 11))
    assert "other way round" in verdict("12.2", (16.5, 25.3))
    assert "still has to be computed" in verdict("12.2", (25.3, 16.1))
    assert "the slower one" in verdict("12.2", (25.3, 9.9))
    assert "fifth" in verdict("12.5", (4, 22))
    assert "only 21.7" in verdict("12.5", (6, 21.7))
    assert "as many" in verdict("12.5", (5, 27.5))


def test_a_beat_that_forgets_a_rule_is_told_which():
    assert "stays ended" in verdict("12.3", lambda e, last, now, s: min(
        last, max(e, now + 2 / 3 * s)))
    assert "*shorter*" in verdict("12.3", lambda e, last, now, s: e if now >= e else min(
        last, now + 2 / 3 * s))
    assert "for ever" in verdict("12.3", lambda e, last, now, s: e if now >= e else max(
        e, now + 2 / 3 * s))
    assert "*this* lease" in verdict("12.3", lambda e, last, now, s: e if now >= e else min(
        last, max(e, now + 20)))


def test_asking_too_much_or_never_again_is_told():
    assert "may be lost" in verdict("12.4", lambda keys, asked, here, now: [
        key for key in keys if key not in here and key not in asked])
    assert "room for three" in verdict("12.4", lambda keys, asked, here, now: [
        key for key in keys if key not in here and now - asked.get(key, 0) >= 0.5])
    assert "*less*" in verdict("12.4", lambda keys, asked, here, now: [
        key for key in keys if key not in here and now - asked.get(key, 0) > 0.5])
    assert "takes no room" in verdict("12.4", lambda keys, asked, here, now: [
        key for key in keys if key not in here and now - asked.get(key, 0) >= 0.5
    ][:4 - len(asked.keys() - here)])


def test_the_link_twice_as_fast_is_worked_out():
    said = judge(exercises.CHAPTER["12.2"], (25.3, 16.5)).message
    assert f"{0.35 + 22 * max(0.35, 0.4) + 0.4:.2f}:" in said
