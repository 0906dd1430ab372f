"""The routes that carry inference, and /ping: answered on the event loop, from bytes to bytes.

    /ping                                   GET, POST   health
    /invocations                            POST        SageMaker, single model or by X-Amzn-SageMaker-Target-Model
    /models/{name}/invoke                   POST        SageMaker, multi-model
    /v2/models/{name}[/versions/{v}]/infer  POST        KServe v2
    /endpoints/{endpoint}/invocations       POST        SageMaker Runtime API, what boto3 calls

A request for a model in memory is decoded, queued and, when its batch is done, encoded and sent, without a task or a
lock of its own. A request for any other model becomes a task that waits for the load. Everything here runs on the
loop; Flask reaches it through the same `dispatch`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from container import answers
from container.codec.compression import inflate
from container.codec.decode import Decoder
from container.codec.encode import Reply, encode
from container.codec.framing import BINARY_TYPE, accepts_binary, header_length
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from container.exchange import Exchange
    from model_handlers.config import ModelConfig
    from serve.engine import Engine
    from serve.request import InferenceRequest, InferenceResponse, LoadReport

_log = logging.getLogger("mme.infer")
_MAX_ROUTES = 4096  # targets remembered
_MAX_VERSION_DIGITS = 19

TARGET_MODEL = "x-amzn-sagemaker-target-model"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"
_OURS = frozenset({Kind.INTERNAL, Kind.EXECUTION_FAILED, Kind.OUT_OF_MEMORY})


class Flavor(Enum):
    """Which protocol's conventions an answer follows."""

    SAGEMAKER = "sagemaker"
    KSERVE = "kserve"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True)
class Route:
    """What a target means. `model` is "" where a header or the default names it."""

    flavor: Flavor | None  # None: /ping
    model: str = ""
    version: str = ""


_INFER = re.compile(rb"/v2/models/(?P<model>.+?)(?:/versions/(?P<version>[^/]*))?/infer")
_INVOKE = re.compile(rb"/models/(?P<model>.+)/invoke")
_RUNTIME = re.compile(rb"/endpoints/[^/]+/invocations")


def parse_target(target: bytes) -> Route | None:
    """The hot route of a request target, None if it is not one; with a trailing slash where Flask allows it."""
    path = target.partition(b"?")[0]
    if match := _INFER.fullmatch(path):
        return Route(Flavor.KSERVE, _text(match["model"]), _text(match["version"] or b""))
    if match := _INVOKE.fullmatch(path):
        return Route(Flavor.SAGEMAKER, _text(match["model"]))
    path = path.removesuffix(b"/")
    if path == b"/ping":
        return Route(None)
    if path == b"/invocations":
        return Route(Flavor.SAGEMAKER)
    if _RUNTIME.fullmatch(path):
        return Route(Flavor.RUNTIME)
    return None


def _text(quoted: bytes) -> str:
    return unquote_to_bytes(quoted).decode("utf-8", "replace")


