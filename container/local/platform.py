"""SageMaker's part on an instance of a multi-model endpoint, towards any container that speaks its contract.

A request for a model that is not there has it downloaded, unpacked to a folder such as /opt/ml/models/<hash>/model and
loaded by `POST /models`, once for all who wait; a request waits a minute and is told then that the model is not ready,
while the load goes on for up to six. A 507 of the container, at a load or an invocation, unloads the model that was
used longest ago and tries again, until nobody is left to leave. What was unloaded stays on disk.

Threads of the front come in by `invoke`; loads run on a pool. One lock guards who is here, and nobody holds it while
he waits.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from container.local.faults import RuntimeApiError, model_error, not_ready, timed_out
from container.local.residency import Resident, State, least_used, may_give_way
from container.local.upstream import TARGET_MODEL, Answer, SilentError
from model_handlers.errors import Kind, MmeError
from serve.sources.archive import extract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from container.local.upstream import Container
    from serve.sources.store import Store

_LOADS_AT_ONCE = 8
_LOOK_SECONDS = 10.0
_WHY_NOT = (
    "Please ensure that there is an object located at the URL and that the role passed to CreateModel has permissions "
    "to download the model."
)


@dataclass(frozen=True, slots=True)
class Limits:
    """SageMaker's patience, in seconds."""

    invocation: float = 60.0
    load: float = 360.0
    unload: float = 360.0
    stream: float = 480.0


@dataclass(eq=False)
class _Entry:
    """A model with its load, and what is set when it is no more."""

    resident: Resident
    ready: Future[None] = field(default_factory=Future)
    gone: threading.Event = field(default_factory=threading.Event)


