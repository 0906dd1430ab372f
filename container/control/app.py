"""Everything that is not inference over HTTP: the event loop awaits the operation, Flask makes the response.

One view serves every route. It runs on a thread of a small pool when the operation is over, which no load, unload or
model's own code holds up: however many of these are under way, any other request is answered. Errors of ours need no
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from flask import Flask, Response, current_app, request
from werkzeug.exceptions import HTTPException, InternalServerError, MethodNotAllowed
from werkzeug.routing import PathConverter, UnicodeConverter
from werkzeug.test import run_wsgi_app

from container.control.http import PAGE, HttpOperations
from container.control.routes import HOT, HTTP_ROUTES, Flavor, parse_target, path_of
from container.http1.rules import JSON_TYPE
from container.inference import errors
from container.steps.access import Restrictions, access_of
from model_handlers.errors import Kind, MmeError
from serve.threads import ThreadPool

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from wsgiref.types import WSGIApplication

    from container.control.http import Build, Operation
    from container.control.routes import Route
    from container.http1 import HttpRequest, Refusal
    from container.http1.server import Gate
    from container.process.service import Service

    Answered = tuple[int, bytes, list[bytes]]  # status, header lines and the parts of the body

T = TypeVar("T")
_log = logging.getLogger("mme.wsgi")
_THREADS = 8
_AT_ONCE = 1 << 18  # bytes of an answer that is one write, and of a longer one that its client may leave unread
_PIECE = 1 << 16  # bytes of that in a turn of the loop
_AGAIN_SECONDS, _AT_MOST_SECONDS = 0.005, 0.32  # between two looks at what such a client has left
_OUTCOME = "mme.outcome"  # in the WSGI environment: what makes the response, or the error that is raised for it
_OURS = frozenset({"content-length", "connection", "date", "transfer-encoding"})  # the HTTP server writes these


class _Name(UnicodeConverter):
    """A name between two slashes, whose `%2F` and `%25` are decoded here: routes are matched before."""

    def to_python(self, value: str) -> str:
        return unquote(value)


class _Names(PathConverter):
    """A name that may hold slashes, `%2F` or not."""

    def to_python(self, value: str) -> str:
        return unquote(value)


class ControlPlane:
    """Hands each request, by `handle`, to the loop's hot routes, or to an operation and then to Flask."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.handle: Callable[[HttpRequest], None] = partial(service.routes.dispatch, otherwise=self._begin)
        self._home = service.engine.home
        self._loop = loop
        self._keys = service.keys
        self._allowed_hosts = service.settings.allowed_hosts
        self._restrictions = Restrictions(service.settings.http_restrictions)
        self._pool = ThreadPool("flask", most=_THREADS, keeps_one=True)
        self._operations: dict[str, Operation] = HttpOperations(service, self._on_thread).by_name()
        routes = [route for route in HTTP_ROUTES if route in HOT or route.operation in self._operations]
        self._app = _make_app(routes)
        self._routes = {endpoint: route for route in routes for _, endpoint, _, _ in _rules(route)}
        self._adapter = self._app.url_map.bind("mme")
        self._waiting: set[asyncio.Task[None]] = set()
        self._closed = False

    def gate(self, sockets: Iterable[socket.socket]) -> Gate:
        """What lets requests in, by their host and page, and by their keys where some are needed."""
        access = access_of(sockets, self._allowed_hosts)

        def refusal(method: str, target: bytes, headers: Mapping[str, str], host: str | None) -> Refusal | None:
            refused = access.refusal(method, target, headers, host)
            if refused is not None or self._keys is None:
                return refused
            role = self._role(method, target)
            return None if role is None else self._keys.denial(role, headers.get("authorization"))

        return refusal

    def _role(self, method: str, target: bytes) -> str | None:
        """What a request's key has to be for, by the route that answers; "" for any key where there is none."""
        hot = parse_target(target)
        if hot is not None and hot.flavor is None:
            return None
        if hot is not None and method == "POST":
            return "inference"
        route, _ = self._match(method, target)
        return "" if route is None else route.key_role

    def _match(self, method: str, target: bytes) -> tuple[Route | None, dict[str, Any]]:
        """The route of a request beside inference, and the names in its path."""
        path = path_of(target).decode("utf-8", "replace")
        try:
            rule, names = self._adapter.match(path, "GET" if method == "HEAD" else method, return_rule=True)
        except HTTPException:
            return None, {}
        return self._routes[rule.endpoint], dict(names)

    def _begin(self, exchange: HttpRequest) -> None:
        task = self._loop.create_task(self._answer(exchange))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def handle_metrics(self, exchange: HttpRequest) -> None:
        """Answer as the port does that has /metrics alone."""
        path = exchange.target.partition(b"?")[0]
        if path == b"/metrics":
            self.handle(exchange)
        else:
            sentence = f"Not Found: {path.decode('latin-1')} is not a route of this port, which has /metrics alone"
            exchange.respond(404, JSON_TYPE, (errors.error_body(sentence),))

    async def _answer(self, exchange: HttpRequest) -> None:
        environ, route = make_environ(exchange), None
        try:
            route, names = self._match(exchange.method, exchange.target)
            environ[_OUTCOME] = await self._outcome(exchange, route, names)
        except MmeError as error:
            flavor = Flavor.SAGEMAKER if route is None or route.flavor is None else route.flavor
            status, headers, body = errors.error(error, flavor.value)
            exchange.respond(status, headers, (body,))
            return
        except asyncio.CancelledError:  # of what it waited for, by the end of the engine
            environ[_OUTCOME] = CancelledError()
        except Exception as error:  # noqa: BLE001 - Flask logs it, and answers
            environ[_OUTCOME] = error
        if self._closed:
            return
        exchange.body = b""
        self._home.disarm()
        with contextlib.suppress(asyncio.CancelledError):  # nothing more is sent by a server that has gone
            status, headers, parts = await self._on_thread(lambda: call_application(self._app, environ))
            if exchange.method == "HEAD" or sum(map(len, parts)) <= _AT_ONCE:
                exchange.respond(status, headers, parts)
            else:
                await _send_slowly(exchange, status, headers, parts)

    async def _outcome(self, exchange: HttpRequest, route: Route | None, names: dict[str, Any]) -> Build | None:
        """What makes the response, None where Flask knows by itself."""
        if route is None:
            return None
        if self._restrictions:
            self._restrictions.check(route.category, exchange.headers)
        if exchange.method == "OPTIONS" or (route in HOT and exchange.method not in route.methods):
            return None
        operation = self._operations.get(route.operation)
        if operation is None:  # a hot one, in a form that the event loop does not know
            raise MmeError(Kind.UNSUPPORTED, f"{exchange.method} is not a method of this route")
        return await operation(exchange, **names)

    def _on_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._pool.submit(work))

    def close(self) -> None:
        """Let the threads go; what is still waited for is cancelled with the engine."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _send_slowly(exchange: HttpRequest, status: int, headers: bytes, parts: list[bytes]) -> None:
    """Send a long answer in pieces, between which the event loop does what else there is to do."""
    exchange.begin(status, headers)
    sent = 0
    for part in parts:
        for at in range(0, len(part), _PIECE):
            exchange.write(part[at : at + _PIECE])
            sent += min(len(part) - at, _PIECE)
            if sent >= _PIECE:
                sent = 0
                await asyncio.sleep(0)
                pause = _AGAIN_SECONDS
                while exchange.unsent > _AT_ONCE:  # nothing tells when a client has read, and many may read nothing
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _AT_MOST_SECONDS)
    exchange.end()


def _make_app(routes: Iterable[Route]) -> Flask:
    app = Flask("mme", static_folder=None, template_folder=str(PAGE / "templates"))
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    app.url_map.converters.update(default=_Name, string=_Name, path=_Names)
    for route in routes:
        for rule, endpoint, view, methods in _rules(route):
            app.add_url_rule(rule, endpoint, view, methods=methods)
    app.register_error_handler(HTTPException, _http_error)
    return app


def _rules(route: Route) -> Iterator[tuple[str, str, Callable[..., Response], list[str]]]:
    """Flask's rules of a route: each with its endpoint, view and methods."""
    for rule in route.rules:
        yield rule, f"{route.methods} {rule}", _view, route.methods.split()
        if route in HOT and route.flavor is Flavor.KSERVE:  # or it would be the metadata of a model of that name
            yield rule, f"{rule} got", _only_posted, ["GET"]


