"""The clocks that serving is judged by: how long until the first token, how long between tokens.

All of it is computed from time stamps, one when a request arrives and one for every token it is
given, whatever clock they come from (a simulator's will do):

    arrived        first token          second    third      last
    |------------------|------------------|---------|---------|
    |<----- TTFT ----->|<----- gap ------>|<- gap ->|<- gap ->|
                       |<--- TPOT is the mean of these ------>|
    |<--------------------- end to end ---------------------->|

The definitions are the field's, as vLLM's serving benchmark computes them:
* TTFT, time to first token: from the request's arrival, waiting in a queue included;
* ITL, inter-token latency: each gap between one token and the next;
* TPOT, time per output token: (end to end - TTFT) / (tokens - 1). The first token is left out,
  since TTFT has paid for it; an answer of one token has no gap and its TPOT is 0;
* goodput: requests per second that meet every goal. Throughput counts the others too.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class RequestTimes:
    """When one request arrived and when it was given each token: seconds of one clock.

    Raises ValueError where there is no token, where time runs backwards, or where it is no number.
    """

    arrived_s: float
    token_times_s: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(self, "token_times_s", tuple(self.token_times_s))
        if not self.token_times_s:
            raise ValueError("token_times_s is empty: a request that was given no token has no "
                             "latency; leave it out, and count it as a failure")
        times = (self.arrived_s, *self.token_times_s)
        if not all(map(math.isfinite, times)):
            raise ValueError(f"a time among {times} is no finite number: leave out a request that "
                             "was never answered, and count it as a failure")
        for earlier, later in pairwise(times):
            if not earlier <= later:
                raise ValueError(f"time runs backwards, from {earlier} to {later}: give the "
                                 "arrival and the tokens in order, all of one clock")

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies: one fewer than there are tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first: the mean gap, 0 where there is none."""
        gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / gaps if gaps else 0.0

    @property
    def end_to_end_s(self) -> float:
        """From the arrival to the last token."""
        return self.token_times_s[-1] - self.arrived_s


def timed(start: Callable[[], Iterable[int]],
          clock: Callable[[], float] = time.perf_counter) -> tuple[list[int], RequestTimes]:
    """Read a stream of tokens to its end: the tokens, and when each of them came.

    The request arrives when `start()` is called, so what the call itself does is waited for too.
    """
    arrived = clock()
    tokens, times = [], []
    for token in start():
        times.append(clock())
        tokens.append(token)
    return tokens, RequestTimes(arrived, tuple(times))


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that `percent` of 100 of the values do not exceed, between two of them if need be.

    Sorted, the values stand at 0, 1, ... n - 1; the answer is read off at (n - 1) percent / 100,
    on the straight line between neighbours. This is method 7 of Hyndman and Fan (1996), numpy's
    default. Few values make a poor tail: the 99th percentile of ten is nearly their maximum.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to take a percentile of: measure at least one")
    if not all(map(math.isfinite, ordered)):
        raise ValueError(f"values from {ordered[0]} to {ordered[-1]} are not all finite: leave "
                         "out what failed, and count it apart")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent={percent} must be between 0 and 100")
    place = (len(ordered) - 1) * percent / 100
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Goals:
    """What a request is promised (a service level objective): seconds that must not be exceeded."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self):
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 seconds: no "
                                 "request is served in no time")

    def met_by(self, request: RequestTimes) -> bool:
        """Whether both goals hold; one of them is not enough."""
        return request.ttft_s <= self.ttft_s and request.tpot_s <= self.tpot_s


def goodput(requests: Sequence[RequestTimes], goals: Goals, duration_s: float) -> float:
    """Requests per second that meet both goals, over the `duration_s` that all of them took."""
    if not 0 < duration_s < math.inf:
        raise ValueError(f"duration_s={duration_s} must be above 0 and finite: goodput is a "
                         "rate, so say how long the requests were served")
    return sum(map(goals.met_by, requests)) / duration_s
