"""From any thread to the loop and back."""

import asyncio
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from container.control.on_loop import LoopThread, OnLoop, WaitingExchange
from model_handlers.errors import Kind, MmeError


@pytest.fixture
def thread():
    """A loop on a thread of its own."""
    thread = LoopThread()
    yield thread
    thread.stop()


def thread_of(looped):
    """The thread that its loop runs on."""
    return OnLoop(looped.loop).call(threading.current_thread)


class Routes:
    """Routes that answer POST later, and know nothing else."""

    def dispatch(self, exchange):
        """As InferRoutes."""
        if exchange.method == "POST":
            asyncio.get_running_loop().call_soon(exchange.respond, 200, b"A: b\r\n", (b"one", memoryview(b"two")))
        return exchange.method == "POST"


def test_functions_and_coroutines_run_on_the_loops_thread(thread):
    """Their arguments arrive, their results come back."""
    on_loop, loops = OnLoop(thread.loop), thread_of(thread)
    assert loops is not threading.current_thread()

    async def where(number):
        await asyncio.sleep(0)
        return number, threading.current_thread()

    assert on_loop.call(lambda number, *, plus: (number + plus, threading.current_thread()), 1, plus=2) == (
        3,
        loops,
    )
    assert on_loop.run(where(4)) == (4, loops)


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


class Streams:
    """Routes that take an exchange and leave its answer to the test."""

    def __init__(self):
        self.left = []

    def dispatch(self, exchange):
        """As InferRoutes."""
        exchange.on_disconnect = lambda: self.left.append(threading.current_thread())
        return True


@pytest.fixture
def streams():
    """The routes of `streamed`."""
    return Streams()


@pytest.fixture
def streamed(thread, streams):
    """An exchange that a route took, and the way to the loop."""
    exchange = WaitingExchange("POST", b"/x", {}, b"")
    on_loop = OnLoop(thread.loop)
    on_loop.dispatch(streams, exchange)
    return exchange, on_loop.call


def begun(exchange, call):
    """The parts of an exchange's answer, which begins."""
    call(exchange.begin, 201, b"A: b\r\n")
    status, headers, parts = exchange.wait()
    assert (status, headers) == (201, b"A: b\r\n")
    return parts


def test_a_streamed_answer_is_iterated_as_it_comes(streamed):
    """Part by part, each as bytes, empty ones left out; the end ends it for good."""
    exchange, call = streamed
    parts = begun(exchange, call)
    for part in (b"one", memoryview(b"two"), memoryview(struct.pack("2f", 1, 2)).cast("f")):
        call(exchange.write, b"")
        call(exchange.write, part)
        assert next(parts) == bytes(part)
    call(exchange.write, b"three")
    call(exchange.end)

    assert list(parts) == [b"three"]
    assert list(parts) == []


def test_a_thread_waits_for_parts(streamed):
    """It may wait for the beginning and for each part before they are there."""
    exchange, call = streamed
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(lambda: b"".join(exchange.wait()[2]))
        call(exchange.begin, 200, b"")
        for number in range(1000):
            call(exchange.write, b"%d " % number)
        call(exchange.end)

        assert whole.result(60) == b"".join(b"%d " % number for number in range(1000))


def test_an_answer_that_is_cut_raises(streamed, streams):
    """Behind the parts that came before, so that the WSGI server does not take them for all; nobody has left."""
    exchange, call = streamed
    parts = begun(exchange, call)
    call(exchange.write, b"one")
    call(exchange.cut)

    assert next(parts) == b"one"
    with pytest.raises(MmeError, match="the answer to POST /x can't be finished and was cut"):
        next(parts)
    assert list(parts) == []
    parts.close()
    call(int)
    assert streams.left == []


@pytest.mark.parametrize("over", ["end", "cut"])
def test_closing_early_is_a_client_that_left(streamed, streams, thread, over):
    """The route is told once, on the loop; what it does then does nothing."""
    exchange, call = streamed
    parts = begun(exchange, call)
    call(exchange.write, b"one")
    assert next(parts) == b"one"
    parts.close()
    parts.close()
    call(int)

    assert streams.left == [thread_of(thread)]
    assert exchange.on_disconnect is None
    call(exchange.write, b"two")
    assert exchange.unsent == 0
    call(getattr(exchange, over))
    assert list(parts) == []
    assert streams.left == [thread_of(thread)]


