"""tritonserver's flags, and what each of them means here. PURE.

    ARGUMENTS        says what a variable of ours says
    SEVERAL          says several things, or one in another form
    IDLE_ARGUMENTS   changes nothing here; accepted, since archives and variables are to stay, and said once in the log

They come in SAGEMAKER_TRITON_ADDITIONAL_ARGS, and behind a SAGEMAKER_TRITON_LOG_ value: Triton pastes that value
unquoted into a command line, and `false --load-model=encoder` was the only way to load a second model. Any other flag
refuses to start, with what there is in its place. People may give them to `mme serve` as well.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from container.settings.reading import Given
from container.settings.trace_config import COLLECTOR, sends_traces
from container.settings.trace_config import FLAGS as TRACE_FLAGS
from container.settings.values import boolean, fraction

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from container.settings.reading import Reading

    Meaning = tuple[str, str] | None  # variable and value; None for what is so anyway

ARGUMENTS = {
    "--id": "MME_SERVER_ID",
    "--load-model": "MME_LOAD_MODEL",
    "--model-config-name": "MME_MODEL_CONFIG_NAME",
    "--disable-auto-complete-config": "MME_DISABLE_AUTO_COMPLETE_CONFIG",
    "--strict-model-config": "MME_DISABLE_AUTO_COMPLETE_CONFIG",
    "--model-control-mode": "MME_MODEL_CONTROL_MODE",
    "--model-load-thread-count": "MME_LOAD_THREADS",
    "--model-namespacing": "SAGEMAKER_TRITON_DISABLE_MODEL_NAMESPACING",
    "--repository-poll-secs": "MME_REPOSITORY_POLL_SECS",
    "--exit-timeout-secs": "MME_DRAIN_SECONDS",
    "--rate-limit": "MME_RATE_LIMIT",
    "--rate-limit-resource": "MME_RATE_LIMIT_RESOURCE",
    "--cache-config": "MME_RESPONSE_CACHE",
    "--response-cache-byte-size": "MME_RESPONSE_CACHE",
    "--log-verbose": "SAGEMAKER_TRITON_LOG_VERBOSE",
    "--log-info": "SAGEMAKER_TRITON_LOG_INFO",
    "--log-warning": "SAGEMAKER_TRITON_LOG_WARNING",
    "--log-error": "SAGEMAKER_TRITON_LOG_ERROR",
    "--log-format": "MME_LOG_FORMAT",
    "--allow-client-shm": "MME_ALLOW_CLIENT_SHM",
    "--sagemaker-port": "MME_PORT",
    "--sagemaker-safe-port-range": "SAGEMAKER_SAFE_PORT_RANGE",
    "--sagemaker-thread-count": "SAGEMAKER_TRITON_THREAD_COUNT",
    "--buffer-manager-thread-count": "SAGEMAKER_TRITON_BUFFER_MANAGER_THREAD_COUNT",
    "--http-max-input-size": "MME_MAX_BODY",
    "--http-header-forward-pattern": "MME_HTTP_HEADER_FORWARD_PATTERN",
    "--http-restricted-api": "MME_HTTP_RESTRICTED_API",
    "--allow-grpc": "SAGEMAKER_TRITON_ALLOW_GRPC",
    "--grpc-address": "MME_GRPC_ADDRESS",
    "--grpc-port": "SAGEMAKER_TRITON_GRPC_PORT",
    "--grpc-header-forward-pattern": "MME_GRPC_HEADER_FORWARD_PATTERN",
    "--grpc-restricted-protocol": "MME_GRPC_RESTRICTED_PROTOCOL",
    "--grpc-use-ssl": "MME_GRPC_USE_SSL",
    "--grpc-use-ssl-mutual": "MME_GRPC_USE_SSL_MUTUAL",
    "--grpc-server-cert": "MME_GRPC_SERVER_CERT",
    "--grpc-server-key": "MME_GRPC_SERVER_KEY",
    "--grpc-root-cert": "MME_GRPC_ROOT_CERT",
    "--grpc-infer-response-compression-level": "MME_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL",
    "--allow-metrics": "SAGEMAKER_TRITON_ALLOW_METRICS",
    "--metrics-address": "MME_METRICS_ADDRESS",
    "--metrics-port": "SAGEMAKER_TRITON_METRICS_PORT",
    "--metrics-config": "MME_METRICS_CONFIG",
}
_KEEPALIVE = {
    "--grpc-keepalive-time": "time",
    "--grpc-keepalive-timeout": "timeout",
    "--grpc-keepalive-permit-without-calls": "permit-without-calls",
    "--grpc-http2-max-pings-without-data": "max-pings-without-data",
    "--grpc-http2-min-recv-ping-interval-without-data": "min-recv-ping-interval-without-data",
    "--grpc-http2-max-ping-strikes": "max-ping-strikes",
    "--grpc-max-connection-age": "max-connection-age",
    "--grpc-max-connection-age-grace": "max-connection-age-grace",
}
_ONE_LOOP = "one event loop answers every connection"
_NO_POOL = "tensors are handed over where they lie, and frameworks have memory of their own"
_GPUS = "GPUs and processors are asked when somebody scrapes, and are always among the metrics"
IDLE_ARGUMENTS = {
    "--allow-cpu-metrics": _GPUS,
    "--allow-gpu-metrics": _GPUS,
    "--allow-http": "KServe's routes are always there, on the main port",
    "--allow-sagemaker": "SageMaker's routes are always there, on the main port",
    "--cache-directory": "the response cache is part of the server",
    "--cuda-memory-pool-byte-size": _NO_POOL,
    "--cuda-virtual-address-size": _NO_POOL,
    "--enable-peer-access": _NO_POOL,
    "--exit-on-error": "the models that load are served; /ping and /v2/health/ready tell of the others",
    "--grpc-infer-allocation-pool-size": _ONE_LOOP,
    "--grpc-infer-thread-count": _ONE_LOOP,
    "--grpc-max-response-pool-size": _ONE_LOOP,
    "--http-thread-count": _ONE_LOOP,
    "--metrics-interval-ms": _GPUS,
    "--min-supported-compute-capability": "each framework says itself which GPUs it knows",
    "--model-load-retry-count": "a load is tried once, and again when somebody asks for the model again",
    "--pinned-memory-pool-byte-size": _NO_POOL,
    "--reuse-grpc-port": "a port belongs to one server",
    "--reuse-http-port": "a port belongs to one server",
}
_INSTEAD = {
    "--allow-vertex-ai": "Vertex AI's routes are not served",
    "--backend-directory": "backends are classes of Python here, see docs/handlers.md",
    "--host-policy": "threads are not bound to NUMA nodes",
    "--http-address": "MME_HOST",
    "--http-port": "KServe's routes are on the main port, MME_PORT",
    "--log-file": "lines go to standard error",
    "--model-repository": "MME_MODEL_REPOSITORY, where models do not come from SageMaker",
    "--model-store": "MME_MODEL_REPOSITORY, where models do not come from SageMaker",
    "--repoagent-directory": "checksums are checked without an agent, and there are no others",
    "--vertex-ai-default-model": "Vertex AI's routes are not served",
    "--vertex-ai-port": "Vertex AI's routes are not served",
    "--vertex-ai-thread-count": "Vertex AI's routes are not served",
}
_LISTS = frozenset(  # what is given several times adds up
    {
        "MME_LOAD_MODEL",
        "MME_RATE_LIMIT_RESOURCE",
        "MME_DEFAULT_MAX_BATCH_SIZE",
        "MME_HTTP_RESTRICTED_API",
        "MME_GRPC_RESTRICTED_PROTOCOL",
        "MME_GRPC_KEEPALIVE",
        "MME_METRICS_CONFIG",
        "MME_TRACE_LEVEL",
    }
)
LOG_VARIABLES = tuple(f"SAGEMAKER_TRITON_LOG_{name}" for name in ("VERBOSE", "INFO", "WARNING", "ERROR"))
_ADDITIONAL_ARGS = "SAGEMAKER_TRITON_ADDITIONAL_ARGS"

# -- flags whose value says more than one thing ----------------------------------------------------------------------

_PYTHON_BACKEND = {
    "shm-default-byte-size": "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE",
    "shm-growth-byte-size": "SAGEMAKER_TRITON_SHM_GROWTH_BYTE_SIZE",
}
_BACKENDS_AS_HERE = ("python,shm-region-prefix-name=", "python,stub-timeout-seconds=", "python,thread-pool-size=")
_BATCH_SIZE = "default-max-batch-size"


def _backend_config(text: str) -> Meaning:
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


def _gpu_limit(text: str) -> Meaning:
    """`DEVICE:FRACTION`; one share counts for every GPU."""
    device, _, share = text.rpartition(":")
    if not device.isdecimal():
        raise ValueError("DEVICE:FRACTION, such as 0:0.8")
    fraction(share)
    return "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", share


def _strict_readiness(text: str) -> Meaning:
    return "MME_PING_MODE", "ready" if boolean(text) else "live"


def _keepalive(name: str) -> Callable[[str], Meaning]:
    return lambda text: ("MME_GRPC_KEEPALIVE", f"{name}={text}")


SEVERAL: dict[str, Callable[[str], Meaning]] = {
    **TRACE_FLAGS,
    "--backend-config": _backend_config,
    "--model-load-gpu-limit": _gpu_limit,
    "--strict-readiness": _strict_readiness,
    **{flag: _keepalive(name) for flag, name in _KEEPALIVE.items()},
}

# -- from words to variables -----------------------------------------------------------------------------------------


_COMMAND = "command line"
_OF_MAIN_PORT = {"--http-port": "--port", "--http-address": "--host"}  # which people may choose, and SageMaker does not


def tritons_words(words: Sequence[str], ours: Container[str]) -> tuple[list[str], list[str]]:
    """A command line apart: flags that only tritonserver has, with their values, and what is left, in flags of ours.

    Args:
        words: of the command line.
        ours: flags that `mme serve` has itself.
    """
    theirs: list[str] = []
    left: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in _OF_MAIN_PORT:
            left.append(f"{_OF_MAIN_PORT[flag]}{has_value}{value}")
        elif flag in ours or flag not in ARGUMENTS.keys() | SEVERAL.keys() | IDLE_ARGUMENTS.keys() | _INSTEAD.keys():
            left.append(word)
        else:
            theirs.append(word)
            if not has_value and waiting and not waiting[0].startswith("--"):
                theirs.append(waiting.pop(0))
    return theirs, left


def expand_arguments(reading: Reading, given: Sequence[str] = ()) -> None:
    """Turn flags of tritonserver into the variables that say the same; refuse others by name.

    Args:
        reading: what has them in its variables.
        given: those of the command line.
    """
    words: list[tuple[str, str]] = []
    for name in (*LOG_VARIABLES, _ADDITIONAL_ARGS):
        if name not in reading.given:
            continue
        try:
            parts = shlex.split(reading.given[name].text)
        except ValueError as error:
            reading.problems.append(f"{name}={reading.given[name].text!r}: cannot be split into words: {error}")
            continue
        if name != _ADDITIONAL_ARGS and parts:
            reading.given[name] = Given(reading.label(name), parts.pop(0))
        words += [(name, part) for part in parts]
    words += [(_COMMAND, word) for word in given]
    sends, before = sends_traces([word for _, word in words]), frozenset(reading.given)
    _take_words(reading, words)
    if sends and "MME_TRACE_URL" not in reading.given:
        reading.given["MME_TRACE_URL"] = Given("--trace-config mode", COLLECTOR)
    if "MME_TRACE_LEVEL" not in reading.given and reading.given.keys() & {"MME_TRACE_URL", "MME_TRACE_FILE"} - before:
        reading.given["MME_TRACE_LEVEL"] = Given("--trace-config without a level", "OFF")


def _take_words(reading: Reading, words: list[tuple[str, str]]) -> None:
    while words:
        origin, word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if flag not in ARGUMENTS.keys() | SEVERAL.keys() | IDLE_ARGUMENTS.keys():
            reading.problems.append(f"{origin}: {_refusal(flag)}")
            if flag in _INSTEAD and not has_value:
                _next_value(words)
            continue
        if not has_value:
            value = _next_value(words)
        _take_flag(reading, f"{origin} ({flag})", flag, value or "true")


def _next_value(words: list[tuple[str, str]]) -> str:
    """The value that comes in a word of its own, "" where another flag comes."""
    return words.pop(0)[1] if words and not words[0][1].startswith("--") else ""


def _refusal(flag: str) -> str:
    if flag in _INSTEAD:
        return f"{flag!r} is not understood; {_INSTEAD[flag]}"
    known = ", ".join((*ARGUMENTS, *SEVERAL, *IDLE_ARGUMENTS))
    return f"{flag!r} is not understood; of tritonserver's flags only {known} are"


def _take_flag(reading: Reading, label: str, flag: str, value: str) -> None:
    if flag in IDLE_ARGUMENTS:
        reading.notices.append(f"{label} has no effect: {IDLE_ARGUMENTS[flag]}")
        return
    if flag in ARGUMENTS:
        _take(reading, label, ARGUMENTS[flag], value)
        return
    try:
        found = SEVERAL[flag](value)
    except ValueError as error:
        reading.problems.append(f"{label}={value!r}: expected {error}")
        return
    if found is not None:
        _take(reading, label, *found)


def _take(reading: Reading, label: str, name: str, value: str) -> None:
    """One flag: Triton's own variables lose against it, as in Triton; ours win over it, and lists add up."""
    before = reading.given.get(name)
    if before and name in _LISTS:
        reading.given[name] = Given(before.label, f"{before.text},{value}")
    elif before is None or not name.startswith("MME_"):
        reading.given[name] = Given(label, value)
