"""What can go wrong around a rank's death: another dies meanwhile, or hangs, or nobody told it."""

import importlib.util
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist
from group_play import Played, Shelf, until, written

from minimodel.cluster.epochs import Abort, Epoch, Joined, Lost, Progress, Serve, Written
from minimodel.cluster.group import GroupTooSmallError, Supervisor
from minimodel.cluster.launch import LOOPBACK, WorkerError, launch, resolve
from minimodel.cluster.mailbox import MOST_BYTES, Mailbox
from minimodel.cluster.member import Member, toy
from minimodel.engine.generate import generate_without_cache
from minimodel.engine.request import Sampling
from minimodel.model import checkpoint
from minimodel.model.corpus import town_notebook
from minimodel.tokenizer import encode

WORKERS = Path(__file__).with_name("group_workers.py")
spec = importlib.util.spec_from_file_location("group_workers", WORKERS)
workers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workers)

MAKE = f"{WORKERS}:make"
TEN = Sampling(10, stop_ids=())
PROMPTS = [Random(f"faults/{i}").choices(range(256), k=size) for i, size in enumerate([21, 34, 13])]
pytestmark = pytest.mark.timeout(120)


class Clock:
    """Each look takes 10 ms; at some moments something happens."""

    def __init__(self, **at):
        self.now_s, self.at = 0.0, at

    def __call__(self):
        self.now_s += 0.01
        for name in [name for name, (moment_s, _) in self.at.items() if self.now_s >= moment_s]:
            self.at.pop(name)[1]()
        return self.now_s


# --- while others join ----------------------------------------------------------------------------


def test_a_rank_dies_while_the_others_bury_another(tmp_path):
    """Those who wait for it to join notice late. They live."""
    with Supervisor(4, MAKE, str(tmp_path), patience_s=1.5) as group:
        calls = [group.submit(prompt, TEN) for prompt in PROMPTS]
        until(group, written(calls, 2))
        begin = group._begin

        def begin_without_one_more(*arguments, **times):
            group.workers.kill(1)
            begin(*arguments, **times)
        group._begin = begin_without_one_more
        group.workers.kill(0)
        group.run(60)
        assert [change.dead for change in group.changes] == [(), (0,), (1,)], group.changes[-1].why
        model = workers.make_model()
        for call, prompt in zip(calls, PROMPTS, strict=True):
            assert call.output == generate_without_cache(model, prompt, 10, stop_ids=())
        assert [one is None for one in group.close()] == [True, True, False, False]


@pytest.mark.parametrize(("dead", "reports_s", "survivors"), [
    ((1,), 1.5, (0, 2)),            # noticed at once: those who live need not know yet
    ((1,), 2.5, (0,)),              # silent for ever
    ((), 0.5, (0, 2)),              # one says so, after a patience: the next soon will
    ((), 1.5, (0,))])
def test_who_lives_has_time_to_say_so(dead, reports_s, survivors):
    group = Played(3, patience_s=1.0)
    group.workers.dead.update(dead)
    group.says[0].put(Lost(1, "waited in vain"))
    group.group.clock = Clock(late=(reports_s, lambda: group.says[2].put(Lost(1, "waited, too"))))
    group.group.poll()
    assert group.group.epoch.members == survivors
    assert {*group.workers.killed} == {0, 1, 2} - {*dead} - {*survivors}


def test_ranks_that_failed_to_join_differently_often_meet_again():
    assert launch(f"{WORKERS}:meet_after_a_failure_alone", 2, deadline_s=60) == [21.0, 21.0]


def test_a_plan_waits_until_all_have_joined():
    """One that heard of two epochs at once would skip the first, where others wait for it."""
    two = Played(2)
    two.group.rebalance()
    del two.group._wait                         # from here on, really
    with pytest.raises(WorkerError, match="the ranks to join"):
        two.group.rebalance(deadline_s=0.05)
    assert two.group.epoch.number == 2
    for rank in (0, 1):
        two.says[rank].put(Joined(2, 0))
    two.group.rebalance(deadline_s=5)
    assert two.group.epoch.number == 3
    two.workers.dead.add(0)                     # who plans hears of deaths, too
    two.says[1].put(Lost(3, "closed"))
    with pytest.raises(WorkerError, match="the ranks to join"):
        two.group.rebalance(deadline_s=0.05)
    assert (two.group.epoch.number, two.group.epoch.members) == (4, (1,))


