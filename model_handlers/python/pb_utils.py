"""What models import as `triton_python_backend_utils`: all of Triton's names for a model's own code.

`install` puts this module into the loading process under that name; no file of that name is on an import path. What is
counted in metrics comes together in the server: instances and models that use one name and the same labels count into
one metric. `value` tells what this process has counted into it.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.errors import MmeError
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.model_calls import Override
from model_handlers.python import pb_calls
from model_handlers.python.autocomplete import ModelConfig
from model_handlers.python.pb_calls import ResponseIterator, current_model
from model_handlers.python.pb_requests import (
    MEMORY_CPU,
    MEMORY_GPU,
    InferenceRequest,
    InferenceResponseSender,
    InferenceTrace,
    PreferredMemory,
)
from model_handlers.python.pb_responses import InferenceResponse, Tensor, TritonError, TritonModelException, text
from model_handlers.tensor import BF16, BOOL, BY_NUMBER, DATA_TYPES, Array, encode_bytes_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers import metrics


class Metric:
    """One metric of a family: the numbers of one set of labels. Made by `MetricFamily.Metric`."""

    __slots__ = ("_kind", "_metric", "_name", "_owner")

    def __init__(self, metric: metrics.ModelMetric, owner: object) -> None:
        self._metric = metric
        self._owner = owner
        self._name = metric.family.name
        self._kind = metric.family.kind

    def increment(self, value: float) -> None:
        doing = "increment metric value"
        self._check(doing, "Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._kind is MetricKind.COUNTER and not 0 <= value < math.inf:
            what = "can only be incremented monotonically by non-negative values."
            raise TritonModelException(f"Failed to {doing}: {self._kind_name()} {what} Metric '{self._name}': {value}")
        self._metric.add(float(value), self._owner)

    def set(self, value: float) -> None:
        self._check("set metric value", "Set", MetricKind.GAUGE)
        self._metric.set(float(value))

    def observe(self, value: float) -> None:
        self._check("observe metric value", "Observe", MetricKind.HISTOGRAM)
        self._metric.observe(float(value))

    def value(self) -> float:
        self._check("get metric value", "Value", MetricKind.COUNTER, MetricKind.GAUGE)
        return self._metric.value

    def _check(self, doing: str, method: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise TritonModelException(f"Failed to {doing}: {self._kind_name()} does not support {method}")

    def _kind_name(self) -> str:
        return f"TRITONSERVER_METRIC_KIND_{self._kind.name}"


class MetricFamily:
    """Metrics of one name, which differ in their labels."""

    COUNTER: ClassVar[int] = 0
    GAUGE: ClassVar[int] = 1
    HISTOGRAM: ClassVar[int] = 2

    def __init__(self, name: str, description: str, kind: int = COUNTER) -> None:
        if kind not in _KINDS:
            raise TritonModelException(f"metric family '{name}' has kind {kind!r}; use one of MetricFamily's constants")
        try:
            self._family = METRICS.family(name, description, _KINDS[kind])
        except MmeError as error:
            raise TritonModelException(error.message) from None

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802 - its interface
        """The metric of these labels: the same one each time. `buckets` are a histogram's upper bounds, ascending."""
        if labels is not None and not isinstance(labels, Mapping):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        bounds = self._bounds(buckets)
        try:
            owner = current_model()
            return Metric(METRICS.metric(self._family, labels or {}, bounds, owner), owner)
        except MmeError as error:
            raise TritonModelException(f"Failed to create metric. {error.message}") from None

    def _bounds(self, buckets: Sequence[float] | None) -> tuple[float, ...]:
        has_buckets = self._family.kind is MetricKind.HISTOGRAM
        if buckets is None:
            if has_buckets:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return ()
        if not isinstance(buckets, list | tuple):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if not has_buckets:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        return tuple(map(float, buckets))


_KINDS = {
    MetricFamily.COUNTER: MetricKind.COUNTER,
    MetricFamily.GAUGE: MetricKind.GAUGE,
    MetricFamily.HISTOGRAM: MetricKind.HISTOGRAM,
}


__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "json",  # as Triton's: models write `import *` and use these three
    "load_model",
    "np",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "struct",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

_log = logging.getLogger("mme.model")
_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")  # Triton's is in two languages

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MEMORY_GPU

