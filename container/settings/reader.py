"""The one reader of settings: from variables and flags to `Settings`, every problem named at once.

Takes a mapping and never looks at `os.environ` by itself; flags of `mme serve` become variables of that mapping first.

`schema` says what each variable may be by itself; rules say what they mean together: modes, ports, log levels, TLS,
what Azure and SageMaker bring. A rule yields what follows from what is given and from the settings so far: fields to
change, problems and notices. The texts that Triton's own start-up prints are kept, because people search for them.

About ports: SAGEMAKER_SAFE_PORT_RANGE holds the ports that a container may open *for itself*; the port that SageMaker
calls is its own choice, lies outside that range as a rule (8080 against 21000-21999), and is never checked against it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from container.settings.parsers import Mode, PingMode, Refused, SettingsError
from container.settings.places import TLS_OF_GRPC, TLS_OF_HTTP, repository_in
from container.settings.schema import (
    ALL_MODELS,
    BY_NAME,
    DEFAULT_GRPC_PORT,
    DEFAULT_PORT,
    LONGEST_INVOCATION,
    LOOPBACK,
    VARIABLES,
    Settings,
    user_cache_dir,
)
from container.settings.triton_flags import LOG_VARIABLES, Given, expand
from model_handlers.scripts.default_script import DEFAULT_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    Found = Iterator["Problem | Notice | dict[str, Any]"]

# A mistyped variable of these families would otherwise be a setting that silently does not hold. SageMaker itself
# adds SAGEMAKER_ variables as it likes, so those that are not in the table are let through; one that is a letter or
# two from one of the table is said.
_STRICT_PREFIXES = ("MME_", "SAGEMAKER_TRITON_")
_LOOSE_PREFIX = "SAGEMAKER_"
_MISTYPED = 0.9  # how alike names are, of which one is likely meant for the other

# What Amazon's containers hand on to their model servers by these beginnings, and what has no row in the table.
_OF_CONTAINERS = ("MMS_", "TS_", "SAGEMAKER_GUNICORN_", "SAGEMAKER_MMS_", "SAGEMAKER_TFS_", "SAGEMAKER_TS_")

# Kubernetes describes every Service of the namespace to every container; one called "mme" (or "mme-…") makes
# MME_PORT=tcp://10.0.0.1:8080, MME_SERVICE_HOST and MME_PORT_8080_TCP_ADDR, none of which is meant for us.
_SERVICE_LINK = re.compile(
    r"MME_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - in a container, whose ports are opened from outside
_PLATFORMS = ("AZUREML_MODEL_DIR", "KUBERNETES_SERVICE_HOST")
_MARKS = ("/.dockerenv", "/run/.containerenv")  # Docker's and Podman's
_PLACES = {variable.name: place for place, variable in enumerate(VARIABLES)}


def read_settings(environ: Mapping[str, str], arguments: Sequence[str] = (), host: str = LOOPBACK) -> Settings:
    """Read and check the settings.

    Args:
        environ: the variables.
        arguments: flags of tritonserver with their values, as if they stood in its variable.
        host: where to listen if `environ` does not say; see `listening_address`.

    Raises:
        SettingsError: with one sentence for every variable that is unknown, malformed or in conflict.
    """
    problems: list[str] = []
    notices: list[str] = []
    given = _collect(environ, problems, notices)
    expand(given, arguments, problems, notices)
    values: dict[str, Any] = {}
    for name in sorted(given, key=_PLACES.__getitem__):
        label, text = given[name]
        try:
            values[name] = BY_NAME[name].parse(text)
        except Refused as error:
            problems.append(f"{label}={text!r}: {error}")
        except ValueError as error:
            problems.append(f"{label}={text!r}: expected {error}")
        else:
            if BY_NAME[name].has_notice:
                notices.append(f"{label} has {BY_NAME[name].help}")
    fields: dict[str, Any] = {"host": host, "cache_dir": user_cache_dir(environ)}
    fields |= {BY_NAME[name].field: value for name, value in reversed(values.items()) if BY_NAME[name].field}
    fields |= repositories_of(fields.pop("model_repository", ()))
    settings = Settings(**fields)
    parsed = Parsed(values, given)
    for rule in RULES:
        changes: dict[str, Any] = {}
        for found in rule(parsed, settings):
            if isinstance(found, dict):
                changes |= found
            else:
                (problems if isinstance(found, Problem) else notices).append(found)
        settings = replace(settings, **changes) if changes else settings
    if problems:
        raise SettingsError(*problems)
    return replace(settings, notices=tuple(notices))


def _collect(environ: Mapping[str, str], problems: list[str], notices: list[str]) -> dict[str, Given]:
    """Take the variables of the table out of `environ`; refuse or tell others that may be meant for us."""
    given: dict[str, Given] = {}
    for name, text in sorted(environ.items()):
        if not text.strip() or _is_service_link(name, text):
            continue
        if name in BY_NAME:
            given[name] = Given(BY_NAME[name].label, text.strip())
        elif name.startswith(_STRICT_PREFIXES):
            problems.append(_unknown(name))
        elif name.startswith(_LOOSE_PREFIX) and (meant := _nearest(name, _LOOSE_PREFIX, _MISTYPED)):
            notices.append(f"{name} means nothing to the server; did you mean {meant}?")
        elif name == "GUNICORN_CMD_ARGS":
            notices.append(f"{name} has no effect: gunicorn is configured by the server's own settings")
        elif name.startswith(_OF_CONTAINERS):
            notices.append(f"{name} has no effect: it is of a model server of Amazon's containers")
    return given


def _is_service_link(name: str, text: str) -> bool:
    """Whether Kubernetes put the variable there to describe a Service."""
    return bool(
        _SERVICE_LINK.fullmatch(name)
        or (name.startswith("MME_") and name.endswith("PORT") and _SERVICE_LINK_URL.match(text))
    )


def _unknown(name: str) -> str:
    begins = next((prefix for prefix in _STRICT_PREFIXES if name.startswith(prefix)), "")  # which makes none alike
    nearest = _nearest(name, begins, 0.6)
    hint = f"did you mean {nearest}?" if nearest else "remove it; `mme settings` lists those there are"
    return f"{name}: there is no such variable; {hint}"


def _nearest(name: str, begins: str, cutoff: float) -> str | None:
    """The variable with an effect that is most like it behind what it begins with, if any is as much as `cutoff`."""
    known = {each.removeprefix(begins): each for each, variable in BY_NAME.items() if not variable.has_notice}
    nearest = difflib.get_close_matches(name.removeprefix(begins), known, n=1, cutoff=cutoff)
    return known[nearest[0]] if nearest else None


class Address(NamedTuple):
    """Where to listen, and the reason, to follow the address and a colon."""

    host: str
    reason: str


def listening_address(environ: Mapping[str, str], exists: Callable[[str], bool], pid: int) -> Address:
    """Return where to listen, by variables (flags among them), files that exist, and the process's own number."""
    if given := environ.get("MME_HOST", "").strip():
        return Address(given, "--host/MME_HOST says so")
    variables = (name for name in sorted(environ) if name.startswith("SAGEMAKER_") or name in _PLATFORMS)
    if name := next(variables, ""):
        return Address(_EVERYWHERE, f"all interfaces, since {name} is set")
    if mark := next((mark for mark in _MARKS if exists(mark)), ""):
        return Address(_EVERYWHERE, f"all interfaces, since there is {mark}, as in a container")
    if pid == 1:
        return Address(_EVERYWHERE, "all interfaces, since this is process 1, as in a container")
    return Address(LOOPBACK, "this machine alone, since nothing tells of a container; --host/MME_HOST says otherwise")


