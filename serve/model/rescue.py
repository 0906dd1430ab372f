"""Requests that ran out of memory: room is made, and they run once more. On the event loop only.

A framework takes memory for an execution that no budget counts, so it may find none though every model fits. Then the
request is taken back with its inputs, other models leave until about as much is free as its own model holds, and it is
queued again. It runs twice at most: what fails again is the client's to know. A model whose second try failed moves
nobody for a while, or a client whose requests are simply too large would empty the cache again and again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cachetools import TTLCache

from model_handlers.errors import MmeError
from model_handlers.worker.fork_client import ChildOutgrownError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from serve.model.model import Model
    from serve.request import InferenceRequest, Lease

    RescueRequest = Callable[[Model, InferenceRequest, MmeError], bool]
    Relieve = Callable[[Any], Coroutine[Any, Any, tuple[str, ...]]]

_log = logging.getLogger("mme.rescue")
_MODELS = 1024
_SECONDS_IN_VAIN = 60.0


class _SecondTry:
    """The lease of a request that runs once more, by which it is known."""

    def __init__(self, lease: Lease) -> None:
        self.release = lease.release


class Rescue:
    """Takes requests back.

    Args:
        relieve: puts out others for the model whose lease it is given; returns whom, when their memory is back.
    """

    def __init__(self, relieve: Relieve) -> None:
        self._relieve = relieve
        self._reliefs: dict[str, asyncio.Task[tuple[str, ...]]] = {}  # under way, by the model they are for
        self._in_vain: TTLCache[str, bool] = TTLCache(_MODELS, _SECONDS_IN_VAIN)
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, model: Model, request: InferenceRequest, error: MmeError) -> bool:
        """Whether the request was taken back: then it is answered later, by the model or with `error`."""
        if isinstance(request.lease, _SecondTry):
            self._in_vain[model.name] = True
            return False
        if request.lease is None or request.cancelled or model.name in self._in_vain:
            return False
        if isinstance(error, ChildOutgrownError):  # no model's leaving helps
            return False
        relief = self._relief(model.name, request.lease)
        request.lease = _SecondTry(request.lease)
        task = asyncio.get_running_loop().create_task(self._try_again(relief, model, request, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _relief(self, name: str, lease: Lease) -> asyncio.Task[tuple[str, ...]]:
        """One for all requests of a batch, and for those of others that fail meanwhile."""
        relief = self._reliefs.get(name)
        if relief is None:
            relief = asyncio.get_running_loop().create_task(self._relieve(lease), name=f"make room for {name}")
            self._reliefs[name] = relief
            relief.add_done_callback(lambda _: self._reliefs.pop(name))
        return relief

    async def _try_again(
        self, relief: asyncio.Task[tuple[str, ...]], model: Model, request: InferenceRequest, error: MmeError
    ) -> None:
        try:
            victims = await asyncio.shield(relief)
        except Exception:  # noqa: BLE001 - the client must be answered whatever keeps others from leaving
            _log.exception("no room could be made", extra={"target_model": model.name})
            victims = ()
        if not victims:
            model.fail(request, error)
            return
        _log.info("running once more without %s: %s", ", ".join(victims), error, extra={"target_model": model.name})
        try:
            model.submit(request)
        except MmeError as refused:
            request.resolve(refused)
