"""Two threads: one speaks HTTP, one steps the engines. Here is all that passes between them.

Torch computes in one call after another, and HTTP is many clients who wait; so the event loop of
asyncio has its thread, and the engines have another. Neither ever touches what belongs to the
other. It asks:

    HTTP, asyncio                                 engines
    ------------------------------------------------------------------------------------
    bridge.call(function, ...)  -- queue of calls -->   bridge.run_calls(): runs them all,
    await bridge.result_of(function)                    between two steps
    await inbox.get()  <-- call_soon_threadsafe ------  inbox.put(news)

A call is run even if the engines' thread ends meanwhile: `close` runs those that are left, and
whoever comes later is told. So nobody waits for an answer that does not come.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock

from .errors import unavailable


class Inbox:
    """What the engines tell one client's handler. It belongs to the event loop that made it."""

    def __init__(self):
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()

    def put(self, news: object) -> None:
        """From any thread. If the event loop is closed, nobody listens, and nobody minds."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, news)

    async def get(self) -> object:
        """The next news; an exception among them is raised."""
        news = await self.queue.get()
        if isinstance(news, Exception):
            raise news
        return news


class Bridge:
    """Carries calls from the event loop's thread to the engines' thread, in their order."""

    def __init__(self):
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.lock, self.is_open = Lock(), True

    # --- HTTP's side ----------------------------------------------------------------------

    def call(self, function: Callable, *arguments: object) -> None:
        """Have a function run on the other side. Raises ApiError if that side has ended."""
        with self.lock:
            if not self.is_open:
                raise unavailable("the server has stopped serving")
            self.calls.put(partial(function, *arguments))

    async def result_of(self, function: Callable[[], object]) -> object:
        """What a function returns there, or the exception that it raises."""
        inbox = Inbox()

        def run() -> None:
            try:
                inbox.put((function(),))
            except Exception as error:
                inbox.put(error)
        self.call(run)
        return (await inbox.get())[0]

    # --- the engines' side ----------------------------------------------------------------

    def run_calls(self, wait: bool) -> None:
        """Run all calls that are here; with `wait`, wait for one."""
        with suppress(Empty):
            self.calls.get(block=wait)()
            while True:
                self.calls.get_nowait()()

    def close(self) -> None:
        """Take no more calls, and run those that are left."""
        with self.lock:
            self.is_open = False
        self.run_calls(wait=False)
