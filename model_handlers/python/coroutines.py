"""The event loop of models whose `execute` is a coroutine: one a model, on a thread of its own, from the first one on.

It keeps turning between batches, so that connections and tasks that the model keeps stay alive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

_log = logging.getLogger("mme.model")


class LoopThread:
    """A running event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._aside: set[Future[None]] = set()  # asyncio itself would forget a task that nobody else holds
        self._thread = threading.Thread(target=self._turn, name=f"{name} asyncio", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns. Called on another thread, which waits.

        Raises:
            BaseException: what the coroutine raised.
        """
        result, error = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop).result()
        if error is not None:
            raise error
        return result

    def start(self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[Any, BaseException | None], None]) -> None:
        """Run the coroutine aside; `ended` is told on the loop's thread what it returned or raised."""

        async def run() -> None:
            ended(*await _outcome(coroutine))

        task = asyncio.run_coroutine_threadsafe(run(), self._loop)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    def close(self) -> None:
        """Cancel what is still running, and end the thread."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(_wound_up())
        self._loop.close()

    def _turn(self) -> None:
        while not self._closing:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a task that the model started: asyncio lets them out
                _log.error("a task of the model raised %s, which ends nothing but the task", type(error).__name__)


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await coroutine, None
    except BaseException as error:  # noqa: BLE001 - see failures.py; asyncio would let some of them out of the loop
        return None, error


async def _wound_up() -> None:
    """Cancel what still runs on this loop, and wait for it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
