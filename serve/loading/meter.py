"""What executions take of the serving process and of GPUs: measured now and then, counted, and given back.

A model is measured when it is loaded. What its executions take later, in arenas, heaps and libraries, no framework
tells; but the process as a whole can be measured. What it takes beyond all that is known (see `Meter`) is growth:
`serve/cache/growth.py` says when it counts and which models are charged. Others leave then, or loads are refused.

The process is looked at every ten seconds while anything executes, and at most once a second after a batch with more
input bytes than any before of its model. Nothing here is on the way of a request. On the event loop; what takes time
is done on a thread, of the usual priority: while it shrinks an arena or a heap, it has locks that executions want.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

from model_handlers.base import Footprint, total
from model_handlers.system import devices, memory
from serve.cache.growth import Growth
from serve.loading.measuring import taken
from serve.maintenance import Maintenance

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from serve.cache.model_cache import ModelCache
    from serve.loading.loader import Target

_SECONDS = 10.0
_SOON_SECONDS = 1.0
_OWN = 32 << 20  # bytes that the server itself may grow by, with what it knows of clients and the heap's free pages
_NOTABLE = 1 << 20  # bytes that make a difference


class _Executing:
    """A target in memory of which the meter has to know what it executes.

    Attributes:
        target: it.
        inputs: bytes of what it executed since the look before the last one.
        idle: whether it executed nothing since the last look.
        owes: whether it has executed since it was last asked to give back.
        kinds: the handlers that execute it in this process.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.kinds = {type(each) for model in target.models() if not model.handlers.apart for each in model.handlers}
        self.inputs = 0
        self.idle = True
        self.owes = False
        self._last = 0
        self._total = 0
        self._parts = list(target.parts())
        self._models = list(target.models())
        self._footprints = [part.footprint for part in self._parts]
        self._known = target.known()

    def known(self) -> Footprint:
        """See `Target`; worked out again where a footprint is another one by now, which few are between two looks."""
        footprints = [part.footprint for part in self._parts]
        if not all(map(operator.is_, footprints, self._footprints)):
            self._footprints, self._known = footprints, self.target.known()
        return self._known

    def advance(self) -> None:
        """Another look."""
        total = sum([model.executed.bytes for model in self._models])
        last, self._last, self._total = self._last, total - self._total, total
        self.inputs = last + self._last
        self.idle = not self._last
        self.owes |= not self.idle