def test_a_script_that_starts_workers_when_it_is_loaded_starts_no_more_in_them(tmp_path):
    """They load it to find their function: without end, if nobody says no."""
    script = tmp_path / "starts_at_once.py"
    script.write_text("from minimodel.cluster.launch import launch\n\n\n"
                      "def work(world):\n    return world.rank\n\n\n"
                      "found = launch(work, 1)\n")
    with pytest.raises(RuntimeError, match=r"starts_at_once.py starts workers .*__main__"):
        resolve("file", str(script), "work")
    script.write_text(script.read_text().replace("launch(work, 1)", "1"))
    assert resolve("file", str(script), "work").__name__ == "work"
    assert launch(f"{WORKERS}:same_rank", 1) == [0]         # and others may be started again


# --- the end --------------------------------------------------------------------------------------


def test_a_group_closes_whoever_is_dead_or_hangs():
    with Supervisor(3, MAKE, room=3) as group:
        group.submit(PROMPTS[0], TEN)
        group.workers.kill(0)
        with pytest.raises(GroupTooSmallError):
            group.run(60)
        group.workers.hang(2)
        stats = group.close(deadline_s=4)
        assert [one is None for one in stats] == [True, False, True]
        assert not group.workers.is_alive(2)


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begun", "again"), [(False, 0), (True, 3 + 3 - 1 - 2)])
def test_computed_again_is_what_a_dead_member_had_computed(begun, again):
    """What another group had written is no work of this one's until a member has begun."""
    two = Played(2)
    call = two.group.submit([1, 2, 3], TEN, written=[7, 8])
    assert call.member == 0
    if begun:
        two.says[0].put(Progress([Written(0, [9], 0, 0, None)], [[0] * 6] * 2))
        two.group.poll()
    two.workers.dead.add(0)
    two.says[1].put(Lost(1, "closed"))
    two.group.poll()
    moved = [message for message in two.heard(1) if isinstance(message, Serve)]
    assert [message.written for message in moved] == [(7, 8, 9) if begun else (7, 8)]
    two.says[1].put(Progress([Written(0, [4], 2, 0, None)], [[0] * 6] * 2))
    two.group.poll()
    assert (call.moved, call.computed_again) == (1, again)


def test_a_member_forgets_whoever_left_or_is_done():
    shelf = Shelf()
    to, heard = Mailbox(shelf, "to/0"), Mailbox(shelf, "from/0")
    member = Member(0, *workers.make(), shelf, 1.0)
    for number in range(40):
        to.put(Serve(number, tuple(PROMPTS[2]), Sampling(1, stop_ids=()), (), {}))
    for number in range(0, 40, 2):
        to.put(Abort(number))
    member._hear()
    member.engine.run()
    member._report()
    (progress,) = heard.take()
    assert [written.number for written in progress.written] == [*range(1, 40, 2)]
    assert (member.requests, member.num_said, shelf) == ({}, {}, {})
    assert member.engine.stats()["held"] == 0


def test_a_prompt_that_no_message_can_hold_is_refused():
    two = Played(2)
    with pytest.raises(ValueError, match=r"a message of \d+,\d+,\d+ bytes .* shorter prompt"):
        two.group.submit([1] * 9_000_000)
    assert two.group.is_idle
    call = two.group.submit([1, 2])
    assert (call.number, call.member) == (0, 0)
    assert [type(message) for message in two.heard(0)] == [Epoch, Serve]


def test_a_message_of_the_largest_size_arrives():
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    box, message = Mailbox(store, "to/0"), bytes(MOST_BYTES - 100)
    box.put(message)
    assert Mailbox(store, "to/0").take() == [message]


def test_a_model_that_drops_rows_early_loses_a_rank_and_its_store(tmp_path):
    """Shared notes: whoever reads a part of a prompt has no rows in the last layers."""
    prompts = [encode(town_notebook(Random(i), size, num_facts=2).text)
               for i, size in enumerate([700, 90])]
    expected = toy(folder=checkpoint.TOY_SHARED)[0].generate(prompts, TEN)
    store = tmp_path / "notes"
    with Supervisor(2, "minimodel.cluster.member:toy", str(store), str(checkpoint.TOY_SHARED), 90,
                    patience_s=10.0) as group:
        calls = [group.submit(prompt, TEN) for prompt in prompts]
        until(group, written(calls, 2))
        store.rename(tmp_path / "gone")
        group.workers.kill(calls[1].member)
        group.run(60)
        assert [call.output for call in calls] == expected
        assert [call.moved for call in calls] == [0, 1]
        assert calls[1].computed_again > 16             # not found on disk
