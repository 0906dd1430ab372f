"""Triton's `identity`: each output is the input of the same number, INPUT0 → OUTPUT0.

Parameters: `execute_delay_ms` keeps the instance busy for so long with each batch; `instance_wise_delay_multiplier`
multiplies that by the instance's number where it has a process of its own (MME_PLACEMENT); `creation_delay_sec` delays
the load. Bytes that come in are counted in the metric `input_byte_size_counter`.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, ClassVar

from model_handlers.errors import MmeError, invalid_model
from model_handlers.examples.parts import FilelessHandler
from model_handlers.metric_checks import MetricKind
from model_handlers.metrics import METRICS
from model_handlers.parameters import number, warn_of_unknown
from model_handlers.requests import ModelResponse
from model_handlers.tensor import BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config import ModelConfig
    from model_handlers.requests import ModelRequest
    from model_handlers.tensor import Array, TensorSpec

_KNOWN = ("execute_delay_ms", "instance_wise_delay_multiplier", "creation_delay_sec")
_HARMLESS = {"nested_span_count": "executions have no spans of their own"}
_LAST_NUMBER = re.compile(r"(\d+)\D*$")
# What it says of itself beside the tensors, so that clients can be tried with parameters of every kind.
_PARAMETERS = {"param0": "an example string param", "param1": 42, "param2": False}


class IdentityHandler(FilelessHandler):
    """Returns what it is given."""

    backend: ClassVar[str] = "identity"

    def __init__(self, config: ModelConfig, instance: int = 0) -> None:
        super().__init__(config)
        times = number(config, "instance_wise_delay_multiplier", 0.0) * instance
        self._seconds = max(0.0, number(config, "execute_delay_ms", 0.0)) * max(times, 1.0) / 1000
        self._sources = {target.name: source.name for source, target in _pairs(config)}
        family = METRICS.family("input_byte_size_counter", "Bytes of inputs so far.", MetricKind.COUNTER)
        self._bytes = METRICS.metric(family, {"model": config.name})

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """As many outputs as inputs, each of the input's type and shape."""
        config = super().autocomplete(config, model_file)
        if len(config.inputs) != len(config.outputs):
            raise invalid_model(
                f"model '{config.name}': backend 'identity' needs as many outputs as inputs, and config.pbtxt has "
                f"{len(config.inputs)} inputs and {len(config.outputs)} outputs"
            )
        for source, target in _pairs(config):
            if (source.data_type, source.dims) != (target.data_type, target.dims):
                raise invalid_model(
                    f"model '{config.name}': backend 'identity' needs '{target.name}' to have the data_type and "
                    f"dims of '{source.name}'"
                )
        return config

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> IdentityHandler:  # noqa: ARG003 - of no file
        """Takes as long as `creation_delay_sec` says."""
        warn_of_unknown(config, _KNOWN, "identity models", "mme.examples", _HARMLESS)
        time.sleep(max(0.0, number(config, "creation_delay_sec", 0.0)))
        digits = _LAST_NUMBER.search(lane)
        return cls(cls.autocomplete(config, model_file), int(digits[1]) if digits else 0)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        """Hand the inputs back."""
        for request in requests:
            self._bytes.add(float(sum(_size(self.config, name, array) for name, array in request.inputs.items())))
        if self._seconds:
            time.sleep(self._seconds)
        return [ModelResponse(self._echo(request), _PARAMETERS) for request in requests]

    def _echo(self, request: ModelRequest) -> dict[str, Array]:
        sources = {name: self._sources[name] for name in request.outputs}
        return {name: request.inputs[source] for name, source in sources.items() if source in request.inputs}


def _pairs(config: ModelConfig) -> list[tuple[TensorSpec, TensorSpec]]:
    """Each output behind the input of its number; where a name has none, of its place."""
    numbers = {_number(spec.name): spec for spec in config.inputs}
    return [
        (numbers.get(_number(target.name), source), target)
        for source, target in zip(config.inputs, config.outputs, strict=True)
    ]


def _number(name: str) -> str:
    found = _LAST_NUMBER.search(name)
    return found[1] if found else name


def _size(config: ModelConfig, name: str, array: Array) -> int:
    spec = config.input(name)
    if spec is not None and spec.data_type is BYTES:
        return sum(len(element) for element in array.ravel().tolist())
    return int(array.nbytes)