# -- what variables mean together -----------------------------------------------------------------------------------

_KILL_AFTER_SECONDS = 30  # SageMaker's patience between SIGTERM and SIGKILL
_DRAIN_MARGIN_SECONDS = 3
_LOAD_SECONDS = 360  # SageMaker's patience with a load
_MODES = {
    "SAGEMAKER_MULTI_MODEL": Mode.PLATFORM,
    "MME_MODEL_STORE": Mode.STORE,
    "MME_MODEL_REPOSITORY": Mode.REPOSITORY,
    "MME_MODEL_DIR": Mode.SINGLE,
}
_SWITCH, _MUTUAL, _KEYS = "MME_GRPC_USE_SSL", "MME_GRPC_USE_SSL_MUTUAL", "MME_KEY_FILE"


class Problem(str):
    """A reason not to start."""

    __slots__ = ()


class Notice(str):
    """What deserves a log line."""

    __slots__ = ()


class Parsed(NamedTuple):
    """What is given: values by variable, of those that parse, and the texts of all."""

    values: Mapping[str, Any]
    given: Mapping[str, Given]

    def label(self, name: str) -> str:
        """How to name a given variable in a message."""
        return self.given[name].label

    def sets(self, field: str) -> bool:
        return any(BY_NAME[name].field == field for name in self.values)


