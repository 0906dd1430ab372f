"""Settings → a running engine: which models come from where, what is loaded at start, when /ping is healthy.

Lives on the event loop. The HTTP side is handed `routes` and `engine`.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from container.inference.http import InferRoutes
from container.inference.limits import RequestLimit, RequestMemory, by_thread
from container.observe.dashboard import Documents, Watcher
from container.observe.emf import EmfReporter
from container.observe.logs import LogControl
from container.observe.trace_settings import TIMESTAMPS, TraceControl, TraceSettings
from container.observe.tracing import FileTracer
from container.settings import ALL_MODELS, Mode, PingMode, RateLimit, Settings, choose_single_model
from container.settings.parsers import SettingsError, to_text
from container.steps.access import Keys
from container.steps.shared_memory import Regions
from model_handlers.base import Footprint, by_device
from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices, memory
from model_handlers.system.threads import processors
from model_handlers.worker.limits import Deadlines
from model_handlers.worker.memory import SIZES
from model_handlers.worker.policies import BusyPoll
from serve.cache.eviction import Rules
from serve.cache.room import megabytes
from serve.engine import Engine
from serve.options import DEVICE_SHARE, HOST_SHARE, Control, EngineOptions, bytes_of
from serve.sources.layout import is_model, list_models
from serve.sources.polling import Poller
from serve.sources.store import ARCHIVE_SUFFIX, read_credentials
from serve.state_file import began
from serve.threads import UnderWay

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.observe.tracing import Tracing
    from container.process.master import LastWords
    from container.settings import SingleModel
    from serve.options import MemoryBudget


_log = logging.getLogger("mme.service")
# OpenTelemetry's switch for its whole SDK. The library heeds it where it makes spans; here it only sends ours.
_OTEL_DISABLED = "OTEL_SDK_DISABLED"
_TRACES_SECONDS = 0.5  # gunicorn kills us a second after models had their time to end


class Service:
    """Everything behind HTTP, made from settings."""

    def __init__(
        self, settings: Settings, loop: asyncio.AbstractEventLoop, life: str = "", words: LastWords | None = None
    ) -> None:
        self.settings = settings
        self.memory = RequestMemory(request_memory(settings))  # of requests on the way
        self.limit = RequestLimit(settings.request_timeout, loop)
        self.keys = Keys(settings.key_file) if settings.key_file is not None else None
        self._start_models: tuple[str, ...] = settings.load_models
        default_model = settings.default_model_name
        options = replace(engine_options(settings), life=life)
        if words is not None:
            options = replace(options, under_way=UnderWay(words.loads), left_out=words.left_out)
        if settings.mode is Mode.SINGLE:
            model = choose_single_model(settings.model_dir, settings.default_model_name, settings.scripts)
            default_model = model.name
            self._start_models = (default_model,)
            options = _with_single(options, model)
        BusyPoll.longest = settings.busy_poll_microseconds * 1000
        SIZES.smallest, SIZES.growth = settings.shared_memory_bytes, settings.shared_memory_growth_bytes
        Deadlines.usual_execution = settings.request_timeout
        self.unsent: list[Callable[[], int]] = []  # tell how many bytes of answers clients have not taken yet
        self.engine = Engine(options, loop, self._on_the_way)
        self.tracer = _tracer(settings, life)  # None where traces go nowhere
        self.traces = TraceControl(TraceSettings(), sends=False) if self.tracer is None else self.tracer.control
        self.regions = Regions(allowed=settings.allow_client_shm)
        self.cuda_regions = Regions("cuda", allowed=settings.allow_client_shm)
        self.logs = LogControl(settings.log_level, settings.log_format)
        self.routes = InferRoutes(
            self.engine, settings, self.memory, self.regions, default_model, self.tracer, self.limit
        )
        self.routes.starting = settings.ping_mode is PingMode.READY and settings.mode is not Mode.PLATFORM
        self.routes.on_healthy = words.serves if words is not None else None
        self.emf = EmfReporter(self.engine, settings) if settings.emf else None
        self.watcher = Watcher(self.engine) if settings.dashboard else None
        self.dashboard = Documents(self.engine, settings, self.watcher) if self.watcher is not None else None
        self._loading: asyncio.Task[None] | None = None
        self._has_begun = settings.mode is not Mode.REPOSITORY and not settings.model_control_mode.limits
        self._polling: asyncio.Task[None] | None = None
        registered = [name for name, _ in self.engine.index.registered()]
        self._poller = Poller(self.engine, self.engine.origins.scan, settings.poll_seconds, registered)

    def _on_the_way(self) -> int:
        return self.memory.used + sum([tell() for tell in self.unsent])

    def start(self) -> asyncio.Task[None]:
        """Begin to load the start-up models, until the task is over; the server accepts requests meanwhile."""
        budget = self.engine.options.budget
        _log.info("serving in %s mode, memory budget %s", self.settings.mode.value, megabytes(budget))
        if complaint := devices.complaint():
            _log.warning("no GPU is used: NVIDIA's driver says '%s'", complaint)
        loop = asyncio.get_running_loop()
        if self.emf is not None:
            self.emf.start(loop)
        if self.watcher is not None:
            self.watcher.start(loop)
        self._loading = loop.create_task(self._begin())
        return self._loading

    async def _begin(self) -> None:
        await self._load_start_models()
        self._has_begun = True
        if self.settings.mode is Mode.REPOSITORY or (
            self.settings.mode is Mode.STORE and self._start_models != (ALL_MODELS,)
        ):
            await self._look_for_models()

    async def _load_start_models(self) -> None:
        if self.settings.model_control_mode is Control.POLL:
            await self._poll()
            return
        names = self._start_models
        explicit = self.settings.model_control_mode is Control.EXPLICIT
        if names == (ALL_MODELS,) or (self.settings.mode is Mode.REPOSITORY and not names and not explicit):
            names = await self._find_all()
        unloaded = self.engine.registry.unloaded  # from the worker before this one
        names = tuple(name for name in names if self.engine.registry.canonical(name) not in unloaded)
        results = await asyncio.gather(*(self._load(name) for name in names))
        if all(results):
            self.routes.starting = False

    async def _find_all(self) -> tuple[str, ...]:
        while True:
            try:
                return tuple(await by_thread(self.engine.origins.find_all))
            except MmeError as error:
                _log.error("nothing is loaded at start until store or repository can be read: %s", error)
            await asyncio.sleep(self.settings.poll_seconds)

    async def _look_for_models(self) -> None:
        """The log says at the start what else the first client would be told."""
        try:
            if await by_thread(self.engine.origins.is_bare):
                _log.warning("%s", await by_thread(bare_source, self.settings))
        except MmeError as error:
            _log.warning("no model can be loaded for now: %s", error)

    async def _poll(self) -> None:
        self._looked(await self._poller.look())
        self._polling = asyncio.get_running_loop().create_task(self._poller.run(self._looked))

    def _looked(self, all_are_there: bool) -> None:  # noqa: FBT001 - see `Poller.run`
        if all_are_there:
            self.routes.starting = False

    async def _load(self, name: str) -> bool:
        known = self.engine.registry.canonical(name)
        try:
            if self.engine.index.is_overridden(
                known
            ):  # since the worker before: a load would be of its own files again
                async with self.engine.leased(known):
                    return True
            await self.engine.load(known)
        except MmeError as error:
            if error.kind is Kind.ALREADY_EXISTS:  # a request was quicker
                return True
            why = "" if error.logged else f": {error}"
            _log.error("start-up model '%s' did not load%s", name, why, extra={"target_model": name})
            return False
        except Exception:  # noqa: BLE001 - the others are loaded all the same, and the server is ready some time
            _log.exception("start-up model '%s' did not load", name, extra={"target_model": name})
            return False
        return True

    @property
    def ready(self) -> bool:
        """Whether every start-up model is there, where that is waited for, and we are not on our way out.

        Of a repository, and where only models answer that were loaded by name, the loads at start are over, however
        each of them ended: a rollout that waits for this sends its requests to models in memory.
        """
        going = self.routes.draining or self.routes.broken
        return self._has_begun and not going and not self.routes.starting

    async def close(self, *, ends: bool = False) -> None:
        """Give everything back; where the process ends, what would outlive it alone."""
        for task in (self._loading, self._polling):
            if task is not None:
                task.cancel()
        if self.emf is not None:
            self.emf.close()  # before the engine: what unloads because we end is no metric
        if self.watcher is not None:
            self.watcher.close()
        try:
            await self.engine.close(ends=ends)
        except asyncio.CancelledError:  # models are not waited for any longer; a file of traces takes a moment
            await self._close_tracer(_TRACES_SECONDS)
            raise
        await self._close_tracer()  # after the last answer, whose spans are among those that it sends

    async def _close_tracer(self, seconds: float | None = None) -> None:
        if self.tracer is not None:
            await asyncio.wait([asyncio.ensure_future(by_thread(self.tracer.close))], timeout=seconds)


def _tracer(settings: Settings, life: str) -> Tracing | None:
    first = TraceSettings(on=TIMESTAMPS in settings.trace_level, rate=settings.trace_rate, count=settings.trace_count)
    if settings.trace_file is not None:
        first = replace(first, frequency=settings.trace_log_frequency)
        return FileTracer(str(settings.trace_file), first, began(life))
    if not settings.trace_url:
        return None
    if os.environ.get(_OTEL_DISABLED, "").strip().lower() == "true":
        _log.warning("MME_TRACE_URL is without effect: %s is true", _OTEL_DISABLED)
        return None
    from container.observe.otel import Tracer  # noqa: PLC0415 - optional, and 200 ms

    name = settings.endpoint_name
    called = "mme" if name == "unknown" else name
    return Tracer(settings.trace_url, first, called)


def engine_options(settings: Settings) -> EngineOptions:
    repositories = {Mode.SINGLE: settings.model_dir, Mode.REPOSITORY: settings.model_repository}
    return EngineOptions(
        budget=memory_budget(settings),
        cache_directory=settings.cache_dir,
        disk_budget=disk_budget(settings),
        max_archive_files=settings.max_archive_files,
        evicts=settings.mode is not Mode.PLATFORM,
        eviction=Rules(settings.eviction, settings.pins, settings.min_residency),
        store=settings.model_store if settings.mode is Mode.STORE else "",
        buckets=settings.repository_urls if settings.mode is Mode.REPOSITORY else (),
        credentials=read_credentials(settings.cloud_credentials) if settings.cloud_credentials is not None else {},
        repository=repositories.get(settings.mode),
        more_repositories=settings.more_repositories if settings.mode is Mode.REPOSITORY else (),
        namespaces=settings.model_namespacing,
        control=settings.model_control_mode,
        scripts=settings.scripts,
        load_threads=settings.load_threads,
        framework_threads=framework_threads(settings),
        load_patience=settings.load_timeout,
        drain_patience=settings.drain_seconds,
        inline_ns=settings.inline_microseconds * 1000,
        require_gpu=settings.require_gpu,
        batch_guess=settings.batch_guess,
        weights=settings.weights,
        response_cache_bytes=settings.response_cache_bytes,
        latencies=settings.latencies,
        resources={limit.pool: limit.count for limit in settings.rate_limit_resources}
        if settings.rate_limit is RateLimit.EXECUTION_COUNT
        else None,
    )


def _with_single(options: EngineOptions, model: SingleModel) -> EngineOptions:
    """The model stays in memory; and where the whole folder is a script's, what lies in it are no models."""
    rules = replace(options.eviction, pins=(*options.eviction.pins, glob.escape(model.name)))
    if model.folder == options.repository:
        return replace(options, eviction=rules, repository=None, folders={model.name: model.folder})
    return replace(options, eviction=rules)


