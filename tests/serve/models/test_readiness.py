"""Models that have a say in whether they are ready: who is asked, how often, and how long that is waited for."""

import asyncio

import pytest

from serve.models import readiness
from serve.models.readiness import Readiness


class Handler:
    """Tells what the test has it tell, when the test says so."""

    def __init__(self, *, tells_ready=True):
        self.tells_ready = tells_ready
        self.down = False
        self.asked = []

    def is_down(self):
        """See `model_handlers.base.Handler`."""
        return self.down

    def ask_ready(self, done):
        """See `model_handlers.base.Handler`."""
        self.asked.append(done)


@pytest.fixture
def told():
    """What comes of a function that is given a loop, and returns a coroutine."""

    def told(make):
        async def run():
            return await make(asyncio.get_running_loop())

        return asyncio.run(run())

    return told


def test_who_has_no_say_is_ready(told):
    """Nobody is asked, and nothing waited for."""
    silent = Handler(tells_ready=False)
    assert told(lambda loop: Readiness("m", lambda: [silent], loop).told())
    assert silent.asked == []


@pytest.mark.parametrize("says", [[True, True], [True, False], [False, True]])
def test_all_instances_have_to_say_so(told, says):
    """All of them are asked before any has answered."""
    handlers = [Handler(), Handler()]

    async def ask(loop):
        asked = asyncio.ensure_future(Readiness("m", lambda: handlers, loop).told())
        await asyncio.sleep(0)
        for handler, ready in zip(handlers, says, strict=True):
            [done] = handler.asked
            await asyncio.to_thread(done, ready)
        return await asked

    assert told(ask) == all(says)


def test_one_that_hangs_is_asked_once_and_is_not_ready_meanwhile(told, monkeypatch, caplog):
    """Who asks behind it waits for the same answer; once that has come the next one asks again."""
    monkeypatch.setattr(readiness, "_SECONDS", 0.01)
    handler = Handler()

    async def ask(loop):
        asks = Readiness("m", lambda: [handler], loop)
        first = [await asks.told(), await asks.told()]
        asked = len(handler.asked)
        monkeypatch.setattr(readiness, "_SECONDS", 60.0)
        third = asyncio.ensure_future(asks.told())
        await asyncio.sleep(0)
        handler.asked[0](True)
        handler.asked[0](False)  # what is told again is not heard
        second = await third
        last = asyncio.ensure_future(asks.told())
        await asyncio.sleep(0)
        handler.asked[1](False)
        return first, asked, second, await last

    assert told(ask) == ([False, False], 1, True, False)
    assert "model 'm': is_ready has not answered" in caplog.text