def repositories_of(found: tuple[Path, ...] | tuple[str, ...]) -> dict[str, Any]:
    """The fields that say these repositories: folders, or URLs."""
    if not found or isinstance(found[0], str):
        return {"repository_urls": found}
    return {"model_repository": found[0], "more_repositories": found[1:]}


def _mode(parsed: Parsed, _: Settings) -> Found:
    chosen = {name: mode for name, mode in _MODES.items() if parsed.values.get(name)}
    if len(chosen) > 1:
        labels = " and ".join(f"{parsed.label(name)}={parsed.given[name].text!r}" for name in chosen)
        yield Problem(f"{labels} say different things about where models come from; keep one of them")
    mode = next(iter(chosen.values()), Mode.SINGLE)
    if mode is Mode.PLATFORM and (name := "MME_LOAD_MODEL") in parsed.given:
        yield Problem(
            f"{parsed.label(name)}: with SAGEMAKER_MULTI_MODEL=true SageMaker decides what is loaded; unset it"
        )
    yield {"mode": mode}


def _azureml(parsed: Parsed, settings: Settings) -> Found:
    """A registered model is a repository, where nothing else says where models come from. Looks at the disk."""
    name = "AZUREML_MODEL_DIR"
    if name not in parsed.values or settings.mode is not Mode.SINGLE or "MME_MODEL_DIR" in parsed.values:
        return
    folder = parsed.values[name]
    if not folder.is_dir():
        yield Problem(
            f"{name}='{folder}': there is no such folder; give the deployment a model, or name one of --model-store, "
            "--model-repository and --model-dir"
        )
        return
    yield {"mode": Mode.REPOSITORY, "model_repository": repository_in(folder)}


