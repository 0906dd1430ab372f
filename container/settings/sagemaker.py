"""The rules between variables: modes, ports, log levels, Triton's choice of a single model.

`table` says what each variable may be by itself; here is what they mean together. The texts that Triton's own
start-up prints are kept, because people search for them.

About ports: SAGEMAKER_SAFE_PORT_RANGE holds the ports that a container may open *for itself*; the port that SageMaker
calls is its own choice, lies outside that range as a rule (8080 against 21000-21999), and is never checked against it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from container.settings.arguments import LOG_VARIABLES
from container.settings.azureml import choose_azureml
from container.settings.kinds import (
    DEFAULT_GRPC_PORT,
    DEFAULT_MAX_BODY,
    DEFAULT_PORT,
    LONGEST_INVOCATION,
    Mode,
    SettingsError,
)
from container.settings.tls import choose_tls
from model_handlers.scripts.default_script import DEFAULT_TYPE
from serve.control import Control
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.settings.reading import Reading

ALL_MODELS = "*"  # in a list of models to load
SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")
_KILL_AFTER_SECONDS = 30  # SageMaker's patience between SIGTERM and SIGKILL
_DRAIN_MARGIN_SECONDS = 3
_LOAD_SECONDS = 360  # SageMaker's patience with a load

_SCRIPT_MODEL = "model"  # what Amazon's containers call it
_NOT_MODELS = frozenset({"__MACOSX", "lost+found"})


def apply_rules(reading: Reading) -> None:
    """Everything that takes more than one variable."""
    _choose_mode(reading)
    choose_azureml(reading)
    _choose_repositories(reading)
    _check_control(reading)
    _choose_port(reading)
    _choose_grpc(reading)
    choose_tls(reading)
    _choose_metrics_port(reading)
    _choose_log_level(reading)
    _raise_max_body(reading)
    _choose_request_timeout(reading)
    _check_drain(reading)
    _check_load_timeout(reading)
    _choose_emf(reading)
    _choose_booster_accept(reading)
    _choose_pickles(reading)
    _check_traces(reading)


def _choose_mode(reading: Reading) -> None:
    modes = {
        "SAGEMAKER_MULTI_MODEL": Mode.PLATFORM,
        "MME_MODEL_STORE": Mode.STORE,
        "MME_MODEL_REPOSITORY": Mode.REPOSITORY,
        "MME_MODEL_DIR": Mode.SINGLE,
    }
    chosen = {name: mode for name, mode in modes.items() if reading.parsed.get(name)}
    if len(chosen) > 1:
        labels = " and ".join(f"{reading.label(name)}={reading.given[name].text!r}" for name in chosen)
        reading.problems.append(f"{labels} say different things about where models come from; keep one of them")
    mode = next(iter(chosen.values()), Mode.SINGLE)
    reading.fields["mode"] = mode
    if mode is Mode.PLATFORM and "MME_LOAD_MODEL" in reading.given:
        label = reading.label("MME_LOAD_MODEL")
        reading.problems.append(f"{label}: with SAGEMAKER_MULTI_MODEL=true SageMaker decides what is loaded; unset it")


def _choose_repositories(reading: Reading) -> None:
    first, *more = reading.fields.pop("model_repository", ()) or (None,)
    if isinstance(first, str):
        reading.fields["repository_urls"] = (first, *more)
        if more and reading.fields.get("model_namespacing"):
            label = reading.label("MME_MODEL_NAMESPACING")
            reading.problems.append(f"{label}: only folders are namespaces; rename models that two prefixes in S3 have")
        return
    if first is not None:
        reading.fields["model_repository"], reading.fields["more_repositories"] = first, tuple(more)
    names = [folder.name for folder in (first, *more) if folder is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None and reading.fields.get("model_namespacing"):
        reading.problems.append(
            f"{reading.label('MME_MODEL_REPOSITORY')}: two folders are called '{twice}', and namespaces are called as "
            "their folders are; rename one"
        )


def _check_control(reading: Reading) -> None:
    """What only a repository can have, and which modes take a list of models."""
    control = reading.fields.get("model_control_mode", Control.DEMAND)
    if control.loads_all and reading.fields["mode"] is not Mode.REPOSITORY:
        label = reading.label("MME_MODEL_CONTROL_MODE")
        reading.problems.append(
            f"{label}: only a repository has control mode {control.value}; give --model-repository, or unset it"
        )
    if "MME_LOAD_MODEL" not in reading.parsed:
        return
    label, named = reading.label("MME_LOAD_MODEL"), reading.parsed["MME_LOAD_MODEL"]
    if control.loads_all:
        reading.problems.append(
            f"{label}: in mode {control.value} every model is loaded; name models with --model-control-mode=explicit"
        )
    if ALL_MODELS in named and len(named) > 1:
        reading.problems.append(f"{label}: '{ALL_MODELS}' means every model, and must be the only one that is named")


def _choose_port(reading: Reading) -> None:
    bind, own = reading.parsed.get("SAGEMAKER_BIND_TO_PORT"), reading.parsed.get("MME_PORT")
    if bind is None:
        if own not in {None, DEFAULT_PORT}:
            _check_port(reading, "MME_PORT", "HTTP")
        return
    if own not in {None, bind}:
        reading.notices.append(
            f"{reading.label('MME_PORT')}={own} is not used: SageMaker calls SAGEMAKER_BIND_TO_PORT={bind}"
        )
    reading.fields["port"] = bind


def _choose_grpc(reading: Reading) -> None:
    """A port switches gRPC on by itself; Triton's has a switch beside it, and counts only where ours is not given."""
    own, triton, allow = "MME_GRPC_PORT", "SAGEMAKER_TRITON_GRPC_PORT", "SAGEMAKER_TRITON_ALLOW_GRPC"
    if own in reading.parsed:
        _check_port(reading, own, "gRPC")
    elif reading.parsed.get(allow):
        reading.fields["grpc_port"] = port = reading.parsed.get(triton, DEFAULT_GRPC_PORT)
        _check_port(reading, triton if triton in reading.parsed else allow, "gRPC", port)
    elif triton in reading.parsed:
        _check_port(reading, triton, "gRPC")
        reading.notices.append(f"{reading.label(triton)} has no effect: {allow}=true switches gRPC on")
    port = reading.fields.get("grpc_port")
    if port and port == reading.fields.get("port", DEFAULT_PORT):
        reading.problems.append(f"port {port} is HTTP's and gRPC's at once; choose another for gRPC with {own}")


