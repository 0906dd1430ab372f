"""A server of models in the calling process: the engine, made of a few arguments, on an event loop."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from mme.model import Model
from mme.runner import Runner, check_not_forked
from model_handlers.base import Footprint, by_device
from model_handlers.config.convert import config_json
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.model_calls import Override
from model_handlers.system import devices, memory
from serve.engine import end_shared
from serve.options import DEVICE_SHARE, HOST_SHARE, EngineOptions, bytes_of, memory_budget
from serve.threads import STARTER, on_daemon

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Coroutine, Iterable, Mapping


P = ParamSpec("P")
T = TypeVar("T")


def _forms(
    call: Callable[Concatenate[Server, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[Concatenate[Server, P], T], Callable[Concatenate[Server, P], Coroutine[Any, Any, T]]]:
    """A call of the server's loop as threads make it, which wait, and as coroutines of any loop do."""

    def wait(self: Server, /, *args: P.args, **options: P.kwargs) -> T:
        return self._running.call(lambda: call(self, *args, **options))

    async def wait_async(self: Server, /, *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.wrap_future(self._running.send(lambda: call(self, *args, **options)))

    for form, end in ((wait, ""), (wait_async, "_async")):
        functools.update_wrapper(form, call).__name__ = f"{call.__name__[1:]}{end}"
    return wait, wait_async


class Server:
    """All models of a repository or a store, loaded when they are asked for, and unloaded when memory fills.

    `with`, or `start` and `close`, run it on a thread of its own, `async with` on the caller's event loop. Its end is
    that of all its threads and processes; at the end of the interpreter that happens by itself.

    Args:
        model_repository: a folder of models as Triton has them, each with its `config.pbtxt` and versions.
        model_store: a folder, or a URL `s3://bucket/prefix`, of `.tar.gz` archives, each a model.
        memory_budget: bytes for all models on the host: a number, `"4GB"`, `"2GiB"`, or a share such as `0.5`, `"80%"`
            or `"95%-2GiB"`; four fifths of the machine's memory by default.
        gpu_memory_budget: the same of each GPU; nine tenths by default.
        load_models: names of the models to load at once, or the one; what can't be loaded is the error of `with`.
        cache_directory: where archives are unpacked, and measurements kept for the next time; by default a temporary
            folder, which goes with the server.
        load_threads: loads at a time.
        load_timeout: seconds that a load may take.
        response_cache: bytes of responses kept for models whose configuration asks for it.
    """

    def __init__(
        self,
        model_repository: str | os.PathLike[str] = "",
        model_store: str | os.PathLike[str] = "",
        *,
        memory_budget: float | str | None = None,
        gpu_memory_budget: float | str | None = None,
        load_models: str | Iterable[str] = (),
        cache_directory: str | os.PathLike[str] = "",
        load_threads: int = 2,
        load_timeout: float = 350.0,
        response_cache: int | str = 64 << 20,
    ) -> None:
        if bool(model_repository) == bool(model_store):
            raise invalid_argument("a server needs either model_repository or model_store")
        if model_repository and not Path(model_repository).is_dir():
            raise invalid_argument(f"model_repository: there is no folder {model_repository}")
        if load_threads < 1 or load_timeout <= 0:
            raise invalid_argument("load_threads and load_timeout have to be positive")
        self._options: dict[str, Any] = {
            "budget": _budget(memory_budget, gpu_memory_budget),
            "store": str(model_store),
            "repository": Path(model_repository).absolute() if model_repository else None,
            "load_threads": load_threads,
            "load_patience": load_timeout,
            "response_cache_bytes": _size("response_cache", response_cache, 0, 0) if response_cache else 0,
        }
        self._folder = str(cache_directory)
        self._load_models = (load_models,) if isinstance(load_models, str) else tuple(load_models)
        self._runner: Runner | None = None
        self._temporary = ""  # the folder where none is named

    def __repr__(self) -> str:
        return f"<mme.Server of {self._options['store'] or self._options['repository']}>"

    def start(self) -> Self:
        """Begin on a thread of its own, as `with` does; end it by `close`."""
        self._runner = self._fresh(None)
        try:
            self._runner.call(self._begin)
        except BaseException:
            self.close()
            raise
        return self

    __enter__ = start

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._runner = self._fresh(asyncio.get_running_loop())
        try:
            await asyncio.wrap_future(self._runner.send(self._begin))
        except BaseException:
            await self.close_async()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close_async()

    def close(self) -> None:
        """Refuse further calls, wait for those under way, and end all that the server began."""
        if self._runner is not None and not STARTER.is_copy:
            self._runner.stop()
            end_shared()
            atexit.unregister(self.close)
            if self._temporary:
                shutil.rmtree(self._temporary, ignore_errors=True)

    async def close_async(self) -> None:
        if self._runner is not None and self._runner.loop is asyncio.get_running_loop():
            await self._runner.shut()
        await on_daemon("end", self.close)

    def _fresh(self, loop: asyncio.AbstractEventLoop | None) -> Runner:
        check_not_forked()
        if self._runner is not None and self._runner.is_open:
            raise invalid_argument("the server has begun already")
        return Runner(loop)

    async def _begin(self) -> None:
        atexit.register(self.close)
        self._temporary = "" if self._folder else tempfile.mkdtemp(prefix="mme-")
        folder = Path(self._folder or self._temporary)
        self._running.open(EngineOptions(cache_directory=folder, **self._options))
        for name in self._load_models:
            await self._load(name)

    @property
    def _running(self) -> Runner:
        if self._runner is None:
            raise MmeError(Kind.UNAVAILABLE, "the server has not begun: `start` it, or write `with` or `async with`")
        return self._runner

    def model(self, name: str, version: int | None = None) -> Model:
        """A model by its name, and one of its versions instead of the one that its configuration chooses."""
        return Model(self._running, name, version)

    async def _load(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load a model as it is now, again if it is in memory.

        Args:
            name: the model's.
            config: its configuration instead of the one in its folder, as the JSON of Triton's load API.
            files: path inside its folder → content, instead of all of its files; needs `config`.

        Raises:
            mme.Error: there is no such model, or it can't be loaded, and why.
        """
        override = None
        if config is not None or files:
            named = {f"file:{path}": content for path, content in (files or {}).items()}
            override = Override("" if config is None else json.dumps(dict(config)), named)
        await self._running.engine.reload(self._known(name), override)

    async def _unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model, once its requests are answered; the models of an ensemble's steps, too, with `dependents`."""
        await self._running.engine.unload(self._known(name), dependents=dependents)

    async def _is_ready(self, name: str, version: int | None = None) -> bool:
        """Whether a request would be answered, by a model in memory or one that comes back for it."""
        return await self._running.engine.index.says_ready(self._known(name), version)

    async def _index(self) -> list[dict[str, Any]]:
        """Every model that there is, its state, and why it is not available, in the form of Triton's index."""
        return self._running.engine.index.rows(await on_daemon("index", self._running.engine.origins.find_all))

    async def _config(self, name: str) -> dict[str, Any]:
        """A model's configuration with all that was completed, in the form of Triton's; loads the model if need be."""
        async with self._running.engine.leased(self._known(name)) as model:
            found: dict[str, Any] = config_json(model.config)
            return found

    async def _statistics(self) -> list[dict[str, Any]]:
        """What was counted of each version of each model, in the form of Triton's statistics."""
        return self._running.engine.index.statistics()

    load, load_async = _forms(_load)
    unload, unload_async = _forms(_unload)
    is_ready, is_ready_async = _forms(_is_ready)
    index, index_async = _forms(_index)
    config, config_async = _forms(_config)
    statistics, statistics_async = _forms(_statistics)

    def _known(self, name: str) -> str:
        return self._running.engine.registry.canonical(name)


def _budget(host: float | str | None, each_gpu: float | str | None) -> Footprint:
    gpus = {gpu.index: _size("gpu_memory_budget", each_gpu, gpu.total, DEVICE_SHARE) for gpu in devices.gpus()}
    return Footprint(_size("memory_budget", host, memory.host_memory(), HOST_SHARE), by_device(gpus))


def _size(argument: str, said: float | str | None, whole: int, share: float) -> int:
    try:
        return bytes_of(memory_budget(said) if isinstance(said, str) else said, whole, share)
    except ValueError as error:  # which says what a budget is, or what this one leaves
        raise invalid_argument(f"{argument}={said!r}: {error}") from None
