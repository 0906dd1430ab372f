"""The SageMaker Runtime API over an endpoint: what boto3 calls. On the event loop, by the server's own HTTP.

InvokeEndpoint, InvokeEndpointWithResponseStream, InvokeEndpointAsync; `GET /` tells which models are loaded. What
SageMaker says of a request before the container sees it is said here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import orjson

from container.codec.bodies import exception, payload_part
from container.control.routes import path_of
from container.http1 import Http1Server, Limits
from container.inference.errors import TARGET_MODEL, TARGET_VARIANT, name_of, runtime_headers
from container.local.container import ACCOUNT, RuntimeApiError, SilentError, invalid, model_error
from container.local.platform import Timeouts
from container.process.sockets import listening
from container.steps.access import access_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from container.http1 import HttpRequest
    from container.local.async_invocations import AsyncInvocations
    from container.local.container import Container
    from container.local.platform import Platform
    from container.ship.client import HttpResponse

ANY_NAME = "local"  # in errors, of an endpoint that answers to any name
_MAX_BODY = 25_000_000  # bytes of a request in real time
_MOST_BODY = 256 << 20  # beyond it no body is read, for SageMaker's own sentence
_MAX_ATTRIBUTES = 1024
_UNSENT = 1 << 20  # bytes of a stream that its client may leave unread before the container has to wait
_AGAIN_SECONDS = 0.01
_PARTING_SECONDS = 5.0  # at the end, for answers that are under way
_PREFIX = "X-Amzn-SageMaker-"
_ATTRIBUTES = f"{_PREFIX}Custom-Attributes"
_REQUEST_HEADERS = ("Content-Type", "Accept", _ATTRIBUTES, f"{_PREFIX}Inference-Id", f"{_PREFIX}Session-Id")
_RESPONSE_HEADERS = (_ATTRIBUTES, f"{_PREFIX}New-Session-Id", f"{_PREFIX}Closed-Session-Id", "Server-Timing")
_OPERATION = re.compile(r"/endpoints/([^/]+)/(invocations|invocations-response-stream|async-invocations)")
_log = logging.getLogger("mme.local")


@dataclass(frozen=True)
class Endpoint:
    """What boto3 calls: one of many models, with a platform, or of one, whose requests go to its container as they are.

    A name of "" answers to any.
    """

    name: str
    container: Container
    platform: Platform | None = None
    limits: Timeouts = field(default_factory=Timeouts)

    def check(self, name: str, target: str) -> None:
        if self.name and name != self.name:
            raise invalid(f"Endpoint {name} of account {ACCOUNT} not found.")
        if self.platform and not target:
            raise invalid(
                f"Request {uuid.uuid4()} is missing a target model header, please specify the target model when "
                "invoking a multi-model endpoint."
            )
        if target and not self.platform:
            raise invalid(f"Endpoint {name} is not a multi-model endpoint and does not support target model header.")

    async def invoke(self, target: str, body: bytes, headers: Mapping[str, str], patience: float = 0.0) -> HttpResponse:
        """The container's answer of status 200, in so many seconds, a load included; 0 means SageMaker's own."""
        patience = patience or self.limits.invocation
        if self.platform:
            return self._checked(await self.platform.invoke(target, body, headers, patience))
        try:
            return self._checked(await self.container.ask("POST", "/invocations", body, headers, patience))
        except SilentError as error:
            raise error.of_invocation(self.name or ANY_NAME) from error

    @asynccontextmanager
    async def stream(
        self, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """The same of one model, read as it comes."""
        answering = self.container.stream("POST", "/invocations", body, headers, self.limits.stream)
        async with answering as (answer, pieces):
            if answer.status != 200:
                self._checked(replace(answer, body=b"".join([piece async for piece in pieces])))
            yield answer, pieces

    def _checked(self, answer: HttpResponse) -> HttpResponse:
        if answer.status == 200:
            return answer
        raise model_error(answer.status, answer.body.decode("utf-8", "replace"), self.name or ANY_NAME)


class Throttle:
    """A bucket of tokens. Takes `rate` requests a second on average, and as many at once; a rate of 0 takes all."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = max(rate, 1.0)
        self._seen = now

    def admits(self, now: float) -> bool:
        """Whether a request that comes now is taken; one that is counts."""
        if not self._rate:
            return True
        self._tokens = min(self._tokens + (now - self._seen) * self._rate, max(self._rate, 1.0))
        self._seen = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Front:
    """Answers for an endpoint; asks the throttle before anything else. Without `background` nothing is asynchronous."""

    def __init__(self, endpoint: Endpoint, throttle: Throttle, background: AsyncInvocations | None) -> None:
        self._endpoint = endpoint
        self._throttle = throttle
        self._background = background
        self._answering: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self, host: str, port: int, allowed_hosts: Sequence[str] = ()) -> AsyncIterator[int]:
        loop = asyncio.get_running_loop()
        sockets = listening(host, port, "boto3's", "--port, 0 takes a free one")
        gate = access_of(sockets, allowed_hosts).refusal
        http = Http1Server(self._handle, Limits(body=_MOST_BODY), loop, gate=gate)
        servers = [await loop.create_server(http.protocol_factory, sock=each) for each in sockets]
        try:
            yield sockets[0].getsockname()[1]
        finally:
            for server in servers:
                server.close()
            http.drain()
            if not await http.wait_closed(_PARTING_SECONDS):
                http.abort()

    def _handle(self, exchange: HttpRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, exchange: HttpRequest) -> None:
        try:
            await self._operate(exchange)
        except RuntimeApiError as error:
            refusal = error
        except SilentError as error:
            refusal = RuntimeApiError("ServiceUnavailable", str(error))
        except Exception as error:  # noqa: BLE001 - a bug, and its request waits for an answer
            _log.exception("%s %s failed", exchange.method, exchange.target.decode("latin-1"))
            refusal = RuntimeApiError("InternalFailure", f"`mme local` failed, and its log says why: {error}")
        else:
            return
        status, headers, body = refusal.answer()
        exchange.respond(status, headers, [body])

    async def _operate(self, exchange: HttpRequest) -> None:
        path = path_of(exchange.target).decode("utf-8", "replace")
        if path == "/" and exchange.method in {"GET", "HEAD"}:
            endpoint = self._endpoint
            loaded = endpoint.platform.resident() if endpoint.platform else None
            _respond(exchange, 200, {"endpoint": endpoint.name, "container": endpoint.container.url, "loaded": loaded})
            return
        operation = _OPERATION.fullmatch(path)
        if operation is None or exchange.method != "POST":
            raise _no_operation(exchange.method, path, exchange.headers.get("x-amz-target", ""))
        name = unquote(operation[1])
        if not self._throttle.admits(time.monotonic()):
            raise RuntimeApiError("ThrottlingException", "Rate exceeded")
        target = name_of(exchange.headers.get(TARGET_MODEL, ""))
        self._endpoint.check(name, target)
        _check_sizes(exchange)
        operate = {"invocations": self._invoke, "async-invocations": self._invoke_async}
        await operate.get(operation[2], self._stream)(exchange, name, target)

    async def _invoke(self, exchange: HttpRequest, _name: str, target: str) -> None:
        answer = await self._endpoint.invoke(target, exchange.body, _request_headers(exchange))
        exchange.respond(200, _response_headers(exchange, answer, "Content-Type"), [answer.body])

    async def _stream(self, exchange: HttpRequest, name: str, _target: str) -> None:
        if self._endpoint.platform:
            raise invalid(f"Endpoint {name} is a multi-model one, and those do not stream.")
        headers = _request_headers(exchange)
        if accept := exchange.headers.get("x-amzn-sagemaker-accept"):
            headers["Accept"] = accept
        exchange.on_disconnect = partial(_cancel, asyncio.current_task())
        async with self._endpoint.stream(exchange.body, headers) as (answer, pieces):
            lines = _response_headers(exchange, answer, f"{_PREFIX}Content-Type")
            exchange.begin(200, b"Content-Type: application/vnd.amazon.eventstream\r\n" + lines)
            try:
                async for piece in pieces:
                    exchange.write(payload_part(piece))
                    while exchange.unsent > _UNSENT:  # noqa: ASYNC110 - nothing tells when a client has read
                        await asyncio.sleep(_AGAIN_SECONDS)
            except SilentError as error:
                exchange.write(exception(f"the container's answer broke off: {error}"))
        exchange.end()

    async def _invoke_async(self, exchange: HttpRequest, name: str, target: str) -> None:
        if self._background is None:
            raise invalid(f"Endpoint {name} is not an asynchronous one: start it with --async-output")
        accepted = self._background.accept(target, exchange.headers)
        headers = {f"{_PREFIX}OutputLocation": accepted.output, f"{_PREFIX}FailureLocation": accepted.failure}
        _respond(exchange, 202, {"InferenceId": accepted.inference_id}, headers)


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()


