"""The Flask application: every route of the contract, on whatever WSGI server runs it.

Under our own worker, Flask gets what is not inference; under any other server it gets everything, and hands the hot
routes to the same functions. Views run on the server's threads and reach the engine through the event loop alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING
from urllib.parse import unquote

from flask import Flask, Response, current_app, request
from werkzeug.exceptions import HTTPException, InternalServerError, RequestEntityTooLarge
from werkzeug.routing import PathConverter, UnicodeConverter

from container.control import kserve, runtime_api, sagemaker
from container.control.on_loop import LoopThread, OnLoop, Parts, WaitingExchange
from container.control.targets import parse_target, path_of
from container.control.views import keep_out, refusal_answer, request_target
from container.dashboard import routes as dashboard
from container.inference import errors
from container.observe import metrics
from container.observe.logs import configure
from container.process.service import Service
from container.settings import Settings
from container.steps.access import Access, refused
from container.steps.restrictions import Restrictions, category_of_route, role_of_route
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from wsgiref.types import StartResponse, WSGIEnvironment

    from container.control.views import View
    from container.steps.access import Keys

_END_SECONDS = 20.0  # for models that still execute when the process ends


class _Name(UnicodeConverter):
    """A name between two slashes, whose `%2F` and `%25` are decoded here: routes are matched before."""

    def to_python(self, value: str) -> str:
        """Decode the name."""
        return unquote(value)


class _Names(PathConverter):
    """A name that may hold slashes, `%2F` or not."""

    def to_python(self, value: str) -> str:
        """Decode the name."""
        return unquote(value)


def make_app(service: Service, on_loop: OnLoop) -> Flask:
    """The application over a running service."""
    app = Flask("mme", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = service.settings.max_body_bytes
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    app.url_map.converters.update(default=_Name, string=_Name, path=_Names)

    def hot(**_names: str) -> Response:
        """A route that the event loop answers."""
        exchange = WaitingExchange(
            request.method,
            request_target(request.environ),
            {name.lower(): value for name, value in request.headers.items()},
            request.get_data(cache=False),
        )
        on_loop.dispatch(service.routes, exchange)
        status, headers, body = exchange.wait()
        return _response(status, headers, body)

    view: View = hot
    for module in (sagemaker, kserve, runtime_api, metrics):
        app.register_blueprint(module.blueprint(service, on_loop, view))
    _restrict(app, service.settings)
    if service.dashboard is not None:
        app.register_blueprint(dashboard.blueprint(service.dashboard, on_loop, service.keys))
    app.register_error_handler(MmeError, _refused)
    app.register_error_handler(HTTPException, _http_error)
    return app


def _restrict(app: Flask, settings: Settings) -> None:
    """Have routes of restricted categories refuse requests that do not bring what these want."""
    restrictions = Restrictions(settings.http_restrictions)
    if not restrictions:
        return

    def check() -> None:
        if request.url_rule is not None:
            headers = {name.lower(): value for name, value in request.headers.items()}
            restrictions.check(category_of_route(request.url_rule.rule), headers)

    app.before_request(check)


def roles_of(app: Flask) -> Callable[[str, bytes], str | None]:
    """A function that tells what a request's key has to be for, by its method and target.

    By the route that answers: the loop's own first, as there, then the application's. "" is any key's, where no route
    answers, None is nobody's, where no key is needed.
    """
    routes = app.url_map.bind("mme")

    def role(method: str, target: bytes) -> str | None:
        hot = parse_target(target)
        if hot is not None and hot.flavor is None:
            return role_of_route("/ping")
        if hot is not None and method == "POST":
            return role_of_route("/invocations")
        try:
            path = path_of(target).decode("utf-8", "replace")
            rule, _ = routes.match(path, "GET" if method == "HEAD" else method, return_rule=True)
        except HTTPException:
            return ""
        return role_of_route(rule.rule)

    return role


def _want_keys(app: Flask, keys: Keys) -> None:
    """Have every route want a key that is for it.

    The file is looked at with each request: another server has no loop of ours that does it.
    """

    def check() -> Response | None:
        keys.look()
        role = role_of_route(request.url_rule.rule) if request.url_rule is not None else ""
        denial = None if role is None else keys.denial(role, request.headers.get("Authorization"))
        return None if denial is None else refusal_answer(refused(denial))

    app.before_request(check)


def create_app() -> Flask:
    """The application with an engine of its own, for any WSGI server; settings come from the environment.

    The engine's thread starts here, so a server that forks must not preload. It ends with the main thread, or before it
    by `app.extensions["mme"]()`.
    """
    settings = Settings.from_environ(os.environ)
    configure(settings.log_level, settings.log_format)
    thread = LoopThread()
    on_loop = OnLoop(thread.loop)
    service = on_loop.call(Service, settings, thread.loop)
    on_loop.call(service.start)
    app = make_app(service, on_loop)
    keep_out(app, Access(settings.allowed_hosts, local=False))  # where it listens, the other server knows
    if service.keys is not None:
        _want_keys(app, service.keys)

    @functools.cache
    def end() -> None:
        with contextlib.suppress(TimeoutError):
            on_loop.run(asyncio.wait_for(service.close(), _END_SECONDS))
        thread.stop()

    # `atexit` would be too late: Python has ended its thread pools by then, with which models are unloaded. This is
    # how the pools themselves are told, right after the main thread's end.
    threading._register_atexit(end)  # type: ignore[attr-defined]  # noqa: SLF001
    app.extensions["mme"] = end
    decoded = app.wsgi_app

    def with_quoted_percent_signs(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Other servers decode the whole path: what is left of a percent sign stands for itself."""
        environ["PATH_INFO"] = environ["PATH_INFO"].replace("%", "%25")
        return decoded(environ, start)

    app.wsgi_app = with_quoted_percent_signs  # type: ignore[method-assign,assignment]
    return app


