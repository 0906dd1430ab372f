"""One model that the cache knows: its states, and the lease that requests hold on it. On the event loop only.

The states carry Triton's names, since the repository index shows them. *Registered* is no state: a registered model
that was evicted is UNAVAILABLE and comes back with its next request.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from serve.loading.loader import Target
    from serve.loading.prepare import PreparedTarget
    from serve.request import LoadReport
    from serve.statistics import TargetStats


class State(Enum):
    """Where a target model stands."""

    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"


class Event(Enum):
    """What can happen to a target model."""

    LOAD = "load"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOAD = "unload"
    UNLOADED = "unloaded"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.UNAVAILABLE, Event.LOAD): State.LOADING,
    (State.LOADING, Event.LOADED): State.READY,
    (State.LOADING, Event.FAILED): State.UNAVAILABLE,
    (State.READY, Event.UNLOAD): State.UNLOADING,
    (State.UNLOADING, Event.UNLOADED): State.UNAVAILABLE,
}


def transition(state: State, event: Event) -> State:
    """The state after `event`; ValueError if it can't happen in that state, which is a bug of the caller."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a model that is {state.value} can't be told '{event.value}'") from None


class Failure(NamedTuple):
    """What is remembered of a failed load: not its error, whose traceback holds all that was made for the model.

    `version` is the one that could not be loaded, if known; before `until` on the monotonic clock no request retries.
    """

    message: str
    version: int | None
    kind: Kind
    until: float


class Entry:
    """A model the cache knows, in memory or not. An entry is the lease that requests hold."""

    def __init__(self, name: str, source: Any, stats: TargetStats, lease_ended: Callable[[Entry], None]) -> None:
        self._lease_ended = lease_ended
        self._drained: asyncio.Future[None] | None = None
        self.name = name
        self.source = source
        self.state = State.UNAVAILABLE
        self.reason = ""
        # why its last load failed, or that of its successor; None if that did not fail
        self.failure: Failure | None = None
        self.failures = 0  # loads that failed since one succeeded
        self.resident: Target | None = None  # None unless READY or UNLOADING; so is its footprint
        self.prepared: PreparedTarget | None = None
        self.footprint = Footprint()
        self.measured: Footprint | None = None  # what it took by itself when it was in memory last
        self.leases = 0
        self.loaded_at = 0.0  # on the monotonic clock, as the next one and `loading_since`
        self.last_used = 0.0
        self.reload_ns = 0  # that its last load took without waiting; download_ns: its last download
        self.download_ns = 0
        self.pinned = False
        self.age = 0.0  # see `serve/cache/residents.py`
        self.stats = stats
        self._used_before = stats.hits + stats.misses
        self.abandoned = False  # it is being unloaded for good; cut_short: because the server shuts down
        self.cut_short = False
        self.evicted = False  # whether it left memory for another, and comes back with its next request
        self.force = False  # whether a successor takes that place even if it is loaded from the very same content
        # the entry that is being loaded to take its place, and the one whose place it is to take
        self.successor: Entry | None = None
        self.predecessor: Entry | None = None
        # the load under way, and the requests that get a lease when it is done
        self.task: asyncio.Task[LoadReport] | None = None
        self.waiters: list[asyncio.Future[LoadReport]] = []
        # a load that was given up and has not ended; no other begins meanwhile
        self.orphan: asyncio.Task[None] | None = None
        self.loading_since = 0.0
        # the unload under way, or the removal of what was unpacked; a load waits for it
        self.closing: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        megabytes = (self.footprint.host + self.footprint.device) / 1e6
        return f"<Entry {self.name}: {self.state.value}, {megabytes:.1f} MB, {self.leases} leases>"

    @property
    def registered(self) -> bool:
        """Whether its next request is answered: it is in memory, or was and comes back."""
        return not self.abandoned and (self.resident is not None or self.evicted)

    @property
    def busy(self) -> bool:
        """Whether it is in memory, or on its way there or out of it."""
        return self.task is not None or self.closing is not None or self.state is not State.UNAVAILABLE

    @property
    def goes_with_process(self) -> bool:
        """Whether it can be left as it is where the process ends: no request uses it, and it holds memory alone."""
        if self.leases or self.task is not None or self.closing is not None or self.successor is not None:
            return False
        return self.resident is None or self.resident.is_memory_only()

    def is_same_content(self, prepared: PreparedTarget) -> bool:
        """Whether its predecessor serves, was loaded from just that, and is not to be replaced all the same."""
        before = self.predecessor
        if self.force or before is None or before.state is not State.READY or before.prepared is None:
            return False
        return before.prepared.content == prepared.content and not before.leased().is_down()

    @property
    def uses(self) -> int:
        """Requests since it was last out of memory; those that waited for its load are among them."""
        return self.stats.hits + self.stats.misses - self._used_before

    def reset(self, reason: str) -> None:
        """It is out of memory."""
        if self.prepared is not None:
            self.prepared.release()
        self.closing = None
        self.resident, self.prepared = None, None
        self.state, self.reason, self.failure = transition(self.state, Event.UNLOADED), reason, None
        self.measured = self.measured if self.evicted else None
        self._used_before = self.stats.hits + self.stats.misses - len(self.waiters)

    def leased(self) -> Target:
        """What the holder of a lease may use."""
        if self.resident is None:
            raise MmeError(Kind.INTERNAL, f"model '{self.name}' is used without a lease")
        return self.resident

    @property
    def held(self) -> dict[str, Target] | None:
        """What a lease keeps beside the model: see `JointLease`."""
        return None

    def uncount(self, *, missed: bool = False) -> None:
        """It was leased for nothing: no hit, or no miss."""
        if missed:
            self.stats.misses -= 1
        else:
            self.stats.hits -= 1

    def share(self) -> None:
        """One more lease, for the holder of one, or of one on the model whose place it took; else UNAVAILABLE."""
        if not self.leases and self.state is not State.READY:
            raise MmeError(Kind.UNAVAILABLE, f"model '{self.name}' is being unloaded; try again")
        self.leases += 1

    def release(self) -> None:
        self.leases -= 1
        self.last_used = time.monotonic()
        if self.leases == 0:
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            self._lease_ended(self)

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the served models that it consists of; () if it is no ensemble of those, or not in memory."""
        return () if self.resident is None else self.resident.steps

    def drained(self) -> asyncio.Future[None]:
        """Done when no lease is left."""
        if self._drained is None or self._drained.done():
            self._drained = asyncio.get_running_loop().create_future()
            if self.leases == 0:
                self._drained.set_result(None)
        return self._drained


class JointLease:
    """A lease on an ensemble, and on the served models of all its steps, those of ensembles among them too.

    One for all requests, as long as the models are the same: those that were in memory at that `reading` of the cache.
    """

    def __init__(self, entries: dict[str, Entry], reading: int) -> None:
        self.reading = reading
        self._entries = list(entries.values())  # the ensemble first
        self.held: dict[str, Target] | None = {entry.name: entry.leased() for entry in self._entries}

    def __repr__(self) -> str:
        return f"<JointLease of {', '.join(entry.name for entry in self._entries)}>"

    def leased(self) -> Target:
        return self._entries[0].leased()

    def take(self) -> JointLease:
        """Lease them all once more."""
        for entry in self._entries:
            entry.leases += 1
            entry.stats.hits += 1
        return self

    def uncount(self) -> None:
        for entry in self._entries:
            entry.uncount()

    def release(self) -> None:
        for entry in self._entries:
            entry.release()