def bare_source(settings: Settings) -> str:
    """Which store or repository has nothing to serve, and what to do, by what a folder holds instead."""
    if settings.mode is Mode.STORE:
        lacks = f"there is no archive (*.tar.gz) in the store {settings.model_store}"
        folder = None if settings.model_store.startswith("s3://") else Path(settings.model_store)
        if folder is not None and (is_model(folder) or list_models(folder)):
            return f"{lacks}: it holds models that are not packed; --model-repository serves a folder of those"
        return f"{lacks}: check its name, or put archives there"
    lacks = f"there is no model in the repository {', '.join(map(str, settings.repositories))}"
    folders = [each for each in settings.repositories if isinstance(each, Path)]
    if any(is_model(folder) for folder in folders):
        return f"{lacks}, which is a model's own directory: name the folder above it"
    if any(next(folder.glob(f"*{ARCHIVE_SUFFIX}"), None) for folder in folders):
        return f"{lacks}, which holds archives: --model-store serves those"
    return f"{lacks}: check its name, or put directories of models there"


_REQUESTS_PART = 8  # of the memory budget, for requests on the way
_LEAST_FOR_REQUESTS = 256 << 20
_THREADS_EACH = 4  # of frameworks, a processor
_LEAST_THREADS = 64


def memory_budget(settings: Settings) -> Footprint:
    """Bytes for all models together, on the host and on each GPU by its number."""
    host = _bytes("MME_MEMORY_BUDGET", settings.memory_budget, memory.host_memory(), HOST_SHARE)
    each = {
        gpu.index: _bytes("MME_GPU_MEMORY_BUDGET", settings.gpu_memory_budget, gpu.total, DEVICE_SHARE)
        for gpu in devices.gpus()
    }
    return Footprint(host, by_device(each))


