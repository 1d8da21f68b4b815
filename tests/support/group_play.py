"""A group for tests: waiting for what becomes true of it, and members that the test plays."""

import time

from minimodel.cluster.epochs import Joined, Ready
from minimodel.cluster.group import Supervisor
from minimodel.cluster.mailbox import Mailbox


def until(group, is_true, deadline_s=60):
    """Poll until something is true of the group."""
    ends_at = time.monotonic() + deadline_s
    while not is_true():
        group.poll()
        assert time.monotonic() < ends_at, "it never came true"
        time.sleep(0.001)


def written(calls, count):
    return lambda: all(len(call.output) >= count for call in calls)


class Shelf(dict):
    """A store where both look."""

    set = dict.__setitem__
    get = dict.__getitem__
    delete_key = dict.pop

    def check(self, keys):
        return all(key in self for key in keys)


class PlayedWorkers:
    """Processes that there are not."""

    def __init__(self, num_workers):
        self.num_workers, self.store, self.dead, self.killed = num_workers, Shelf(), set(), []

    def is_alive(self, rank):
        return rank not in self.dead

    def kill(self, rank):
        self.killed.append(rank)
        self.dead.add(rank)

    def require_alive(self):
        assert not self.dead


class Played:
    """A started supervisor, and what its members hear and say."""

    def __init__(self, num_ranks, **options):
        self.group = Supervisor(num_ranks, **options)
        self.workers = self.group.workers = PlayedWorkers(num_ranks)
        self.says = {rank: Mailbox(self.workers.store, f"from/{rank}") for rank in range(num_ranks)}
        self.hears = {rank: Mailbox(self.workers.store, f"to/{rank}") for rank in range(num_ranks)}
        self.group._wait = self._say_so
        self.group._start()

    def _say_so(self, is_true, deadline_s, what):
        message = Ready("f" * 64, 2, 6) if "ready" in what else Joined(1, 0)
        for mailbox in self.says.values():
            mailbox.put(message)
        assert is_true()

    def heard(self, rank):
        return self.hears[rank].take()
