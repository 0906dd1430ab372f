"""KServe v2 with Triton's extensions: the routes beside inference. A Flask blueprint; views run on server threads."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, request

from container.load_parameters import check_name, load_error, load_override, unload_dependents
from container.targets import parse_version
from container.views import json_answer, json_body
from model_handlers.config_json import config_json
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.registry import platform_of
from serve.lifecycle import State

if TYPE_CHECKING:
    from container.on_loop import OnLoop
    from container.service import Service
    from container.views import View
    from model_handlers.config import ModelConfig
    from model_handlers.tensor import TensorSpec

# Of Triton's extensions, by Triton's names, those that are served.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "generate",
    "trace",
)


def blueprint(service: Service, on_loop: OnLoop, hot: View) -> Blueprint:
    """The routes over a service; `hot` answers the inference ones."""
    routes = Blueprint("kserve", __name__, url_prefix="/v2")
    _add_server_routes(routes, service)
    _add_model_routes(routes, service, on_loop, hot)
    _add_repository_routes(routes, service, on_loop)
    return routes


def _add_server_routes(routes: Blueprint, service: Service) -> None:
    def metadata() -> Response:
        return json_answer({"name": "mme", "version": _version(), "extensions": EXTENSIONS})

    def live() -> Response:
        return Response(status=200)

    def ready() -> Response:
        return Response(status=200 if service.ready else 400)

    routes.add_url_rule("", "metadata", metadata)
    routes.add_url_rule("/health/live", "live", live)
    routes.add_url_rule("/health/ready", "ready", ready)


def _add_model_routes(routes: Blueprint, service: Service, on_loop: OnLoop, hot: View) -> None:
    engine = service.engine

    async def configured(name: str, number: int | None) -> tuple[str, ModelConfig, list[int]]:
        canonical = engine.canonical(name)
        async with engine.leased(canonical, number) as model:
            versions = [model.version] if number is not None else sorted(engine.versions(canonical))
            return canonical, model.config, versions

    def metadata(name: str, version: str = "") -> Response:
        canonical, config, versions = on_loop.run(configured(name, parse_version(version)))
        return json_answer(model_metadata(canonical, config, versions))

    def config(name: str, version: str = "") -> Response:
        return json_answer(config_json(on_loop.run(configured(name, parse_version(version)))[1]))

    def ready(name: str, version: str = "") -> Response:
        if on_loop.call(engine.is_ready, engine.canonical(name), parse_version(version)):
            return Response(status=200)
        return json_answer({"error": f"Model version not ready: '{name}'"}, 400)

    def stats(name: str = "", version: str = "") -> Response:
        return json_answer({"model_stats": on_loop.call(_statistics, service, name, parse_version(version))})

    for prefix in ("/models/<path:name>", "/models/<path:name>/versions/<version>"):
        routes.add_url_rule(prefix, view_func=metadata, endpoint=f"{prefix} metadata".replace(".", "_"))
        routes.add_url_rule(f"{prefix}/config", view_func=config, endpoint=f"{prefix} config")
        routes.add_url_rule(f"{prefix}/ready", view_func=ready, endpoint=f"{prefix} ready")
        routes.add_url_rule(f"{prefix}/stats", view_func=stats, endpoint=f"{prefix} stats")
        for hot_route in ("infer", "generate", "generate_stream"):
            endpoint = f"{prefix} {hot_route}"
            routes.add_url_rule(f"{prefix}/{hot_route}", view_func=hot, endpoint=endpoint, methods=["POST"])
    routes.add_url_rule("/models/stats", view_func=stats, endpoint="all stats")


def _add_repository_routes(routes: Blueprint, service: Service, on_loop: OnLoop) -> None:
    engine = service.engine

    def index() -> Response:
        if _only_ready():
            return json_answer([row for row in on_loop.call(engine.index) if row.get("state") == State.READY.value])
        return json_answer(on_loop.call(engine.index, engine.find_all()))

    def load(name: str) -> Response:
        engine.check_control()
        check_name(name)
        override = load_override(_parameters())
        try:
            on_loop.run(engine.reload(engine.canonical(name), override))
        except MmeError as error:
            raise load_error(name, error) from None
        return Response(status=200)

    def unload(name: str) -> Response:
        engine.check_control()
        dependents = unload_dependents(_parameters())
        try:
            on_loop.run(engine.unload(engine.canonical(name), dependents=dependents))
        except MmeError as error:
            if error.kind is not Kind.UNKNOWN_MODEL:  # Triton unloads what it does not know without a word
                raise
        return Response(status=200)

    routes.add_url_rule("/repository/index", "index", index, methods=["GET", "POST"])
    routes.add_url_rule("/repository/models/<path:name>/load", "load", load, methods=["POST"])
    routes.add_url_rule("/repository/models/<path:name>/unload", "unload", unload, methods=["POST"])


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


def _statistics(service: Service, name: str, number: int | None) -> list[dict[str, Any]]:
    """Of one model, or of all in memory; on the loop."""
    engine = service.engine
    wanted = engine.canonical(name) if name else ""
    rows = [
        stats.as_dict(model, str(version))
        for (model, version), stats in sorted(engine.stats.items())
        if (not wanted or model == wanted) and (number is None or version == number)
    ]
    if wanted and not rows:
        known = any(model == wanted for model, _ in engine.stats)
        raise invalid_argument(
            f"requested model version is not available for model '{name}'"
            if known
            else f"requested model '{name}' is not available"
        )
    return rows


def model_metadata(name: str, config: ModelConfig, versions: list[int]) -> dict[str, Any]:
    """The metadata document: shapes as a client sends them, the batch dimension first as -1."""

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "datatype": spec.data_type.name, "shape": spec.shape(config.max_batch_size)}

    return {
        "name": name,
        "versions": [str(number) for number in versions],
        "platform": config.platform or platform_of(config.backend),
        "inputs": [tensor(spec) for spec in config.inputs],
        "outputs": [tensor(spec) for spec in config.outputs],
    }


def _version() -> str:
    try:
        return version("mme")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
