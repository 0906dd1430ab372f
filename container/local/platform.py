"""SageMaker's part on an instance of a multi-model endpoint, towards any container that speaks its contract.

A request for a model that is not there has it downloaded, unpacked to a folder such as /opt/ml/models/<hash>/model
and loaded by `POST /models`, once for all requests that wait; a request waits a minute and is told then that the
model is not ready, while the load goes on for up to six. A 507 of the container, at a load or an invocation, unloads
the model that was used longest ago and tries again, until none is left to unload. What was unloaded stays on disk.
All of it runs on one event loop; downloads on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from container.local.container import TARGET_MODEL, RuntimeApiError, SilentError, invalid, model_error
from container.ship.client import JSON
from model_handlers.errors import Kind, MmeError
from serve.sources.archive import extract

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
    from pathlib import Path

    from container.local.container import Container
    from container.ship.client import HttpResponse
    from serve.sources.store import Store

_LOADS_AT_ONCE = 8
_LOOK_SECONDS = 10.0
_WHY_NOT = (
    "Please ensure that there is an object located at the URL and that the role passed to CreateModel has permissions "
    "to download the model."
)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """SageMaker's patience, in seconds."""

    invocation: float = 60.0
    load: float = 360.0
    unload: float = 360.0
    stream: float = 480.0


class Stage(Enum):
    """Where a model is on its way."""

    QUEUED = "queued"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Resident:
    """A model of the instance, called `name` (hexadecimal) by the container and `target` by clients."""

    name: str
    target: str
    state: Stage = Stage.QUEUED
    in_flight: int = 0  # requests that it answers now, or that wait for it
    last_used: float = 0.0  # by `time.monotonic()`
    wants_room: bool = False  # waits itself for another one to leave
    gone: asyncio.Event = field(default_factory=asyncio.Event)


def least_used(residents: Iterable[Resident], spare: Resident) -> Resident | None:
    """The model that makes room for `spare`: loaded, without a request, used longest ago. None where there is none."""
    idle = [each for each in residents if each.state is Stage.LOADED and not each.in_flight and each is not spare]
    return min(idle, key=lambda each: each.last_used, default=None)


def may_give_way(residents: Iterable[Resident], spare: Resident) -> bool:
    """Whether it is worth to wait until another model leaves for `spare`: of two that want room, one gives up."""
    return any(
        not each.wants_room and each.state is not Stage.QUEUED  # its load may need the very slot that waits
        for each in residents
        if each is not spare
    )


