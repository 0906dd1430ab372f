"""One name that the cache knows, the table of its states, and its stays in memory, which requests lease.

An `Entry` outlives what is loaded under its name; a `Residency` is one stay of it in memory; what brings one there is a
`Load`. On the event loop only.
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

    from serve.cache.load import Load
    from serve.loading.loader import Target
    from serve.loading.prepare import PreparedTarget
    from serve.statistics import TargetStats


class State(Enum):
    """Where a name stands."""

    ABSENT = "absent"  # not loaded so far
    LOADING = "loading"
    READY = "ready"
    RELOADING = "reloading"  # it serves, and what is to take its place is being loaded
    EVICTING = "evicting"  # it is on its way out of memory, for another
    EVICTED = "evicted"  # its next request loads it again
    RETURNING = "returning"  # that load is under way
    UNLOADING = "unloading"  # it is on its way out for good; or its load is, which was under way
    UNLOADED = "unloaded"
    FAILED = "failed"  # its load failed

    @property
    def shown(self) -> str:
        """What the repository index calls it, in Triton's words."""
        return _SHOWN.get(self, "UNAVAILABLE")

    @property
    def serves(self) -> bool:
        return self is State.READY or self is State.RELOADING


_SHOWN = {
    State.LOADING: "LOADING",
    State.RETURNING: "LOADING",
    State.READY: "READY",
    State.RELOADING: "READY",
    State.EVICTING: "UNLOADING",
    State.UNLOADING: "UNLOADING",
}
_REGISTERED = {State.READY, State.RELOADING, State.EVICTING, State.EVICTED, State.RETURNING}


class Event(Enum):
    """What can happen to a name."""

    LOAD = "load"  # a load begins
    COMMIT = "commit"  # it is there, and answers requests
    FAIL = "fail"
    KEEP = "keep"  # what was to take its place is the same
    GIVE_WAY = "give way"  # there is no room for both: it leaves before its successor comes
    EVICT = "evict"
    UNLOAD = "unload"
    CLOSE = "close"  # nothing of it is in memory any more
    RESTORE = "restore"  # the worker before had it registered
    GIVE_UP = "give up"  # its next request does not load it again


