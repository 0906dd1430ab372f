"""The SageMaker Runtime API over an endpoint, as a Flask application: what boto3 calls.

InvokeEndpoint, InvokeEndpointWithResponseStream, InvokeEndpointAsync; `GET /` tells which models are loaded. What
SageMaker says of a request before the container sees it is said here. Views run on a thread for each connection; all
that lasts runs on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_from_bytes

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from container.codec.streaming import exception, payload_part
from container.inference.errors import error_body, header_pairs
from container.inference.headers import TARGET_MODEL, name_of
from container.local.container import SilentError
from container.local.errors import (
    RuntimeApiError,
    model_error,
    no_endpoint,
    no_operation,
    no_target,
    target_not_wanted,
    throttled,
    timed_out,
)
from container.local.platform import Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping

    from werkzeug.datastructures import Headers

    from container.local.async_invocations import AsyncInvocations
    from container.local.container import Container
    from container.local.platform import Platform
    from container.ship.client import HttpResponse
    from container.steps.access import Access

    Run = Callable[[Coroutine[Any, Any, Any]], Any]  # a coroutine on the loop, for a thread that waits

ANY_NAME = "local"  # in errors, of an endpoint that answers to any name
_INVOCATIONS = "/invocations"
_MAX_BODY = 25_000_000  # bytes of a request in real time
_MAX_ATTRIBUTES = 1024
_PREFIX = "X-Amzn-SageMaker-"
_REQUEST_HEADERS = ("Content-Type", "Accept", f"{_PREFIX}Custom-Attributes", f"{_PREFIX}Inference-Id",
                    f"{_PREFIX}Session-Id")  # fmt: skip
_RESPONSE_HEADERS = (f"{_PREFIX}Custom-Attributes", f"{_PREFIX}New-Session-Id", f"{_PREFIX}Closed-Session-Id",
                     "Server-Timing")  # fmt: skip
_EVENT_STREAM = "application/vnd.amazon.eventstream"


@dataclass(frozen=True)
class Endpoint:
    """What boto3 calls: one of many models, with a platform, or of one, whose requests go to its container as they are.

    Attributes:
        name: the only one that it answers to; "" answers to any.
        container: that serves it.
        platform: for many models; None for one.
        limits: how long each thing may take.
    """

    name: str
    container: Container
    platform: Platform | None = None
    limits: Timeouts = field(default_factory=Timeouts)

    def check(self, name: str, target: str) -> None:
        """Refuse what SageMaker would refuse."""
        if self.name and name != self.name:
            raise no_endpoint(name)
        if self.platform and not target:
            raise no_target(str(uuid.uuid4()))
        if target and not self.platform:
            raise target_not_wanted(name)

    async def invoke(self, target: str, body: bytes, headers: Mapping[str, str], patience: float = 0.0) -> HttpResponse:
        """The container's answer of status 200.

        Args:
            target: the model, "" on an endpoint of one.
            body: the request's.
            headers: the request's, those that the platform lets through.
            patience: seconds, a load included; 0 means SageMaker's own.
        """
        patience = patience or self.limits.invocation
        if self.platform:
            return self._checked(await self.platform.invoke(target, body, headers, patience))
        return self._checked(await self._asked(body, headers, patience))

    @asynccontextmanager
    async def stream(
        self, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """The same of one model, read as it comes."""
        answering = self.container.stream("POST", _INVOCATIONS, body, headers, self.limits.stream)
        async with answering as (answer, pieces):
            if answer.status != 200:
                self._checked(replace(answer, body=b"".join([piece async for piece in pieces])))
            yield answer, pieces

    async def _asked(self, body: bytes, headers: Mapping[str, str], patience: float) -> HttpResponse:
        try:
            return await self.container.ask("POST", _INVOCATIONS, body, headers, patience)
        except SilentError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise timed_out(self.name or ANY_NAME) from error
            raise model_error(502, str(error), self.name or ANY_NAME) from error

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


def make_front(
    endpoint: Endpoint,
    throttle: Throttle,
    background: AsyncInvocations | None,
    loop: asyncio.AbstractEventLoop,
    access: Access | None = None,
) -> Flask:
    """The application.

    Args:
        endpoint: that it answers for.
        throttle: asked before anything else.
        background: for asynchronous invocations; None refuses them.
        loop: that endpoint and background run on.
        access: which requests are let in; None for all.
    """
    app = Flask(__name__, static_folder=None)

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    if access is not None:
        _keep_out(app, access)

    def entered(name: str) -> tuple[str, bytes]:
        """The target model and the body of a request that SageMaker lets in."""
        body = request.get_data()
        if not throttle.admits(time.monotonic()):
            raise throttled()
        target = name_of(request.headers.get(TARGET_MODEL, ""))
        endpoint.check(name, target)
        _check_sizes(body, request.headers.get(f"{_PREFIX}Custom-Attributes", ""))
        return target, body

    def invoke(name: str) -> Response:
        target, body = entered(name)
        answer = run(endpoint.invoke(target, body, _request_headers(request.headers)))
        return Response(answer.body, 200, _response_headers(answer.headers, "Content-Type"))

    def stream(name: str) -> Response:
        _, body = entered(name)
        if endpoint.platform:
            raise RuntimeApiError("ValidationError", f"Endpoint {name} is a multi-model one, and those do not stream.")
        headers = _request_headers(request.headers)
        if accept := request.headers.get(f"{_PREFIX}Accept"):
            headers["Accept"] = accept
        answering = endpoint.stream(body, headers)
        answer, pieces = run(answering.__aenter__())
        response = Response(_frames(run, pieces), 200, _response_headers(answer.headers, f"{_PREFIX}Content-Type"))
        response.content_type = _EVENT_STREAM
        response.call_on_close(lambda: run(answering.__aexit__(None, None, None)))
        return response

    def invoke_async(name: str) -> Response:
        target, _ = entered(name)
        if background is None:
            raise RuntimeApiError(
                "ValidationError", f"Endpoint {name} is not an asynchronous one: start it with --async-output"
            )
        accepted = run(background.accept(target, request.headers))
        headers = {f"{_PREFIX}OutputLocation": accepted.output, f"{_PREFIX}FailureLocation": accepted.failure}
        return _json({"InferenceId": accepted.inference_id}, 202, headers)

    def show() -> Response:
        models = run(_resident(endpoint.platform)) if endpoint.platform else None
        return _json({"endpoint": endpoint.name, "container": endpoint.container.url, "loaded": models}, 200, {})

    app.add_url_rule("/endpoints/<name>/invocations", "invoke", invoke, methods=["POST"])
    app.add_url_rule("/endpoints/<name>/invocations-response-stream", "stream", stream, methods=["POST"])
    app.add_url_rule("/endpoints/<name>/async-invocations", "async", invoke_async, methods=["POST"])
    app.add_url_rule("/", "show", show)
    app.register_error_handler(Exception, _explained)
    return app


def _explained(error: Exception) -> Response:
    """Any error as boto3 reads it."""
    if isinstance(error, HTTPException):
        error = no_operation(request.method, request.path, request.headers.get("X-Amz-Target", ""))
    if isinstance(error, SilentError):
        error = RuntimeApiError("ServiceUnavailable", str(error))
    if not isinstance(error, RuntimeApiError):
        raise error
    status, headers, body = error.answer()
    return Response(body, status, headers)


async def _resident(platform: Platform) -> list[str]:
    return platform.resident()


def _check_sizes(body: bytes, attributes: str) -> None:
    if len(body) > _MAX_BODY:
        raise RuntimeApiError(
            "ValidationError", f"the request has {len(body)} bytes; SageMaker takes {_MAX_BODY} at most"
        )
    if len(attributes) > _MAX_ATTRIBUTES:
        raise RuntimeApiError(
            "ValidationError", f"CustomAttributes has {len(attributes)} characters, {_MAX_ATTRIBUTES} at most"
        )


def _request_headers(headers: Headers) -> dict[str, str]:
    return {name: headers[name] for name in _REQUEST_HEADERS if name in headers}


def _response_headers(headers: Mapping[str, str], content_type: str) -> dict[str, str]:
    """What SageMaker hands on of the container's, and what it says itself."""
    return {
        **{name: headers[name.lower()] for name in _RESPONSE_HEADERS if name.lower() in headers},
        content_type: headers.get("content-type", "application/octet-stream"),
        "x-Amzn-Invoked-Production-Variant": request.headers.get(f"{_PREFIX}Target-Variant", "AllTraffic"),
        "x-amzn-RequestId": str(uuid.uuid4()),
    }


def _frames(run: Run, pieces: AsyncIterator[bytes]) -> Iterator[bytes]:
    """An event stream of the pieces, whose last frame says so if they break off."""

    async def following() -> bytes | None:
        return await anext(pieces, None)

    try:
        while (piece := run(following())) is not None:
            yield payload_part(piece)
    except SilentError as error:
        yield exception(f"the container's answer broke off: {error}")


def _json(document: Any, status: int, headers: Mapping[str, str]) -> Response:
    return Response(json.dumps(document), status, dict(headers), content_type="application/json")


def _keep_out(app: Flask, access: Access) -> None:
    """Have every route refuse requests of pages and hosts that the server would not let in."""

    def check() -> Response | None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        raw: str | None = request.environ.get("RAW_URI")
        target = quote_from_bytes(request.environ["PATH_INFO"].encode("latin-1")) if raw is None else raw
        refusal = access.refusal(request.method, target.encode("latin-1"), headers, headers.get("host"))
        if refusal is None:
            return None
        response = Response(error_body(str(refusal)), refusal.status, content_type="application/json")
        response.headers.extend(header_pairs(refusal.headers))
        return response

    app.before_request(check)