def _choose_metrics_port(reading: Reading) -> None:
    """Ours opens it by itself, Triton's beside its switch."""
    own, triton, allow = "MME_METRICS_PORT", "SAGEMAKER_TRITON_METRICS_PORT", "SAGEMAKER_TRITON_ALLOW_METRICS"
    name = own if own in reading.parsed else triton
    if name in reading.parsed:
        _check_port(reading, name, "metrics")
    if name == triton and triton in reading.parsed:
        if reading.parsed.get(allow):
            reading.fields["metrics_port"] = reading.parsed[triton]
        else:
            reading.notices.append(f"{reading.label(triton)} has no effect: {allow}=true opens it")
    port = reading.fields.get("metrics_port")
    if port and port in {reading.fields.get("port", DEFAULT_PORT), reading.fields.get("grpc_port")}:
        reading.problems.append(f"port {port} is to serve more than metrics; choose another for those with {own}")


def _check_port(reading: Reading, name: str, protocol: str, port: int | None = None) -> None:
    """Check the port that a variable says, or that it stands for."""
    port = reading.parsed[name] if port is None else port
    safe = reading.parsed.get("SAGEMAKER_SAFE_PORT_RANGE")
    if safe and not safe[0] <= port <= safe[1]:
        reading.problems.append(
            f"{reading.label(name)}: The server cannot listen to {protocol} requests at port {port}, "
            f"allowed port range is [{safe[0]}, {safe[1]}]"
        )