# The drawing in docs/cache.md is this table.
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ABSENT, Event.LOAD): State.LOADING,
    (State.FAILED, Event.LOAD): State.LOADING,
    (State.UNLOADED, Event.LOAD): State.LOADING,
    (State.UNLOADING, Event.LOAD): State.LOADING,
    (State.LOADING, Event.COMMIT): State.READY,
    (State.LOADING, Event.FAIL): State.FAILED,
    (State.READY, Event.LOAD): State.RELOADING,
    (State.RELOADING, Event.COMMIT): State.READY,
    (State.RELOADING, Event.KEEP): State.READY,
    (State.RELOADING, Event.FAIL): State.READY,
    (State.RELOADING, Event.GIVE_WAY): State.RETURNING,
    (State.READY, Event.EVICT): State.EVICTING,
    (State.EVICTING, Event.CLOSE): State.EVICTED,
    (State.EVICTING, Event.LOAD): State.RETURNING,
    (State.EVICTED, Event.LOAD): State.RETURNING,
    (State.RETURNING, Event.COMMIT): State.READY,
    (State.RETURNING, Event.FAIL): State.EVICTED,
    (State.EVICTED, Event.GIVE_UP): State.FAILED,
    (State.ABSENT, Event.RESTORE): State.EVICTED,
    (State.UNLOADING, Event.CLOSE): State.UNLOADED,
    **{(state, Event.UNLOAD): State.UNLOADED for state in (State.ABSENT, State.EVICTED, State.FAILED, State.UNLOADED)},
    **{
        (state, Event.UNLOAD): State.UNLOADING
        for state in (State.LOADING, State.READY, State.RELOADING, State.EVICTING, State.RETURNING, State.UNLOADING)
    },
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
    """A name that the cache knows, in memory or not."""

    def __init__(self, name: str, source: Any, stats: TargetStats) -> None:
        self.name = name
        self.source = source
        self.stats = stats
        self.state = State.ABSENT
        self.reason = ""
        # why its last load failed, also that of a successor; None if that did not fail
        self.failure: Failure | None = None
        self.failures = 0  # loads that failed since one succeeded
        self.load: Load | None = None  # the one under way
        self.residency: Residency | None = None  # what answers its requests, or leaves and none has taken its place
        self.retiring: set[Residency] = set()  # those that leave and whose place was taken
        # a load that was given up and has not ended; no other begins meanwhile
        self.orphan: asyncio.Task[None] | None = None
        self.removal: asyncio.Future[None] | None = None  # of what was unpacked for it; a load waits for it
        self.measured: Footprint | None = None  # what it took by itself when it was in memory last
        self.last_used = 0.0  # on the monotonic clock
        self.reload_ns = 0  # that its last load took without waiting; download_ns: its last download
        self.download_ns = 0

    def __repr__(self) -> str:
        megabytes = (self.footprint.host + self.footprint.device) / 1e6
        return f"<Entry {self.name}: {self.state.value}, {megabytes:.1f} MB, {self.leases} leases>"

    def tell(self, event: Event) -> None:
        self.state = transition(self.state, event)

    @property
    def registered(self) -> bool:
        """Whether its next request is answered: it is in memory, or was and comes back."""
        return self.state in _REGISTERED

    @property
    def unloaded(self) -> bool:
        """Whether it was unloaded for good, or is being."""
        return self.state is State.UNLOADED or self.state is State.UNLOADING

    @property
    def busy(self) -> bool:
        """Whether it is in memory, or on its way there or out of it."""
        return self.load is not None or self.residency is not None or self.removal is not None

    @property
    def closing(self) -> asyncio.Future[None] | None:
        """The end of its stay in memory, or of what was unpacked for it, if it is under way."""
        return self.removal if self.residency is None else self.residency.closing

    @property
    def goes_with_process(self) -> bool:
        """Whether it can be left as it is where the process ends: no request uses it, and it holds memory alone."""
        if self.leases or self.load is not None or self.closing is not None:
            return False
        return self.residency is None or self.residency.target.is_memory_only()

    @property
    def resident(self) -> Target | None:
        return None if self.residency is None else self.residency.target

    @property
    def footprint(self) -> Footprint:
        """What it is charged for."""
        return Footprint() if self.residency is None else self.residency.footprint

    @property
    def leases(self) -> int:
        return 0 if self.residency is None else self.residency.leases

    @property
    def pinned(self) -> bool:
        """Whether it is in memory and never evicted."""
        return self.residency is not None and self.residency.pinned

    @property
    def waiting(self) -> int:
        """Requests that wait for its load."""
        return 0 if self.load is None else len(self.load.waiters)

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the served models that it consists of; () if it is no ensemble of those, or not in memory."""
        return () if self.residency is None else self.residency.target.steps

    def give_up(self) -> None:
        """If it was evicted, its next request does not load it again."""
        if self.state is State.EVICTED:
            self.tell(Event.GIVE_UP)


class Residency:
    """One stay of a model in memory. It is the lease that requests hold."""

    def __init__(
        self,
        entry: Entry,
        target: Target,
        prepared: PreparedTarget,
        lease_ended: Callable[[Residency], None],
        *,
        pinned: bool = False,
        waiting: int = 0,  # requests that wait for it
    ) -> None:
        self.entry = entry
        self.name = entry.name
        self.stats = entry.stats
        self.target = target
        self.prepared = prepared
        self.footprint = Footprint()  # what it is charged for
        self.pinned = pinned
        self.leases = 0
        self.loaded_at = time.monotonic()
        self.age = 0.0  # that of the cache at its last use: see `serve/cache/residents.py`
        self.leaving = False
        self.closing: asyncio.Future[None] | None = None  # its end, once it is leaving
        self._used_before = entry.stats.hits + entry.stats.misses - waiting
        self._lease_ended = lease_ended
        self._drained: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Residency of {self.entry!r}>"

    @property
    def uses(self) -> int:
        """Requests since it came; those that waited for its load are among them."""
        return self.stats.hits + self.stats.misses - self._used_before

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
        if not self.leases and self.leaving:
            raise MmeError(Kind.UNAVAILABLE, f"model '{self.name}' is being unloaded; try again")
        self.leases += 1

    def release(self) -> None:
        self.leases -= 1
        self.entry.last_used = time.monotonic()
        if self.leases == 0:
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            self._lease_ended(self)

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

    def __init__(self, residencies: dict[str, Residency], reading: int) -> None:
        self.reading = reading
        self._residencies = list(residencies.values())  # the ensemble first
        self.target = self._residencies[0].target
        self.held: dict[str, Target] | None = {each.name: each.target for each in self._residencies}

    def __repr__(self) -> str:
        return f"<JointLease of {', '.join(each.name for each in self._residencies)}>"

    def take(self) -> JointLease:
        """Lease them all once more."""
        for residency in self._residencies:
            residency.leases += 1
            residency.stats.hits += 1
        return self

    def uncount(self) -> None:
        for residency in self._residencies:
            residency.uncount()

    def missed_since(self, began: float) -> None:
        """It is for a request that came at that time on the monotonic clock: what was loaded since was no hit of it."""
        for residency in self._residencies:
            if residency.loaded_at >= began:
                residency.uncount()
                residency.stats.misses += 1

    def release(self) -> None:
        for residency in self._residencies:
            residency.release()


class Ready:
    """The models that serve, by name: one look-up for a request."""

    def __init__(self) -> None:
        self.models: dict[str, Residency] = {}
        self.reading = 0  # which grows with each change of those

    def __repr__(self) -> str:
        return f"<Ready {len(self.models)} models>"

    def put(self, residency: Residency) -> None:
        self.models[residency.name] = residency
        self.reading += 1

    def remove(self, residency: Residency) -> None:
        if self.models.get(residency.name) is residency:
            del self.models[residency.name]
            self.reading += 1

    def serves(self, target: Target) -> bool:
        """Whether this is what requests for its name are answered by, and is to stay."""
        return self.target(target.name) is target

    def target(self, name: str) -> Target | None:
        """What requests for that name are answered by, if it is in memory."""
        residency = self.models.get(name)
        return None if residency is None else residency.target

    def lease(self, name: str) -> Residency | JointLease | None:
        """The model if it is in memory, leased; else None.

        An ensemble is there if the models of all its steps are; they are leased with it, or none is.
        """
        residency = self.models.get(name)
        if residency is None:
            return None
        if residency.target.steps:
            return self._lease_joint(name, residency.target)
        residency.leases += 1
        residency.stats.hits += 1
        return residency

    def _lease_joint(self, name: str, whole: Target) -> JointLease | None:
        joint = whole.joint
        if joint is None or joint.reading != self.reading:
            there, away = self.parts(name)
            if away:
                return None
            joint = whole.joint = JointLease(there, self.reading)
        return joint.take()

    def parts(self, name: str) -> tuple[dict[str, Residency], list[str]]:
        """A model and all that it consists of, as far as that is known: what serves, and the names of the rest."""
        there: dict[str, Residency] = {}
        names = [name]
        for each in names:  # which grows
            residency = self.models.get(each)
            if residency is not None and each not in there:
                there[each] = residency
                names += residency.target.steps
        return there, list(dict.fromkeys(each for each in names if each not in there))
