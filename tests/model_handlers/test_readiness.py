"""Models that have a say in whether they are ready: who is asked, how often, and how long that is waited for."""

import asyncio

import pytest

from model_handlers import executor
from model_handlers.executor import Executor, ExecutorLoop, Executors
from serve.threads import ThreadPool


class Handler:
    """Tells what the test has it tell, when the test says so."""

    def __init__(self, *, tells_ready=True):
        self.tells_ready = tells_ready
        self.apart = False
        self.asked = []

    def ask_ready(self, done):
        """See `model_handlers.base.Handler`."""
        self.asked.append(done)


def executors(*handlers):
    """What executes a model by such handlers."""
    home = ExecutorLoop(asyncio.get_running_loop(), ThreadPool("unused", idle_seconds=0))
    return Executors([Executor("m_0", number, handler, home) for number, handler in enumerate(handlers)])


async def test_who_has_no_say_is_ready():
    """Nobody is asked, and nothing waited for."""
    silent = Handler(tells_ready=False)
    assert await executors(silent).ask_ready("m")
    assert silent.asked == []


@pytest.mark.parametrize("says", [[True, True], [True, False], [False, True]])
async def test_all_instances_have_to_say_so(says):
    """All of them are asked before any has answered."""
    handlers = [Handler(), Handler()]
    asked = asyncio.ensure_future(executors(*handlers).ask_ready("m"))
    await asyncio.sleep(0)
    for handler, ready in zip(handlers, says, strict=True):
        [done] = handler.asked
        await asyncio.to_thread(done, ready)
    assert await asked == all(says)


async def test_one_that_hangs_is_asked_once_and_is_not_ready_meanwhile(monkeypatch, caplog):
    """Who asks behind it waits for the same answer; once that has come the next one asks again."""
    monkeypatch.setattr(executor, "_READY_SECONDS", 0.01)
    handler = Handler()
    model = executors(handler)
    assert [await model.ask_ready("m"), await model.ask_ready("m")] == [False, False]
    assert len(handler.asked) == 1
    monkeypatch.setattr(executor, "_READY_SECONDS", 60.0)
    second = asyncio.ensure_future(model.ask_ready("m"))
    await asyncio.sleep(0)
    handler.asked[0](True)
    handler.asked[0](False)  # what is told again is not heard
    assert await second
    last = asyncio.ensure_future(model.ask_ready("m"))
    await asyncio.sleep(0)
    handler.asked[1](False)
    assert not await last
    assert "model 'm': is_ready has not answered" in caplog.text