def _namespaces(parsed: Parsed, settings: Settings) -> Found:
    if not settings.model_namespacing:
        return
    if len(settings.repository_urls) > 1:
        label = parsed.label("MME_MODEL_NAMESPACING")
        yield Problem(f"{label}: only folders are namespaces; rename models that two prefixes in S3 have")
    names = [each.name for each in settings.repositories if not isinstance(each, str)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield Problem(
            f"{parsed.label('MME_MODEL_REPOSITORY')}: two folders are called '{twice}', and namespaces are called as "
            "their folders are; rename one"
        )


def _control(parsed: Parsed, settings: Settings) -> Found:
    """What only a repository can have, and which modes take a list of models."""
    control = settings.model_control_mode
    if control.loads_all and settings.mode is not Mode.REPOSITORY:
        label = parsed.label("MME_MODEL_CONTROL_MODE")
        yield Problem(
            f"{label}: only a repository has control mode {control.value}; give --model-repository, or unset it"
        )
    if not parsed.sets("load_models"):
        return
    label = parsed.label("MME_LOAD_MODEL")
    if control.loads_all:
        yield Problem(
            f"{label}: in mode {control.value} every model is loaded; name models with --model-control-mode=explicit"
        )
    if ALL_MODELS in settings.load_models and len(settings.load_models) > 1:
        yield Problem(f"{label}: '{ALL_MODELS}' means every model, and must be the only one that is named")


def _port(parsed: Parsed, settings: Settings) -> Found:
    bind = parsed.values.get("SAGEMAKER_BIND_TO_PORT")
    if bind is None:
        if settings.port != DEFAULT_PORT:
            yield from _outside(parsed, "MME_PORT", "HTTP", settings.port)
        return
    if parsed.sets("port") and settings.port != bind:
        label = parsed.label("MME_PORT")
        yield Notice(f"{label}={settings.port} is not used: SageMaker calls SAGEMAKER_BIND_TO_PORT={bind}")
    yield {"port": bind}


def _grpc_port(parsed: Parsed, settings: Settings) -> Found:
    """A port switches gRPC on by itself; Triton's has a switch beside it, and counts only where ours is not given."""
    triton, allow = "SAGEMAKER_TRITON_GRPC_PORT", "SAGEMAKER_TRITON_ALLOW_GRPC"
    port, name = settings.grpc_port, "MME_GRPC_PORT"
    if port is None:
        name = triton if triton in parsed.values else allow
        if parsed.values.get(allow):
            port = parsed.values.get(triton, DEFAULT_GRPC_PORT)
            yield {"grpc_port": port}
        elif triton in parsed.values:
            yield Notice(f"{parsed.label(triton)} has no effect: {allow}=true switches gRPC on")
    if name in parsed.values:
        yield from _outside(parsed, name, "gRPC", parsed.values[triton] if port is None and name == triton else port)
    if port and port == settings.port:
        yield Problem(f"port {port} is HTTP's and gRPC's at once; choose another for gRPC with MME_GRPC_PORT")


def _metrics_port(parsed: Parsed, settings: Settings) -> Found:
    """Ours opens it by itself, Triton's beside its switch."""
    triton, allow = "SAGEMAKER_TRITON_METRICS_PORT", "SAGEMAKER_TRITON_ALLOW_METRICS"
    port = settings.metrics_port
    if port is not None:
        yield from _outside(parsed, "MME_METRICS_PORT", "metrics", port)
    elif triton in parsed.values:
        yield from _outside(parsed, triton, "metrics", parsed.values[triton])
        if parsed.values.get(allow):
            port = parsed.values[triton]
            yield {"metrics_port": port}
        else:
            yield Notice(f"{parsed.label(triton)} has no effect: {allow}=true opens it")
    if port and port in {settings.port, settings.grpc_port}:
        yield Problem(f"port {port} is to serve more than metrics; choose another for those with MME_METRICS_PORT")


def _outside(parsed: Parsed, name: str, protocol: str, port: int | None) -> Found:
    safe = parsed.values.get("SAGEMAKER_SAFE_PORT_RANGE")
    if safe and port is not None and not safe[0] <= port <= safe[1]:
        yield Problem(
            f"{parsed.label(name)}: The server cannot listen to {protocol} requests at port {port}, "
            f"allowed port range is [{safe[0]}, {safe[1]}]"
        )


def _tls_of_http(parsed: Parsed, _: Settings) -> Found:
    """A certificate needs its key; and SageMaker, over plain HTTP and without a key, would find no healthy server."""
    cert = BY_NAME[TLS_OF_HTTP[0]]
    given = [name for name in TLS_OF_HTTP if name in parsed.given]
    for name in TLS_OF_HTTP[:2]:
        if given and name not in parsed.given:
            yield Problem(f"{parsed.label(given[0])}: TLS needs {BY_NAME[name].label} as well")
    if _KEYS in parsed.given and not given:
        yield Notice(f"keys arrive in plain text, since there is no {cert.label}: let a proxy or a mesh have TLS")
    platform = [name for name in ("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_BIND_TO_PORT") if parsed.values.get(name)]
    for name in (*TLS_OF_HTTP, _KEYS):
        if platform and name in parsed.given:
            yield Problem(
                f"{parsed.label(name)}: SageMaker speaks plain HTTP and brings no key, and {platform[0]} is set; unset "
                "one of them"
            )


def _tls_of_grpc(parsed: Parsed, settings: Settings) -> Found:
    """Clients that have to show a certificate are served by TLS, as in Triton; without TLS the files are not read.

    gRPC has HTTP's certificates where its own settings say nothing: a certificate and its key belong together.
    """
    mutual, on = settings.grpc_use_ssl_mutual, settings.grpc_use_ssl
    if TLS_OF_HTTP[0] in parsed.given and _SWITCH not in parsed.given and _MUTUAL not in parsed.given:
        mutual, on = TLS_OF_HTTP[2] in parsed.given, True
        yield {"grpc_use_ssl_mutual": mutual}
    if not mutual and not on:
        for name in TLS_OF_GRPC:
            if name in parsed.given:
                yield Notice(f"{parsed.label(name)} has no effect: {BY_NAME[_SWITCH].label} switches TLS on")
        if TLS_OF_HTTP[0] in parsed.given and settings.grpc_port is not None:
            yield Notice(f"gRPC is served without TLS, since {BY_NAME[_SWITCH].label} says so")
        return
    cert, key, root = settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert
    if cert is None and key is None and settings.tls_cert and settings.tls_key:
        cert, key = settings.tls_cert, settings.tls_key
    root = root or settings.tls_client_ca
    yield {"grpc_use_ssl": True, "grpc_server_cert": cert, "grpc_server_key": key, "grpc_root_cert": root}
    switch = _MUTUAL if mutual else _SWITCH
    for name, file in zip(TLS_OF_GRPC if mutual else TLS_OF_GRPC[:2], (cert, key, root), strict=False):
        if switch in parsed.given and name not in parsed.given and file is None:
            yield Problem(f"{parsed.label(switch)}: TLS needs {BY_NAME[name].label} as well")


def _log_level(parsed: Parsed, _: Settings) -> Found:
    """Triton's four switches, unless MME_LOG_LEVEL speaks: the least severe level that is not switched off."""
    given = {name: parsed.values[name] for name in LOG_VARIABLES if name in parsed.values}
    if "MME_LOG_LEVEL" in parsed.values or not given:
        return
    levels = zip(LOG_VARIABLES, ("debug", "info", "warning", "error"), strict=True)
    on = [level for name, level in levels if given.get(name, name != LOG_VARIABLES[0])]
    yield {"log_level": on[0] if on else "critical"}


def _batch_transform(parsed: Parsed, settings: Settings) -> Found:
    """A job's payload raises the largest body; and a job waits as long as it was told to, not an endpoint's minute."""
    payload = parsed.values.get("SAGEMAKER_MAX_PAYLOAD_IN_MB", 0) << 20
    yield {"max_body_bytes": max(payload, settings.max_body_bytes)}
    if settings.batch_transform and not parsed.sets("request_timeout"):
        yield {"request_timeout": LONGEST_INVOCATION}


def _patience_of_sagemaker(parsed: Parsed, settings: Settings) -> Found:
    drain, timeout = settings.drain_seconds, settings.load_timeout
    if drain + _DRAIN_MARGIN_SECONDS >= _KILL_AFTER_SECONDS:
        label = parsed.label("MME_DRAIN_SECONDS")
        yield Notice(
            f"{label}={drain:g} is longer than SageMaker waits: it kills {_KILL_AFTER_SECONDS} s after SIGTERM"
        )
    if settings.mode is Mode.PLATFORM and timeout >= _LOAD_SECONDS:
        label = parsed.label("MME_LOAD_TIMEOUT")
        yield Problem(f"{label}={timeout:g}: SageMaker gives up on a load after {_LOAD_SECONDS} s; give less")


def _emf(parsed: Parsed, settings: Settings) -> Found:
    """On by itself where SageMaker runs the container, since it hands what we print to CloudWatch."""
    on = settings.emf if parsed.sets("emf") else "SAGEMAKER_SAFE_PORT_RANGE" in parsed.values
    yield {"emf": on}
    if on and not parsed.sets("endpoint_name"):
        yield Notice(
            "CloudWatch metrics name this endpoint 'unknown', as those of every endpoint whose MME_ENDPOINT_NAME is "
            "not set; SageMaker does not tell its containers"
        )


def _defaults(parsed: Parsed, settings: Settings) -> Found:
    """What is not given, and depends on the mode or on the platform."""
    accept = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
    if parsed.sets("default_accept") and not parsed.given[accept].text.startswith("*"):
        yield {"booster_accept": settings.default_accept}
    elif settings.mode is not Mode.SINGLE:  # SageMaker's XGBoost answers clients of many models in JSON
        yield {"booster_accept": DEFAULT_TYPE}
    if not parsed.sets("allow_pickle"):  # SageMaker's archives come from the account's own buckets
        platform = {"SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_MULTI_MODEL"}
        yield {"allow_pickle": not platform.isdisjoint(parsed.given)}
    if not parsed.sets("ping_mode"):  # Azure's readiness route asks, and traffic waits for the models
        azureml = settings.mode is Mode.REPOSITORY and "MME_MODEL_REPOSITORY" not in parsed.values
        yield {"ping_mode": PingMode.READY if settings.mode is Mode.SINGLE or azureml else PingMode.LIVE}


def _traces(parsed: Parsed, settings: Settings) -> Found:
    if settings.trace_url and settings.trace_file is not None:
        labels = f"{parsed.label('MME_TRACE_URL')} and {parsed.label('MME_TRACE_FILE')}"
        yield Problem(f"{labels}: traces are sent or written, not both; keep one of them")
    if "TENSORS" in settings.trace_level:
        label = parsed.label("MME_TRACE_LEVEL")
        yield Notice(f"{label}: TENSORS is without effect: tensors are not traced, and 0.3 refuses it; leave it out")
        yield {"trace_level": tuple(each for each in settings.trace_level if each != "TENSORS") or ("OFF",)}


RULES: tuple[Callable[[Parsed, Settings], Found], ...] = (
    _mode,
    _azureml,
    _namespaces,
    _control,
    _port,
    _grpc_port,
    _tls_of_http,
    _tls_of_grpc,
    _metrics_port,
    _log_level,
    _batch_transform,
    _patience_of_sagemaker,
    _emf,
    _defaults,
    _traces,
)