# Scalar types, as models write them: `np.float32`. numpy has none for BF16.
_NUMPY_TYPES: dict[int, type[Any]] = {row.number: row.dtype.type for row in DATA_TYPES if row is not BF16}
TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    BY_NUMBER[number].config_name: bool if number == BOOL.number else scalar for number, scalar in _NUMPY_TYPES.items()
}


def install() -> None:
    """Make `import triton_python_backend_utils` find this module, in this process alone; under its other name, too."""
    for name in _NAMES:
        sys.modules[name] = sys.modules[__name__]


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name, None when the request has none."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of that name, None when the response has none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of the input of that name, or None."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of the output of that name, or None."""
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the configuration says that the model is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """The numpy type of a data type's number, None where numpy has none."""
    return _NUMPY_TYPES.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of the data type that carries a numpy type or dtype, None where none does."""
    if data_type is None:  # numpy would take it for float64
        return None
    try:
        dtype = np.dtype(data_type)
    except TypeError:
        return None
    if dtype.kind == "S":
        dtype = np.dtype(np.object_)
    return next((number for number, scalar in _NUMPY_TYPES.items() if dtype == scalar), None)


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """The numpy type of a data type as configurations name it: "TYPE_FP32" → `np.float32`."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """The wire form of strings; () when there are none, None for other elements."""
    if input_tensor.size == 0:
        return ()
    return encode_bytes_elements(input_tensor) if input_tensor.dtype.kind in "OS" else None


def deserialize_bytes_tensor(encoded_tensor: Any) -> Array:
    """The strings in a wire form, as a one-dimensional object array of `bytes`. Raises struct.error."""
    strings: list[bytes] = []
    offset = 0
    while offset < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, offset)
        strings += struct.unpack_from(f"<{length}s", encoded_tensor, offset + 4)
        offset += 4 + length
    return np.array(strings, np.object_)


def get_model_dir() -> str:
    """The directory of model.py: that of the version, with the model's other files."""
    model = current_model()
    if model is None:
        raise TritonModelException("get_model_dir is for models that are loaded")
    return str(model.directory)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model and wait until it is ready.

    `config` is JSON to load it with this once, `files` what to load it from: `file:1/model.onnx` and its like →
    contents.
    """
    if files is not None and not isinstance(files, dict):
        what = "files should be a dictionary of file paths and file contents"
        raise TritonModelException(f"failed to load model '{model_name}', {what}")
    override = None
    if config or files:
        contents = {text("path of a file", key): bytes(content) for key, content in (files or {}).items()}
        override = Override(text("config of a model", config), contents)
    name = text("model_name", model_name)
    pb_calls.ask(lambda outside, callers, done: outside.load(name, override, callers, done))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:  # noqa: FBT001, FBT002 - its interface
    """Unload a model and wait until it is gone; with the models that it depends on if they are to be."""
    name = text("model_name", model_name)
    pb_calls.ask(lambda outside, callers, done: outside.unload(name, unload_dependents, callers, done))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model would answer a request."""
    try:
        version = int(model_version) if model_version else None
    except ValueError:
        raise TritonModelException(f"is_model_ready of '{model_name}': '{model_version}' is no version") from None
    name = text("model_name", model_name)
    return pb_calls.ask(lambda outside, _, done: outside.is_ready(name, version, done))


class Logger:
    """The server's log, for a model to write to: lines carry the model's name."""

    class LogLevel(IntEnum):
        """The levels, which are attributes of the logger as well."""

        INFO = logging.INFO
        WARNING = logging.WARNING
        ERROR = logging.ERROR
        VERBOSE = logging.DEBUG

    INFO: ClassVar[int] = LogLevel.INFO
    WARNING: ClassVar[int] = LogLevel.WARNING
    ERROR: ClassVar[int] = LogLevel.ERROR
    VERBOSE: ClassVar[int] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        """Write a line; in a process that keeps no log to standard error, from where the server takes it."""
        message = text("message of a line", message) if isinstance(message, bytes) else message
        if _log.hasHandlers():
            model = current_model()
            _log.log(level, "%s", message, extra={"target_model": model.name} if model else None)
        else:
            sys.stderr.write(f"{logging.getLevelName(level)}: {message}\n")
            sys.stderr.flush()

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)