def _response(status: int, headers: bytes, body: bytes | Parts) -> Response:
    """An answer of the event loop's with its own headers and no others; a streamed one is iterated by the server."""
    response = Response(body, status)
    del response.headers["Content-Type"]  # Flask's idea of it
    response.headers.extend(errors.header_pairs(headers))
    return response


def _refused(error: MmeError) -> Response:
    flavor = "kserve" if request.path.startswith("/v2") else "sagemaker"
    if request.path.startswith("/endpoints"):
        flavor = "runtime"
    return _response(*errors.error(error, flavor))


def _http_error(error: HTTPException) -> Response:
    """404, 405 and their like, as JSON; the sentence names the route."""
    status = error.code or 500
    if isinstance(error, RequestEntityTooLarge):
        limit: int = current_app.config["MAX_CONTENT_LENGTH"]
        refusal = errors.too_large(request.path.encode(), request.content_length or limit + 1, limit)
        status, sentence = refusal.status, str(refusal)
    elif isinstance(error, InternalServerError):  # a bug; Flask has logged its traceback
        sentence = f"the server failed to answer {request.method} {request.path}; its log says why"
    else:
        sentence = f"{error.name}: {request.method} {request.path} is not a route of this server"
        if request.method == "POST" and request.content_length:  # as other servers are asked
            sentence += "; models are asked by POST at /invocations or /v2/models/NAME/infer"
    if request.path == "/" and "dashboard" in current_app.blueprints:  # a person, with a browser
        sentence += "; /dashboard shows what it does"
    methods = sorted(getattr(error, "valid_methods", None) or ())  # of a 405
    if methods and request.method != "POST":
        sentence += f"; it takes {' and '.join(method for method in methods if method not in {'HEAD', 'OPTIONS'})}"
    response = Response(errors.error_body(sentence), status, content_type="application/json")
    if methods:
        response.headers["Allow"] = ", ".join(methods)
    return response
