"""Every method but inference: health, metadata, statistics, the repository, traces, logs. On the event loop.

What they tell is `control.operations`'s, and becomes a message by protobuf's own reader of JSON; long lists do so on a
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict

from container.control.operations import Operations, repository_error
from container.control.routes import parse_version
from container.grpc import grpc_service_pb2 as pb
from container.grpc.codec import parsed, values
from container.inference.limits import by_thread
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from google.protobuf.message import Message

    from container.control.routes import Route
    from container.grpc.rpc import Rpc
    from container.process.service import Service
    from container.steps.shared_memory import Regions

    Unary = Callable[[bytes, Any], Coroutine[Any, Any, bytes]]

_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_LOOK_SECONDS = 0.5  # between two looks at what Watch tells of
_LONG = frozenset({"index", "model_statistics"})  # operations whose documents take long to write


class Methods:
    """The methods over a service; `draining` is set when the server goes."""

    def __init__(self, service: Service, draining: asyncio.Event) -> None:
        self._operations = operations = Operations(service)
        self._draining = draining
        # by the route table's names, of a request's message: what the one field of the response holds, or all of it
        self._answers: dict[str, Callable[[Any], Any]] = {
            "check": lambda _: self._health(),  # of the server, whatever service is named, as Triton does
            "server_live": lambda _: True,
            "server_ready": lambda _: operations.is_ready,
            "server_metadata": lambda _: operations.server_metadata(),
            "model_ready": lambda asked: operations.model_ready(*_model(asked)),
            "model_metadata": lambda asked: operations.model_metadata(*_model(asked)),
            "model_config": lambda asked: operations.model_config(*_model(asked)),
            "model_statistics": self._statistics,
            "index": lambda asked: operations.index(ready=asked.ready),
            "load": lambda asked: operations.load(asked.model_name, operations.override(values(asked.parameters))),
            "unload": lambda asked: operations.unload(asked.model_name, values(asked.parameters)),
            "trace_setting": self._trace_setting,
            "log_settings": self._log_settings,
        }
        for kind, regions in operations.regions.items():
            self._answers[f"{kind}_status"] = functools.partial(_rows, regions)
            self._answers[f"{kind}_register"] = functools.partial(_register, regions)
            self._answers[f"{kind}_unregister"] = functools.partial(_unregister, regions)

    def unary(self, route: Route) -> Unary:
        """What answers the calls of a route, which are of one message each."""
        name = route.pattern.rpartition("/")[2]
        name = "HealthCheck" if name == "Check" else name
        request, response = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
        answer, fields = self._answers[route.operation], response.DESCRIPTOR.fields

        async def serve(data: bytes, _context: Any) -> bytes:
            message = parsed(request, data if request.DESCRIPTOR.fields else b"")
            if getattr(message, "repository_name", ""):
                raise repository_error()
            told = answer(message)
            if inspect.isawaitable(told):
                told = await told
            document = {fields[0].name: told} if len(fields) == 1 else told or {}
            if route.operation in _LONG:
                return await by_thread(_message, document, response())
            return _message(document, response())

        return serve

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

    async def _statistics(self, asked: pb.ModelStatisticsRequest) -> Any:
        """How requests went, of one model or of all in all versions."""
        name, version = _model(asked)
        return await self._operations.model_statistics(name, version if name else None)

    async def _trace_setting(self, asked: pb.TraceSettingRequest) -> Any:
        """Change how requests are traced, and tell how they are."""
        wanted = {name: _setting(list(setting.value)) for name, setting in asked.settings.items()}
        now = await self._operations.trace_setting(asked.model_name, wanted)
        return {name: {"value": each if isinstance(each, list) else [each]} for name, each in now.items()}

    async def _log_settings(self, asked: pb.LogSettingsRequest) -> Any:
        """Change what is logged, and tell what is; one that says nothing is no value of any, as in Triton."""
        given = {name: (setting, setting.WhichOneof("parameter_choice")) for name, setting in asked.settings.items()}
        wanted = {name: "" if field is None else getattr(setting, field) for name, (setting, field) in given.items()}
        try:
            now = await self._operations.log_settings(wanted or None)
        except MmeError as error:
            if error.kind is Kind.UNAVAILABLE:  # a format that there is not, which is HTTP's alone to call so
                raise invalid_argument(error.message) from None
            raise
        return {name: {_LOG_FIELDS[type(value)]: value} for name, value in now.items()}


def _model(asked: Any) -> tuple[str, int | None]:
    return asked.name, parse_version(asked.version)


def _rows(regions: Regions, asked: Any) -> dict[str, Any]:
    return {row["name"]: row for row in regions.rows(asked.name)}


def _register(regions: Regions, asked: Any) -> None:
    wanted = {field.name: getattr(asked, field.name) for field in asked.DESCRIPTOR.fields}
    regions.register(wanted.pop("name"), wanted)


def _unregister(regions: Regions, asked: Any) -> None:
    regions.unregister(asked.name)


def _setting(given: list[str]) -> list[str] | str | None:
    """A trace setting as JSON would have it: null, a text, or a list of them."""
    if not given:
        return None
    return given[0] if len(given) == 1 else given


def _message(document: dict[str, Any], message: Message) -> bytes:
    """The bytes of a message of a document, which may say more than the message can."""
    return ParseDict(document, message, ignore_unknown_fields=True).SerializeToString()
