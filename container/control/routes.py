"""The one table of routes, over HTTP and gRPC, and which of them a request target names. PURE.

Of its rows come Flask's rules, the hot routes that the event loop answers itself, gRPC's methods, what is restricted
and what a key is for. Patterns are Flask's, with optional parts in brackets: `<path:name>` may hold slashes.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from model_handlers.errors import Kind, MmeError, invalid_argument


class Flavor(Enum):
    """Which protocol's conventions an answer follows."""

    SAGEMAKER = "sagemaker"
    KSERVE = "kserve"
    RUNTIME = "runtime"


class InferenceType(Enum):
    """What a body means and how its answers are written."""

    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"


CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"


class Route(NamedTuple):
    """One row of the table below."""

    methods: str  # HTTP's between spaces, "" over gRPC alone
    pattern: str  # of paths, or service and method
    operation: str  # a name of `container.control.http`, or `container.grpc.methods`, or a hot one
    category: str = ""  # what an operator may restrict
    flavor: Flavor | None = None  # None for probes and pages
    waits: bool = False  # a model may be loaded or unloaded for it, or asked by its own code, which may take minutes
    role: str = ""  # what a key is for where there is no category
    is_open: bool = False  # needs no key: probes of the platform, and a page that holds nothing before it has one
    grpc: str = ""  # the method of gRPC's service that is the same operation

    @property
    def key_role(self) -> str | None:
        """What a key has to be for: a category, "" for any key, None where none is needed."""
        return None if self.is_open else self.category or self.role

    @property
    def rules(self) -> tuple[str, ...]:
        """The patterns without and with what is optional."""
        found = _OPTIONAL.search(self.pattern)
        if found is None:
            return (self.pattern,)
        return self.pattern.replace(found[0], ""), self.pattern.replace(found[0], found[1])


_OPTIONAL = re.compile(r"\[([^\]]*)\]")
_MODEL = "/v2/models/<path:name>[/versions/<version>]"
_STORED, _OTHER = "/v2/repository/models/<path:name>", "/v2/repository/<repository>"
_SAGEMAKER, _KSERVE, _RUNTIME = Flavor.SAGEMAKER, Flavor.KSERVE, Flavor.RUNTIME
_HEALTH, _INFERENCE, _METADATA = "health", "inference", "metadata"
_MODELS, _STATISTICS, _TRACE = "model-repository", "statistics", "trace"

