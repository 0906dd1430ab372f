"""tritonserver's flags, as one table: what each means here, that it changes nothing, or what there is instead. PURE.

They come in SAGEMAKER_TRITON_ADDITIONAL_ARGS, and behind a SAGEMAKER_TRITON_LOG_ value: Triton pastes that value
unquoted into a command line, and `false --load-model=encoder` was the only way to load a second model. `mme serve`
takes them too. A flag that is in no row refuses to start.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from container.settings.parsers import boolean, fraction
from container.settings.schema import BY_NAME, FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    Said = tuple[str, str] | None  # variable and value; None for what is so anyway

COLLECTOR = "http://localhost:4318/v1/traces"  # Triton's default
_PYTHON_BACKEND = {
    "shm-default-byte-size": "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE",
    "shm-growth-byte-size": "SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE",
}
_BACKENDS_AS_HERE = ("python,shm-region-prefix-name=", "python,stub-timeout-seconds=", "python,thread-pool-size=")
_BATCH_SIZE = "default-max-batch-size"
_TRACES = {
    "rate": "MME_TRACE_RATE",
    "count": "MME_TRACE_COUNT",
    "triton,file": "MME_TRACE_FILE",
    "triton,log-frequency": "MME_TRACE_LOG_FREQUENCY",
}
_TRACES_UNDERSTOOD = (
    "level=TIMESTAMPS, level=TENSORS, level=OFF, mode=opentelemetry, mode=triton, rate=N, count=N, "
    "opentelemetry,url=URL, triton,file=PATH, triton,log-frequency=N; of OpenTelemetry's library the variables "
    "OTEL_RESOURCE_ATTRIBUTES and OTEL_BSP_… say more"
)


class Use(NamedTuple):
    """A flag that says what a variable says; or, by a function of its value, several or in another form."""

    variable: str = ""
    read: Callable[[str], Said] | None = None


class Ignore(NamedTuple):
    """A flag that changes nothing here: accepted, since archives and variables are to stay, and logged."""

    why: str


class Refuse(NamedTuple):
    """A flag that is refused, with what there is in its place."""

    instead: str


def _backend_config(text: str) -> Said:
    """`python,shm-default-byte-size=N` and its like; of any backend, or of none, what its models batch by default."""
    backend, _, setting = text.rpartition(",")
    key, _, value = setting.partition("=")
    if value and key == _BATCH_SIZE:
        return "MME_DEFAULT_MAX_BATCH_SIZE", f"{backend}:{value}" if backend else value
    if backend == "python" and value and key in _PYTHON_BACKEND:
        return _PYTHON_BACKEND[key], value
    if backend == "tensorflow" and value and key == "version":
        return "SAGEMAKER_TRITON_TENSORFLOW_VERSION", value
    if text.startswith(_BACKENDS_AS_HERE):
        return None
    here = [f"python,{name}=N" for name in _PYTHON_BACKEND] + [f"{setting}N" for setting in _BACKENDS_AS_HERE]
    raise ValueError(
        f"one of {', '.join(here)}, tensorflow,version=N, {_BATCH_SIZE}=N, BACKEND,{_BATCH_SIZE}=N; of anything else a "
        "model's config.pbtxt is the place"
    )


def _gpu_limit(text: str) -> Said:
    """`DEVICE:FRACTION`; one share counts for every GPU."""
    device, _, share = text.rpartition(":")
    if not device.isdecimal():
        raise ValueError("DEVICE:FRACTION, such as 0:0.8")
    fraction(share)
    return "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", share


def _strict_readiness(text: str) -> Said:
    return "MME_PING_MODE", "ready" if boolean(text) else "live"


def _trace(text: str) -> Said:
    """One --trace-config; a level is MME_TRACE_LEVEL, and a mode says what URL or file say as well."""
    if text in {"mode=opentelemetry", "mode=triton"}:
        return None
    key, _, value = text.partition("=")
    if text in {"level=TIMESTAMPS", "level=TENSORS", "level=OFF"}:
        return "MME_TRACE_LEVEL", value
    if value and key in _TRACES:
        return _TRACES[key], value
    if value and key == "opentelemetry,url":  # Triton's has no scheme
        return "MME_TRACE_URL", value if "://" in value else f"http://{value}"
    raise ValueError(f"one of {_TRACES_UNDERSTOOD}")


def _traced(key: str) -> Use:
    return Use(read=lambda text: _trace(f"{key}={text}"))


def _keepalive(name: str) -> Use:
    return Use(read=lambda text: ("MME_GRPC_KEEPALIVE", f"{name}={text}"))


_ONE_LOOP = Ignore("one event loop answers every connection")
_NO_POOL = Ignore("tensors are handed over where they lie, and frameworks have memory of their own")
_GPUS = Ignore("GPUs and processors are asked when somebody scrapes, and are always among the metrics")
_ONE_SERVER = Ignore("a port belongs to one server")
_NO_VERTEX = Refuse("Vertex AI's routes are not served")
_REPOSITORY = Refuse("MME_MODEL_REPOSITORY, where models do not come from SageMaker")

TRITON_FLAGS: dict[str, Use | Ignore | Refuse] = {
    "--id": Use("MME_SERVER_ID"),
    "--load-model": Use("MME_LOAD_MODEL"),
    "--model-config-name": Use("MME_MODEL_CONFIG_NAME"),
    "--disable-auto-complete-config": Use("MME_DISABLE_AUTO_COMPLETE_CONFIG"),
    "--strict-model-config": Use("MME_DISABLE_AUTO_COMPLETE_CONFIG"),
    "--model-control-mode": Use("MME_MODEL_CONTROL_MODE"),
    "--model-load-thread-count": Use("MME_LOAD_THREADS"),
    "--model-namespacing": Use("SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING"),
    "--repository-poll-secs": Use("MME_REPOSITORY_POLL_SECS"),
    "--exit-timeout-secs": Use("MME_DRAIN_SECONDS"),
    "--rate-limit": Use("MME_RATE_LIMIT"),
    "--rate-limit-resource": Use("MME_RATE_LIMIT_RESOURCE"),
    "--cache-config": Use("MME_RESPONSE_CACHE"),
    "--response-cache-byte-size": Use("MME_RESPONSE_CACHE"),
    "--log-verbose": Use("SAGEMAKER_TRITON_LOG_VERBOSE"),
    "--log-info": Use("SAGEMAKER_TRITON_LOG_INFO"),
    "--log-warning": Use("SAGEMAKER_TRITON_LOG_WARNING"),
    "--log-error": Use("SAGEMAKER_TRITON_LOG_ERROR"),
    "--log-format": Use("MME_LOG_FORMAT"),
    "--allow-client-shm": Use("MME_ALLOW_CLIENT_SHM"),
    "--sagemaker-port": Use("MME_PORT"),
    "--sagemaker-safe-port-range": Use("SAGEMAKER_SAFE_PORT_RANGE"),
    "--sagemaker-thread-count": Use("SAGEMAKER_TRITON_THREAD_COUNT"),
    "--buffer-manager-thread-count": Use("SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT"),
    "--http-max-input-size": Use("MME_MAX_BODY"),
    "--http-header-forward-pattern": Use("MME_HTTP_HEADER_FORWARD_PATTERN"),
    "--http-restricted-api": Use("MME_HTTP_RESTRICTED_API"),
    "--allow-grpc": Use("SAGEMAKER_TRITON_ALLOW_GRPC"),
    "--grpc-address": Use("MME_GRPC_ADDRESS"),
    "--grpc-port": Use("SAGEMAKER_TRITON_GRPC_PORT"),
    "--grpc-header-forward-pattern": Use("MME_GRPC_HEADER_FORWARD_PATTERN"),
    "--grpc-restricted-protocol": Use("MME_GRPC_RESTRICTED_PROTOCOL"),
    "--grpc-use-ssl": Use("MME_GRPC_USE_SSL"),
    "--grpc-use-ssl-mutual": Use("MME_GRPC_USE_SSL_MUTUAL"),
    "--grpc-server-cert": Use("MME_GRPC_SERVER_CERT"),
    "--grpc-server-key": Use("MME_GRPC_SERVER_KEY"),
    "--grpc-root-cert": Use("MME_GRPC_ROOT_CERT"),
    "--grpc-infer-response-compression-level": Use("MME_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL"),
    "--allow-metrics": Use("SAGEMAKER_TRITON_ALLOW_METRICS"),
    "--metrics-address": Use("MME_METRICS_ADDRESS"),
    "--metrics-port": Use("SAGEMAKER_TRITON_METRICS_PORT"),
    "--metrics-config": Use("MME_METRICS_CONFIG"),
    "--trace-config": Use(read=_trace),
    "--trace-file": _traced("triton,file"),
    "--trace-level": _traced("level"),
    "--trace-rate": _traced("rate"),
    "--trace-count": _traced("count"),
    "--trace-log-frequency": _traced("triton,log-frequency"),
    "--backend-config": Use(read=_backend_config),
    "--model-load-gpu-limit": Use(read=_gpu_limit),
    "--strict-readiness": Use(read=_strict_readiness),
    "--grpc-keepalive-time": _keepalive("time"),
    "--grpc-keepalive-timeout": _keepalive("timeout"),
    "--grpc-keepalive-permit-without-calls": _keepalive("permit-without-calls"),
    "--grpc-http2-max-pings-without-data": _keepalive("max-pings-without-data"),
    "--grpc-http2-min-recv-ping-interval-without-data": _keepalive("min-recv-ping-interval-without-data"),
    "--grpc-http2-max-ping-strikes": _keepalive("max-ping-strikes"),
    "--grpc-max-connection-age": _keepalive("max-connection-age"),
    "--grpc-max-connection-age-grace": _keepalive("max-connection-age-grace"),
    "--allow-cpu-metrics": _GPUS,
    "--allow-gpu-metrics": _GPUS,
    "--allow-http": Ignore("KServe's routes are always there, on the main port"),
    "--allow-sagemaker": Ignore("SageMaker's routes are always there, on the main port"),
    "--cache-directory": Ignore("the response cache is part of the server"),
    "--cuda-memory-pool-byte-size": _NO_POOL,
    "--cuda-virtual-address-size": _NO_POOL,
    "--enable-peer-access": _NO_POOL,
    "--exit-on-error": Ignore("the models that load are served; /ping and /v2/health/ready tell of the others"),
    "--grpc-infer-allocation-pool-size": _ONE_LOOP,
    "--grpc-infer-thread-count": _ONE_LOOP,
    "--grpc-max-response-pool-size": _ONE_LOOP,
    "--http-thread-count": _ONE_LOOP,
    "--metrics-interval-ms": _GPUS,
    "--min-supported-compute-capability": Ignore("each framework says itself which GPUs it knows"),
    "--model-load-retry-count": Ignore("a load is tried once, and again when somebody asks for the model again"),
    "--pinned-memory-pool-byte-size": _NO_POOL,
    "--reuse-grpc-port": _ONE_SERVER,
    "--reuse-http-port": _ONE_SERVER,
    "--allow-vertex-ai": _NO_VERTEX,
    "--backend-directory": Refuse("backends are classes of Python here, see docs/handlers.md"),
    "--host-policy": Refuse("threads are not bound to NUMA nodes"),
    "--http-address": Refuse("MME_HOST"),
    "--http-port": Refuse("KServe's routes are on the main port, MME_PORT"),
    "--log-file": Refuse("lines go to standard error"),
    "--model-repository": _REPOSITORY,
    "--model-store": _REPOSITORY,
    "--repoagent-directory": Refuse("checksums are checked without an agent, and there are no others"),
    "--vertex-ai-default-model": _NO_VERTEX,
    "--vertex-ai-port": _NO_VERTEX,
    "--vertex-ai-thread-count": _NO_VERTEX,
}
LOG_VARIABLES = tuple(f"SAGEMAKER_TRITON_LOG_{name}" for name in ("VERBOSE", "INFO", "WARNING", "ERROR"))
_ADDITIONAL_ARGS = "SAGEMAKER_TRITON_ADDITIONAL_ARGS"
_COMMAND = "command line"
_OF_MAIN_PORT = {"--http-port": "--port", "--http-address": "--host"}  # which people may choose, and SageMaker does not


class Given(NamedTuple):
    """One value as it was given: how to name its origin, and its text."""

    label: str
    text: str


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line apart: flags that only tritonserver has, with their values, and what is left, in flags of ours."""
    theirs: list[str] = []
    left: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in _OF_MAIN_PORT:
            left.append(f"{_OF_MAIN_PORT[flag]}{has_value}{value}")
        elif flag in FLAGS or flag not in TRITON_FLAGS:
            left.append(word)
        else:
            theirs.append(word)
            if not has_value and waiting and not waiting[0].startswith("--"):
                theirs.append(waiting.pop(0))
    return theirs, left


