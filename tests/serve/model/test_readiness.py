"""Models that have a say in whether they are ready: who is asked, how often, and how long that is waited for."""

import asyncio
from types import SimpleNamespace

import pytest

from serve.model import readiness
from serve.model.readiness import Readiness


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


def executors(*handlers):
    """What executes a model by such handlers."""
    return SimpleNamespace(handlers=handlers, is_down=lambda: any(handler.is_down() for handler in handlers))


async def test_who_has_no_say_is_ready():
    """Nobody is asked, and nothing waited for."""
    silent = Handler(tells_ready=False)
    assert await Readiness("m", executors(silent), asyncio.get_running_loop()).told()
    assert silent.asked == []


@pytest.mark.parametrize("says", [[True, True], [True, False], [False, True]])
async def test_all_instances_have_to_say_so(says):
    """All of them are asked before any has answered."""
    handlers = [Handler(), Handler()]
    asked = asyncio.ensure_future(Readiness("m", executors(*handlers), asyncio.get_running_loop()).told())
    await asyncio.sleep(0)
    for handler, ready in zip(handlers, says, strict=True):
        [done] = handler.asked
        await asyncio.to_thread(done, ready)
    assert await asked == all(says)


async def test_one_that_hangs_is_asked_once_and_is_not_ready_meanwhile(monkeypatch, caplog):
    """Who asks behind it waits for the same answer; once that has come the next one asks again."""
    monkeypatch.setattr(readiness, "_SECONDS", 0.01)
    handler = Handler()
    asks = Readiness("m", executors(handler), asyncio.get_running_loop())
    assert [await asks.told(), await asks.told()] == [False, False]
    assert len(handler.asked) == 1
    monkeypatch.setattr(readiness, "_SECONDS", 60.0)
    second = asyncio.ensure_future(asks.told())
    await asyncio.sleep(0)
    handler.asked[0](True)
    handler.asked[0](False)  # what is told again is not heard
    assert await second
    last = asyncio.ensure_future(asks.told())
    await asyncio.sleep(0)
    handler.asked[1](False)
    assert not await last
    assert "model 'm': is_ready has not answered" in caplog.text
