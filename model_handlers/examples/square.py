"""Triton's `square`: a decoupled model that answers IN = n with n responses OUT = n.

Parameters: `CUSTOM_INFER_DELAY_NS` passes before a request is answered, `CUSTOM_OUTPUT_DELAY_NS` before each response;
of the responses the first `CUSTOM_EMPTY_COUNT` have no tensors; with `CUSTOM_FAIL_COUNT` the stream ends in an error
instead of its last responses, as many as that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from model_handlers.errors import Kind, MmeError
from model_handlers.examples.parts import StreamingHandler
from model_handlers.parameters import integer, warn_of_unknown
from model_handlers.requests import ModelResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.config import ModelConfig
    from model_handlers.requests import ModelRequest

_INFER, _OUTPUT, _FAIL, _EMPTY = (
    "CUSTOM_INFER_DELAY_NS",
    "CUSTOM_OUTPUT_DELAY_NS",
    "CUSTOM_FAIL_COUNT",
    "CUSTOM_EMPTY_COUNT",
)
_HARMLESS = {"CUSTOM_CANCEL_DELAY_NS": "a client that leaves is heard of before the next response"}
_COUNTS = range(1 << 31)
_DELAYS = range(1 << 62)


class SquareHandler(StreamingHandler):
    """Sends a number as often as it says."""

    backend: ClassVar[str] = "square"
    inputs: ClassVar[tuple[str, ...]] = ("IN",)
    outputs: ClassVar[tuple[str, ...]] = ("OUT",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        warn_of_unknown(config, (_INFER, _OUTPUT, _FAIL, _EMPTY), "square models", "mme.examples", _HARMLESS)
        self._before = integer(config, _INFER, 0, _DELAYS) / 1e9
        self._between = integer(config, _OUTPUT, 0, _DELAYS) / 1e9
        self._failures = integer(config, _FAIL, 0, _COUNTS)
        self._empty = integer(config, _EMPTY, 0, _COUNTS)

    def respond(self, request: ModelRequest, send: Callable[[ModelResponse], None]) -> None:
        """The number, as often as it says."""
        self.pause(self._before)
        value = request.inputs["IN"]
        count = int(value.ravel()[0])
        for index in range(count - self._failures):
            self.pause(self._between)
            send(ModelResponse({"OUT": value} if index >= self._empty else {}))
        if self._failures and count > 0:
            raise MmeError(Kind.EXECUTION_FAILED, f"model '{self.config.name}' fails as its {_FAIL} asks")
