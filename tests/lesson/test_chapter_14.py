"""Chapter 14: the hand-built mending decides rightly, its figures say what they were given."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from notebooks import Notebook, refusals

from minimodel.cluster.balance import Placement, place_experts
from minimodel.cluster.epochs import Epoch
from minimodel.cluster.group import Call, Change
from minimodel.cluster.launch import WorkerError
from minimodel.engine.request import Sampling
from minimodel.lesson import chapter_14
from minimodel.lesson.exercises import chapter_14 as exercises
from minimodel.lesson.exercises.engine import judge
from minimodel.lesson.facts import find

NOTEBOOK = Notebook("14_failed_chip")
run, verdict = NOTEBOOK.run, refusals(exercises)


# --- the notebook's own code ---------------------------------------------------------------


class Workers:
    """Stands in for processes: a store in which some have said that they live."""

    def __init__(self, *alive: str):
        self.said, self.killed = dict.fromkeys(alive, b"yes"), []
        self.store = SimpleNamespace(check=lambda keys: all(key in self.said for key in keys),
                                     set=self.said.__setitem__)

    def kill(self, rank: int) -> None:
        assert not any(key.startswith("members/") for key in self.said), "too late"
        self.killed.append(rank)


def mend(workers: Workers, epoch: int, members: list[int]) -> list[int]:
    function = run("mend", json=json, time=time, until=chapter_14.until)["mend"]
    return function(workers, epoch, members, 0.05)


def test_the_hand_built_mending_kills_the_silent_before_the_new_epoch():
    workers = Workers("alive/3/7", "alive/3/2", "alive/2/5")
    assert mend(workers, 3, [2, 5, 7]) == [2, 7]
    assert workers.killed == [5] and json.loads(workers.said["members/4"]) == [2, 7]


def test_a_false_alarm_kills_nobody():
    workers = Workers("alive/1/4", "alive/1/0")
    assert mend(workers, 1, [0, 4]) == [0, 4] and not workers.killed


def test_hand_counted_experts_are_those_that_a_member_fetches():
    before = Epoch(1, (0, 1, 2), (Placement(((0, 1), (2, 3), (4, 5))),) * 2)
    after = Epoch(2, (0, 2), (Placement(((0, 1, 2), (5, 3, 4))), Placement(((4, 5, 3), (0, 1, 2)))))
    lacking = run("fetched", epochs=[before, after], model=SimpleNamespace(
        config=SimpleNamespace(num_experts=6)), killed=SimpleNamespace(
            change=SimpleNamespace(epoch=after, joined={0: 4, 2: 4})))["lacking"]
    assert [lacking(rank, before, after) for rank in (0, 2)] == [4, 4]
    with pytest.raises(AssertionError):
        run("fetched", epochs=[before, after], model=None, killed=SimpleNamespace(
            change=SimpleNamespace(epoch=after, joined={0: 3, 2: 4})))


def test_experts_are_counted_from_the_epoch_before_the_accident():
    """Also when a false alarm has begun an epoch of its own."""
    first = Epoch(1, (0, 1), (Placement(((0, 1), (2, 3))),))
    alarm = Epoch(2, (0, 1), (Placement(((2, 0), (3, 1))),))
    after = Epoch(3, (1,), (Placement(((0, 1, 2, 3),)),))
    run("fetched", epochs=[first, alarm, after], model=SimpleNamespace(
        config=SimpleNamespace(num_experts=4)), killed=SimpleNamespace(
            change=SimpleNamespace(epoch=after, joined={1: 2})))


def once_found(**again: int) -> dict:
    """What the cell 'again' is given, by how much each of three calls had computed again."""
    calls = {name: SimpleNamespace(prompt=[0] * 20, moved=name != "still", computed_again=count)
             for name, count in again.items()}
    return {"kept": [calls["yours"]], "bare": [calls["other"], calls["still"]],
            "calls": [*calls.values()], "my_guess": (0, 0, 0)}


def test_nothing_again_is_an_outcome_when_the_last_block_was_just_full():
    run("again", **once_found(yours=0, other=27, still=0))
    run("again", **once_found(yours=15, other=29, still=0))
    for wrong in ({"yours": 16}, {"other": 26}, {"still": 1}):
        with pytest.raises(AssertionError):
            run("again", **once_found(**{"yours": 3, "other": 27, "still": 0, **wrong}))


# --- plumbing ------------------------------------------------------------------------------


def test_waiting_ends():
    asked = iter([0, 0, 1])
    chapter_14.until(lambda: next(asked), deadline_s=5)
    with pytest.raises(TimeoutError, match=r"0\.01 s in vain"):
        chapter_14.until(lambda: False, deadline_s=0.01)


def test_waiting_ends_at_once_when_a_worker_has_failed():
    def failed():
        raise WorkerError("worker 1 of 3 ended with 1")
    with pytest.raises(WorkerError, match="worker 1"):
        chapter_14.until(lambda: False, SimpleNamespace(require_alive=failed))


def test_the_gist_of_an_error_leaves_out_where_in_the_source():
    assert chapter_14.gist("[a/b/pair.cc:5] Connection closed by peer [127.0.0.1]:3. Oh!"
                           ) == "Connection closed by peer"
    assert chapter_14.gist("[x.cc:81] Timed out waiting 2000ms for recv operation to complete"
                           ) == "Timed out waiting 2000ms for recv operation to complete"
    assert chapter_14.gist("[pair.cc:9] Read error [127.0.0.1]:8041: Connection reset by peer"
                           ) == "Read error: Connection reset by peer"
    assert chapter_14.gist("Something else") == "Something else"


def test_prompts_share_no_block_but_the_title():
    prompts = chapter_14.prompts(10)
    assert len(prompts[0]) == 1_025 and all(950 < len(prompt) < 1_050 for prompt in prompts)
    assert len({tuple(prompt[16:32]) for prompt in prompts}) == 10


# --- accidents -----------------------------------------------------------------------------


def call(number: int, member: int, times: list[float], again: int = 0) -> Call:
    made = Call(number, (1, 2), Sampling(), {}, member=member, output=[5] * len(times),
                token_times_s=times, computed_again=again)
    return made


def accident(how: str = "killed", at_s: float = 50.0) -> chapter_14.Accident:
    change = Change(Epoch(2, (0, 2), (place_experts([1.0] * 6, 2),)), dead=(1,),
                    noticed_s=50.25, decided_s=51.5, rebuilt_s=53.0)
    calls = (call(0, 2, [49.0, 49.5, 56.0]), call(1, 2, [49.25, 49.75, 53.5, 54.0]))
    return chapter_14.Accident(how, at_s, (1, 2), calls, change)


def test_an_accident_is_told_from_its_moment():
    seen = accident()
    assert seen.seconds == {"noticed": 0.25, "decided": 1.5, "rebuilt": 3.0}
    assert seen.gaps_s() == [6.5, 3.75] and seen.names() == ["1 → 2", "2"]


def test_the_gap_figure_names_the_longest_wait():
    shown = chapter_14.gap_figure(accident(), accident("hangs"))
    titles = [" ".join(ax.get_title("left").split()) for ax in shown.fig.axes]
    assert titles == [f"Rank 1 {how}: gaps of up to 6.5 s" for how in ("killed", "hangs")]
    assert shown.table["longest wait, s"] == [6.5, 3.75] * 2
    assert set(shown.table["kind"]) == {"measured"}
    assert "rank 1 hangs, from 3.75 to 6.50 s" in shown.alt


def test_computed_again_stands_in_bars():
    shown = chapter_14.again_figure(call(0, 1, [], again=11), call(1, 1, [], again=974))
    assert "11 tokens" in shown.alt and "974" in shown.alt


def test_noticing_is_measured():
    shown = chapter_14.noticing_figure(0.003, 2.01, 2.0)
    assert [round(x) for x in shown.table["x"]] == [2010, 3]
    assert set(shown.table["kind"]) == {"measured"}


# --- drawings ------------------------------------------------------------------------------


def test_the_others_wait():
    drawing = str(chapter_14.meeting_drawing())
    assert drawing.count(">waits for rank 1<") == 2 and drawing.count(">✕<") == 1


def test_an_epoch_s_messages_are_drawn_in_order():
    drawing = str(chapter_14.epoch_drawing())
    said = re.findall(r">(Lost|kill|Epoch|Joined|Serve)", drawing)
    assert said == ["Lost", "Lost", "kill", "Epoch", "Epoch", "Joined", "Joined", "Serve"]
    assert drawing.count("<polygon") == len(said)


# --- how often -----------------------------------------------------------------------------


def test_the_rate_is_that_of_the_register():
    assert float(find("P-LL06").value) == pytest.approx(chapter_14.FAILURES_PER_CHIP_HOUR, rel=1e-3)
    assert find("P-LL01").value == str(chapter_14.LLAMA_STOPS)


def test_e9_comes_out_as_worked():
    shown = chapter_14.stops(64, 50_677, 10)
    assert shown["days"] == pytest.approx(33.0, abs=0.05)
    assert shown["chance"] == pytest.approx(59.7, abs=0.05)
    assert shown["lost"] == pytest.approx(10.67, abs=0.01)
    assert shown["stops_a_day"] == pytest.approx(3.03, abs=0.01)
    assert chapter_14.days_between_stops(320) == pytest.approx(6.6, abs=0.05)


def test_a_shorter_restart_changes_the_cost_and_not_how_often():
    long, short = chapter_14.stops(144, 20_000, 30), chapter_14.stops(144, 20_000, 1)
    assert short["days"] == long["days"] and short["lost"] == pytest.approx(long["lost"] / 30)


def test_stops_keep_reported_and_modelled_apart():
    shown = chapter_14.stops_figure()
    assert sorted(shown.table["kind"]) == ["modelled"] * 4 + ["reported"]
    assert "3.1 hours" in shown.alt


# --- exercises: wrong answers are told why ----------------------------------------------------


def test_near_misses_get_their_own_sentence():
    assert "other way round" in verdict("14.1", (17, 10))
    assert "begins at second 3" in verdict("14.1", (7, 14))
    assert "another patience" in verdict("14.1", (10, 10))
    assert "never computed" in verdict("14.2", (8, 1_048))
    assert "answer filled" in verdict("14.2", (11, 1_003))
    assert "all but one" in verdict("14.2", (7, 1_003))
    assert "in days" in verdict("14.3", (11.57, 74.6))
    assert "one stop" in verdict("14.3", (277.8, 28.8))
    assert "144 chips stand" in verdict("14.3", (277.8, 0.518))


def test_deciding_wrongly_is_told_what_follows():
    assert "ended after that" in verdict("14.4", lambda members, said, ended: (
        tuple(sorted(set(members) & said)), set(members) - said - ended))
    assert "wake up" in verdict("14.4", lambda members, said, ended: (
        tuple(sorted(set(members) & said - ended)), set()))
    assert "whatever it says" in verdict("14.4", lambda members, said, ended: (
        tuple(sorted(said - ended)), set(members) - said - ended))
    assert "sorted" in verdict("14.4", lambda members, said, ended: (
        tuple(rank for rank in members if rank in said - ended), set(members) - said - ended))


def test_a_fence_with_a_hole_is_told_which():
    def for_each_call(messages):
        answers, newest = {}, {}
        for epoch, name, tokens in messages:
            newest[name] = max(newest.get(name, 0), epoch)
            if epoch == newest[name]:
                answers.setdefault(name, []).extend(tokens)
        return answers

    def last_only(messages):
        answers, last = {}, max((message[0] for message in messages), default=0)
        for epoch, name, tokens in messages:
            if epoch == last:
                answers.setdefault(name, []).extend(tokens)
        return answers
    assert "the group's" in verdict("14.5", for_each_call)
    assert "Only the last epoch's" in verdict("14.5", last_only)
    assert "twice" in verdict("14.5", lambda messages: {
        name: [token for _, other, tokens in messages if other == name for token in tokens]
        for name in "ab"})


def test_tokens_in_tuples_are_tokens():
    def accept(messages):
        answers, newest = {}, 0
        for epoch, name, tokens in messages:
            newest = max(newest, epoch)
            if epoch == newest:
                answers[name] = (*answers.get(name, ()), *tokens)
        return answers
    assert judge(exercises.CHAPTER["14.5"], accept)


def test_placing_wastefully_or_too_full_is_told():
    def keep(held, num_experts, room):
        placed = [list(experts) for experts in held]
        there = {expert for experts in held for expert in experts}
        return placed, [expert for expert in range(num_experts) if expert not in there]

    def all_to_one(held, num_experts, room):
        placed, missing = keep(held, num_experts, room)
        placed[-1] += missing
        return placed

    def never_refuses(held, num_experts, room):
        placed, missing = keep(held, num_experts, room)
        for expert in missing:
            min(placed, key=len).append(expert)
        return placed

    def forgets(held, num_experts, room):
        return keep(held, num_experts, room)[0]
    assert "would do" in verdict("14.6", lambda held, num_experts, room: [
        list(range(num_experts))[rank::len(held)] for rank in range(len(held))])
    assert "fewest" in verdict("14.6", all_to_one)
    assert "ValueError" in verdict("14.6", never_refuses)
    assert "nowhere" in verdict("14.6", forgets)


def test_the_month_on_paper():
    said = judge(exercises.CHAPTER["14.3"], (277.78, 74.65)).message
    assert "103,680" in said and 144 * 720 == 103_680 and 74.65 / 103_680 < 1e-3
