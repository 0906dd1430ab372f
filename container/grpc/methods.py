"""Every method but inference: health, metadata, statistics, the repository, traces, logs. On the event loop.

What they tell is `control.operations`'s, and becomes a message by protobuf's own reader of JSON; long lists do so on a
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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

    from container.control.routes import Route
    from container.grpc.rpc import Rpc
    from container.process.service import Service
    from container.steps.shared_memory import Regions

    Document = dict[str, Any]
    Unary = Callable[[bytes, Any], Coroutine[Any, Any, bytes]]

_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_LOOK_SECONDS = 0.5  # between two looks at what Watch tells of
_LONG = frozenset({"index", "model_statistics"})  # operations whose documents take long to write


class Methods:
    """The methods over a service: by the route table's names, from a request's message to a document of the response.

    Args:
        service: what they tell of.
        draining: set when the server goes.
    """

    def __init__(self, service: Service, draining: asyncio.Event) -> None:
        self._operations = Operations(service)
        self._draining = draining

    def unary(self, route: Route) -> Unary:
        """What answers the calls of a route, which are of one message each."""
        name = route.pattern.rpartition("/")[2]
        name = "HealthCheck" if name == "Check" else name
        request, response = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
        kind, _, deed = route.operation.partition("_")
        regions = self._operations.regions.get(kind)
        if regions is None:
            answer = getattr(self, route.operation)
        else:
            answer = functools.partial(getattr(self, f"memory_{deed}"), regions)

        async def serve(data: bytes, _context: Any) -> bytes:
            message = parsed(request, data if request.DESCRIPTOR.fields else b"")
            if getattr(message, "repository_name", ""):
                raise repository_error()
            document = await answer(message)
            if route.operation in _LONG:
                return await by_thread(_message, document, response())
            return _message(document, response())

        return serve

    # -- health ----------------------------------------------------------------------------------------------------

    async def check(self, _request: pb.HealthCheckRequest) -> Document:
        """Health's Check: of the server, whatever service is named, as Triton does."""
        return {"status": self._health()}

    async def watch(self, context: Rpc) -> None:
        """Health's Watch: the status now and whenever it has changed."""
        parsed(pb.HealthCheckRequest, await context.read() or b"")
        told = ""
        while True:
            over, status = self._draining.is_set(), self._health()
            if status != told:
                told = status
                await context.write(_message({"status": status}, pb.HealthCheckResponse()))
            if over:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), _LOOK_SECONDS)

    def _health(self) -> str:
        return "SERVING" if self._operations.is_ready else "NOT_SERVING"

    async def server_live(self, _request: pb.ServerLiveRequest) -> Document:
        return {"live": True}

    async def server_ready(self, _request: pb.ServerReadyRequest) -> Document:
        return {"ready": self._operations.is_ready}

    async def model_ready(self, request: pb.ModelReadyRequest) -> Document:
        return {"ready": await self._operations.model_ready(request.name, parse_version(request.version))}

    # -- what there is ---------------------------------------------------------------------------------------------

    async def server_metadata(self, _request: pb.ServerMetadataRequest) -> Document:
        return await self._operations.server_metadata()

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> Document:
        return await self._operations.model_metadata(request.name, parse_version(request.version))

    async def model_config(self, request: pb.ModelConfigRequest) -> Document:
        return {"config": await self._operations.model_config(request.name, parse_version(request.version))}

    async def model_statistics(self, request: pb.ModelStatisticsRequest) -> Document:
        """How requests went, of one model or of all in all versions."""
        version = parse_version(request.version)
        rows = await self._operations.model_statistics(request.name, version if request.name else None)
        return {"model_stats": rows}

    # -- the repository --------------------------------------------------------------------------------------------

    async def index(self, request: pb.RepositoryIndexRequest) -> Document:
        return {"models": await self._operations.index(ready=request.ready)}

    async def load(self, request: pb.RepositoryModelLoadRequest) -> Document:
        await self._operations.load(request.model_name, self._operations.override(values(request.parameters)))
        return {}

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> Document:
        await self._operations.unload(request.model_name, values(request.parameters))
        return {}

    async def trace_setting(self, request: pb.TraceSettingRequest) -> Document:
        """Change how requests are traced, and tell how they are."""
        wanted = {name: _setting(list(setting.value)) for name, setting in request.settings.items()}
        now = await self._operations.trace_setting(request.model_name, wanted)
        return {"settings": {name: {"value": each if isinstance(each, list) else [each]} for name, each in now.items()}}

    async def log_settings(self, request: pb.LogSettingsRequest) -> Document:
        """Change what is logged, and tell what is."""
        wanted = {name: _log_setting(setting) for name, setting in request.settings.items()}
        try:
            now = await self._operations.log_settings(wanted or None)
        except MmeError as error:
            if error.kind is Kind.UNAVAILABLE:  # a format that there is not, which is HTTP's alone to call so
                raise invalid_argument(error.message) from None
            raise
        return {"settings": {name: {_LOG_FIELDS[type(value)]: value} for name, value in now.items()}}

    # -- shared memory, of the system and of CUDA ------------------------------------------------------------------

    async def memory_status(self, regions: Regions, request: Any) -> Document:
        return {"regions": {row["name"]: row for row in regions.rows(request.name)}}

    async def memory_register(self, regions: Regions, request: Any) -> Document:
        wanted = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
        regions.register(wanted.pop("name"), wanted)
        return {}

    async def memory_unregister(self, regions: Regions, request: Any) -> Document:
        regions.unregister(request.name)
        return {}


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
