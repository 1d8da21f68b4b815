"""The bridge: calls are run in order on the other side, and nobody waits in vain."""

import asyncio
from threading import Thread, get_ident

import pytest

from minimodel.serve.bridge import Bridge, Inbox
from minimodel.serve.errors import ApiError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def bridge():
    """With another side that runs calls until it is told to end."""
    bridge, going = Bridge(), [True]

    def run():
        while going:
            bridge.run_calls(wait=True)
        bridge.close()
    thread = Thread(target=run)
    thread.start()
    bridge.end = lambda: bridge.call(going.clear)
    yield bridge
    if bridge.is_open:
        bridge.end()
    thread.join()


def test_calls_are_run_in_order_by_the_other_thread(bridge):
    seen = []
    for number in range(100):
        bridge.call(seen.append, number)
    thread = asyncio.run(bridge.result_of(get_ident))
    assert seen == list(range(100))
    assert thread != get_ident()


def test_an_exception_comes_back_and_stops_nobody(bridge):
    with pytest.raises(KeyError, match="lost"):
        asyncio.run(bridge.result_of(lambda: {}["lost"]))
    assert asyncio.run(bridge.result_of(lambda: 41 + 1)) == 42


def test_news_comes_in_order_and_an_exception_among_it_is_raised(bridge):
    async def listen():
        inbox = Inbox()
        for news in (1, None, ValueError("bad news"), 3):
            bridge.call(inbox.put, news)
        heard = [await inbox.get(), await inbox.get()]
        with pytest.raises(ValueError, match="bad news"):
            await inbox.get()
        return [*heard, await inbox.get()]
    assert asyncio.run(listen()) == [1, None, 3]


def test_a_listener_whose_loop_is_closed_is_no_error():
    async def leave():
        return Inbox()
    asyncio.run(leave()).put("anybody?")


def test_calls_that_are_left_at_the_end_are_run_and_later_ones_refused():
    bridge, seen = Bridge(), []
    bridge.call(seen.append, 1)
    bridge.call(seen.append, 2)
    bridge.close()
    assert seen == [1, 2]
    with pytest.raises(ApiError, match=r"stopped serving.*later") as refused:
        bridge.call(seen.append, 3)
    assert refused.value.status == 503
    assert seen == [1, 2]


def test_without_waiting_it_returns_at_once():
    Bridge().run_calls(wait=False)
