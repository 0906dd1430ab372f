"""The models of an ensemble's steps: loaded for it, and leased for its requests all at once. On the event loop only.

No request waits for memory that another one holds: what is missing is loaded while it holds no lease, all leases are
taken in one turn of the loop, and it begins again if a model has left meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from model_handlers.base import Footprint
from model_handlers.errors import MmeError, invalid_model, out_of_memory
from serve.cache.entry import Entry
from serve.model.ensemble_plan import blaming, check_circle, not_available
from serve.request import LoadReport
from serve.statistics import TargetStats

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from serve.cache.entry import JointLease, Residency
    from serve.cache.model_cache import ModelCache
    from serve.load_api import WaitGraph
    from serve.loading.loader import Target
    from serve.registry import Registry

T = TypeVar("T")

_ATTEMPTS = 5  # of a request to have all models of an ensemble at once, once it is alone with that


@dataclass(eq=False, repr=False)
class StepLoads:
    """Loads and leases of ensembles' models."""

    cache: ModelCache
    registry: Registry
    waits: WaitGraph  # which models wait for the load of which
    # leases an entry, loading it first if need be
    load: Callable[[str, Entry], Coroutine[Any, Any, tuple[Residency, LoadReport]]]
    # reloads the model of a step for an ensemble that is loaded by name
    reload: Callable[[str, str], Coroutine[Any, Any, None]]
    # of requests whose models did not stay in memory together
    line: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __repr__(self) -> str:
        return f"<StepLoads of {self.cache!r}>"

    async def acquire(
        self, name: str, version: int | None, report: LoadReport
    ) -> tuple[Residency | JointLease, LoadReport]:
        """Lease an ensemble and all its models in one turn of the loop; what is missing is loaded without any lease.

        A request whose models left again meanwhile begins again, one such request at a time: else two of them would put
        out each other's for ever. One for which a model waits, which holds memory itself, keeps out of that line.
        """
        lease, report = await self._try_joint(name, version, report)
        if lease is None:
            async with contextlib.nullcontext() if self.waits.behind(name) else self.line:
                for _ in range(_ATTEMPTS):
                    lease, report = await self._try_joint(name, version, report)
                    if lease is not None:
                        break
        if lease is None:
            raise out_of_memory(
                f"the models of ensemble '{name}' did not stay in memory together, since others took their places: "
                "raise MME_MEMORY_BUDGET, or try again"
            )
        return lease, report

    async def _try_joint(
        self, name: str, version: int | None, report: LoadReport
    ) -> tuple[Residency | JointLease | None, LoadReport]:
        ready = self.cache.ready
        lease = ready.lease(name)
        tried: set[str] = set()
        while lease is None:
            there, away = ready.parts(name)
            if tried.issuperset(away):
                break
            tried.update(away)  # what was loaded may have left again; those of an ensemble in it are known only then
            if name in away:
                found, more = await self.load(name, self.registry.entry(name, version))
                found.uncount(missed=bool(more.load))
                found.release()
            else:
                await self._check_together(name, self.cache.entries[name].steps)
                with self.cache.residents.wanting([*there, *away]):
                    _, more = await self._load_all(name, away)
            report = report.then(more)
            lease = ready.lease(name)
        return lease, report

    async def bring(self, name: str, steps: tuple[str, ...]) -> Mapping[str, Target]:
        """Have the models of an ensemble's steps loaded, for its own load: those that are not there.

        Where the ensemble is loaded by name, steps that changed are reloaded, except those that a client loaded
        with a configuration or files of its own.

        Raises:
            MmeError: OUT_OF_MEMORY if they can't be in memory together; INVALID_MODEL for a circle, for models that are
                nowhere, or that do not load.
        """
        names = list(dict.fromkeys(steps))
        try:
            self._check_there(name, names)
            await self._check_together(name, steps)
            await _all(self.reload(name, each) for each in names)
            targets, _ = await self._load_all(name, names)
            self._check_known_circle(name, names)
        except MmeError as error:
            error.parts = tuple(names)
            raise
        return targets

    def _check_there(self, name: str, steps: Iterable[str]) -> None:
        missing = []
        for step in steps:
            self._check_circle(name, step)
            try:
                self._step(step)
            except MmeError:
                missing.append(step.rpartition("/")[2])
        if missing:
            raise not_available(name, missing)

    def _check_circle(self, whole: str, step: str) -> None:
        """Refuse a step whose model waits for the load of the ensemble."""
        chain = (*self.waits.behind(whole), whole)
        if step in chain:
            circle = " -> ".join((*chain[chain.index(step) :], step))
            raise invalid_model(f"circular dependency between ensembles: {circle}")

    def _check_known_circle(self, whole: str, steps: Sequence[str]) -> None:
        """Refuse steps that consist of the ensemble, though none of them waits for its load: they were in memory."""
        dependents = self.registry.dependents
        known = {part: dependents.parts(part) for step in steps for part in (step, *dependents.all_parts_of(step))}
        check_circle(whole, {**known, whole: steps})

    def _step(self, name: str) -> Entry:
        """The entry of a step's model, or what would be one if it were loaded now; UNKNOWN_MODEL if it is nowhere."""
        entry = self.cache.entries.get(name)
        if entry is not None and entry.registered:
            return entry
        return Entry(name, self.registry.source(name), TargetStats())

    async def _check_together(self, name: str, steps: Iterable[str]) -> None:
        """Refuse models that can't be in memory at the same time: by what is known of them, then by looking again."""
        for exact in (False, True):
            needs: dict[str, Footprint] = {}
            level = list(dict.fromkeys(steps))
            while level:
                found = await asyncio.gather(*(self._need(each, exact=exact) for each in level))
                needs.update(zip(level, (need for need, _ in found), strict=True))
                level = list(dict.fromkeys(step for _, more in found for step in more if step not in needs))
            try:
                self.cache.room.check_together(name, sum(needs.values(), Footprint()).whole(), needs)
            except MmeError:
                if exact:
                    raise
            else:
                return

    async def _need(self, name: str, *, exact: bool) -> tuple[Footprint, tuple[str, ...]]:
        """What a step's model takes by itself, and the served models that it consists of.

        If that need not be `exact`, one that was evicted is what it was.
        """
        try:
            entry = self._step(name)
            if entry.residency is not None:
                own = self.cache.residents.own.get(entry.residency, Footprint())
                return replace(own, shared=self.cache.residents.shared.files(entry.residency)), entry.steps
            if entry.measured is not None and entry.measured != Footprint() and not exact:
                return entry.measured, ()
            return await self.cache.loading.estimate(entry)
        except MmeError:  # as its load says
            return Footprint(), ()

    async def _load_all(self, whole: str, names: Iterable[str]) -> tuple[dict[str, Target], LoadReport]:
        """Have models loaded side by side; they may leave at once."""
        began = time.perf_counter_ns()
        loaded = await _all(self._load_step(whole, name) for name in names)
        took = time.perf_counter_ns() - began
        evicted = tuple(each for _, report in loaded for each in report.evicted)
        download = min(sum(report.download for _, report in loaded), took)
        report = LoadReport(download, took - download, evicted)
        return {target.name: target for target, _ in loaded}, report

    async def _load_step(self, whole: str, name: str) -> tuple[Target, LoadReport]:
        self._check_circle(whole, name)
        with self.waits.waiting((whole,), name), blaming(whole, name.rpartition("/")[2]):
            lease, report = await self.load(name, self.registry.entry(name))
        lease.uncount(missed=bool(report.load))
        lease.release()
        return lease.target, report


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return, or what the first of them that failed raises, when all are over."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return cast("list[T]", done)
