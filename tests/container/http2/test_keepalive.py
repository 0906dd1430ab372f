"""Pings of both sides, and connections that grow old."""

import asyncio

import pytest

from container.http2 import frames
from container.http2.frames import ErrorCode
from tests.container.http2.conftest import OPENING, live
from tests.waiting import until

PING = frames.frame(frames.PING, 0, 0, b"whatever")
ANSWER = frames.frame(frames.PING, frames.ACK, 0, b"mme-ping")
BOTH = frames.END_HEADERS | frames.END_STREAM


async def _until(life, kind):
    while True:
        sent = await life.sent()
        if any(each[0] == kind for each in sent):
            return sent
        await asyncio.sleep(0.001)


async def _until_aborted(life):
    await until(lambda: life.wire.aborted)


async def test_a_client_that_does_not_answer_is_left():
    """One that does is asked again."""
    async with live(time=0.001, timeout=0.001, permit_without_calls=True) as life:
        life.send(OPENING)
        await _until(life, frames.PING)
        await _until_aborted(life)
    async with live(time=0.001, timeout=30, permit_without_calls=True, max_pings_without_data=0) as life:
        life.send(OPENING)
        for _ in range(3):
            await _until(life, frames.PING)
            life.send(ANSWER)
        assert not life.wire.closed


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_answers_late_but_lives(reads):
    """It sends something else, or reads what lies before the ping."""
    async with live(timeout=0.0, permit_without_calls=True) as life:
        life.send(OPENING)
        life.wire.unread = 1000 * reads
        life.connection.watch.ping()
        for _ in range(100):
            if reads:
                life.wire.unread -= 1
            else:
                life.send(frames.frame(frames.PRIORITY, 0, 1, bytes(5)))
            await asyncio.sleep(0)
            assert not life.wire.aborted
        await _until_aborted(life)


async def test_nobody_is_asked_without_calls_or_too_often():
    """Unless that is permitted."""
    async with live(time=0.001, timeout=30, max_pings_without_data=1) as life:
        life.send(OPENING)
        await life.sent()
        await asyncio.sleep(0.02)
        assert not await life.sent()
        life.open(1)
        await _until(life, frames.PING)
        life.send(ANSWER)
        await asyncio.sleep(0.02)
        assert not await life.sent()
        life.told[1].stream.data(b"x")
        await _until(life, frames.PING)


@pytest.mark.parametrize("strikes", [0, 2])
async def test_a_client_that_asks_too_often_is_told_off(strikes):
    """After its strikes; 0 is any number."""
    async with live(max_ping_strikes=strikes) as life:
        life.send(OPENING)
        life.open(1)
        await life.sent()
        life.send(PING * 3)
        assert [each[0] for each in await life.sent()] == [frames.PING] * 3
        life.send(PING)
        assert await life.fault() is (ErrorCode.ENHANCE_YOUR_CALM if strikes else None)


async def test_an_answer_forgives():
    """What is sent of a call lets a client ask anew."""
    async with live(max_ping_strikes=2) as life:
        life.send(OPENING)
        life.open(1)
        for _ in range(20):
            life.send(PING * 2)
            life.told[1].stream.data(b"x")
            assert await life.fault() is None


async def test_old_connections_end():
    """As soon as they are idle, else after their grace."""
    async with live(max_age=0.001) as life:
        life.send(OPENING)
        (*_, (*_, payload)) = await _until(life, frames.PING)
        life.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        await until(lambda: life.wire.closed)
        assert not life.wire.aborted
    for grace in ({"grace": 0.001}, {}):
        async with live(max_age=0.001, **grace) as life:
            life.send(OPENING)
            life.open(1, flags=BOTH)
            await _until(life, frames.GOAWAY)
            if grace:
                await _until_aborted(life)
            else:
                await asyncio.sleep(0.02)
                assert not life.wire.closed
