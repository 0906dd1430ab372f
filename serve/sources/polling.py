"""A repository whose models are served as its folder has them.

What fails to load is tried again when it has changed, or at the next look if nothing is wrong with it; whatever was
served before goes on. The poller lives on the event loop and reads directories on a thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from model_handlers.errors import Kind, MmeError
from serve.threads import on_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_log = logging.getLogger("mme.poll")
_AGAIN = "to be tried again"  # what files never look like
_LEAVE_SECONDS = 10.0  # that models which were removed keep those waiting that came or changed


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of models, in order: those that were added or changed, and those that are gone."""

    present: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> Changes:
    """What has become of a repository, by the name of each model and what its files look like."""
    return Changes(
        tuple(name for name in sorted(now) if before.get(name) != now[name]),
        tuple(name for name in sorted(before) if name not in now),
    )


class Index(Protocol):
    """What is known of the engine's models."""

    def is_ready(self, name: str) -> bool: ...


class Models(Protocol):
    """What is asked of the engine. On the event loop."""

    @property
    def index(self) -> Index: ...

    async def reload(self, name: str) -> None:
        """Load a model, again if it is in memory."""

    async def unload(self, name: str) -> None:
        """Unregister a model."""


class Poller:
    """Keeps an engine and a repository the same, looking again so many seconds after it was done.

    `scan` reads the repository on a thread; `registered` are names that the engine knows from the worker before.
    """

    def __init__(
        self, models: Models, scan: Callable[[], dict[str, str]], seconds: float, registered: Iterable[str] = ()
    ) -> None:
        self._models = models
        self._scan = scan
        self._seconds = seconds
        self._seen = dict.fromkeys(registered, _AGAIN)
        self._failing: set[str] = set()
        self._leaving: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"<Poller of {len(self._seen)} models, {len(self._leaving)} leave>"

    async def run(self, tell: Callable[[bool], None]) -> None:
        """Look again and again, until cancelled; `tell` is told what each look returned."""
        while True:
            await asyncio.sleep(self._seconds)
            tell(await self.look())

    async def look(self) -> bool:
        """Look once, and do what there is to do; returns whether each model is served."""
        try:
            now = await on_daemon("poll", self._scan)
        except Exception as error:  # noqa: BLE001 - nothing else would look again
            _log.error("everything stays as it is, the repository can't be read: %s", error)
            return False
        changed, self._seen = changes(self._seen, now), now
        await self._remove_all(changed.removed)
        await asyncio.gather(*(self._load(name) for name in changed.present))
        # An ensemble that did not load is loaded by the engine when its last part is.
        self._failing = {name for name in self._failing if not self._models.index.is_ready(name)}
        return not self._failing

    async def _load(self, name: str) -> None:
        try:
            await self._models.reload(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the folder is to be looked at again
            ours = isinstance(error, MmeError)
            if isinstance(error, MmeError) and error.kind is Kind.UNAVAILABLE:  # as S3 may be, or memory
                self._seen[name] = _AGAIN
            why = "" if isinstance(error, MmeError) and error.logged else f": {error}"
            _log.error("model '%s' did not load%s", name, why, exc_info=not ours, extra={"target_model": name})
            self._failing.add(name)
        else:
            self._failing.discard(name)

    async def _remove_all(self, names: Iterable[str]) -> None:
        """Return when they have given back their memory; one that executes for long goes on alone."""
        leaving = [asyncio.ensure_future(self._remove(name)) for name in names]
        self._leaving.update(leaving)
        for each in leaving:
            each.add_done_callback(self._leaving.discard)
        if leaving:
            await asyncio.wait(leaving, timeout=_LEAVE_SECONDS)

    async def _remove(self, name: str) -> None:
        self._failing.discard(name)
        try:
            await self._models.unload(name)
        except Exception as error:  # noqa: BLE001 - it never loaded, or does not come to an end, or as above
            _log.info("model '%s' left the repository: %s", name, error, extra={"target_model": name})
        else:
            _log.info("model '%s' left the repository, and is unloaded", name, extra={"target_model": name})
