"""From any thread to the loop and back."""

import asyncio
import threading

import pytest

from container.on_loop import LoopThread, OnLoop, WaitingExchange
from model_handlers.errors import Kind, MmeError


@pytest.fixture
def thread():
    """A loop on a thread of its own."""
    thread = LoopThread()
    yield thread
    thread.stop()


class Routes:
    """Routes that answer POST later, and know nothing else."""

    def dispatch(self, exchange):
        """As InferRoutes."""
        if exchange.method == "POST":
            asyncio.get_running_loop().call_soon(exchange.respond, 200, b"A: b\r\n", (b"one", memoryview(b"two")))
        return exchange.method == "POST"


def test_functions_and_coroutines_run_on_the_loops_thread(thread):
    """Their arguments arrive, their results come back."""
    on_loop = OnLoop(thread.loop)

    async def where(number):
        await asyncio.sleep(0)
        return number, threading.current_thread()

    assert on_loop.call(lambda number, *, plus: (number + plus, threading.current_thread()), 1, plus=2) == (
        3,
        thread._thread,
    )
    assert on_loop.run(where(4)) == (4, thread._thread)


def test_errors_come_back_to_the_caller(thread):
    """Whatever is raised on the loop is raised where somebody waits for it."""
    on_loop = OnLoop(thread.loop)
    with pytest.raises(ZeroDivisionError):
        on_loop.call(lambda: 1 / 0)
    with pytest.raises(MmeError, match="not now"):
        on_loop.run(_raising())


async def _raising():
    raise MmeError(Kind.UNAVAILABLE, "not now")


def test_a_hot_route_answers_a_thread_that_waits(thread):
    """The answer is there when the loop gives it, its parts joined."""
    exchange = WaitingExchange("POST", b"/x", {}, b"")
    OnLoop(thread.loop).dispatch(Routes(), exchange)
    assert exchange.wait() == (200, b"A: b\r\n", b"onetwo")


def test_a_method_that_the_route_does_not_know_is_refused(thread):
    """Instead of waiting for an answer that never comes."""
    with pytest.raises(MmeError, match="GET is not a method of this route") as caught:
        OnLoop(thread.loop).dispatch(Routes(), WaitingExchange("GET", b"/x", {}, b""))
    assert caught.value.kind is Kind.UNSUPPORTED


def test_stopping_ends_the_thread():
    """Nothing of it is left."""
    thread = LoopThread()
    thread.stop()
    assert not thread._thread.is_alive()
    assert thread.loop.is_closed()