@dataclass
class Platform:
    """One instance; `report` is told when a model comes or goes."""

    endpoint: str
    store: Store
    models: Path  # where archives are unpacked
    mounted: str  # what the container calls that folder
    container: Container
    limits: Timeouts = field(default_factory=Timeouts)
    report: Callable[[str], None] = lambda _sentence: None
    keep: bool = True  # else each model leaves, from the disk too, when no request waits for it: ModelCacheSetting

    def __post_init__(self) -> None:
        self._here: dict[str, tuple[Resident, asyncio.Task[None]]] = {}  # models and their loads, by target
        self._slots = asyncio.Semaphore(_LOADS_AT_ONCE)
        self._moved = asyncio.Event()  # set, and another one made, when a model became idle, came or went
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Drop loads that have not begun, and wait for those that run."""
        for resident, load in list(self._here.values()):
            if resident.state is Stage.QUEUED:
                load.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def resident(self) -> list[str]:
        """The target models that are loaded, the one that was used last first."""
        loaded = [each for each in self._residents() if each.state is Stage.LOADED]
        return [each.target for each in sorted(loaded, key=lambda each: -each.last_used)]

    async def invoke(self, target: str, body: bytes, headers: Mapping[str, str], patience: float) -> HttpResponse:
        began = time.monotonic()
        deadline = began + patience
        may_be_lost, waited = True, False
        while True:
            waited |= target not in self.resident()
            async with self._leased(target, deadline) as resident:
                ready = time.monotonic()
                answer = await self._asked(resident, body, headers, deadline)
                if answer.status == 507 and await self._unload_one(resident, deadline):
                    continue
            if not (may_be_lost and answer.status == 404 and await self._lost(resident)):
                return _timed(answer, (ready - began) * 1000 if waited else None)
            may_be_lost = False

    async def _asked(
        self, resident: Resident, body: bytes, headers: Mapping[str, str], deadline: float
    ) -> HttpResponse:
        path = f"/models/{resident.name}/invoke"
        try:
            sent = {**headers, TARGET_MODEL: resident.target}
            return await self.container.ask("POST", path, body, sent, deadline - time.monotonic())
        except SilentError as error:
            raise error.of_invocation(self.endpoint) from error

    @asynccontextmanager
    async def _leased(self, target: str, deadline: float) -> AsyncIterator[Resident]:
        """The model, loaded, which is not unloaded meanwhile."""
        while True:
            resident, load = self._begun(target)
            resident.in_flight += 1
            try:
                done, _ = await asyncio.wait([load], timeout=max(deadline - time.monotonic(), 0.0))
                if not done:
                    why = f"Model {target} is still being downloaded or loaded. Retry your request."
                    raise RuntimeApiError("ModelNotReadyException", why)
                load.result()
                if resident.state is Stage.LOADED:  # else the container has lost it since
                    yield resident
                    return
            finally:
                self._release(resident)

    def _release(self, resident: Resident) -> None:
        resident.in_flight -= 1
        resident.last_used = time.monotonic()
        if not self.keep and not resident.in_flight and resident.state is Stage.LOADED:
            resident.state = Stage.LEAVING
            self._spawn(self._unload(resident))
        self._notify()

    def _begun(self, target: str) -> tuple[Resident, asyncio.Task[None]]:
        """The model and its load, which begins now unless it has begun."""
        known = self._here.get(target)
        if known is None or known[0].state is Stage.LEAVING:
            resident = Resident(hashlib.sha256(target.encode()).hexdigest()[:32], target)
            known = self._here[target] = resident, self._spawn(self._load(resident, known and known[0]))
        return known

    async def _load(self, resident: Resident, before: Resident | None) -> None:
        """Download, unpack, LOAD; behind the UNLOAD of the same model where one runs."""
        try:
            async with self._slots:
                began = time.monotonic()
                if before is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(before.gone.wait(), self.limits.unload)
                await asyncio.to_thread(self._fetch, resident)
                fetched = time.monotonic()
                resident.state = Stage.LOADING
                self._notify()
                await self._load_fetched(resident, began + self.limits.load)
        except BaseException:
            self._drop(resident)
            raise
        resident.state, resident.last_used = Stage.LOADED, time.monotonic()
        self._notify()
        took = time.monotonic() - fetched
        self.report(f"loaded {resident.target}: download {fetched - began:.2f} s, load {took:.2f} s")

    def _fetch(self, resident: Resident) -> None:
        directory = self.models / resident.name / "model"
        if directory.exists():
            return
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            extract(self.store.open(self.store.stat(resident.target)), directory, name=resident.target)
        except MmeError as error:
            if error.kind in {Kind.UNKNOWN_MODEL, Kind.UNAVAILABLE, Kind.INVALID_ARGUMENT}:
                place = f"{self.store.uri}, {resident.target}"
                why = f"Failed to download model data ({place}): {error.message}. {_WHY_NOT}"
                raise invalid(why) from error
            raise invalid(f"Failed to extract model data: {error.message}") from error

    async def _load_fetched(self, resident: Resident, deadline: float) -> None:
        model = {"model_name": resident.name, "url": f"{self.mounted}/{resident.name}/model"}
        headers = {"Content-Type": JSON, "Accept": JSON, TARGET_MODEL: resident.target}
        while True:
            try:
                patience = deadline - time.monotonic()
                answer = await self.container.ask("POST", "/models", json.dumps(model).encode(), headers, patience)
            except SilentError as error:
                raise model_error(0, str(error), self.endpoint) from error
            if answer.status in {200, 409}:
                return
            if answer.status != 507 or not await self._unload_one(resident, deadline):
                raise model_error(answer.status, answer.body.decode("utf-8", "replace"), self.endpoint)

    async def _unload_one(self, spare: Resident, deadline: float) -> bool:
        """Have the container unload the least used model; whether one has left."""
        victim = await self._victim(spare, deadline)
        if victim is None:
            return False
        await self._unload(victim)
        self.report(f"unloaded {victim.target}: the container had no memory for {spare.target} (507)")
        return True

    async def _victim(self, spare: Resident, deadline: float) -> Resident | None:
        """The model that leaves for `spare`, once one is idle; None where none will be."""
        spare.wants_room = True
        self._notify()
        try:
            while (victim := least_used(self._residents(), spare)) is None:
                left = deadline - time.monotonic()
                if left <= 0 or not may_give_way(self._residents(), spare):
                    return None
                await asyncio.wait([moved := asyncio.ensure_future(self._moved.wait())], timeout=left)
                moved.cancel()
        finally:
            spare.wants_room = False
        victim.state = Stage.LEAVING
        return victim

    async def _unload(self, resident: Resident) -> None:
        """Have the container unload a model, which may be loaded again when this is over."""
        try:
            path, headers = f"/models/{resident.name}", {TARGET_MODEL: resident.target}
            await self.container.ask("DELETE", path, b"", headers, self.limits.unload)
        except SilentError as error:
            raise model_error(0, str(error), self.endpoint) from error
        finally:
            if not self.keep:
                await asyncio.to_thread(shutil.rmtree, self.models / resident.name, ignore_errors=True)
            self._drop(resident)

    async def _lost(self, resident: Resident) -> bool:
        """Whether the container has lost a model that it had loaded, as after a restart; it is none of ours then."""
        try:
            path = f"/models/{resident.name}"
            answer = await self.container.ask("GET", path, b"", {TARGET_MODEL: resident.target}, _LOOK_SECONDS)
        except SilentError:
            return False
        if answer.status != 404:
            return False
        if resident in self._residents():
            self._drop(resident)
            self.report(f"loading {resident.target} again: the container has lost it")
        return True

    def _drop(self, resident: Resident) -> None:
        resident.state = Stage.LEAVING
        if resident in self._residents():
            del self._here[resident.target]
        resident.gone.set()
        self._notify()

    def _residents(self) -> list[Resident]:
        return [resident for resident, _ in self._here.values()]

    def _notify(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `close` waits for; requests, if any, see its error."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen


def _timed(answer: HttpResponse, waited: float | None) -> HttpResponse:
    """The answer with the news whether its model was in memory, unless the container tells; milliseconds if it was not.

    SageMaker tells CloudWatch alone; on a laptop that is what a person wants to see.
    """
    if "server-timing" in answer.headers:
        return answer
    timing = "cache;desc=hit" if waited is None else f"cache;desc=miss, load;dur={waited:.1f}"
    return replace(answer, headers={**answer.headers, "server-timing": timing})
