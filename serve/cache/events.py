"""What the cache does, told as it happens to histograms, CloudWatch and the dashboard. On the event loop only.

It tells of loads, evictions and unloads, and of requests that waited for one; never of a request whose model was
there, so that nothing here is on the way of those.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.base import Footprint
from serve.statistics import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.errors import Kind

    Listener = Callable[["CacheEvent"], None]

_log = logging.getLogger("mme.cache")


class EventType(Enum):
    """What happened to a target model."""

    WAITED = "waited"  # a request, until its model was there
    LOADED = "loaded"
    FAILED = "failed"  # to load
    EVICTED = "evicted"  # chosen to leave; UNLOADED follows
    UNLOADED = "unloaded"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One thing that happened."""

    type: EventType
    name: str
    ns: int = 0  # nanoseconds that waiting, loading (without the download) or unloading took
    download_ns: int = 0  # nanoseconds of a load's download, 0 when it was on disk
    footprint: Footprint = field(default_factory=Footprint)  # what the model takes, or took
    why: str = ""  # FAILED: the error; EVICTED: the model that needs the room; UNLOADED: the reason
    kind: Kind | None = None  # FAILED: of the error
    at: float = field(default_factory=time.time)  # when, in seconds since 1970


class CacheEvents:
    """Calls listeners."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def tell(self, event: CacheEvent) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - a load must not fail because it could not be counted
                _log.exception("a listener failed: a model %s", event.type.value, extra={"target_model": event.name})


class CacheTimes:
    """How long requests waited, and how long downloads, loads and unloads took, of all models together."""

    def __init__(self) -> None:
        self.wait = Histogram()
        self.download = Histogram()
        self.load = Histogram()
        self.unload = Histogram()

    def hear(self, event: CacheEvent) -> None:
        if event.type is EventType.WAITED:
            self.wait.add(event.ns)
        elif event.type is EventType.UNLOADED:
            self.unload.add(event.ns)
        elif event.type is EventType.LOADED:
            self.load.add(event.ns)
            if event.download_ns:
                self.download.add(event.download_ns)
