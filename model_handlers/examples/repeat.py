"""Triton's `repeat`: a decoupled model that sends the elements of IN one by one as OUT, with their positions as IDX.

DELAY says how many milliseconds pass before each, WAIT how many the instance is busy with the request itself: a WAIT
of less than the delays together lets the next request begin while this one is still being answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from model_handlers.errors import invalid_argument
from model_handlers.examples.parts import StreamingHandler
from model_handlers.requests import ModelResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_handlers.requests import ModelRequest


class RepeatHandler(StreamingHandler):
    """Sends what it is given, element by element."""

    backend: ClassVar[str] = "repeat"
    inputs: ClassVar[tuple[str, ...]] = ("IN", "DELAY", "WAIT")
    outputs: ClassVar[tuple[str, ...]] = ("OUT", "IDX")

    def hold(self, requests: Sequence[ModelRequest]) -> None:
        """Keep the instance busy for as long as the requests say."""
        self.pause(sum(float(request.inputs["WAIT"].ravel()[0]) for request in requests) / 1000)

    def respond(self, request: ModelRequest, send: Callable[[ModelResponse], None]) -> None:
        """Before each element its delay."""
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
