"""A group loses a rank: it costs time, and no token.

The rules are tested with members that a test plays itself, the rest with real processes: each test
has a deadline, and `Supervisor` leaves no process behind.
"""

import importlib.util
import os
import signal
import time
from pathlib import Path
from random import Random

import pytest
import torch
from group_play import Played, Shelf, until, written

from minimodel.cluster.epochs import Epoch, Joined, Lost, Progress, Serve, Written
from minimodel.cluster.group import GroupTooSmallError, Supervisor
from minimodel.cluster.launch import WorkerError, Workers, launch
from minimodel.cluster.mailbox import Mailbox
from minimodel.engine.engine import Engine
from minimodel.engine.generate import generate_without_cache
from minimodel.engine.request import Sampling

WORKERS = Path(__file__).with_name("group_workers.py")
spec = importlib.util.spec_from_file_location("group_workers", WORKERS)
workers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workers)

MAKE = f"{WORKERS}:make"
COUNT = 25
GREEDY = Sampling(COUNT, stop_ids=())
PROMPTS = [Random(f"group/{i}").choices(range(256), k=size)
           for i, size in enumerate([40, 31, 52, 40, 17, 33])]
pytestmark = pytest.mark.timeout(250)


@pytest.fixture(scope="module")
def expected():
    model = workers.make_model()
    answers = [generate_without_cache(model, prompt, COUNT, stop_ids=()) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


# --- real processes -------------------------------------------------------------------------------


def test_ranks_are_killed_one_after_another_and_no_token_changes(tmp_path, expected):
    """Four, three, two, one: experts move each time, and in between by plan."""
    with Supervisor(4, MAKE, str(tmp_path), spare=1) as group:
        calls = [group.submit(prompt, GREEDY) for prompt in PROMPTS]
        assert {call.member for call in calls} == {0, 1, 2, 3}
        until(group, written(calls, 3))
        group.rebalance()
        assert max(map(max, group.loads)) > min(map(min, group.loads))
        for victim, count in ((2, 6), (0, 10), (3, 14)):
            until(group, written(calls, count))
            moving = {call.number for call in calls if call.member == victim}
            group.workers.kill(victim)
            until(group, lambda victim=victim: victim not in group.epoch.members)
            assert {*group.changes[-1].moved} == moving
        group.run(60)
        assert [call.output for call in calls] == expected
        assert [change.dead for change in group.changes] == [(), (), (2,), (0,), (3,)], [
            change.why for change in group.changes]
        assert [change.epoch.members for change in group.changes] == [
            (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3), (1, 3), (1,)]
        assert [len(change.epoch.placements[0].experts_of[0]) for change in group.changes] == [
            3, 3, 4, 5, 8]                                      # a share each, and one more
        until(group, lambda: len(group.changes[-1].joined) == 1)
        assert group.changes[-1].joined[1] >= 2 * (8 - 5)       # rank 1 holds all of them now
        moved = [call for call in calls if call.moved]
        assert moved and any(not call.moved for call in calls)
        for call in moved:                      # its full blocks are found on disk, each time
            assert call.computed_again <= call.moved * workers.BLOCK
        assert all(call.computed_again == 0 for call in calls if not call.moved)
        for call, prompt in zip(calls, PROMPTS, strict=True):
            assert (call.usage.hit_tokens, call.usage.miss_tokens) == (0, len(prompt))
            assert call.usage.output_tokens == COUNT
        stats = group.close()
        assert [one is None for one in stats] == [True, False, True, True]
        assert stats[1]["held"] == 0
    assert all(process.poll() is not None for process in group.workers.processes)


def test_g69_a_rank_hangs_and_nobody_waits_for_it_twice(expected):
    """No sign but silence: noticed after `patience_s`; without a store its notes are gone."""
    with Supervisor(3, MAKE, patience_s=1.0) as group:
        calls = [group.submit(prompt, GREEDY) for prompt in PROMPTS]
        until(group, written(calls, 4))
        hung_s = time.perf_counter()
        group.workers.hang(1)
        assert group.workers.is_alive(1)
        group.run(60)
        assert [call.output for call in calls] == expected
        change = group.changes[-1]
        assert (change.dead, change.epoch.members) == ((1,), (0, 2))
        assert change.noticed_s - hung_s > 0.5
        assert change.decided_s > change.noticed_s
        assert not group.workers.is_alive(1)                    # or it might wake up
        for call in calls:
            if call.moved:
                assert call.computed_again >= len(call.prompt) + 4 - 1
            else:
                assert call.computed_again == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_g69_leaving_a_group_does_not_wait_for_the_dead(how):
    """Only the meeting itself waits, and for a hanging rank only `patience_s` of it."""
    patience_s = 2.0
    with Workers(f"{WORKERS}:meet_without", 3, patience_s, how) as three:
        until_done = time.monotonic() + 60
        while any(three.is_alive(rank) for rank in (0, 1)):
            assert time.monotonic() < until_done
            time.sleep(0.01)
        three.kill(2)
        found = three.wait(10, may_die={2})[:2]
    for rank in found:
        assert rank["total"] == 10 + 11
        assert rank["left_s"] < patience_s / 2
        if how == signal.SIGSTOP:
            assert rank["noticed_s"] > patience_s / 2


def test_a_false_alarm_costs_an_epoch_and_no_rank(expected):
    """A rank is slow, not dead: the others stop waiting, it hears of that, and all go on."""
    with Supervisor(3, MAKE, patience_s=1.0) as group:
        calls = [group.submit(prompt, GREEDY) for prompt in PROMPTS]
        until(group, written(calls, 4))
        group.workers.hang(2)
        while len(group.reporting) < 2:
            group._listen()                     # and decide nothing yet
            time.sleep(0.01)
        os.killpg(group.workers.processes[2].pid, signal.SIGCONT)
        group.run(60)
        assert [call.output for call in calls] == expected
        assert [change.dead for change in group.changes] == [(), ()]
        assert group.epoch.members == (0, 1, 2)
        assert not any(call.moved for call in calls)


def test_too_few_are_left_and_another_group_goes_on(tmp_path, expected):
    """8 experts, room for 3 in each of 3 ranks: after a death they do not fit. Nothing is lost."""
    with Supervisor(3, MAKE, str(tmp_path), room=3) as group:
        calls = [group.submit(prompt, GREEDY) for prompt in PROMPTS]
        until(group, written(calls, 4))
        group.workers.kill(0)
        with pytest.raises(GroupTooSmallError, match=r"for 3 experts .* 2 cannot hold all 8"):
            group.run(60)
        with pytest.raises(GroupTooSmallError, match="start a group with more ranks"):
            group.poll()                                        # it is still so
        assert [call.reason for call in calls] == [None] * 6
    with Supervisor(1, MAKE, str(tmp_path)) as another:
        again = [another.submit(call.prompt, GREEDY, written=call.output) for call in calls]
        another.run(60)
        assert [call.output for call in again] == expected
        for call, prompt in zip(again, PROMPTS, strict=True):
            found = call.usage
            most = (len(prompt) - 1) // workers.BLOCK * workers.BLOCK
            assert most <= found.hit_tokens < len(prompt)
            assert found.disk_hit_tokens == found.hit_tokens


def test_a_group_serves_whatever_an_engine_does(expected):
    """Sampling by chance, salts, what is refused, who leaves: and one of them dies."""
    by_chance = Sampling(COUNT, temperature=1.3, top_p=0.9, seed=5, stop_ids=())
    engine: Engine = workers.make()[0]
    alone = engine.generate([PROMPTS[2]], by_chance)[0]
    with Supervisor(2, MAKE) as group:
        drawn = group.submit(PROMPTS[2], by_chance)
        plain = group.submit(PROMPTS[0], GREEDY, salt=b"a tenant's", retention="agent")
        refused = [group.submit([3, 271], GREEDY), group.submit([], GREEDY),
                   group.submit([1] * 300, GREEDY), group.submit([1], retention="for ever")]
        with pytest.raises(TypeError, match="sampling=30 must be a Sampling"):
            group.submit([1], 30)
        unknown = group.submit(PROMPTS[3], GREEDY, reuse=False)
        leaving = group.submit(PROMPTS[1], GREEDY)
        until(group, written([drawn, plain, leaving], 5))
        group.abort(leaving)
        group.abort(leaving)
        group.workers.kill(drawn.member)
        group.run(60)
        assert drawn.output == alone and drawn.moved == 1
        assert plain.output == expected[0]
        assert unknown.output == expected[3] and unknown.usage.hit_tokens == 0
        assert [call.reason.partition(":")[0] for call in refused] == ["rejected"] * 4
        for call, words in zip(refused, ("token id 271", "empty", "context", "for ever"),
                               strict=True):
            assert words in call.reason
        assert leaving.reason == "aborted" and 5 <= len(leaving.output) < COUNT
        assert leaving.output == expected[1][:len(leaving.output)]


def test_a_survivor_has_too_few_blocks_for_all_and_no_token_changes(expected):
    """All requests come to one rank, which must send some away again."""
    with Supervisor(2, MAKE, None, 16, 20) as group:
        calls = [group.submit(prompt, GREEDY) for prompt in PROMPTS]
        until(group, lambda: sum(len(call.output) > 2 for call in calls) >= 2)
        group.workers.kill(1)
        group.run(60)
        assert [call.output for call in calls] == expected
        stats = group.close()[0]
        assert stats["preempted"] >= 1 and stats["held"] == 0


def test_a_poisonous_request_does_not_kill_every_rank(expected):
    with Supervisor(4, MAKE) as group:
        calls = [group.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
        bad = group.submit([*PROMPTS[2], workers.POISON], GREEDY)
        group.run(90)
        assert bad.reason.startswith("rejected: 3 ranks died while they served it")
        assert [call.output for call in calls] == expected[:2]
        assert len(group.epoch.members) == 1


def test_a_group_that_cannot_start_says_what_a_member_said():
    with pytest.raises(WorkerError, match="ZeroDivisionError: no model today"), \
            Supervisor(2, f"{WORKERS}:fail"):
        pass


def test_g65_g70_experts_move_and_every_path_finds_them():
    """One map says where each expert lies: for rows sent, for weights fetched, on every rank.

    Fetched are those that a rank does not hold, by their own number, not by a slot of before.
    """
    for ranks in zip(*launch(f"{WORKERS}:move_experts", 3, deadline_s=120), strict=True):
        assert max(rank["far"] for rank in ranks) < 1e-11
        assert sum(rank["chosen"] for rank in ranks) == 3 * (12 + 13)
        for layer in range(2):
            held = [expert for rank in ranks for expert in rank["experts"][layer]]
            assert {*held} == {*range(8)} and len(held) == 12
    assert any(rank["fetched"] for rank in ranks)
    (alone,) = launch(f"{WORKERS}:move_experts", 1, deadline_s=120)
    assert [moment["fetched"] for moment in alone] == [0] * 4   # it holds all of them already


# --- the supervisor's rules, with members that the test plays -------------------------------------


def test_g68_all_ranks_meet_in_one_order_whoever_spoke_first():
    told = []
    for order in ((3, 0, 1), (0, 1, 3), (1, 3, 0)):
        played = Played(4)
        played.workers.dead.add(2)
        for rank in order:
            played.says[rank].put(Lost(1, "connection closed"))
            played.group._listen()
        played.group.poll()
        epochs = {rank: [message for message in played.heard(rank) if isinstance(message, Epoch)]
                  for rank in (0, 1, 3)}
        assert epochs[0] == epochs[1] == epochs[3] and len(epochs[0]) == 2
        told.append(epochs[0][-1])
    assert told[0] == told[1] == told[2]
    assert (told[0].number, told[0].members) == (2, (0, 1, 3))


def test_who_is_not_a_member_any_more_is_not_heard():
    """Thought dead, could not be killed, and wakes up: what it says of its call is dropped."""
    played = Played(2, patience_s=0.1)
    calls = [played.group.submit([1, 2, 3]) for _ in range(2)]
    assert [call.member for call in calls] == [0, 1]
    played.says[1].put(Progress([Written(1, [7], 0, 0, None)], [[0] * 6] * 2))
    played.says[0].put(Lost(1, "timed out"))
    played.workers.kill = lambda rank: None
    played.group.poll()                                         # rank 1 stays silent
    assert played.group.changes[-1].dead == (1,)
    assert (calls[1].output, calls[1].member, calls[1].moved) == ([7], 0, 1)
    moved = [message for message in played.heard(0) if isinstance(message, Serve)][-1]
    assert (moved.number, moved.written) == (1, (7,))
    played.says[1].put(Progress([Written(1, [8, 9], 0, 0, "length")], [[0] * 6] * 2))
    played.says[1].put(Lost(1, "it is me"))
    played.says[1].put(Lost(2, "me again"))
    played.group.poll()
    assert calls[1].output == [7] and calls[1].reason is None
    assert len(played.group.changes) == 2


def test_what_a_member_says_of_an_earlier_epoch_breaks_no_later_one():
    """But tokens count whenever they were written: an epoch that was planned begins in a step."""
    played = Played(2)
    call = played.group.submit([1, 2, 3], Sampling(3, stop_ids=()))
    played.group.rebalance()
    played.says[0].put(Progress([Written(0, [4, 5], 2, 0, None)], [[1] * 6, [2] * 6]))
    played.says[0].put(Lost(1, "late"))
    played.says[1].put(Joined(1, 9))
    played.group.poll()
    assert call.output == [4, 5]
    assert played.group.loads == [[1] * 6, [2] * 6]
    assert len(played.group.changes) == 2 and played.group.changes[-1].joined == {}
    for rank in (0, 1):
        played.says[rank].put(Joined(2, rank))
    played.group.poll()
    assert played.group.changes[-1].joined == {0: 0, 1: 1}
    assert played.group.changes[-1].rebuilt_s > 0


def test_busy_experts_get_the_spare_places():
    played = Played(2, spare=1)
    played.says[0].put(Progress([], [[9, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 7]]))
    played.group.poll()
    played.group.rebalance()
    first, second = played.group.epoch.placements
    assert len(first.copies_of[0]) > 1
    assert len(second.copies_of[5]) > 1
    assert all(len(experts) == 4 for experts in first.experts_of)


def test_the_last_rank_dies():
    played = Played(1)
    played.workers.dead.add(0)
    with pytest.raises(GroupTooSmallError, match="no rank is left"):
        played.group.poll()


@pytest.mark.parametrize(("options", "words"), [
    ({"num_ranks": 0}, "num_ranks=0 must be at least 1"),
    ({"num_ranks": 2, "room": 0}, "room=0 must be at least 1"),
    ({"num_ranks": 2, "spare": -1}, "spare=-1 must be at least 0"),
    ({"num_ranks": 2, "patience_s": 0.0}, "patience_s=0.0 must be at least 0.1")])
def test_a_group_that_could_not_be(options, words):
    with pytest.raises(ValueError, match=words):
        Supervisor(**options)


def test_a_mailbox_keeps_the_order_and_nothing_else():
    shelf = Shelf()
    to, other = Mailbox(shelf, "to/1"), Mailbox(shelf, "to/11")
    for message in ("a", {"b": torch.tensor(2)}, None):
        to.put(message)
    other.put("for somebody else")
    reader = Mailbox(shelf, "to/1")
    first = reader.take()
    assert [type(message) for message in first] == [str, dict, type(None)]
    assert reader.take() == []
    to.put("d")
    assert reader.take() == ["d"]
    assert [*shelf] == ["to/11/0"]
