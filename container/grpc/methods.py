"""Every method but inference: health, metadata, statistics, the repository, traces, logs. On the event loop.

What they tell is `control.extensions`'s, and becomes a message by protobuf's own reader of JSON; long lists do so on a
thread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict

from container.control.extensions import (
    configured,
    find_all,
    load,
    model_metadata,
    ready_index,
    server_metadata,
    trace_settings,
    unload,
)
from container.control.load_parameters import load_override, repository_error
from container.control.targets import parse_version
from container.grpc import grpc_service_pb2 as pb
from container.grpc.messages import parsed, values
from model_handlers.config.convert import config_json
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from google.protobuf.message import Message

    from container.grpc.rpc import Rpc
    from container.process.service import Service
    from container.steps.shared_memory import CudaRegions, Regions

    Method = Callable[[bytes, Any], Coroutine[Any, Any, bytes]]

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_LOOK_SECONDS = 0.5  # between two looks at what Watch tells of
_Health = pb.HealthCheckResponse


class Methods:
    """The methods over a service.

    Args:
        service: what they tell of.
        draining: set when the server goes.
    """

    def __init__(self, service: Service, draining: asyncio.Event) -> None:
        self._service = service
        self._engine = service.engine
        self._draining = draining

    def by_name(self) -> dict[str, Method]:
        """The methods of the inference service that answer once, by name."""
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
            **_memory_methods("System", self._service.regions),
            **_memory_methods("Cuda", self._service.cuda_regions),
        }

    # -- health ----------------------------------------------------------------------------------------------------

    async def check(self, data: bytes, _context: Any) -> bytes:
        """Health's Check: of the server, whatever service is named, as Triton does."""
        parsed(pb.HealthCheckRequest, data)
        return _Health(status=self._health()).SerializeToString()

    async def watch(self, context: Rpc) -> None:
        """Health's Watch: the status now and whenever it has changed."""
        parsed(pb.HealthCheckRequest, await context.read() or b"")
        told: _Health.ServingStatus | None = None
        while True:
            over, status = self._draining.is_set(), self._health()
            if status != told:
                told = status
                await context.write(_Health(status=status).SerializeToString())
            if over:
                return
            await _wait(self._draining)

    def _health(self) -> _Health.ServingStatus:
        return _Health.SERVING if self._service.ready else _Health.NOT_SERVING

    async def _server_live(self, _data: bytes, _context: Any) -> bytes:
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def _server_ready(self, _data: bytes, _context: Any) -> bytes:
        return pb.ServerReadyResponse(ready=self._service.ready).SerializeToString()

    async def _model_ready(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.ModelReadyRequest, data)
        ready = await self._engine.index.says_ready(
            self._engine.registry.canonical(request.name), parse_version(request.version)
        )
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    # -- what there is ---------------------------------------------------------------------------------------------

    async def _server_metadata(self, _data: bytes, _context: Any) -> bytes:
        shares = self._service.regions.allowed
        told = server_metadata(self._service.settings.server_id, shared_memory=shares)
        return pb.ServerMetadataResponse(**told).SerializeToString()

    async def _model_metadata(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.ModelMetadataRequest, data)
        found = await configured(self._engine, request.name, parse_version(request.version))
        return _message(model_metadata(*found), pb.ModelMetadataResponse())

    async def _model_config(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.ModelConfigRequest, data)
        _, config, _ = await configured(self._engine, request.name, parse_version(request.version))
        return _message({"config": config_json(config)}, pb.ModelConfigResponse())

    async def _model_statistics(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.ModelStatisticsRequest, data)
        version = parse_version(request.version)
        rows = self._engine.index.statistics(request.name, version if request.name else None)  # of all in all versions
        return await asyncio.to_thread(_message, {"model_stats": rows}, pb.ModelStatisticsResponse())

    # -- the repository --------------------------------------------------------------------------------------------

    async def _index(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.RepositoryIndexRequest, data)
        _check_repository(request.repository_name)
        rows = ready_index(self._engine) if request.ready else self._engine.index.rows(await find_all(self._engine))
        return await asyncio.to_thread(_message, {"models": rows}, pb.RepositoryIndexResponse())

    async def _load(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.RepositoryModelLoadRequest, data)
        _check_repository(request.repository_name)
        override = load_override(values(request.parameters), allowed=self._service.settings.allow_load_overrides)
        await load(self._engine, request.model_name, override)
        return b""

    async def _unload(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.RepositoryModelUnloadRequest, data)
        _check_repository(request.repository_name)
        await unload(self._engine, request.model_name, values(request.parameters))
        return b""

    async def _trace_setting(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.TraceSettingRequest, data)
        wanted = {name: _setting(list(setting.value)) for name, setting in request.settings.items()}
        offered = await find_all(self._engine) if request.model_name else ()
        now = trace_settings(self._engine, self._service.traces, request.model_name, wanted, offered)
        told = {name: {"value": value if isinstance(value, list) else [value]} for name, value in now.items()}
        return _message({"settings": told}, pb.TraceSettingResponse())

    async def _log_settings(self, data: bytes, _context: Any) -> bytes:
        request = parsed(pb.LogSettingsRequest, data)
        if request.settings:
            try:
                self._service.logs.change({name: _log_setting(setting) for name, setting in request.settings.items()})
            except MmeError as error:
                if error.kind is Kind.UNAVAILABLE:  # a format that there is not, which is HTTP's alone to call so
                    raise invalid_argument(error.message) from None
                raise
        told = {name: {_LOG_FIELDS[type(value)]: value} for name, value in self._service.logs.document().items()}
        return _message({"settings": told}, pb.LogSettingsResponse())


def _memory_methods(kind: str, regions: Regions | CudaRegions) -> dict[str, Method]:
    """Those of one kind of shared memory, System or Cuda, by name."""
    service = f"{kind}SharedMemory"

    def asked(deed: str, data: bytes) -> Any:
        return parsed(getattr(pb, f"{service}{deed}Request"), data)

    async def status(data: bytes, _context: Any) -> bytes:
        told = getattr(pb, f"{service}StatusResponse")()
        for row in regions.rows(asked("Status", data).name):
            told.regions[row["name"]].MergeFrom(type(told).RegionStatus(**row))
        return bytes(told.SerializeToString())

    async def register(data: bytes, _context: Any) -> bytes:
        request = asked("Register", data)
        wanted = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
        regions.register(wanted.pop("name"), wanted)
        return b""

    async def unregister(data: bytes, _context: Any) -> bytes:
        regions.unregister(asked("Unregister", data).name)
        return b""

    return {f"{service}{each.__name__.capitalize()}": each for each in (status, register, unregister)}


async def _wait(event: asyncio.Event) -> None:
    """For the event, or for a moment."""
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            await event.wait()
    except TimeoutError:
        return


def _check_repository(name: str) -> None:
    if name:
        raise repository_error()


def _setting(given: list[str]) -> list[str] | str | None:
    """A trace setting as JSON would have it: null, a text, or a list of them."""
    if not given:
        return None
    return given[0] if len(given) == 1 else given


def _log_setting(given: pb.LogSettingsRequest.SettingValue) -> Any:
    """A log setting as JSON would have it; one that says nothing is no value of any, as in Triton."""
    choice = given.WhichOneof("parameter_choice")
    return "" if choice is None else getattr(given, choice)


def _message(document: dict[str, Any], message: Message) -> bytes:
    """The bytes of a message of a document, which may say more than the message can."""
    return ParseDict(document, message, ignore_unknown_fields=True).SerializeToString()
