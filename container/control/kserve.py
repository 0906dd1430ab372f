"""KServe v2 with Triton's extensions: the routes beside inference. A Flask blueprint; views run on server threads.

GET         /v2, /v2/health/…, /v2/models/{name}[/versions/{version}][/config, /ready, /stats]
POST        /v2/repository/index, /v2/repository/models/{name}/load, …/unload
GET, POST   /v2/logging, /v2/trace/setting, /v2/models/{name}/trace/setting
GET         /v2/systemsharedmemory[/region/{name}]/status        likewise /v2/cudasharedmemory
POST        /v2/systemsharedmemory/region/{name}/register, /v2/systemsharedmemory[/region/{name}]/unregister
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, request
from werkzeug.exceptions import MethodNotAllowed

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
from container.control.pending import waiting
from container.control.targets import path_version
from container.control.views import empty_answer, json_answer, json_body
from model_handlers.config.convert import config_json
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from container.control.on_loop import OnLoop
    from container.control.pending import Steps
    from container.control.views import View
    from container.process.service import Service
    from container.steps.shared_memory import CudaRegions, Regions


def blueprint(service: Service, on_loop: OnLoop, hot: View) -> Blueprint:
    """The routes over a service; `hot` answers the inference ones."""
    routes = Blueprint("kserve", __name__, url_prefix="/v2")
    _add_server_routes(routes, service)
    _add_model_routes(routes, service, on_loop, hot)
    _add_repository_routes(routes, service, on_loop)
    _add_setting_routes(routes, service, on_loop)
    _add_memory_routes(routes, "systemsharedmemory", service.regions, on_loop)
    _add_memory_routes(routes, "cudasharedmemory", service.cuda_regions, on_loop)
    return routes


def _add_server_routes(routes: Blueprint, service: Service) -> None:
    def metadata() -> Response:
        return json_answer(server_metadata(service.settings.server_id, shared_memory=service.regions.allowed))

    def live() -> Response:
        return json_answer({"live": True})  # KServe's client reads it; Triton's are content with the status

    def ready() -> Response:
        return json_answer({"ready": service.ready}, 200 if service.ready else 400)

    routes.add_url_rule("", "metadata", metadata)
    routes.add_url_rule("/health/live", "live", live)
    routes.add_url_rule("/health/ready", "ready", ready)


def _add_model_routes(routes: Blueprint, service: Service, on_loop: OnLoop, hot: View) -> None:
    engine = service.engine

    def metadata(name: str, version: str = "") -> Steps:
        found = yield configured(engine, name, path_version(version))
        return json_answer(model_metadata(*found))

    def config(name: str, version: str = "") -> Steps:
        found = yield configured(engine, name, path_version(version))
        return json_answer(config_json(found[1]))

    def ready(name: str, version: str = "") -> Steps:
        if (yield engine.index.says_ready(engine.registry.canonical(name), path_version(version))):
            return json_answer({"name": name, "ready": True})
        return json_answer({"error": f"Model version not ready: '{name}'"}, 400)

    def stats(name: str = "", version: str = "") -> Response:
        return json_answer({"model_stats": on_loop.call(engine.index.statistics, name, path_version(version))})

    for prefix in ("/models/<path:name>", "/models/<path:name>/versions/<version>"):
        for rule, view in ((prefix, metadata), (f"{prefix}/config", config), (f"{prefix}/ready", ready)):
            routes.add_url_rule(rule, f"{prefix} {view.__name__}".replace(".", "_"), waiting(on_loop, view))
        routes.add_url_rule(f"{prefix}/stats", view_func=stats, endpoint=f"{prefix} stats")
        for hot_route in ("infer", "generate", "generate_stream"):
            endpoint = f"{prefix} {hot_route}"
            routes.add_url_rule(f"{prefix}/{hot_route}", view_func=hot, endpoint=endpoint, methods=["POST"])
            # or it would be the metadata of a model of that name
            routes.add_url_rule(f"{prefix}/{hot_route}", view_func=_only_posted, endpoint=f"{endpoint} got")
    routes.add_url_rule("/models/stats", view_func=stats, endpoint="all stats")


def _add_repository_routes(routes: Blueprint, service: Service, on_loop: OnLoop) -> None:
    engine = service.engine

    def index() -> Steps:
        if _only_ready():
            return json_answer(on_loop.call(ready_index, engine))
        offered = yield find_all(engine)
        return json_answer(on_loop.call(engine.index.rows, offered))

    def load_model(name: str) -> Steps:
        override = load_override(  # here: files in base64 can be large
            _parameters(), allowed=service.settings.allow_load_overrides
        )
        yield load(engine, name, override)
        return empty_answer()

    def unload_model(name: str) -> Steps:
        yield unload(engine, name, _parameters())
        return empty_answer()

    of_model = "/repository/models/<path:name>"
    routes.add_url_rule("/repository/index", "index", waiting(on_loop, index), methods=["GET", "POST"])
    routes.add_url_rule(f"{of_model}/load", "load", waiting(on_loop, load_model), methods=["POST"])
    routes.add_url_rule(f"{of_model}/unload", "unload", waiting(on_loop, unload_model), methods=["POST"])
    of_one = "/repository/<repository>"
    routes.add_url_rule(f"{of_one}/index", "index of one", _named_repository, methods=["GET", "POST"])
    for deed in ("load", "unload"):
        rule = f"{of_one}/models/<path:name>/{deed}"
        routes.add_url_rule(rule, f"{deed} of one", _named_repository, methods=["POST"])


def _add_setting_routes(routes: Blueprint, service: Service, on_loop: OnLoop) -> None:
    """What is logged, and what is traced: of all models, or of one, whose settings are the server's if it has none."""

    def logging() -> Response:
        if request.method == "POST":
            on_loop.call(service.logs.change, json_body())
        return json_answer(on_loop.call(service.logs.document))

    def tracing(name: str = "") -> Steps:
        wanted = json_body() if request.method == "POST" else {}
        offered = (yield find_all(service.engine)) if name else ()
        return json_answer(on_loop.call(trace_settings, service.engine, service.traces, name, wanted, offered))

    both = ["GET", "POST"]
    routes.add_url_rule("/logging", "logging", logging, methods=both)
    view = waiting(on_loop, tracing)
    routes.add_url_rule("/trace/setting", "trace setting", view, methods=both)
    routes.add_url_rule("/models/<path:name>/trace/setting", "trace setting of a model", view, methods=both)


