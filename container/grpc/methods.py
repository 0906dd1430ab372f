"""Every method but inference: health, metadata, statistics, the repository, traces, logs. On the event loop.

What they tell is `control.operations`'s, and becomes a message by protobuf's own reader of JSON; long lists do so on a
thread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict

from container.control.operations import Operations, repository_error
from container.control.routes import parse_version
from container.grpc import grpc_service_pb2 as pb
from container.grpc.codec import parsed, values
from container.inference.offload import by_thread
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from google.protobuf.message import Message

    from container.grpc.rpc import Rpc
    from container.process.service import Service
    from container.steps.shared_memory import CudaRegions, Regions

    Method = Callable[[bytes, Any], Coroutine[Any, Any, bytes]]

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
        self._operations = Operations(service)
        self._draining = draining

    def by_name(self) -> dict[str, Method]:
        """The methods that answer once, as the route table names them."""
        named = (
            *(self.server_live, self.server_ready, self.server_metadata, self.check, self.model_ready),
            *(self.model_metadata, self.model_config, self.model_statistics),
            *(self.index, self.load, self.unload, self.trace_setting, self.log_settings),
        )
        memory = [_memory_methods(kind, regions) for kind, regions in self._operations.regions.items()]
        return {each.__name__: each for each in named} | memory[0] | memory[1]

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
        return _Health.SERVING if self._operations.is_ready else _Health.NOT_SERVING

    async def server_live(self, _data: bytes, _context: Any) -> bytes:
        """ServerLive."""
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def server_ready(self, _data: bytes, _context: Any) -> bytes:
        """ServerReady."""
        return pb.ServerReadyResponse(ready=self._operations.is_ready).SerializeToString()

    async def model_ready(self, data: bytes, _context: Any) -> bytes:
        """ModelReady."""
        request = parsed(pb.ModelReadyRequest, data)
        ready = await self._operations.model_ready(request.name, parse_version(request.version))
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    # -- what there is ---------------------------------------------------------------------------------------------

    async def server_metadata(self, _data: bytes, _context: Any) -> bytes:
        """ServerMetadata."""
        return pb.ServerMetadataResponse(**await self._operations.server_metadata()).SerializeToString()

    async def model_metadata(self, data: bytes, _context: Any) -> bytes:
        """ModelMetadata."""
        request = parsed(pb.ModelMetadataRequest, data)
        document = await self._operations.model_metadata(request.name, parse_version(request.version))
        return _message(document, pb.ModelMetadataResponse())

    async def model_config(self, data: bytes, _context: Any) -> bytes:
        """ModelConfig."""
        request = parsed(pb.ModelConfigRequest, data)
        config = await self._operations.model_config(request.name, parse_version(request.version))
        return _message({"config": config}, pb.ModelConfigResponse())

    async def model_statistics(self, data: bytes, _context: Any) -> bytes:
        """ModelStatistics: of all models in all versions."""
        request = parsed(pb.ModelStatisticsRequest, data)
        version = parse_version(request.version)
        rows = await self._operations.model_statistics(request.name, version if request.name else None)
        return await by_thread(_message, {"model_stats": rows}, pb.ModelStatisticsResponse())

    # -- the repository --------------------------------------------------------------------------------------------

    async def index(self, data: bytes, _context: Any) -> bytes:
        """RepositoryIndex."""
        request = parsed(pb.RepositoryIndexRequest, data)
        _check_repository(request.repository_name)
        rows = await self._operations.index(ready=request.ready)
        return await by_thread(_message, {"models": rows}, pb.RepositoryIndexResponse())

    async def load(self, data: bytes, _context: Any) -> bytes:
        """RepositoryModelLoad."""
        request = parsed(pb.RepositoryModelLoadRequest, data)
        _check_repository(request.repository_name)
        await self._operations.load(request.model_name, self._operations.override(values(request.parameters)))
        return b""

    async def unload(self, data: bytes, _context: Any) -> bytes:
        """RepositoryModelUnload."""
        request = parsed(pb.RepositoryModelUnloadRequest, data)
        _check_repository(request.repository_name)
        await self._operations.unload(request.model_name, values(request.parameters))
        return b""

    async def trace_setting(self, data: bytes, _context: Any) -> bytes:
        """TraceSetting."""
        request = parsed(pb.TraceSettingRequest, data)
        wanted = {name: _setting(list(setting.value)) for name, setting in request.settings.items()}
        now = await self._operations.trace_setting(request.model_name, wanted)
        told = {name: {"value": value if isinstance(value, list) else [value]} for name, value in now.items()}
        return _message({"settings": told}, pb.TraceSettingResponse())

    async def log_settings(self, data: bytes, _context: Any) -> bytes:
        """LogSettings."""
        request = parsed(pb.LogSettingsRequest, data)
        wanted = {name: _log_setting(setting) for name, setting in request.settings.items()}
        try:
            now = await self._operations.log_settings(wanted or None)
        except MmeError as error:
            if error.kind is Kind.UNAVAILABLE:  # a format that there is not, which is HTTP's alone to call so
                raise invalid_argument(error.message) from None
            raise
        told = {name: {_LOG_FIELDS[type(value)]: value} for name, value in now.items()}
        return _message({"settings": told}, pb.LogSettingsResponse())


def _memory_methods(kind: str, regions: Regions | CudaRegions) -> dict[str, Method]:
    """Those of one kind of shared memory, system or cuda."""
    service = f"{kind.capitalize()}SharedMemory"

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

    return {f"{kind}_{each.__name__}": each for each in (status, register, unregister)}


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