def parse_version(text: str) -> int | None:
    """A version from a path, None for the latest.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_VERSION_DIGITS:
        raise invalid_argument(
            f"failed to get model version from specified version string '{text[:100]}', "
            "version should be an integral value > 0"
        )
    return int(text)


class InferRoutes:
    """Dispatches hot requests to the engine.

    Args:
        engine: who answers.
        default_model: the model of /invocations without a target model header, "" for none.
        starting: whether /ping has to wait until somebody sets `starting` to False.
        max_body: bytes that a compressed body may have once it is inflated.
        patience: seconds after which the Runtime API answers that a model still loads.
        default_accept: media type of SageMaker's answers to requests without an Accept header.

    Attributes:
        draining: set when the server goes: /ping says so, everything else is still answered.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        default_model: str = "",
        starting: bool = False,
        max_body: int = 64 << 20,
        patience: float = 60.0,
        default_accept: str = "application/json",
    ) -> None:
        self.engine = engine
        self.default_model = default_model
        self.draining = False
        self.starting = starting
        self._max_body = max_body
        self._patience = patience
        self._default_accept = default_accept
        self._decoder = Decoder()
        self._routes: dict[bytes, Route | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def dispatch(self, exchange: Exchange) -> bool:
        """Take the exchange if its route is a hot one; False leaves it to others."""
        target = exchange.target
        try:
            route = self._routes[target]
        except KeyError:
            route = self._learn(target)
        if route is None:
            return False
        if route.flavor is None:
            return self._ping(exchange)
        if exchange.method != "POST":
            return False
        call = _Call(self, exchange, route.flavor)
        try:
            self._infer(call, route)
        except MmeError as error:
            call.fail(error)
        return True

    def _learn(self, target: bytes) -> Route | None:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        route = self._routes[target] = parse_target(target)
        return route

    def _ping(self, exchange: Exchange) -> bool:
        if exchange.method not in {"GET", "POST", "HEAD"}:
            return False
        if self.draining or self.starting:
            exchange.respond(503, b"", ())
        else:
            exchange.respond(200, b"", ())
        return True

    def _infer(self, call: _Call, route: Route) -> None:
        exchange = call.exchange
        exchange.on_disconnect = call.abandon
        headers = exchange.headers
        name = self._model_name(route, headers.get(TARGET_MODEL, ""))
        version = parse_version(route.version) if route.version else None
        body = exchange.body
        if "content-encoding" in headers:
            body = inflate(body, headers["content-encoding"], self._max_body)
        length, call.kserve_form = header_length(headers, len(body), kserve=route.flavor is Flavor.KSERVE)
        if length == 0:
            make = functools.partial(self._made_raw, call, body)
            self._aside(call, name, self.engine.submit_made(name, version, make))
            return
        request, call.reply = self._decoder.decode(body, length, name, call.complete)
        if route.flavor is not Flavor.KSERVE and accepts_binary(headers.get("accept", self._default_accept)):
            call.reply = call.reply.accepting_binary()
        call.request = request
        if not self.engine.submit(name, version, request):
            self._aside(call, name, self.engine.submit_cold(name, version, request))

    def _made_raw(self, call: _Call, body: bytes, config: ModelConfig) -> InferenceRequest:
        """What a request without a header means depends on the model's configuration."""
        call.request, call.reply = self._decoder.decode_raw(body, config, call.complete)
        return call.request

    def _model_name(self, route: Route, header: str) -> str:
        name = route.model or header or self.default_model
        if not name:
            raise MmeError(  # which boto3 knows as a ValidationError, not as an error of some model
                Kind.UNKNOWN_MODEL if route.flavor is Flavor.RUNTIME else Kind.INVALID_ARGUMENT,
                "this endpoint serves many models: name one in the header X-Amzn-SageMaker-Target-Model "
                "(TargetModel in boto3)",
            )
        if route.model and header and route.flavor is Flavor.SAGEMAKER:
            self.engine.check_alias(name, header)
        return self.engine.canonical(name)

    def _aside(self, call: _Call, name: str, submission: Coroutine[None, None, LoadReport]) -> None:
        task = asyncio.get_running_loop().create_task(self._submit_aside(call, name, submission))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit_aside(self, call: _Call, name: str, submission: Coroutine[None, None, LoadReport]) -> None:
        """Submit what may have to wait for a load; whatever goes wrong is answered."""
        try:
            async with asyncio.timeout(self._patience if call.flavor is Flavor.RUNTIME else None):
                report = await submission
        except TimeoutError:
            call.not_ready(name)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task: what is not answered here never is
            call.fail(_known(error))
        else:
            if report.load:
                call.report = report


def _known(error: Exception) -> MmeError:
    """The error as one of ours; anything else is a bug, and its traceback belongs into the log."""
    if isinstance(error, MmeError):
        return error
    _log.error("answering a request failed", exc_info=error)
    return MmeError(Kind.INTERNAL, f"the server failed on this request: {type(error).__name__}: {error}")


class _Call:
    """One inference request between its bytes."""

    __slots__ = ("exchange", "flavor", "kserve_form", "reply", "report", "request", "routes")

    def __init__(self, routes: InferRoutes, exchange: Exchange, flavor: Flavor) -> None:
        self.routes = routes
        self.exchange = exchange
        self.flavor = flavor
        self.kserve_form = False
        self.reply: Reply | None = None
        self.report: LoadReport | None = None
        self.request: InferenceRequest | None = None

    def complete(self, _request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """Send the answer."""
        if result is None or isinstance(result, MmeError) or self.reply is None:
            self.fail(result if isinstance(result, MmeError) else MmeError(Kind.INTERNAL, "no reply was planned"))
            return
        try:
            parts, length = encode(result, self.reply)
            headers = self._headers(result, length)
        except Exception as error:  # noqa: BLE001 - an answer that can't be written must not keep its batch from theirs
            self.fail(_known(error))
            return
        self.exchange.respond(200, headers, parts)

    def _headers(self, response: InferenceResponse, length: int | None) -> bytes:
        if length is None:
            headers = b"Content-Type: application/json\r\n"
        elif self.kserve_form:
            headers = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % length
        else:
            headers = b"Content-Type: %s%d\r\n" % (BINARY_TYPE, length)
        headers += self._attributes()
        if self.flavor is Flavor.RUNTIME:
            headers += answers.runtime_headers()
        if self.report is not None or self.flavor is Flavor.RUNTIME:
            headers += answers.server_timing(response.timings, self.report)
        return headers

    def abandon(self) -> None:
        """The client left: a queued request need not run."""
        if self.request is not None:
            self.request.cancel()

    def fail(self, error: MmeError) -> None:
        """Send an error."""
        self._log_failure(error)
        self._refuse(*answers.error(error, self.flavor.value))

    def _log_failure(self, error: MmeError) -> None:
        """Our failures are errors; a client's are of interest to whoever asked for details."""
        level = logging.ERROR if error.kind in _OURS else logging.DEBUG
        if _log.isEnabledFor(level):
            headers = self.exchange.headers
            context = {
                "path": self.exchange.target.decode("latin-1"),
                "target_model": headers.get(TARGET_MODEL, ""),
                "inference_id": headers.get(INFERENCE_ID, ""),
            }
            _log.log(level, "%s", error, extra={key: value for key, value in context.items() if value})

    def not_ready(self, name: str) -> None:
        """The model still loads; the Runtime API answers so that the client may try again."""
        self._refuse(
            *answers.runtime_error(
                "ModelNotReadyException", f"Model '{name}' is still being downloaded or loaded; try again"
            )
        )

    def _refuse(self, status: int, headers: bytes, body: bytes) -> None:
        self.exchange.respond(status, headers + self._attributes(), (body,))

    def _attributes(self) -> bytes:
        """The client's custom attributes, which every answer hands back."""
        attributes = self.exchange.headers.get(CUSTOM_ATTRIBUTES)
        return b"" if attributes is None else answers.custom_attributes(attributes)
