"""What a handler that sees requests is given, and what it answers: see `Handler.execute_requests`.

Some of each are made for every request, so these are plain classes, which compiled code makes in no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array, DataType

FLAG_SEQUENCE_START = 1
FLAG_SEQUENCE_END = 2
FLAGS_TOLD = FLAG_SEQUENCE_START | FLAG_SEQUENCE_END  # what models are told, and may say
FLAG_SEQUENCE_KEPT = 4  # the server's own: the sequence is ended elsewhere, however long it is idle


class ModelRequest:
    """One request as a handler that wants to see requests gets it."""

    def __init__(
        self,
        inputs: dict[str, Array],
        outputs: tuple[str, ...],
        id: str = "",  # noqa: A002 - the protocol's word
        parameters: Mapping[str, Any] | None = None,
        timeout_us: int = 0,
        correlation_id: int | str = 0,
        flags: int = 0,
        callers: tuple[str, ...] = (),
        responder: Responder | None = None,
        trace: str = "",
    ) -> None:
        self.inputs = inputs  # input name → array of the full shape, batch dimension included
        self.outputs = outputs  # names of the outputs that the client asked for, in the model's order; never empty
        self.id = id
        # what the client sent beside tensors: strings, numbers and booleans
        self.parameters: Mapping[str, Any] = {} if parameters is None else parameters
        self.timeout_us = timeout_us  # the client's own queue timeout in microseconds, 0 for none
        self.correlation_id = correlation_id  # the sequence that it belongs to, 0 or "" for none
        self.flags = flags  # FLAG_SEQUENCE_START and FLAG_SEQUENCE_END together
        # the models that wait for its answer, the outermost first: those that called one another up to it
        self.callers = callers
        self.responder = responder  # takes what the model answers unasked; None where it would not be taken
        self.trace = trace  # the trace that it belongs to, as a JSON object of headers that hand it on; "" for none

    def __repr__(self) -> str:
        return f"<ModelRequest {self.id!r} of {', '.join(self.inputs)}>"


class ModelResponse:
    """One response of a handler that sees requests."""

    def __init__(
        self,
        outputs: dict[str, Array],
        parameters: Mapping[str, Any] | None = None,
        data_types: Mapping[str, DataType] | None = None,
    ) -> None:
        self.outputs = outputs  # output name → array of the full shape
        # what the model sends beside tensors: strings, numbers and booleans
        self.parameters: Mapping[str, Any] = {} if parameters is None else parameters
        # those of outputs whose arrays do not tell: BF16, whose bits numpy carries as UINT16
        self.data_types: Mapping[str, DataType] = {} if data_types is None else data_types

    def __repr__(self) -> str:
        return f"<ModelResponse of {', '.join(self.outputs)}>"


class PutBack(ModelResponse):
    """Stands for the response to a request that the model puts back, to be executed once more. There is one of it."""


PUT_BACK = PutBack({})


class Responder(Protocol):
    """Takes the responses to one request that its model sends unasked: any number of them, from any thread."""

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        """One response, or none but the news that it was the last. Others may follow an error of a decoupled model."""

    def is_cancelled(self) -> bool:
        """Whether responses are not waited for any more."""

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, once and on any thread, when that happens; at once if it has."""
