"""Event loops of tests: what runs on one fails a test by what it leaves there, too."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any

from model_handlers.executor import ExecutorLoop
from serve.threads import ThreadPool
from tests.waiting import PATIENCE, ends

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def run_on_loop(main: Coroutine, loop_factory: Callable | None = None) -> Any:
    """Run a coroutine on a loop of its own; return what it returns.

    Fails the test whose callbacks raised on the loop, which asyncio only logs, or that leaves a task or a thread.
    """
    threads = set(threading.enumerate())
    problems = []

    async def guarded() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        async with asyncio.timeout(PATIENCE):
            result = await main
        await idle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(guarded())
    assert problems == []
    left = [thread.name for thread in set(threading.enumerate()) - threads if not ends(thread)]
    assert left == [], left
    return result


async def with_entered(test: Callable[..., Coroutine], **fixtures: Any) -> None:
    """Await a test; in the place of fixtures that are asynchronous contexts it gets what these give."""
    async with AsyncExitStack() as stack:
        for name, fixture in fixtures.items():
            if isinstance(fixture, AbstractAsyncContextManager):
                fixtures[name] = await stack.enter_async_context(fixture)
        await test(**fixtures)


async def idle(turns: int = 12) -> None:
    """Let the loop turn until callbacks that call callbacks are done."""
    for _ in range(turns):
        await asyncio.sleep(0)


class LoopThread:
    """A loop that runs on a thread of its own, for workers to be heard on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop")
        self._thread.start()
        self.home = ExecutorLoop(self.loop, ThreadPool("work", idle_seconds=0))

    def close(self) -> None:
        """End it, behind what was asked of it before."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