def expand(given: dict[str, Given], command: Sequence[str], problems: list[str], notices: list[str]) -> None:
    """Turn flags of tritonserver into the variables that say the same."""
    words: list[tuple[str, str]] = []
    for name in (*LOG_VARIABLES, _ADDITIONAL_ARGS):
        if name not in given:
            continue
        try:
            parts = shlex.split(given[name].text)
        except ValueError as error:
            problems.append(f"{name}={given[name].text!r}: cannot be split into words: {error}")
            continue
        if name != _ADDITIONAL_ARGS and parts:
            given[name] = Given(given[name].label, parts.pop(0))
        words += [(name, part) for part in parts]
    words += [(_COMMAND, word) for word in command]
    sends, before = _sends_traces([word for _, word in words]), frozenset(given)
    while words:
        origin, word = words.pop(0)
        flag, has_value, value = word.partition("=")
        meaning = TRITON_FLAGS.get(flag)
        if meaning is not None and not has_value and words and not words[0][1].startswith("--"):
            value = words.pop(0)[1]
        label, value = f"{origin} ({flag})", value or "true"
        if isinstance(meaning, Use):
            _use(given, label, meaning, value, problems)
        elif isinstance(meaning, Ignore):
            notices.append(f"{label} has no effect: {meaning.why}")
        else:
            problems.append(f"{origin}: {_refusal(flag, meaning)}")
    if sends and "MME_TRACE_URL" not in given:
        given["MME_TRACE_URL"] = Given("--trace-config mode", COLLECTOR)
    if "MME_TRACE_LEVEL" not in given and given.keys() & {"MME_TRACE_URL", "MME_TRACE_FILE"} - before:
        given["MME_TRACE_LEVEL"] = Given("--trace-config without a level", "OFF")


