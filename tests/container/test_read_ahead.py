"""Large tensors in shared memory are read by a thread before their request is decoded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from container.read_ahead import read_ahead
from container.shared_memory import Unread
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


def test_everything_is_read_by_a_thread_and_decoded_where_it_began(regions):
    """Though the region is unregistered meanwhile; small tensors are read when the others are there."""
    threads = []

    def decode(held):
        threads.append(threading.current_thread())
        return [held.read(held.place("r", offset, size))[:4] for offset, size in ((0, LARGE), (LARGE, LARGE), (0, 4))]

    async def decoded():
        with pytest.raises(Unread) as raised:
            decode(regions)
        reading = asyncio.ensure_future(read_ahead(regions, raised.value.place, decode))
        await asyncio.sleep(0)
        regions.unregister("r")
        return await reading

    assert asyncio.run(decoded()) == [b"one!", b"two!", b"one!"]
    assert threads == [threading.current_thread()] * 3


def test_what_goes_wrong_is_raised(regions):
    """By decoding, or by reading what has become shorter."""

    def decode(held):
        held.read(held.place("s", 0, LARGE))

    place = regions.place("r", 0, LARGE)
    with pytest.raises(MmeError, match="Unable to find shared memory region: 's'"):
        asyncio.run(read_ahead(regions, place, decode))


def test_an_object_that_is_cut_short_is_an_error(shared, regions):
    """Of the thread that reads as well."""
    place = regions.place("r", 0, LARGE)
    with shared.path.open("r+b") as file:
        file.truncate(8)
    with pytest.raises(MmeError, match="has become shorter") as raised:
        asyncio.run(read_ahead(regions, place, lambda _: None))
    assert raised.value.kind is Kind.INVALID_ARGUMENT