def _no_operation(method: str, path: str, operation: str) -> RuntimeApiError:
    """A request for something else; `operation` is what AWS's clients call it, "" where none says."""
    service, _, name = operation.partition(".")
    if service != "SageMaker":
        return invalid(
            f"{method} {path} is no operation of the Runtime API: an endpoint is asked at /endpoints/NAME/invocations, "
            "and GET / tells where its container listens"
        )
    return invalid(
        f"{name} is for the client 'sagemaker', and `mme local` answers the client 'sagemaker-runtime' alone: there is "
        "one endpoint here, which runs already; invoke that, and make models and endpoints on AWS",
        __type="ValidationException",
    )


def _check_sizes(exchange: HttpRequest) -> None:
    size, attributes = len(exchange.body), len(exchange.headers.get(_ATTRIBUTES.lower(), ""))
    if size > _MAX_BODY:
        raise invalid(f"the request has {size} bytes; SageMaker takes {_MAX_BODY} at most")
    if attributes > _MAX_ATTRIBUTES:
        raise invalid(f"CustomAttributes has {attributes} characters, {_MAX_ATTRIBUTES} at most")


def _request_headers(exchange: HttpRequest) -> dict[str, str]:
    return {name: exchange.headers[name.lower()] for name in _REQUEST_HEADERS if name.lower() in exchange.headers}


def _response_headers(exchange: HttpRequest, answer: HttpResponse, content_type: str) -> bytes:
    """What SageMaker hands on of the container's, and what it says itself."""
    headers = {name: answer.headers[name.lower()] for name in _RESPONSE_HEADERS if name.lower() in answer.headers}
    headers[content_type] = answer.headers.get("content-type", "application/octet-stream")
    return _lines(headers) + runtime_headers(exchange.headers.get(TARGET_VARIANT, ""))


def _respond(exchange: HttpRequest, status: int, document: Any, headers: Mapping[str, str] | None = None) -> None:
    lines = _lines({"Content-Type": "application/json", **(headers or {})})
    exchange.respond(status, lines, [orjson.dumps(document)])


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1", "replace")