def test_a_client_that_does_not_read_is_cut_off(streamed, streams, thread, monkeypatch, caplog):
    """It may leave so much unread and one part; then it is forgotten, the thread raises, and the route is told once."""
    monkeypatch.setattr("container.control.on_loop._MOST_UNSENT", 1000)
    exchange, call = streamed
    parts = begun(exchange, call)
    for _ in range(12):
        call(exchange.write, b"x" * 100)
        assert next(parts) == b"x" * 100
    for _ in range(10):
        call(exchange.write, b"x" * 100)
    assert exchange.unsent == 1100  # what the thread took last, it may not have sent
    for _ in range(3):
        call(exchange.write, b"x" * 100)

    assert exchange.unsent == 0
    with pytest.raises(MmeError, match="can't be finished and was cut"):
        next(parts)
    call(exchange.end)
    parts.close()
    call(int)
    assert streams.left == [thread_of(thread)]
    assert [record.getMessage() for record in caplog.records] == [
        "POST b'/x' is cut off: its client has left 1100 bytes of the answer unread"
    ]


def test_closing_without_a_route_that_wants_to_know(streamed, streams, caplog):
    """A route that set no `on_disconnect` is not told."""
    exchange, call = streamed
    parts = begun(exchange, call)
    exchange.on_disconnect = None
    parts.close()
    late = b"two, which nobody would take out"
    held = sys.getrefcount(late)
    call(exchange.write, late)
    call(int)

    assert streams.left == []
    assert caplog.records == []  # of asyncio, that a callback raised
    assert sys.getrefcount(late) == held


@pytest.mark.parametrize("over", ["end", "cut"])
@pytest.mark.parametrize("read", [False, True])
def test_closing_after_the_end_is_nobody_leaving(streamed, streams, over, read):
    """Whether or not all parts were taken: WSGI servers always close."""
    exchange, call = streamed
    parts = begun(exchange, call)
    call(exchange.write, b"one")
    call(getattr(exchange, over))
    if read:
        assert next(parts) == b"one"
    parts.close()
    call(int)

    assert streams.left == []


def test_closing_when_the_loop_is_gone():
    """Raises nothing: nobody is left to be told."""
    thread = LoopThread()
    exchange = WaitingExchange("POST", b"/x", {}, b"")
    parts = begun(exchange, OnLoop(thread.loop).call)
    thread.stop()
    parts.close()

    assert list(parts) == []


def test_what_the_thread_has_not_sent_is_unsent(streamed):
    """A part is sent when the next one is asked for; nothing is unsent before an answer and after."""
    exchange, call = streamed
    assert exchange.unsent == 0
    parts = begun(exchange, call)
    call(exchange.write, bytes(100))
    call(exchange.write, memoryview(bytes(40)).cast("f"))
    assert exchange.unsent == 140
    next(parts)
    assert exchange.unsent == 140
    next(parts)
    assert exchange.unsent == 40
    call(exchange.write, bytes(7))
    next(parts)
    assert exchange.unsent == 7
    call(exchange.end)
    assert exchange.unsent == 0


@pytest.mark.parametrize(
    "steps",
    [
        ["write"],
        ["end"],
        ["cut"],
        ["respond", "respond"],
        ["respond", "begin"],
        ["respond", "write"],
        ["respond", "end"],
        ["begin", "begin"],
        ["begin", "write", "respond"],
        ["begin", "end", "write"],
        ["begin", "end", "begin"],
        ["begin", "end", "respond"],
        ["begin", "end", "cut"],
        ["begin", "cut", "write"],
        ["begin", "cut", "end"],
    ],
)
def test_answers_out_of_turn_are_refused(streamed, steps):
    """As our own server refuses them."""
    exchange, call = streamed
    arguments = {"respond": (200, b"", (b"one",)), "begin": (200, b""), "write": (b"one",)}
    for step in steps[:-1]:
        call(getattr(exchange, step), *arguments.get(step, ()))

    with pytest.raises(RuntimeError, match=r"POST b'/x' has (been answered before|no answer under way)"):
        call(getattr(exchange, steps[-1]), *arguments.get(steps[-1], ()))


def test_stopping_ends_the_thread():
    """Nothing of it is left."""
    thread = LoopThread()
    runs = thread_of(thread)
    thread.stop()
    assert not runs.is_alive()
    assert thread.loop.is_closed()