def _sends_traces(words: Collection[str]) -> bool:
    """Whether a command line has traces sent, wherever that is."""
    said = {word.removeprefix("--trace-config=") for word in words}
    return "mode=opentelemetry" in said and bool(said & {"level=TIMESTAMPS", "--trace-level=TIMESTAMPS"})


def _refusal(flag: str, meaning: Refuse | None) -> str:
    if meaning is not None:
        return f"{flag!r} is not understood; {meaning.instead}"
    known = ", ".join(name for name, each in TRITON_FLAGS.items() if not isinstance(each, Refuse))
    return f"{flag!r} is not understood; of tritonserver's flags only {known} are"


def _use(given: dict[str, Given], label: str, meaning: Use, value: str, problems: list[str]) -> None:
    """One flag: Triton's own variables lose against it, as in Triton; ours win over it, and lists add up."""
    try:
        said: Said = (meaning.variable, value) if meaning.read is None else meaning.read(value)
    except ValueError as error:
        problems.append(f"{label}={value!r}: expected {error}")
        return
    if said is None:
        return
    name, text = said
    before = given.get(name)
    if before and BY_NAME[name].many:
        given[name] = Given(before.label, f"{before.text},{text}")
    elif before is None or not name.startswith("MME_"):
        given[name] = Given(label, text)