HOT = (
    Route("GET POST", "/ping", "ping", _HEALTH, is_open=True),
    Route("POST", "/invocations", "invoke", _INFERENCE, _SAGEMAKER),
    Route("POST", "/models/<path:name>/invoke", "invoke", _INFERENCE, _SAGEMAKER),
    Route("POST", f"{_MODEL}/infer", "infer", _INFERENCE, _KSERVE, grpc="ModelInfer"),
    Route("POST", f"{_MODEL}/generate", "generate", _INFERENCE, _KSERVE),
    Route("POST", f"{_MODEL}/generate_stream", "generate_stream", _INFERENCE, _KSERVE),
    Route("POST", "/endpoints/<endpoint>/invocations", "invoke", _INFERENCE, _RUNTIME),
    Route("POST", "/endpoints/<endpoint>/invocations-response-stream", "event_stream", _INFERENCE, _RUNTIME),
)
HTTP_ROUTES = (
    *HOT,
    Route("GET", "/models", "list_models", _MODELS, _SAGEMAKER),
    Route("POST", "/models", "load_model", _MODELS, _SAGEMAKER, waits=True),
    Route("GET", "/models/<path:name>", "get_model", _MODELS, _SAGEMAKER),
    Route("DELETE", "/models/<path:name>", "unload_model", _MODELS, _SAGEMAKER, waits=True),
    Route("GET", "/execution-parameters", "execution_parameters", "", _SAGEMAKER, role=_METADATA),
    Route("POST", "/endpoints/<endpoint>/async-invocations", "invoke_async", _INFERENCE, _RUNTIME),
    Route("GET", "/v2", "server_metadata", _METADATA, _KSERVE, grpc="ServerMetadata"),
    Route("GET", "/v2/health/live", "server_live", _HEALTH, _KSERVE, is_open=True, grpc="ServerLive"),
    Route("GET", "/v2/health/ready", "server_ready", _HEALTH, _KSERVE, is_open=True, grpc="ServerReady"),
    Route("GET", _MODEL, "model_metadata", _METADATA, _KSERVE, waits=True, grpc="ModelMetadata"),
    Route("GET", f"{_MODEL}/config", "model_config", "model-config", _KSERVE, waits=True, grpc="ModelConfig"),
    Route("GET", f"{_MODEL}/ready", "model_ready", _HEALTH, _KSERVE, waits=True, grpc="ModelReady"),
    Route("GET", f"{_MODEL}/stats", "model_statistics", _STATISTICS, _KSERVE, grpc="ModelStatistics"),
    Route("GET", "/v2/models/stats", "model_statistics", _STATISTICS, _KSERVE),
    Route("GET POST", "/v2/repository/index", "index", _MODELS, _KSERVE, grpc="RepositoryIndex"),
    Route("POST", f"{_STORED}/load", "load", _MODELS, _KSERVE, waits=True, grpc="RepositoryModelLoad"),
    Route("POST", f"{_STORED}/unload", "unload", _MODELS, _KSERVE, waits=True, grpc="RepositoryModelUnload"),
    Route("GET POST", f"{_OTHER}/index", "other_repository", _MODELS, _KSERVE),
    Route("POST", f"{_OTHER}/models/<path:name>/load", "other_repository", _MODELS, _KSERVE),
    Route("POST", f"{_OTHER}/models/<path:name>/unload", "other_repository", _MODELS, _KSERVE),
    Route("GET POST", "/v2/logging", "log_settings", "logging", _KSERVE, grpc="LogSettings"),
    Route("GET POST", "/v2/trace/setting", "trace_setting", _TRACE, _KSERVE, grpc="TraceSetting"),
    Route("GET POST", "/v2/models/<path:name>/trace/setting", "trace_setting", _TRACE, _KSERVE),
    *[
        Route(
            method,
            f"/v2/{kind}sharedmemory[/region/<path:name>]/{deed}",
            f"{kind}_{deed}",
            "shared-memory",
            _KSERVE,
            grpc=f"{kind.capitalize()}SharedMemory{deed.capitalize()}",
        )
        for kind in ("system", "cuda")
        for method, deed in (("GET", "status"), ("POST", "register"), ("POST", "unregister"))
    ],
    Route("GET", "/metrics", "metrics", role=_STATISTICS),
    Route("GET", "/dashboard", "dashboard", _STATISTICS, is_open=True),
    Route("GET", "/dashboard/data", "dashboard_data", _STATISTICS),
    Route("GET", "/dashboard/static/<path:filename>", "dashboard_static", _STATISTICS, is_open=True),
)
GRPC_ROUTES = (
    *[route._replace(methods="", pattern=f"{SERVICE}/{route.grpc}") for route in HTTP_ROUTES if route.grpc],
    Route("", f"{SERVICE}/ModelStreamInfer", "stream_infer", _INFERENCE, _KSERVE),
    Route("", f"{HEALTH}/Check", "check", _HEALTH, _KSERVE, is_open=True),
    Route("", f"{HEALTH}/Watch", "watch", _HEALTH, _KSERVE, is_open=True),
)


class HotTarget(NamedTuple):
    """What the target of a hot route means."""

    flavor: Flavor | None  # None for /ping
    model: str = ""  # as the path has it; "" where a header or the default names the model
    version: str = ""
    inference_type: InferenceType | None = None  # None where the server's setting decides
    event_stream: bool = False  # of AWS