def request_memory(settings: Settings) -> int:
    least = 2 * settings.max_body_bytes
    if settings.request_memory is None:
        return max(memory_budget(settings).host // _REQUESTS_PART, _LEAST_FOR_REQUESTS, least)
    if settings.request_memory < least:
        raise SettingsError(
            f"MME_REQUEST_MEMORY={settings.request_memory}: at least {least} bytes, twice the largest body: raise it, "
            "or lower MME_MAX_BODY"
        )
    return settings.request_memory


def framework_threads(settings: Settings) -> int:
    """Threads that frameworks may have in the serving process: by the processors, and by what the system allows."""
    if settings.framework_threads is not None:
        return settings.framework_threads
    usual = max(_THREADS_EACH * processors(), _LEAST_THREADS)
    free = memory.free_tasks()
    return usual if free is None else min(usual, free // 2)


def disk_budget(settings: Settings) -> int | None:
    """Bytes for all unpacked archives, a share being one of the file system; None where nothing is set."""
    if settings.disk_budget is None:
        return None
    there = next(folder for folder in (settings.cache_dir, *settings.cache_dir.parents) if folder.is_dir())
    return _bytes("MME_DISK_BUDGET", settings.disk_budget, shutil.disk_usage(there).total, 1.0)


def _bytes(variable: str, setting: MemoryBudget, available: int, default_share: float) -> int:
    try:
        return bytes_of(setting, available, default_share)
    except ValueError as error:
        raise SettingsError(f"{variable}={to_text(setting)}: {error}") from None