def _choose_log_level(reading: Reading) -> None:
    """Triton's four switches, unless MME_LOG_LEVEL speaks: the least severe level that is not switched off."""
    given = {name: reading.parsed[name] for name in LOG_VARIABLES if name in reading.parsed}
    if "MME_LOG_LEVEL" in reading.parsed or not given:
        return
    levels = zip(LOG_VARIABLES, ("debug", "info", "warning", "error"), strict=True)
    on = [level for name, level in levels if given.get(name, name != LOG_VARIABLES[0])]
    reading.fields["log_level"] = on[0] if on else "critical"


def _raise_max_body(reading: Reading) -> None:
    payload = reading.parsed.get("SAGEMAKER_MAX_PAYLOAD_IN_MB", 0) * 1024 * 1024
    limit = reading.fields.get("max_body_bytes", DEFAULT_MAX_BODY)
    reading.fields["max_body_bytes"] = max(payload, limit)


def _choose_request_timeout(reading: Reading) -> None:
    """A batch transform job waits as long as it was told to, which is more than an endpoint's minute."""
    if reading.parsed.get("SAGEMAKER_BATCH"):
        reading.fields.setdefault("request_timeout", LONGEST_INVOCATION)


def _check_drain(reading: Reading) -> None:
    drain = reading.fields.get("drain_seconds", 0)
    if drain + _DRAIN_MARGIN_SECONDS >= _KILL_AFTER_SECONDS:
        label = reading.label("MME_DRAIN_SECONDS")
        reading.notices.append(
            f"{label}={drain:g} is longer than SageMaker waits: it kills {_KILL_AFTER_SECONDS} s after SIGTERM"
        )


def _choose_emf(reading: Reading) -> None:
    """On by itself where SageMaker runs the container, since it hands what we print to CloudWatch."""
    on = reading.fields.setdefault("emf", "SAGEMAKER_SAFE_PORT_RANGE" in reading.parsed)
    if on and "endpoint_name" not in reading.fields:
        reading.notices.append(
            "CloudWatch metrics name this endpoint 'unknown', as those of every endpoint whose MME_ENDPOINT_NAME is "
            "not set; SageMaker does not tell its containers"
        )


def _choose_booster_accept(reading: Reading) -> None:
    """SageMaker's XGBoost answers a lone model's clients in CSV, and those of many models in JSON."""
    name = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
    if name in reading.parsed and not reading.given[name].text.startswith("*"):
        reading.fields["booster_accept"] = reading.parsed[name]
    elif reading.fields["mode"] is not Mode.SINGLE:
        reading.fields["booster_accept"] = DEFAULT_TYPE


def _choose_pickles(reading: Reading) -> None:
    """Allowed where SageMaker runs the container, unless set: its archives come from the account's own buckets."""
    platform = {"SAGEMAKER_SAFE_PORT_RANGE", "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_MULTI_MODEL"}
    reading.fields.setdefault("allow_pickle", not platform.isdisjoint(reading.given))


def _check_traces(reading: Reading) -> None:
    if "MME_TRACE_URL" in reading.parsed and "MME_TRACE_FILE" in reading.parsed:
        labels = f"{reading.label('MME_TRACE_URL')} and {reading.label('MME_TRACE_FILE')}"
        reading.problems.append(f"{labels}: traces are sent or written, not both; keep one of them")
    if "MME_TRACE_URL" in reading.parsed and "TENSORS" in reading.parsed.get("MME_TRACE_LEVEL", ()):
        label = reading.label("MME_TRACE_LEVEL")
        reading.problems.append(f"{label}: tensors are written to a file alone; give --trace-file in place of a URL")