def _expression(route: Route) -> re.Pattern[bytes]:
    """The pattern of a route for paths as they were sent."""
    text = route.pattern.replace("[", "(?:").replace("]", ")?")
    text = text.replace("<path:name>", "(?P<name>.+?)").replace("<endpoint>", "[^/]+")
    text = text.replace("<version>", "(?P<version>[^/]*)")
    return re.compile((text if "<path:" in route.pattern else f"{text}/?").encode())


_NEGATIVE = re.compile(r"-[0-9]+", re.ASCII)
_OF_MODEL = b"/v2/models/"
_FRONT = re.compile(rb"\A/+")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})?")
_SLASH, _PERCENT = 0x2F, 0x25
_MAX_VERSION_DIGITS = 19
_TYPES = {each.value: each for each in InferenceType}
_HOT = tuple((_expression(route), route) for route in HOT)
_KNOWN_WITHOUT_LOAD = tuple(
    _expression(route)
    for route in HTTP_ROUTES
    if "GET" in route.methods and route.pattern.startswith(_OF_MODEL.decode()) and not route.waits
)


def parse_target(target: bytes) -> HotTarget | None:
    """The hot route of a request target, None if it is not one.

    As Flask has it, so that all routes take the same forms: with a trailing slash where it allows one, and with several
    slashes in front (an address that ends in one).
    """
    path = path_of(target)
    for expression, route in _HOT:
        if match := expression.fullmatch(path):
            named = match.groupdict()
            return HotTarget(
                route.flavor,
                _text(named.get("name") or b""),
                _text(named.get("version") or b""),
                _TYPES.get(route.operation),
                route.operation == "event_stream",
            )
    return None


def only_reads(method: str, target: bytes) -> bool:
    """Return whether a request that is no inference changes nothing, loads nothing and runs no model's code.

    What is told of a model's configuration is read in memory, so that asking for it loads the model.
    """
    if method not in {"GET", "HEAD"}:
        return False
    path = path_of(target)
    return not path.startswith(_OF_MODEL) or any(each.fullmatch(path) for each in _KNOWN_WITHOUT_LOAD)


def shown(target: bytes) -> str:
    """Return a target as logs have it: without its query, where clients put tokens and signatures."""
    return target.partition(b"?")[0].decode("latin-1")


def path_of(target: bytes) -> bytes:
    """Return the path of a target, decoded but for `%2F` and `%25`, which stay, so that a slash in it is a separator.

    A route is matched against this path, and the names in it are decoded afterwards: `/models/a%2Fb` names `a/b`, and
    `/v2%2Fmodels/m` is no route.
    """
    path = target.partition(b"?")[0]
    if b"%" in path:
        path = _ESCAPE.sub(_decoded, path)
    return _FRONT.sub(b"/", path) if path.startswith(b"//") else path


def _decoded(escape: re.Match[bytes]) -> bytes:
    byte = int(escape[1], 16) if escape[1] else _PERCENT  # a percent sign alone stands for itself
    return b"%%%02X" % byte if byte in {_SLASH, _PERCENT} else bytes((byte,))


def parse_version(text: str) -> int | None:
    """A version by its text, None for the latest."""
    if not text:
        return None
    if _NEGATIVE.fullmatch(text):
        raise invalid_argument(
            f"invalid model version specified '{text[:100]}' , version should be an integral value > 0"
        )
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_VERSION_DIGITS:
        raise invalid_argument(
            f"failed to get model version from specified version string '{text[:100]}' (details: no number of at most "
            f"{_MAX_VERSION_DIGITS} digits), version should be an integral value > 0"
        )
    return int(text)


def path_version(text: str) -> int | None:
    """A version from a path, None for the latest; without digits alone it is no path of Triton's."""
    try:
        return parse_version(text)
    except MmeError as error:
        if text.isascii() and text.isdigit():
            raise
        raise MmeError(Kind.UNKNOWN_VERSION, error.message) from None


def _text(quoted: bytes) -> str:
    return unquote_to_bytes(quoted).decode("utf-8", "replace")
