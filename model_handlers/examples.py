"""Triton's example backends identity, repeat and square: models without a file, for trying clients, batching, streams.

They are handlers like those of frameworks, with nothing special about them: something to copy.
"""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from model_handlers.base import Device, Handler
from model_handlers.config.model_config import ModelConfig, integer, number, warn_of_unknown
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model, unavailable, unsupported
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.requests import ModelRequest, ModelResponse, Responder
from model_handlers.tensor import Array, TensorSpec, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class FilelessHandler(Handler):
    """A model that is all in its configuration."""

    default_filename: ClassVar[str] = ""
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:  # noqa: ARG003 - there is none
        """Check that the configuration declares what the backend takes and gives."""
        for what, specs, names in (("input", config.inputs, cls.inputs), ("output", config.outputs, cls.outputs)):
            found = [spec.name for spec in specs]
            if not found or (names and sorted(found) != sorted(names)):
                raise invalid_model(
                    f"model '{config.name}': backend '{cls.backend}' needs the {what}s "
                    f"{', '.join(names) or 'declared'}, and config.pbtxt has {', '.join(found) or 'none'}"
                )
        return normalise(config)

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> Handler:  # noqa: ARG003 - of no file
        return cls(cls.autocomplete(config, model_file))

    def close(self) -> None:
        """There is nothing to give back."""


class StreamingHandler(FilelessHandler):
    """A decoupled model of which each request is answered by a thread of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._closing = threading.Event()
        self._threads: set[threading.Thread] = set()

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """As above, and that it may answer as often as it likes."""
        if not config.decoupled:
            raise invalid_model(
                f"model '{config.name}': backend '{cls.backend}' answers a request several times: set "
                "model_transaction_policy { decoupled: true }"
            )
        return super().autocomplete(config, model_file)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        answers: list[ModelResponse | MmeError | None] = []
        for request in requests:
            if request.responder is None:
                answers.append(unsupported(f"model '{self.config.name}' answers streams alone"))
                continue
            self._begin(request, request.responder)
            answers.append(None)
        self.hold(requests)
        return answers

    def hold(self, requests: Sequence[ModelRequest]) -> None:
        """Keep the instance busy as long as the requests ask for; of itself not at all."""

    def respond(self, request: ModelRequest, send: Callable[[ModelResponse], None]) -> None:
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def close(self) -> None:
        self._closing.set()
        for thread in list(self._threads):
            thread.join()

    def _begin(self, request: ModelRequest, responder: Responder) -> None:
        thread = threading.Thread(target=self._answer, args=(request, responder), name=f"{self.config.name} answers")
        self._threads.add(thread)
        thread.start()

    def _answer(self, request: ModelRequest, responder: Responder) -> None:
        gone = unavailable(f"model '{self.config.name}' was unloaded")
        last: MmeError | None = None

        def send(response: ModelResponse) -> None:
            if self._closing.is_set():
                raise gone
            if responder.is_cancelled():
                raise MmeError(Kind.CANCELLED, "the client left")
            responder.send(response, final=False)

        try:
            self.respond(request, send)
        except MmeError as error:
            last = error
        finally:
            responder.send(last, final=True)
            self._threads.discard(threading.current_thread())


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
        warn_of_unknown(config, _KNOWN, "identity models", "mme.examples", _HARMLESS)
        time.sleep(max(0.0, number(config, "creation_delay_sec", 0.0)))
        digits = _LAST_NUMBER.search(lane)
        return cls(cls.autocomplete(config, model_file), int(digits[1]) if digits else 0)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        for request in requests:
            self._bytes.add(float(sum(map(size_of, request.inputs.values()))))
        if self._seconds:
            time.sleep(self._seconds)
        return [ModelResponse(self._echo(request), _PARAMETERS) for request in requests]

    def _echo(self, request: ModelRequest) -> dict[str, Array]:
        sources = {name: self._sources[name] for name in request.outputs}
        return {name: request.inputs[source] for name, source in sources.items() if source in request.inputs}


def _pairs(config: ModelConfig) -> list[tuple[TensorSpec, TensorSpec]]:
    numbers = {_number(spec.name): spec for spec in config.inputs}
    return [
        (numbers.get(_number(target.name), source), target)
        for source, target in zip(config.inputs, config.outputs, strict=True)
    ]


def _number(name: str) -> str:
    found = _LAST_NUMBER.search(name)
    return found[1] if found else name


class RepeatHandler(StreamingHandler):
    """Sends what it is given, element by element."""

    backend: ClassVar[str] = "repeat"
    inputs: ClassVar[tuple[str, ...]] = ("IN", "DELAY", "WAIT")
    outputs: ClassVar[tuple[str, ...]] = ("OUT", "IDX")

    def hold(self, requests: Sequence[ModelRequest]) -> None:
        self.pause(sum(float(request.inputs["WAIT"].ravel()[0]) for request in requests) / 1000)

    def respond(self, request: ModelRequest, send: Callable[[ModelResponse], None]) -> None:
        elements, delays = request.inputs["IN"].ravel(), request.inputs["DELAY"].ravel()
        if len(elements) != len(delays):
            raise invalid_argument(
                f"model '{self.config.name}' needs a DELAY for each element of IN: got {len(delays)} for "
                f"{len(elements)}"
            )
        leading = request.inputs["IN"].ndim - 1
        for index, (element, delay) in enumerate(zip(elements, delays, strict=True)):
            self.pause(float(delay) / 1000)
            outputs = {
                "OUT": np.array([element], elements.dtype).reshape((1,) * (leading + 1)),
                "IDX": np.array([index], np.uint32).reshape((1,) * (leading + 1)),
            }
            send(ModelResponse({name: outputs[name] for name in request.outputs}))


_INFER, _OUTPUT, _FAIL, _EMPTY = (
    "CUSTOM_INFER_DELAY_NS",
    "CUSTOM_OUTPUT_DELAY_NS",
    "CUSTOM_FAIL_COUNT",
    "CUSTOM_EMPTY_COUNT",
)
_CANCEL_DELAY = {"CUSTOM_CANCEL_DELAY_NS": "a client that leaves is heard of before the next response"}
_COUNTS = range(1 << 31)
_DELAYS = range(1 << 62)


class SquareHandler(StreamingHandler):
    """Sends a number as often as it says."""

    backend: ClassVar[str] = "square"
    inputs: ClassVar[tuple[str, ...]] = ("IN",)
    outputs: ClassVar[tuple[str, ...]] = ("OUT",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        warn_of_unknown(config, (_INFER, _OUTPUT, _FAIL, _EMPTY), "square models", "mme.examples", _CANCEL_DELAY)
        self._before = integer(config, _INFER, 0, _DELAYS) / 1e9
        self._between = integer(config, _OUTPUT, 0, _DELAYS) / 1e9
        self._failures = integer(config, _FAIL, 0, _COUNTS)
        self._empty = integer(config, _EMPTY, 0, _COUNTS)

    def respond(self, request: ModelRequest, send: Callable[[ModelResponse], None]) -> None:
        self.pause(self._before)
        value = request.inputs["IN"]
        count = int(value.ravel()[0])
        for index in range(count - self._failures):
            self.pause(self._between)
            send(ModelResponse({"OUT": value} if index >= self._empty else {}))
        if self._failures and count > 0:
            raise MmeError(Kind.EXECUTION_FAILED, f"model '{self.config.name}' fails as its {_FAIL} asks")
