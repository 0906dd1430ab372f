"""Which models are worth more memory: mapped first, packed while they are hot. On the event loop only.

A target that begins to serve from a form is watched until it leaves memory. What was written for it is kept, and
refined, in the background; then it is loaded once more from the refined form and its instances go over to that. Once a
second the heat of every target is taken: the time that its executions took, halved with every tick. One that keeps a
twentieth of a core busy is hot, at once if it comes suddenly: by then it has paid a good part of what packing costs. A
hot model that would be quicker packed is packed, if its memory is free and no load waits for it; nothing is evicted for
that. When memory gets short, packed models that went cold are mapped again.

Changing over costs requests nothing: the new session is made on a thread of low priority while the old one serves, the
instances change over between two batches, and the old one is closed when the executions that it had begun have ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from model_handlers.base import Footprint
from model_handlers.errors import MmeError
from model_handlers.system import memory
from model_handlers.system.threads import within
from serve.cache.room import megabytes
from serve.model.model import Model
from serve.options import Weights
from serve.threads import ThreadPool
from serve.weights.forms import Tier
from serve.weights.refining import Refiner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Executor

    from model_handlers.base import Handler
    from model_handlers.executor import RetiredHandlers
    from model_handlers.system.threads import ThreadBudget
    from serve.cache.model_cache import ModelCache
    from serve.loading.loader import Target
    from serve.loading.measuring import Scales
    from serve.weights.forms import TargetForms
    from serve.weights.store import WeightStore


HOT_SECONDS = 0.1
_COLD_SECONDS = 0.001


class Heat:
    """The heat of one model, in seconds. What its executions took until now leaves it cold."""

    def __init__(self, busy_seconds: float) -> None:
        self._busy = busy_seconds
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"<Heat {self.seconds:.3f} s>"

    def tick(self, busy_seconds: float | None) -> None:
        """Another second went by; its executions took so long until now. None: there were no more."""
        self.seconds /= 2
        if busy_seconds is not None:
            self.seconds += busy_seconds - self._busy
            self._busy = busy_seconds

    @property
    def is_hot(self) -> bool:
        return self.seconds >= HOT_SECONDS

    @property
    def is_cold(self) -> bool:
        return self.seconds < _COLD_SECONDS


R = TypeVar("R")

_log = logging.getLogger("mme.weights")
_TICK_SECONDS = 1.0
_SWEEP_TICKS = 60
_SHORT = 0.9  # share of the budget from which on memory is short


class _Watched:
    """A part of a target, itself or a member, that serves from forms."""

    def __init__(self, root: Target, target: Target, forms: TargetForms) -> None:
        self.root = root  # the target that is in memory
        self.target = target  # the part
        self.forms = forms
        self.heat = Heat(_busy_seconds(target))  # of all its versions together
        self.settled = False  # whether its forms are as good as they get
        self.told = False  # whether the log says that there is no memory to pack it
        self._executions = 0

    def take_heat(self) -> None:
        executions = sum(model.stats.execution_count for model in self.target.versions.values())
        busy = None if executions == self._executions else _busy_seconds(self.target)
        self._executions = executions
        self.heat.tick(busy)

    @property
    def should_be_packed(self) -> bool:
        return self._changes(Tier.MAPPED) and self.heat.is_hot and self.forms.worth_packing

    @property
    def could_be_mapped(self) -> bool:
        """Whether it takes memory that it has no use for now."""
        return self._changes(Tier.PACKED) and self.heat.is_cold and not self.forms.far_slower

    def _changes(self, tier: Tier) -> bool:
        return self.settled and self.forms.weights is Weights.AUTO and self.forms.tier is tier


class Tiering:
    """Watches over the forms of all targets in memory. Every thread that it starts calls `lower_priority` first."""

    def __init__(
        self,
        store: WeightStore,
        cache: ModelCache,
        scales: Scales,
        threads: ThreadBudget | None,
        loop: asyncio.AbstractEventLoop,
        lower_priority: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._cache = cache
        self._scales = scales
        self._threads = threads
        self._refiner = Refiner(store)
        # Two threads: packing must not wait for a disk, or for a large model that is refined.
        self._changing = ThreadPool("weights", lower_priority, most=1, keeps_one=True)
        self._refining = ThreadPool("refine", lower_priority, most=1, keeps_one=True)
        self._watched: list[_Watched] = []
        self._changes = 0  # under way
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Tiering of {len(self._watched)} models>"

    def watch(self, target: Target) -> None:
        for part in target.parts():
            if part.forms is not None and not self._closed:
                watched = _Watched(target, part, part.forms)
                self._watched.append(watched)
                self._begin(self._settle(watched))
        if self._watched and self._timer is None:
            self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)

    async def close(self) -> None:
        self._closed = True
        self._refiner.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._changing.shutdown(wait=True)
        self._refining.shutdown(wait=True)
        self._refiner.end()

    # -- once a second -------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        self._watched = [watched for watched in self._watched if self._serves(watched)]
        for watched in self._watched:
            watched.take_heat()
        if self._ticks % _SWEEP_TICKS == 0:
            self._begin(self._aside(self._refining, self._store.sweep))
        if self._refiner.idle:
            self._begin(self._aside(self._refining, self._refiner.rest))
        self._ticks += 1
        if not self._changes:
            self._choose()

    def _choose(self) -> None:
        """Change one target over, if any should be."""
        hottest = max(
            (watched for watched in self._watched if watched.should_be_packed),
            key=lambda watched: watched.heat.seconds,
            default=None,
        )
        if hottest is not None:
            self._begin(self._pack(hottest))
        elif not self._cache.room.used().fits(self._cache.room.budget.scaled(_SHORT)):
            cold = next((watched for watched in self._watched if watched.could_be_mapped), None)
            if cold is not None:
                self._begin(self._turn(cold, Tier.MAPPED))

    async def _pack(self, watched: _Watched) -> None:
        """Pack a target if its memory is free; until it is done, the mapped one is there as well."""
        need = Footprint(watched.forms.expected(Tier.PACKED).host)
        if not self._cache.room.spare(need):
            if not watched.told:
                _log.debug("not packed, %s are not free", megabytes(need), extra={"target_model": watched.target.name})
            watched.told = True
            return
        watched.told = False
        try:
            await self._turn(watched, Tier.PACKED)
        finally:
            self._cache.room.give_back(need)
            self._cache.room.settle()

    # -- one target ----------------------------------------------------------------------------------------------

    async def _settle(self, watched: _Watched) -> None:
        """Keep what was written for it, and go over to what can be made of it."""
        forms = watched.forms
        await self._aside(self._refining, forms.keep)
        if not self._serves(watched):
            return
        if not forms.refined:
            if not await self._aside(self._refining, forms.refine, self._refiner):
                if self._serves(watched):  # else its next load knows
                    entry = self._cache.entries[watched.root.name]
                    await self._cache.reload(entry, entry.source, force=True)
                return
            await self._turn(watched, forms.tier)
        watched.settled = True

    async def _turn(self, watched: _Watched, tier: Tier) -> None:
        """Have a target's instances execute in another tier, or from better forms."""
        target, forms = watched.target, watched.forms
        before = forms.tier

        def turned() -> dict[int, Handler]:
            with within(self._threads):
                return forms.turned(tier)

        self._changes += 1
        try:
            loaded = await self._aside(self._changing, self._scales.weigh, turned)
            handlers: dict[int, Handler] = loaded[0]
            if not self._serves(watched):
                await self._aside(self._changing, _close_all, list(handlers.values()))
                return
            models = [(target.versions[version], handler) for version, handler in handlers.items()]
            retired = [model.executors.swap(handler) for model, handler in models if isinstance(model, Model)]
            forms.tier = tier
            await self._aside(self._changing, _close_all, retired)
        except MmeError:
            watched.settled = False  # once is enough
            raise
        finally:
            self._changes -= 1
        if self._serves(watched):
            target.footprint = forms.weighed(loaded[1])
            self._cache.remeasured(self._cache.entries[watched.root.name], watched.root.takes())
            level, own = logging.DEBUG if tier is before else logging.INFO, megabytes(target.footprint)
            _log.log(level, "now %s, %s of its own", tier.value, own, extra={"target_model": target.name})

    def _serves(self, watched: _Watched) -> bool:
        return not self._closed and self._cache.ready.serves(watched.root)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name="weights")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MmeError):
            _log.debug("left as it is: %s", error)
        elif error is not None:
            _log.error("weights are left as they are", exc_info=error)

    async def _aside(self, pool: Executor, function: Callable[..., R], *args: Any) -> R:
        return await self._loop.run_in_executor(pool, function, *args)


def _busy_seconds(target: Target) -> float:
    return (
        sum(batches.compute_infer.ns for model in target.versions.values() for batches in model.stats.batches.values())
        / 1e9
    )


def _close_all(closing: Sequence[Handler | RetiredHandlers]) -> None:
    for one in closing:
        one.close()
    memory.trim()