def _check_load_timeout(reading: Reading) -> None:
    timeout = reading.parsed.get("MME_LOAD_TIMEOUT", 0)
    if reading.fields["mode"] is Mode.PLATFORM and timeout >= _LOAD_SECONDS:
        label = reading.label("MME_LOAD_TIMEOUT")
        reading.problems.append(f"{label}={timeout:g}: SageMaker gives up on a load after {_LOAD_SECONDS} s; give less")


class SingleModel(NamedTuple):
    """The model of a single-model endpoint.

    Attributes:
        name: that it is served under.
        folder: its files.
        warning: a sentence to log, or "".
    """

    name: str
    folder: Path
    warning: str = ""


def choose_single_model(model_dir: Path, default_name: str, scripts: Scripts = DEFAULT_SCRIPTS) -> SingleModel:
    """The model of a single-model endpoint: an inference script's, else by Triton's rules.

    Args:
        model_dir: what SageMaker unpacked; holds one directory a model, or a script and its model.
        default_name: SAGEMAKER_TRITON_DEFAULT_MODEL_NAME, or "" to take the only directory there is.
        scripts: what scripts are called.

    Raises:
        SettingsError: there is no such directory, none at all, or several and no name.
    """
    if model_dir.is_dir() and scripts.serves(model_dir):
        return SingleModel(default_name or _SCRIPT_MODEL, model_dir)
    found = _model_directories(model_dir)
    if default_name:
        if default_name not in found:
            raise SettingsError(
                f"ERROR: Directory with provided SAGEMAKER_TRITON_DEFAULT_MODEL_NAME {default_name} does not exist "
                f"in {model_dir}, which holds {_listing(found)}"
            )
        return SingleModel(default_name, model_dir / default_name)
    if len(found) > 1:
        raise SettingsError(
            "ERROR: More than 1 model directory found in model repository. Either provide a single directory or "
            f"set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME to the one to serve: {model_dir} holds {_listing(found)}"
        )
    if not found:
        from serve.sources.layout import advice  # noqa: PLC0415 - it needs the table of backends, and that numpy

        raise SettingsError(
            f"ERROR: No model found in model repository: {model_dir} holds no directory of a model with its versions, "
            f"and no code/{scripts.program}{advice(model_dir, '<model name>/')}"
        )
    warning = (
        "WARNING: No SAGEMAKER_TRITON_DEFAULT_MODEL_NAME provided. "
        f"Starting with the only existing model directory {found[0]}"
    )
    return SingleModel(found[0], model_dir / found[0], warning)


def _model_directories(model_dir: Path) -> list[str]:
    """The names of the directories in `model_dir` that can be models, sorted."""
    if not model_dir.is_dir():
        raise SettingsError(
            f"ERROR: No model found in model repository: {model_dir} is not a directory; give --model-store, "
            "--model-repository or --model-dir (`mme serve --help` has examples)"
        )
    entries = [entry for entry in model_dir.iterdir() if entry.is_dir()]
    misplaced = _without_a_model(model_dir, entries)
    if misplaced:
        raise SettingsError(
            "ERROR: Incorrect directory structure. Model directory needs to contain the top level folder: "
            f"move {model_dir}/{misplaced} to {model_dir}/<model name>/"
        )
    return sorted(e.name for e in entries if not e.name.startswith(".") and e.name not in _NOT_MODELS)


def _without_a_model(model_dir: Path, directories: Sequence[Path]) -> str:
    """What of a model lies in `model_dir` itself, "" where nothing does."""
    if (model_dir / "config.pbtxt").is_file():
        return "config.pbtxt and its versions"
    numbered = [each for each in directories if each.name.isdecimal()]
    if not numbered:
        return ""
    from serve.sources.layout import is_version  # noqa: PLC0415 - as above

    return next((each.name for each in numbered if is_version(each)), "")


def _listing(names: list[str]) -> str:
    return ", ".join(names) if names else "no directories"
