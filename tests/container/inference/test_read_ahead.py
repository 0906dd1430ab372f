"""Large tensors in shared memory, and large JSON, are read by a thread before their request is decoded."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from container.inference.read_ahead import JsonReading, read_ahead
from container.steps.shared_memory import Unread
from model_handlers.errors import Kind, MmeError
from tests.shared_objects import registered, shared_object

SIZE = 3 << 20
LARGE = (1 << 20) + 1


@pytest.fixture
def shared():
    """An object that a client has made."""
    with shared_object(SIZE) as made:
        made.buf[:4], made.buf[LARGE : LARGE + 4] = b"one!", b"two!"
        yield made


@pytest.fixture
def regions(shared):
    """All of it as the region "r"."""
    return registered("r", shared)


def test_a_small_tensor_is_read_at_once(regions):
    """A larger one is not, unless nobody can wait for a thread."""
    assert len(regions.read(regions.place("r", 0, LARGE - 1))) == LARGE - 1
    with pytest.raises(Unread) as raised:
        regions.read(regions.place("r", 5, LARGE))
    assert (raised.value.place.offset, raised.value.place.byte_size) == (5, LARGE)
    assert len(regions.held(at_once=True).read(regions.place("r", 5, LARGE))) == LARGE


async def test_everything_is_read_by_a_thread_and_decoded_where_it_began(regions):
    """Though the region is unregistered meanwhile; small tensors are read when the others are there."""
    threads = []

    def decode(held):
        threads.append(threading.current_thread())
        return [held.read(held.place("r", offset, size))[:4] for offset, size in ((0, LARGE), (LARGE, LARGE), (0, 4))]

    with pytest.raises(Unread) as raised:
        decode(regions)
    reading = asyncio.ensure_future(read_ahead(regions, raised.value.place, decode))
    await asyncio.sleep(0)
    regions.unregister("r")
    assert await reading == [b"one!", b"two!", b"one!"]
    assert threads == [threading.current_thread()] * 3


async def test_what_goes_wrong_is_raised(regions):
    """By decoding, or by reading what has become shorter."""

    def decode(held):
        held.read(held.place("s", 0, LARGE))

    place = regions.place("r", 0, LARGE)
    with pytest.raises(MmeError, match="Unable to find shared memory region: 's'"):
        await read_ahead(regions, place, decode)


async def test_an_object_that_is_cut_short_is_an_error(shared, regions):
    """Of the thread that reads as well."""
    place = regions.place("r", 0, LARGE)
    with shared.path.open("r+b") as file:
        file.truncate(8)
    with pytest.raises(MmeError, match="has become shorter") as raised:
        await read_ahead(regions, place, lambda _: None)
    assert raised.value.kind is Kind.INVALID_ARGUMENT


# -- large JSON ------------------------------------------------------------------------------------------------------


class Client:
    """Somebody who waits for what is read."""

    over = False


async def gathered(reading, *readers, clients=()):
    """What each reader returns, all of them begun at once."""
    pairs = itertools.zip_longest(readers, clients, fillvalue=Client())
    return await asyncio.gather(*(reading.read(read, b"text and more", 4, client) for read, client in pairs))


async def test_json_is_read_by_threads_in_turns():
    """Who reads little does not wait for the end of who reads much, and one piece is read at a time."""
    ended, reading, most = threading.Event(), [], []

    def piece():
        reading.append(1)
        most.append(len(reading))
        reading.pop()

    def long(text, pause):
        assert (text, threading.current_thread() is threading.main_thread()) == (b"text", False)
        while not ended.is_set():
            piece()
            pause()
        return {"long": 1}

    def short(_text, pause):
        for _ in range(10):
            piece()
            pause()
        ended.set()
        return {"short": 1}

    assert await gathered(JsonReading(), long, long, short) == [{"long": 1}, {"long": 1}, {"short": 1}]
    assert set(most) == {1}


async def test_few_are_read_at_once():
    """Others wait, and are no more than bodies meanwhile."""
    begun, most = [], []

    def read(_text, pause):
        begun.append(1)
        for _ in range(20):
            most.append(len(begun))
            pause()
        begun.pop()
        return {}

    assert await gathered(JsonReading(), *[read] * 12) == [{}] * 12
    assert max(most) <= 4


async def test_nothing_is_read_for_who_has_left():
    """Neither begun, nor gone on with; what comes behind is read."""
    gone, leaves = Client(), Client()
    gone.over = True
    begun = []

    def read(_text, pause):
        begun.append("begun")
        pause()
        leaves.over = True
        pause()
        begun.append("gone on")
        return {}

    reading = JsonReading()
    assert await gathered(reading, read, read, clients=(gone, leaves)) == [None, None]
    assert begun == ["begun"]
    assert await gathered(reading, lambda _text, pause: pause() or {"read": 1}) == [{"read": 1}]


async def test_what_can_not_be_read_is_an_error_that_holds_nothing():
    """Of ours; another is raised. The turn goes on."""

    def wrong(text, _pause):
        try:
            int(text)
        except ValueError:
            raise MmeError(Kind.INVALID_ARGUMENT, "no JSON") from None

    reading = JsonReading()
    (error,) = await gathered(reading, wrong)
    assert (error.message, error.__traceback__, error.__context__) == ("no JSON", None, None)
    with pytest.raises(ZeroDivisionError):
        await gathered(reading, lambda *_: 1 / 0)
    assert await gathered(reading, lambda *_: {}) == [{}]