class Meter:
    """Counts what executions take.

    Known are what the process took before there were models, what their frameworks took when they were imported, what
    models took when they were loaded, what loads under way have reserved, requests and responses on the way, and cached
    responses. Of GPUs it is what was taken at the start, and what models took.

    Args:
        cache: the models in memory.
        loop: the event loop.
        passing: bytes of the process that are no model's, and come and go: those of frameworks, requests, responses.
        counted: told of targets whose growth has changed.
    """

    def __init__(
        self,
        cache: ModelCache,
        loop: asyncio.AbstractEventLoop,
        passing: Callable[[], int],
        counted: Callable[[Target], None],
    ) -> None:
        self._cache = cache
        self._loop = loop
        self.maintenance = Maintenance("meter", loop, self._look, self._rests)
        self._passing = passing
        self._counted = counted
        memory.trim()
        self._before = taken()
        self._host: Growth[Target] = Growth()
        self._gpus: list[Growth[Target]] = [Growth() for _ in range(max(devices.gpu_uuids(), default=-1) + 1)]
        self._growths = [self._host, *self._gpus]
        self._charged: set[Target] = set()
        self._executing: list[_Executing] = []
        self._looked_at = 0.0
        self._soon = False

    def __repr__(self) -> str:
        return f"<Meter of {len(self._executing)} models, {self._host.counted} bytes grown>"

    def watch(self, target: Target) -> None:
        """A target begins to serve."""
        if not self.maintenance.closed and (target.executes_here or target.takes().devices):
            self._executing.append(_Executing(target))
            self.maintenance.look_in(_SECONDS)

    def larger(self) -> None:
        """A model has executed more input bytes at a time than before: look soon, if it was not done just now."""
        self._soon = True
        if self.maintenance.waits:
            since = self._loop.time() - self._looked_at
            self.maintenance.look_in(max(_SOON_SECONDS - since, 0.0))

    async def close(self) -> None:
        """Look no more; what was counted counts no longer."""
        await self.maintenance.close()
        self._cache.room.grown = Footprint()

    def _rests(self) -> float | None:
        if not self._executing and not any(growth.counted for growth in self._growths):
            return None
        soon = self._soon or any(growth.pending for growth in self._growths)
        return _SOON_SECONDS if soon else _SECONDS

    async def _look(self) -> None:
        self._soon = False
        self._looked_at = self._loop.time()
        for each in self._executing:
            each.advance()
        looked_at = self._executing  # those that have left, too: what they share with others may have to be given back
        self._executing = [each for each in looked_at if not each.target.closed]
        known, room = self._known(), self._cache.room
        counted = known + Footprint(self._host.counted)
        most = counted + (room.budget - room.used()).beyond(Footprint())
        look = functools.partial(_measured, looked_at, counted.host, most.host)
        found = await self.maintenance.aside(look)
        if self.maintenance.closed:
            return
        beyond = found.beyond(known.most(self._known()))  # models may have come and gone meanwhile
        self._host.look(beyond.host, self._inputs(lambda target: target.executes_here))
        for number, growth in enumerate(self._gpus):
            size = beyond.devices[number] if number < len(beyond.devices) else 0
            growth.look(size, self._inputs(functools.partial(_is_on, number)))
        self._charge()

    def _known(self) -> Footprint:
        """What the process and the GPUs are known to take, without growth."""
        known = self._before + self._cache.room.reserved + Footprint(_OWN + self._passing())
        return total([each.known() for each in self._executing], known)

    def _inputs(self, may_be_charged: Callable[[Target], bool]) -> dict[Target, int]:
        """Bytes of the recent inputs, of those that may have grown a memory by them."""
        return {each.target: each.inputs for each in self._executing if each.inputs and may_be_charged(each.target)}

    def _charge(self) -> None:
        """Have the cache count what was found, and others leave for it where the budget is passed."""
        room = self._cache.room
        for growth in self._growths:
            growth.keep(lambda target: not target.closed)
        found = {target for growth in self._growths for target in growth.charged}
        for target in found | self._charged:
            grown = Footprint(
                self._host.charged.get(target, 0), tuple(growth.charged.get(target, 0) for growth in self._gpus)
            )
            if grown != target.grown and self._cache.serves(target.name, target):
                target.grown = grown
                self._cache.remeasured(self._cache.entries[target.name], target.takes())
                self._counted(target)
        self._charged = found
        room.grown = Footprint(self._host.uncharged, tuple(growth.uncharged for growth in self._gpus))
        if any(growth.counted for growth in self._growths):
            most = max(found, key=lambda target: target.grown.host + target.grown.device, default=None)
            room.regain(most.name if most is not None else "")


def _is_on(gpu: int, target: Target) -> bool:
    on = target.known().devices
    return gpu < len(on) and on[gpu] > 0


def _measured(executing: Sequence[_Executing], counted: int, most: int) -> Footprint:
    """What is taken, once what idle models need no more was given back. On a thread.

    Where that is more than there is to be, models that are not idle give back what they could do without.

    Args:
        executing: the models.
        counted: bytes of the host that are known, or count already.
        most: bytes of it that may be taken.
    """
    found = taken()
    if found.host <= counted - _NOTABLE:
        return found
    resting = [each for each in executing if each.owes and (each.idle or each.target.closed or found.host > most)]
    if found.host <= counted + _NOTABLE and not resting:
        return found
    for each in resting:
        for model in each.target.models():
            if not model.handlers.apart:
                model.handlers.give_back(idle=True)
        each.owes = False
    for handler in {kind for each in resting for kind in each.kinds}:
        handler.trim()
    memory.trim()
    return taken()