def _view(**_names: str) -> Response:
    """The response of any route, whose operation is over."""
    outcome = request.environ[_OUTCOME]
    if isinstance(outcome, Exception):
        raise outcome
    response: Response = outcome()
    return response


def _only_posted(**_names: str) -> Response:
    raise MethodNotAllowed(["POST"])


def _http_error(error: HTTPException) -> Response:
    """404, 405 and their like, as JSON; the sentence names the route."""
    status = error.code or 500
    if isinstance(error, InternalServerError):  # a bug; Flask has logged its traceback
        sentence = f"the server failed to answer {request.method} {request.path}; its log says why"
    else:
        sentence = f"{error.name}: {request.method} {request.path} is not a route of this server"
        if request.method == "POST" and request.content_length:  # as other servers are asked
            sentence += "; models are asked by POST at /invocations or /v2/models/NAME/infer"
    if request.path == "/" and any(
        rule.rule == "/dashboard" for rule in current_app.url_map.iter_rules()
    ):  # a person, with a browser
        sentence += "; /dashboard shows what it does"
    methods = sorted(getattr(error, "valid_methods", None) or ())  # of a 405
    if methods and request.method != "POST":
        sentence += f"; it takes {' and '.join(method for method in methods if method not in {'HEAD', 'OPTIONS'})}"
    response = Response(errors.error_body(sentence), status, content_type="application/json")
    if methods:
        response.headers["Allow"] = ", ".join(methods)
    return response


def call_application(application: WSGIApplication, environ: dict[str, Any]) -> Answered:
    """The application's answer. Never raises: errors become a 500."""
    try:
        parts, status, headers = run_wsgi_app(application, environ, buffered=True)
        lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in _OURS]
        return int(status.partition(" ")[0]), "".join(lines).encode("latin-1"), list(parts)
    except Exception:  # noqa: BLE001 - whatever an application throws is answered, or its client waits for ever
        _log.exception("%s %s failed", environ["REQUEST_METHOD"], environ["PATH_INFO"])
        return 500, JSON_TYPE, [errors.error_body("the server failed to answer this request; its log says why")]


def make_environ(exchange: HttpRequest) -> dict[str, Any]:
    """The WSGI environment of a request, without its body, which its operation has read.

    Its path keeps `%2F` and `%25`, which the converters of names decode.
    """
    query = exchange.target.partition(b"?")[2]
    environ: dict[str, Any] = {
        # the HTTP server leaves the body of an answer to HEAD away, and has to know how long it would be
        "REQUEST_METHOD": "GET" if exchange.method == "HEAD" else exchange.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path_of(exchange.target).decode("latin-1"),
        "QUERY_STRING": query.decode("latin-1"),
        "SERVER_NAME": "mme",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": str(len(exchange.body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in exchange.headers.items():
        if name == "content-type":
            environ["CONTENT_TYPE"] = value
        elif name not in {"content-length", "transfer-encoding"}:
            environ["HTTP_" + name.upper().replace("-", "_")] = value
    return environ
