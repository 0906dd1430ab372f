"""Load, unload and cold acquire by name: which models come into memory, and leave it, because a client asks.

Each waits no longer than it may, takes along what belongs to the model, as the models that an ensemble consists of, and
leaves nothing behind of one that did not load: no name, and nothing on the disk. On the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from model_handlers.errors import ElsewhereError, Kind, MmeError
from serve.cache.entry import JointLease, State
from serve.model.ensemble_plan import blaming
from serve.options import Control
from serve.request import LoadReport
from serve.sources.catalog import unknown
from serve.sources.source import Archived, InRepository, Overridden, S3Model, origin, source_of
from serve.sources.store import UntoldError
from serve.statistics import CacheEvent, EventType
from serve.step_loads import StepLoads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from concurrent.futures import Executor

    from model_handlers.model_calls import Override
    from serve.cache.entry import Entry, Residency
    from serve.cache.model_cache import ModelCache
    from serve.options import EngineOptions
    from serve.registry import Registry
    from serve.sources.catalog import ModelCatalog
    from serve.sources.source import Source

T = TypeVar("T")
_GRACE_SECONDS = 5.0  # SageMaker waits for 360, of which a load may take 350
_USELESS = {Kind.INVALID_MODEL, Kind.UNSUPPORTED}


@dataclass(eq=False, repr=False)
class LoadApi:
    """Loads and unloads by name. `loads` and `unloads` are threads for work beside those of the cache."""

    options: EngineOptions
    cache: ModelCache
    registry: Registry
    origins: ModelCatalog
    _: KW_ONLY
    loads: Executor
    unloads: Executor
    waits: WaitGraph

    def __post_init__(self) -> None:
        self.steps = StepLoads(self.cache, self.registry, self.waits, self._acquire, self._reload_step)
        self._reloads: dict[str, _Reload] = {}  # of ensembles that are loaded by name
        self._by_name: set[str] = set()  # where clients have a say: loaded by name, not with an ensemble
        self._tasks: set[asyncio.Task[None]] = set()  # what goes on though no client waits for it

    def __repr__(self) -> str:
        return f"<LoadApi to {self.cache!r}, {len(self._tasks)} ends under way>"

    async def acquire(self, name: str, version: int | None = None) -> tuple[Residency | JointLease, LoadReport]:
        """A lease on the model of a request's name: in memory, loaded first if need be; and what that cost.

        Raises:
            MmeError: UNKNOWN_MODEL, or why it can't be loaded, or could not a moment ago; see `Registry.entry`.
        """
        entry, report, began = self.registry.entry(name, version), LoadReport(), time.monotonic()
        try:
            if not entry.state.serves or not entry.steps:
                lease, report = await self._acquire(name, entry)
                if not lease.target.steps:
                    return lease, report
                lease.uncount(missed=bool(report.load))  # it is counted with its lease
                lease.release()
            async with self._deadline(name, "its load goes on, try again later"):
                joint, report = await self.steps.acquire(name, version, report)
        except MmeError as error:
            if error.kind is not Kind.CANCELLED:
                entry.stats.refused += 1
            raise
        if isinstance(joint, JointLease):
            joint.missed_since(began)
        return joint, report

    async def _acquire(self, name: str, entry: Entry) -> tuple[Residency, LoadReport]:
        """Lease an entry, loading it first if need be; what is to be forgotten of one that did not load is."""
        _refuse_too_soon(entry)
        began = time.perf_counter_ns()
        try:
            async with self._deadline(name, "its load goes on, try again later"):
                lease, report = await self.cache.acquire(entry)
        except MmeError as error:
            if _is_unknown(entry, error):
                self.registry.forget(entry)
            elif _is_useless(error):
                await self._discard(entry, error)
            raise
        if report.load:
            self.registry.note(entry)
            waited = time.perf_counter_ns() - began
            entry.stats.wait.add(waited)
            self.cache.events.tell(CacheEvent(EventType.WAITED, name, waited))
        return lease, report

    async def _reload_step(self, whole: str, name: str) -> None:
        """Reload the model of a step if its ensemble is loaded by name, unless a client sent files for it."""
        reload = self._reloads.get(whole)
        entry = self.cache.entries.get(name)
        is_sent = entry is not None and entry.registered and isinstance(entry.source, Overridden)
        if reload is None or name in reload.names or is_sent:
            return
        with self.waits.waiting((whole,), name):
            try:
                await self._load_anew(name, self.registry.source(name), reload)
            except MmeError as error:
                entry = self.cache.entries.get(name)
                if entry is None or entry.resident is None:  # else the one before goes on, and the log says why
                    with blaming(whole, name.rpartition("/")[2]):
                        raise error from None

    # -- loads -----------------------------------------------------------------------------------------------------

    async def load(self, name: str, url: str = "", alias: str = "") -> None:
        """Register a model and load it; one that can't be loaded is not registered either.

        Args:
            name: the name to register.
            url: a folder with the unpacked model, or an archive; "" for a model that store or repository has.
            alias: another name that requests may use, or "".

        Raises:
            MmeError: ALREADY_EXISTS when it is loaded or being loaded; else why it can't be loaded.
        """
        self._refuse_loaded(name, alias)
        source = source_of(url) if url else self.origins.find(name)
        self.registry.call(name, alias)
        await self._load_by_name(name, source)

    def _refuse_loaded(self, *names: str) -> None:
        for name in names:
            known = self.cache.entries.get(self.registry.aliases.get(name, name))
            if known is None or known.unloaded:
                continue
            if known.load is not None or (known.state.serves and self.registry.serves(known)):
                raise MmeError(
                    Kind.ALREADY_EXISTS, f"model '{known.name}' is already loaded; unload it first to load it anew"
                )

    async def reload(self, name: str, override: Override | None = None) -> None:
        """Load a model as it is now where it comes from, this once with an override. One in memory serves meanwhile.

        One that was loaded from the same files with the same configuration stays. A load under way will do.

        Raises:
            MmeError: UNKNOWN_MODEL, or why it can't be loaded. Then it is not registered any more, unless it was in
                memory and had not to leave for the new one: that one goes on serving.
        """
        await self._load_by_name(name, await self._source(name, override))

    async def _load_by_name(self, name: str, source: Source) -> None:
        """Load a model, and then reload ensembles that consist of what changed, and load those that waited for it."""
        reload = _Reload()
        try:
            await self._load_anew(name, source, reload)
        finally:  # though an ensemble fails, some of its steps may be there
            await self._follow(reload)

    async def _follow(self, reload: _Reload) -> None:
        for part in reload.loaded:  # which grows
            for whole in self.registry.dependents.wholes_of(part):
                if whole not in reload.names and self._is_due(whole):
                    with contextlib.suppress(MmeError):  # it goes on as it was, and the log says why
                        await self._load_anew(whole, self._source_of_whole(whole), reload)

    def _is_due(self, whole: str) -> bool:
        """Whether an ensemble serves or did not load, and the models that it consists of are there."""
        state, parts = self.cache.entries[whole].state, self.registry.dependents.parts(whole)
        return (state.serves or state is State.FAILED) and all(map(self._is_registered, parts))

    def _source_of_whole(self, name: str) -> Source:
        source = self.cache.entries[name].source
        return source if isinstance(source, Overridden) else self.registry.source(name)

    async def _load_anew(self, name: str, source: Source, reload: _Reload) -> None:
        """Load one model, and its steps if it is an ensemble.

        One that does not load in time for its client is unloaded, but for one that serves.
        """
        reload.names.add(name)
        self.registry.enable(name)
        entry = self.cache.entries.get(name) or self.registry.add(name, source)
        goes_on, was_evicted = entry.state.serves, entry.registered and not entry.state.serves
        then = "the one that serves goes on" if goes_on else "it is unloaded again; try later"
        try:
            with self._reloading(name, reload):
                async with self._deadline(name, then):
                    report = await self.cache.reload(entry, source)
        except MmeError as error:
            entry = self.cache.entries.get(name, entry)
            if goes_on and entry.resident is not None:
                self.registry.dependents.note(name, (*entry.steps, *self._awaited(entry, error)))
            elif entry.load is not None:
                self._begin(self._unload(entry))
            else:
                await self._unregister_failed(entry, error)
            raise
        finally:
            await self.registry.write(self.cache.entries.get(name, entry))
        if report.load and not was_evicted:
            reload.loaded.append(name)

    def _awaited(self, entry: Entry, error: MmeError) -> tuple[str, ...]:
        """The steps that an ensemble did not load for, if it is loaded again with the last of them."""
        is_sent = isinstance(entry.source, Overridden)
        return error.parts if self.options.control.limits and not is_sent else ()

    @contextlib.contextmanager
    def _reloading(self, name: str, reload: _Reload) -> Iterator[None]:
        first = self._reloads.setdefault(name, reload) is reload
        try:
            yield
        finally:
            if first:
                self._reloads.pop(name, None)

    async def _source(self, name: str, override: Override | None) -> Source:
        if override is None:
            return self.registry.source(name)
        base: Source | None = None
        try:
            base = self.registry.source(name)
        except MmeError:
            if not override.files:
                raise
        made: Source = await asyncio.get_running_loop().run_in_executor(
            self.loads, self.origins.overrides.source, name, base, override
        )
        return made

    @contextlib.asynccontextmanager
    async def _deadline(self, name: str, then: str) -> AsyncIterator[None]:
        """Wait for a load no longer than that may take, and a moment: the load's own end comes first if it can."""
        seconds = self.options.load_patience
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS) as timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise MmeError(Kind.UNAVAILABLE, f"model '{name}' did not load within {seconds:.0f} s; {then}") from None

    def mark_explicit(self, name: str) -> None:
        """It was loaded by name: it does not go with an ensemble that is made of it."""
        entry = self.cache.entries.get(name)
        if self.options.control is Control.EXPLICIT and entry is not None and not entry.unloaded:
            self._by_name.add(name)

    # -- unloads ---------------------------------------------------------------------------------------------------

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unregister a model; return when its memory was given back.

        With its dependents those go too that it consists of, unless others that serve do, or they were loaded by name.

        Raises:
            MmeError: UNKNOWN_MODEL; UNAVAILABLE when it still executes or loads after a long time. Then its memory
                comes back when that ends.
        """
        entry = self.cache.entries.get(name)
        if entry is None or entry.unloaded:
            raise unknown(name)
        lacked_parts = self.registry.lacks_parts(entry)
        parts = self.registry.dependents.parts(name) if dependents else ()
        await self._unload_in_time(entry)
        if lacked_parts:  # it was unloaded to clients
            raise unknown(name)
        for part in parts:
            if self._is_registered(part) and not (part in self._by_name or self._is_part(part)):
                await self.unload(part, dependents=True)  # which may be an ensemble itself

    def _is_registered(self, name: str) -> bool:
        entry = self.cache.entries.get(name)
        return entry is not None and entry.registered

    def _is_part(self, name: str) -> bool:
        """Whether an ensemble that serves consists of a model."""
        wholes = self.registry.dependents.wholes_of(name)
        return any(self.registry.serves(self.cache.entries[whole]) for whole in wholes)

    async def _unload_in_time(self, entry: Entry) -> None:
        seconds = self.options.unload_patience
        try:
            async with asyncio.timeout(seconds):
                await self._unload(entry)
        except TimeoutError:
            self._begin(self._unload(entry))
            raise MmeError(
                Kind.UNAVAILABLE,
                f"model '{entry.name}' still executes or loads after {seconds:.0f} s; nobody is served by it any more, "
                "and its memory comes back when that ends",
            ) from None

    async def _unload(self, entry: Entry) -> None:
        self.registry.disable(entry.name)  # a request that comes while it leaves must not bring it back
        await self.cache.unload(entry)
        entry = self.cache.entries.get(entry.name, entry)
        if entry.unloaded:
            await self._remove(entry)
        await self.registry.write(entry)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what is left of models -----------------------------------------------------------------------------------

    async def _unregister_failed(self, entry: Entry, error: MmeError) -> None:
        """Unregister; but the index goes on saying why of what store or repository has."""
        entry.give_up()
        self.registry.disable(entry.name, self._awaited(entry, error))
        entry.source = origin(entry.source)
        if entry.source.posted or _is_unknown(entry, error):
            await self._remove(entry)
        elif _is_useless(error):
            await self._discard(entry, error)

    async def _remove(self, entry: Entry) -> None:
        """Unregister a model, and remove what was unpacked for it; not if it is being loaded again meanwhile.

        The index goes on telling that a repository's was unloaded.
        """
        await self._discard(entry)
        entry.source = origin(entry.source)
        if entry.unloaded:
            self.registry.disable(entry.name)
            self._by_name.discard(entry.name)
        in_repository = isinstance(entry.source, InRepository | S3Model)
        if not in_repository or not self.origins.offers(entry.name):
            self.registry.forget(entry)

    async def _discard(self, entry: Entry, error: MmeError | None = None) -> None:
        """Remove what was unpacked for a model that is not in memory, with an error the last alone; loads wait."""
        source = origin(entry.source)
        if not isinstance(source, Archived) or entry.busy or self.cache.entries.get(entry.name) is not entry:
            return
        artifacts, name = source.artifacts, source.name
        remove = functools.partial(artifacts.quarantine, error=error) if error else artifacts.discard
        entry.removal = asyncio.get_running_loop().run_in_executor(self.unloads, remove, name)
        try:
            await asyncio.shield(entry.removal)
        finally:
            entry.removal = None


def _refuse_too_soon(entry: Entry) -> None:
    """Tell what its last loads failed of, if that was a moment ago: see `serve/cache/load.py`."""
    failure = entry.failure
    if failure is None or entry.residency is not None or entry.load is not None:
        return
    left = failure.until - time.monotonic()
    if left > 0:
        entry.stats.misses += 1
        again = f"it is loaded again in {math.ceil(left)} s, or by whoever loads it by name"
        error = MmeError(failure.kind, f"{failure.message.rstrip()}; {again}")
        error.version, error.logged = failure.version, True
        raise error


def _is_useless(error: MmeError) -> bool:
    return error.kind in _USELESS and not isinstance(error, ElsewhereError)


def _is_unknown(entry: Entry, error: MmeError) -> bool:
    """Whether a name means no model, or was never seen to: clients may name any, while the store can't be asked."""
    if error.parts:  # it is a step that is unknown
        return False
    if isinstance(error, UntoldError):
        return not entry.registered and not entry.stats.loads
    return error.kind is Kind.UNKNOWN_MODEL


class _Reload:
    """Loads by name that follow from one another."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # what is reloaded already, or about to be
        self.loaded: list[str] = []  # what came or changed


class WaitGraph:
    """Which model waits for the load of which other, so that no two loads wait for each other.

    A model's code may have others loaded and unloaded, while it executes and while it is loaded itself. Chains of
    models wait: each for the next, the last for the load of another, or for its end.
    """

    def __init__(self) -> None:
        self._chains: dict[str, list[tuple[str, ...]]] = {}  # by what their last one waits for

    def __repr__(self) -> str:
        return f"<WaitGraph {self._chains}>"

    @contextmanager
    def waiting(self, chain: tuple[str, ...], name: str) -> Iterator[None]:
        self._chains.setdefault(name, []).append(chain)
        try:
            yield
        finally:
            chains = self._chains[name]
            chains.remove(chain)
            if not chains:
                del self._chains[name]

    def behind(self, name: str) -> tuple[str, ...]:
        """The models that wait for the load of a model, or for one that does; the outermost first."""
        found = [name]
        for each in found:  # which grows meanwhile
            links = dict.fromkeys(link for chain in self._chains.get(each, ()) for link in reversed(chain))
            found += [link for link in links if link not in found]
        return tuple(reversed(found[1:]))