def _add_memory_routes(routes: Blueprint, kind: str, regions: Regions | CudaRegions, on_loop: OnLoop) -> None:
    def status(name: str = "") -> Response:
        return json_answer(on_loop.call(regions.rows, name))

    def register(name: str = "") -> Response:
        on_loop.call(regions.register, name, json_body())
        return empty_answer()

    def unregister(name: str = "") -> Response:
        on_loop.call(regions.unregister, name)
        return empty_answer()

    for view, method in ((status, "GET"), (register, "POST"), (unregister, "POST")):
        deed = view.__name__
        routes.add_url_rule(f"/{kind}/{deed}", f"{kind} {deed} all", view, methods=[method])
        routes.add_url_rule(f"/{kind}/region/<path:name>/{deed}", f"{kind} {deed}", view, methods=[method])


def _only_posted(**_names: str) -> Response:
    raise MethodNotAllowed(["POST"])


def _named_repository(**_names: str) -> Response:
    raise repository_error()


def _only_ready() -> bool:
    """Whether only ready models are asked for: `{"ready": true}` in the body, as Triton's, or ?ready=true."""
    given = {"true": True, "false": False}.get(request.args.get("ready", "false"))
    if request.method == "POST":
        given = json_body().get("ready", given)
    if not isinstance(given, bool):
        raise invalid_argument("Invalid value for 'ready': expected a boolean")
    return given


def _parameters() -> dict[str, Any]:
    parameters = json_body().get("parameters") or {}
    if not isinstance(parameters, dict):
        raise invalid_argument("'parameters' must be an object")
    return parameters