@dataclass
class Platform:
    """One instance.

    Attributes:
        endpoint: its name, for errors.
        store: where the archives are.
        models: the folder that archives are unpacked in.
        mounted: what the container calls that folder.
        container: that serves them.
        limits: how long each thing may take.
        tell: called with a sentence when a model comes or goes.
        keep: whether models stay that were used, as with SageMaker's ModelCacheSetting; else each leaves, from the disk
            too, when nobody waits for it.
    """

    endpoint: str
    store: Store
    models: Path
    mounted: str
    container: Container
    limits: Limits = field(default_factory=Limits)
    tell: Callable[[str], None] = lambda _sentence: None
    keep: bool = True

    def __post_init__(self) -> None:
        self._lock = threading.Condition()  # notified when somebody became idle, came or went
        self._here: dict[str, _Entry] = {}  # by target
        self._loads = ThreadPoolExecutor(_LOADS_AT_ONCE, "load")

    def close(self) -> None:
        """Wait for loads that run."""
        self._loads.shutdown(cancel_futures=True)

    def resident(self) -> list[str]:
        """The target models that are loaded, the one that was used last first."""
        with self._lock:
            loaded = [each for each in self._residents() if each.state is State.LOADED]
        return [each.target for each in sorted(loaded, key=lambda each: -each.last_used)]

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str], patience: float) -> Answer:
        """The container's answer, once the model is there.

        Raises:
            RuntimeApiError: what SageMaker would say instead.
        """
        began = time.monotonic()
        deadline = began + patience
        may_be_lost, waited = True, False
        while True:
            waited |= not self._is_loaded(target)
            with self._leased(target, deadline) as resident:
                ready = time.monotonic()
                answer = self._asked(resident, body, headers, deadline)
                if answer.status == 507 and self._unload_one(resident, deadline):
                    continue
            if not (may_be_lost and answer.status == 404 and self._lost(resident)):
                return _timed(answer, (ready - began) * 1000 if waited else None)
            may_be_lost = False

    def _is_loaded(self, target: str) -> bool:
        with self._lock:
            entry = self._here.get(target)
            return entry is not None and entry.resident.state is State.LOADED

    def _asked(self, resident: Resident, body: bytes, headers: Mapping[str, str], deadline: float) -> Answer:
        path = f"/models/{quote(resident.name)}/invoke"
        try:
            sent = {**headers, TARGET_MODEL: resident.target}
            return self.container.ask("POST", path, body, sent, deadline - time.monotonic())
        except SilentError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise timed_out(self.endpoint) from error
            raise model_error(502, str(error), self.endpoint) from error

    @contextmanager
    def _leased(self, target: str, deadline: float) -> Iterator[Resident]:
        """The model, loaded, which is not unloaded meanwhile."""
        while True:
            entry = self._begun(target)
            with self._using(entry) as resident:
                wait([entry.ready], max(deadline - time.monotonic(), 0.0))
                if not entry.ready.done():
                    raise not_ready(target)
                entry.ready.result()
                if resident.state is State.LOADED:  # else the container has lost it since
                    yield resident
                    return

    @contextmanager
    def _using(self, entry: _Entry) -> Iterator[Resident]:
        """End a request's use of a model, which `_begun` has counted, behind what is done with it."""
        resident = entry.resident
        try:
            yield resident
        finally:
            with self._lock:
                resident.in_flight -= 1
                resident.last_used = time.monotonic()
                leaves = not self.keep and not resident.in_flight and resident.state is State.LOADED
                if leaves:
                    resident.state = State.LEAVING
                self._lock.notify_all()
            if leaves:
                self._loads.submit(self._unload, entry)

    def _begun(self, target: str) -> _Entry:
        """The model and its load, which begins now unless it has begun; with one more request that uses it."""
        with self._lock:
            known = self._here.get(target)
            if known is None or known.resident.state is State.LEAVING:
                entry = _Entry(Resident(hashlib.sha256(target.encode()).hexdigest()[:32], target))
                entry.ready = self._loads.submit(self._load, entry, known)
                self._here[target] = known = entry
            known.resident.in_flight += 1
            return known

    def _residents(self) -> list[Resident]:
        return [entry.resident for entry in self._here.values()]

    def _load(self, entry: _Entry, before: _Entry | None) -> None:
        """Download, unpack, LOAD; behind the UNLOAD of the same model where one runs.

        Raises:
            RuntimeApiError: what SageMaker would say.
        """
        began, resident = time.monotonic(), entry.resident
        try:
            if before is not None:
                before.gone.wait(self.limits.unload)
            self._fetch(resident)
            fetched = time.monotonic()
            with self._lock:
                resident.state = State.LOADING
            self._load_fetched(resident, began + self.limits.load)
        except BaseException:
            self._drop(entry)
            raise
        with self._lock:
            resident.state, resident.last_used = State.LOADED, time.monotonic()
            self._lock.notify_all()
        took = time.monotonic()
        self.tell(f"loaded {resident.target}: download {fetched - began:.2f} s, load {took - fetched:.2f} s")

    def _fetch(self, resident: Resident) -> None:
        directory = self.models / resident.name / "model"
        if directory.exists():
            return
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            extract(self.store.open(self.store.stat(resident.target)), directory, name=resident.target)
        except MmeError as error:
            if error.kind in {Kind.UNKNOWN_MODEL, Kind.UNAVAILABLE, Kind.INVALID_ARGUMENT}:
                why = (
                    f"Failed to download model data ({self.store.uri}, {resident.target}): {error.message}. {_WHY_NOT}"
                )
                raise RuntimeApiError("ValidationError", why) from error
            raise RuntimeApiError("ValidationError", f"Failed to extract model data: {error.message}") from error

    def _load_fetched(self, resident: Resident, deadline: float) -> None:
        url = f"{self.mounted}/{resident.name}/model"
        while True:
            try:
                answer = self.container.load(resident.name, url, resident.target, deadline - time.monotonic())
            except SilentError as error:
                raise model_error(0, str(error), self.endpoint) from error
            if answer.status in {200, 409}:
                return
            if answer.status != 507 or not self._unload_one(resident, deadline):
                raise model_error(answer.status, answer.body.decode("utf-8", "replace"), self.endpoint)

    def _unload_one(self, spare: Resident, deadline: float) -> bool:
        """Have the container unload the least used model; whether one has left."""
        entry = self._victim(spare, deadline)
        if entry is None:
            return False
        self._unload(entry)
        self.tell(f"unloaded {entry.resident.target}: the container had no memory for {spare.target} (507)")
        return True

    def _victim(self, spare: Resident, deadline: float) -> _Entry | None:
        """Who leaves for `spare`, once somebody is idle; None where nobody will be."""
        with self._lock:
            spare.wants_room = True
            try:
                while (victim := least_used(self._residents(), spare)) is None:
                    left = deadline - time.monotonic()
                    if left <= 0 or not may_give_way(self._residents(), spare):
                        return None
                    self._lock.wait(left)
            finally:
                spare.wants_room = False
            victim.state = State.LEAVING
            return self._here[victim.target]

    def _unload(self, entry: _Entry) -> None:
        """Have the container unload a model, which may be loaded again when this is over."""
        try:
            self.container.unload(entry.resident.name, entry.resident.target, self.limits.unload)
        except SilentError as error:
            raise model_error(0, str(error), self.endpoint) from error
        finally:
            if not self.keep:
                shutil.rmtree(self.models / entry.resident.name, ignore_errors=True)
            self._drop(entry)

    def _lost(self, resident: Resident) -> bool:
        """Whether the container has lost a model that it had loaded, as after a restart; it is none of ours then."""
        try:
            path = f"/models/{quote(resident.name)}"
            status = self.container.ask("GET", path, b"", {TARGET_MODEL: resident.target}, _LOOK_SECONDS).status
        except SilentError:
            return False
        if status != 404:
            return False
        with self._lock:
            entry = self._here.get(resident.target)
        if entry is not None and entry.resident is resident:
            self._drop(entry)
            self.tell(f"loading {resident.target} again: the container has lost it")
        return True

    def _drop(self, entry: _Entry) -> None:
        with self._lock:
            entry.resident.state = State.LEAVING
            if self._here.get(entry.resident.target) is entry:
                del self._here[entry.resident.target]
            self._lock.notify_all()
        entry.gone.set()


def _timed(answer: Answer, waited: float | None) -> Answer:
    """The answer with the news whether its model was in memory, unless the container tells; milliseconds if it was not.

    SageMaker tells nobody but CloudWatch; on a laptop that is what one wants to see.
    """
    if "server-timing" in answer.headers:
        return answer
    timing = "cache;desc=hit" if waited is None else f"cache;desc=miss, load;dur={waited:.1f}"
    return replace(answer, headers={**answer.headers, "server-timing": timing})
