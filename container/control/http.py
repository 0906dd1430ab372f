"""Operations beside inference over HTTP: what a request asks for, and what it is answered.

Coroutines on the event loop. Each gives a function by which a thread makes Flask's response, so that no thread waits
for a load, an unload or a model's own code, and long documents are written beside the loop.

SageMaker's names of models are opaque, and a header of its requests tells what clients call them. A model is served
under that name; SageMaker's own is another name for it, by which the routes of its contract show it.

The page at /dashboard is a frame without data. Its script asks for them, and for a key where one is needed;
/dashboard/data?filter=… shows models with that in their name. Everything comes from this server: the policy in the
header forbids the page to load or send anything elsewhere, and to run or style anything that is not in its files.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson
from flask import Response, render_template, request, send_from_directory
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from container.control.operations import Operations, repository_error
from container.control.routes import path_version
from container.inference.errors import TARGET_MODEL, header_pairs, name_of, runtime_error
from container.observe.metrics import Exporter
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from container.http1 import HttpRequest
    from container.process.service import Service
    from model_handlers.model_calls import Override

    Build = Callable[[], Response]
    Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
    Operation = Callable[..., Awaitable[Build]]

_LARGE = 1 << 16  # bytes of a body that a thread reads: files in base64
PAGE = Path(__file__).parents[1] / "observe"  # the dashboard's templates and static files
_LONGEST_FILTER = 200
_DASHBOARD_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def json_response(document: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, content_type="application/json")


def empty_response() -> Response:
    """A 200 without a body, of the type that Triton gives it."""
    return Response(content_type="text/plain")


def json_body(data: bytes, *, required: bool = False) -> dict[str, Any]:
    """A body's JSON object; {} for an empty one unless one is required."""
    if not data and not required:
        return {}
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid_argument(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(document, dict):
        raise invalid_argument("the body must be a JSON object")
    return document


class HttpOperations:
    """The operations over a service. Each takes the exchange and the names in its path."""

    def __init__(self, service: Service, offload: Offload) -> None:
        self._operations = Operations(service)
        self._offload = offload
        self._exporter = Exporter(service, offload)
        self._scrapes = asyncio.Lock()  # one at a time
        self._documents = service.dashboard

    def by_name(self) -> dict[str, Operation]:
        operations = self._operations
        documents: dict[str, Callable[..., Awaitable[Any]]] = {
            "list_models": lambda exchange: operations.list_models(argument(exchange, "next_page_token")),
            "load_model": self._load_model,
            "get_model": lambda _, name: operations.get_model(name),
            "unload_model": self._unload_model,
            "execution_parameters": lambda _: operations.execution_parameters(),
            "server_metadata": lambda _: operations.server_metadata(),
            "server_live": self._server_live,
            "model_metadata": lambda _, name, version="": operations.model_metadata(name, path_version(version)),
            "model_config": lambda _, name, version="": operations.model_config(name, path_version(version)),
            "model_statistics": self._model_statistics,
            "index": lambda exchange: operations.index(ready=_wants_ready_alone(exchange)),
            "log_settings": lambda exchange: operations.log_settings(_posted(exchange)),
            "trace_setting": lambda exchange, name="": operations.trace_setting(name, _posted(exchange) or {}),
        }
        found: dict[str, Operation] = {
            **{name: _in_json(document) for name, document in documents.items()},
            "server_ready": self._server_ready,
            "model_ready": self._model_ready,
            "load": self._load,
            "unload": self._unload,
            "other_repository": self._other_repository,
            "invoke_async": self._invoke_async,
            "metrics": self._metrics,
            **{
                f"{kind}_{deed}": partial(operation, kind)
                for kind in operations.regions
                for deed, operation in (
                    ("status", self._memory_status),
                    ("register", self._memory_register),
                    ("unregister", self._memory_unregister),
                )
            },
        }
        if self._documents is not None:
            found |= {
                "dashboard": self._dashboard,
                "dashboard_data": self._dashboard_data,
                "dashboard_static": self._dashboard_static,
            }
        return found

    async def _load_model(self, exchange: HttpRequest) -> Any:
        """The platform's, and a client's where overrides are allowed."""
        self._operations.check_control()
        document = json_body(exchange.body, required=True)
        return await self._operations.load_model(document, _target(exchange))

    async def _unload_model(self, exchange: HttpRequest, name: str) -> Any:
        await self._operations.unload_model(name, _target(exchange))
        return {}

    async def _server_live(self, _exchange: HttpRequest) -> Any:
        """KServe's client reads the body; Triton's are content with the status."""
        return {"live": True}

    async def _model_statistics(self, _exchange: HttpRequest, name: str = "", version: str = "") -> Any:
        return {"model_stats": await self._operations.model_statistics(name, path_version(version))}

    async def _server_ready(self, _exchange: HttpRequest) -> Build:
        ready = self._operations.is_ready
        return partial(json_response, {"ready": ready}, 200 if ready else 400)

    async def _model_ready(self, _exchange: HttpRequest, name: str, version: str = "") -> Build:
        if await self._operations.model_ready(name, path_version(version)):
            return partial(json_response, {"name": name, "ready": True})
        return partial(json_response, {"error": f"Model version not ready: '{name}'"}, 400)

    async def _load(self, exchange: HttpRequest, name: str) -> Build:
        read = partial(self._override, exchange.body)
        override = await self._offload(read) if len(exchange.body) > _LARGE else read()
        await self._operations.load(name, override)
        return empty_response

    def _override(self, body: bytes) -> Override | None:
        return self._operations.override(_parameters(body))

    async def _unload(self, exchange: HttpRequest, name: str) -> Build:
        await self._operations.unload(name, _parameters(exchange.body))
        return empty_response

    async def _other_repository(self, _exchange: HttpRequest, **_names: str) -> Build:
        raise repository_error()

    async def _invoke_async(self, _exchange: HttpRequest, endpoint: str) -> Build:
        """The one operation of the Runtime API that is not served; boto3 expects errors to look so."""
        status, headers, body = runtime_error(
            "ValidationError",
            f"endpoint '{endpoint}' offers no async invocation: use invoke_endpoint or "
            "invoke_endpoint_with_response_stream",
        )
        return lambda: Response(body, status, header_pairs(headers))

    async def _metrics(self, _exchange: HttpRequest) -> Build:
        async with self._scrapes:
            pieces = await self._exporter.scrape()
        return lambda: Response(pieces, content_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _memory_status(self, kind: str, _exchange: HttpRequest, name: str = "") -> Build:
        return partial(json_response, self._operations.regions[kind].rows(name))

    async def _memory_register(self, kind: str, exchange: HttpRequest, name: str = "") -> Build:
        self._operations.regions[kind].register(name, json_body(exchange.body))
        return empty_response

    async def _memory_unregister(self, kind: str, _exchange: HttpRequest, name: str = "") -> Build:
        self._operations.regions[kind].unregister(name)
        return empty_response

    async def _dashboard(self, _exchange: HttpRequest) -> Build:
        return _frame

    async def _dashboard_data(self, exchange: HttpRequest) -> Build:
        assert self._documents is not None  # noqa: S101 - see `by_name`
        document = self._documents.document(argument(exchange, "filter").strip()[:_LONGEST_FILTER])
        return lambda: Response(orjson.dumps(document), headers=_DASHBOARD_HEADERS, content_type="application/json")

    async def _dashboard_static(self, _exchange: HttpRequest, filename: str) -> Build:
        return partial(send_from_directory, PAGE / "static", filename)


def _in_json(document: Callable[..., Awaitable[Any]]) -> Operation:
    async def operate(exchange: HttpRequest, **names: str) -> Build:
        return partial(json_response, await document(exchange, **names))

    return operate


def _frame() -> Response:
    here = "" if request.path.endswith("/") else "dashboard/"  # a proxy may put us under another path
    text = render_template("dashboard.html", here=here)
    return Response(text, headers=_DASHBOARD_HEADERS, content_type="text/html; charset=utf-8")


def _posted(exchange: HttpRequest) -> dict[str, Any] | None:
    return json_body(exchange.body) if exchange.method == "POST" else None


def _wants_ready_alone(exchange: HttpRequest) -> bool:
    """By `{"ready": true}` in the body, as Triton's clients say it, or ?ready=true."""
    ready = {"true": True, "false": False}.get(argument(exchange, "ready", "false"))
    ready = (_posted(exchange) or {}).get("ready", ready)
    if not isinstance(ready, bool):
        raise invalid_argument("Invalid value for 'ready': expected a boolean")
    return ready


def _target(exchange: HttpRequest) -> str:
    return name_of(exchange.headers.get(TARGET_MODEL, ""))


def argument(exchange: HttpRequest, name: str, default: str = "") -> str:
    query = exchange.target.partition(b"?")[2].decode("latin-1")
    return parse_qs(query, keep_blank_values=True).get(name, [default])[0]


def _parameters(body: bytes) -> dict[str, Any]:
    parameters = json_body(body).get("parameters") or {}
    if not isinstance(parameters, dict):
        raise invalid_argument("'parameters' must be an object")
    return parameters
