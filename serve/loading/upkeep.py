"""What models in processes of their own take while they serve: given back where it is not needed, and counted.

A model's process, and the memory that it shares with the serving one, grow with what it executes. So those in use are
looked at every few seconds, and once more when they are idle: what no recent batch needed goes back to the system, and
what is left is what the cache counts from then on. A model that has been idle since costs nothing. Nothing here is on
the way of a request: the looking is done on a thread of low priority. On the event loop.

Others leave for a process that grew. Where processes grow so fast that the budget may be passed before the next look,
that comes within a second. Where two looks in a row find the budget passed all the same, the process that grew most
since its load is ended, if growth is what passes it; one batch that executes all the while is no growth yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from serve.threads import Maintenance

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from model_handlers.base import Footprint
    from model_handlers.worker.executor import Worker
    from serve.cache.model_cache import ModelCache
    from serve.loading.loader import Target

_SECONDS = 10.0
_SOON_SECONDS = 1.0  # while the budget is passed, or may be before the next look
_NOTABLE = 1 << 20  # bytes that a model grows by before others leave for it


class _Watched:
    """A target in memory that has processes."""

    def __init__(self, root: Target, parts: Sequence[Target]) -> None:
        self.root = root  # the target
        self.parts = parts  # itself and its members, as far as they live in processes
        # idle: whether it was not used since the last look; rests: whether it was idle then too, and has given back all
        # that it can: its process trims its heap behind one; ousts: whether others may leave for what it grew by: a
        # batch that is executed just then is no reason yet; moves: whether what it takes is more than that of one
        # batch, which executes since the last look
        self.idle = self.rests = self.ousts = self.moves = self._grew = self._trimmed = False
        self._executions = 0
        self._complete = True
        self._last_used = 0.0

    def is_due(self, leases: int, last_used: float) -> bool:
        """Whether there is anything to look at; asked once a look."""
        self.idle = not leases and last_used == self._last_used
        self._last_used = last_used
        return not (self.idle and self.rests)

    def look(self, room: int) -> list[Footprint]:
        """Have it give back what it needs no more; what its parts take then. On any thread.

        If it grew by more than `room` bytes, it gives back all that no batch needs just now: it may need that again,
        but a model that left would have to be loaded again.
        """
        complete = self._give_back(idle=self.idle)
        footprints = self._measured()
        if self._growth(footprints) > max(room, 0) and not self.idle:
            complete = self._give_back(idle=True)
            footprints = self._measured()
        self._grew |= self._growth(footprints) > _NOTABLE
        executions = sum(model.stats.execution_count for part in self.parts for model in part.versions.values())
        self.moves, self._executions = complete or executions != self._executions, executions
        lasts, self._complete = complete or not self._complete, complete
        self.ousts = self._grew and lasts
        self._grew &= not lasts
        self.rests, self._trimmed = self._trimmed and self.idle and complete, self.idle
        return footprints

    def grown(self) -> list[tuple[Worker, Target]]:
        """Processes that took notably more when they were looked at than when they had loaded, and their targets."""
        processes = [
            (handler, part)
            for part in self.parts
            for model in part.versions.values()
            for handler in model.executors.workers
        ]
        return [(process, part) for process, part in processes if process.growth() > _NOTABLE]

    def _give_back(self, *, idle: bool) -> bool:
        given_back = [model.executors.trim(idle=idle) for part in self.parts for model in part.versions.values()]
        return all(given_back)

    def _measured(self) -> list[Footprint]:
        return [replace(part.footprint, host=part.memory().host) for part in self.parts]

    def _growth(self, footprints: Sequence[Footprint]) -> int:
        return sum(now.host - part.footprint.host for now, part in zip(footprints, self.parts, strict=True))


class Upkeep:
    """Looks after all models in memory that have processes of their own; tells `counted` of those looked at."""

    def __init__(
        self,
        cache: ModelCache,
        loop: asyncio.AbstractEventLoop,
        lower_priority: Callable[[], None],
        counted: Callable[[Target], None],
    ) -> None:
        self.maintenance = Maintenance("upkeep", loop, self._look, self._next_delay, lower_priority)
        self._cache = cache
        self._loop = loop
        self._counted = counted
        self._watched: list[_Watched] = []
        self._passed = False  # whether the last look found the budget passed by what processes grew
        self._added = 0  # bytes that the last look found more than the one before
        self._looked_at = loop.time()
        self._nears = False  # whether processes that go on growing as they do pass the budget before the next look

    def __repr__(self) -> str:
        return f"<Upkeep of {len(self._watched)} models>"

    def watch(self, target: Target) -> None:
        """Look after a target of which at least one part has processes, from now on."""
        if self.maintenance.closed:
            return
        if not self._watched:  # nothing was looked at meanwhile
            self._looked_at = self._loop.time()
        self._watched.append(_Watched(target, [part for part in target.parts() if part.apart]))
        self.maintenance.look_in(_SECONDS)

    async def close(self) -> None:
        await self.maintenance.close()

    def _next_delay(self) -> float | None:
        seconds = _SOON_SECONDS if self._passed or self._nears else _SECONDS
        return seconds if self._watched else None

    async def _look(self) -> None:
        looked_at, self._looked_at, self._added = self._looked_at, self._loop.time(), 0
        self._watched = [watched for watched in self._watched if self._serves(watched)]
        due = [watched for watched in self._watched if self._is_due(watched)]
        for watched in due:
            if not self._serves(watched):
                continue
            room = self._cache.room.budget - self._cache.room.used()
            footprints = await self.maintenance.run_in_thread(watched.look, room.host)
            if self._serves(watched):
                self._count(watched, footprints)
        left = (self._cache.room.budget - self._cache.room.used()).host
        seconds = max(self._looked_at - looked_at, _SOON_SECONDS)
        self._nears = self._added > _NOTABLE and self._added * _SECONDS > left * seconds
        if due or self._passed:
            self._keep_budget()

    def _count(self, watched: _Watched, footprints: Sequence[Footprint]) -> None:
        for part, footprint in zip(watched.parts, footprints, strict=True):
            self._added += max(footprint.host - part.footprint.host, 0)
            part.footprint = footprint
        self._cache.remeasured(self._cache.entries[watched.root.name], watched.root.takes())
        self._counted(watched.root)
        if watched.ousts:
            self._cache.room.regain(watched.root.name)

    def _keep_budget(self) -> None:
        """End the process that grew most, if the budget was passed at the look before this one too."""
        passed_before, self._passed = self._passed, False
        passed, budget = self._cache.room.overdrawn(), self._cache.room.budget.host
        watched = [each for each in self._watched if passed and each.moves and self._serves(each)]
        grown = [(*each, target.root) for target in watched for each in target.grown()]
        if not grown or sum(process.growth() for process, _, _ in grown) < passed:  # others pass it
            return
        if passed_before:
            process, part, root = max(grown, key=lambda each: each[0].growth())
            part.footprint = replace(part.footprint, host=part.footprint.host - process.growth())
            process.outgrow(
                f"all models together take {(budget + passed) / 1e6:.1f} MB of a budget of {budget / 1e6:.1f} MB "
                "(MME_MEMORY_BUDGET)"
            )
            self._cache.remeasured(self._cache.entries[root.name], root.takes())
            self._counted(root)
        self._passed = True

    def _is_due(self, watched: _Watched) -> bool:
        entry = self._cache.entries[watched.root.name]
        return watched.is_due(entry.leases, entry.last_used)

    def _serves(self, watched: _Watched) -> bool:
        return not self.maintenance.closed and self._cache.ready.serves(watched.root)
