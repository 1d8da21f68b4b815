"""How long something takes, for the ratios that chapters print."""

import time
from collections.abc import Callable


def seconds(
    fn: Callable[[], object],
    repeat: int = 3,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Seconds of the fastest of `repeat` calls of `fn()`.

    The fastest run is the one that the rest of the machine disturbed least. The
    default clock counts this process's CPU time over all its threads, so a busy
    neighbour does not count; with one thread it is the time of an idle machine.
    Work that waits (a disk, other processes) needs `clock=time.perf_counter`.
    Compare times of one run with each other only, and print the ratio.
    """
    if repeat < 1:
        raise ValueError(f"repeat={repeat}: at least one run is needed to time something")
    return min(_once(fn, clock) for _ in range(repeat))


def _once(fn: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    fn()
    return clock() - start
