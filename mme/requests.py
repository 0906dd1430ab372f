"""Requests made of arrays, without a copy where none is needed, and what becomes of their responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START
from model_handlers.tensor import BF16, BY_DTYPE, BY_DTYPE_NAME, BYTES, DataType, size_of
from serve.request import InferenceRequest, layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from model_handlers.tensor import Array
    from serve.request import InferenceResponse, Layout

    Result = InferenceResponse | MmeError | None

_LONGEST = 100 * 365 * 86400.0  # seconds in a queue
_MOST_UNREAD = 64 << 20  # bytes of responses that a stream keeps for a caller that is slower than the model


class OneResponse:
    """The one response of a request; a decoupled model may send it as well, if it sends no second one.

    Args:
        take: takes it, or what is wrong; on the server's loop.
    """

    def __init__(self, take: Callable[[Result], object]) -> None:
        self.take = take
        self._first: Result = None
        self._over = False

    def complete(self, _request: InferenceRequest, result: Result) -> None:
        if not self._over:
            self._over = True
            self.take(result or self._first or _not_one("none"))

    def respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        if self._first is None:
            self._first = response
        elif not self._over:
            self._over = True
            request.cancel()
            self.take(_not_one("several"))


class Stream:
    """The responses of one request on their way to the caller, which may be slower than the model.

    Args:
        put: takes each for the caller, and whether it is the last; on the server's loop.

    Attributes:
        is_read: whether the caller has read the last.
    """

    def __init__(self, put: Callable[[tuple[Result, bool]], object]) -> None:
        self.is_read = False
        self._put = put
        self._sent = self._taken = 0  # bytes, which the loop and the caller count, each for itself
        self._ended = False

    def read(self, put: tuple[Result, bool]) -> Result:
        """What the caller reads of what was put."""
        result, self.is_read = put
        self._taken += _size_of(result)
        return result

    def respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        self._sent += _size_of(response)
        if self._sent - self._taken <= _MOST_UNREAD:
            self._put((response, False))
        else:
            unread = f"{_MOST_UNREAD >> 20} MiB of responses are unread: read them as fast as the model sends them"
            self.complete(request, MmeError(Kind.UNAVAILABLE, unread))

    def complete(self, request: InferenceRequest, result: Result) -> None:
        """End with the last response, or with an error, behind which no other is awaited."""
        if self._ended:
            return
        self._ended = True
        if isinstance(result, MmeError) and not request.answered:
            request.cancel()
        self._put((result, True))


def _size_of(result: Result) -> int:
    return 0 if result is None or isinstance(result, MmeError) else sum([size_of(out[2]) for out in result.outputs])


def _not_one(many: str) -> MmeError:
    return MmeError(Kind.UNSUPPORTED, f"the model sent {many}, not one response: call `stream` or `stream_async`")


def request_of(
    call: OneResponse | Stream,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    id: str = "",  # noqa: A002 - the protocol's word
    parameters: Mapping[str, Any] | None = None,
    priority: int = 0,
    queue_timeout: float = 0,
    sequence: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
) -> InferenceRequest:
    """A request whose responses a call takes: see `Model`."""
    if not 0 <= queue_timeout < _LONGEST or priority < 0:
        raise invalid_argument("priority and queue_timeout can't be negative, nor queue_timeout a century")
    layout, arrays = tensors_of(inputs, (outputs,) if isinstance(outputs, str) else tuple(outputs))
    request = InferenceRequest(layout, arrays, call.complete, id, parameters, int(queue_timeout * 1e6))
    request.on_response = call.respond
    if isinstance(call, Stream):
        request.on_error = call.complete
    request.priority = priority
    if sequence:
        request.correlation_id = sequence
        request.flags = FLAG_SEQUENCE_START * sequence_start | FLAG_SEQUENCE_END * sequence_end
    return request


def tensors_of(inputs: Mapping[str, Any], outputs: tuple[str, ...]) -> tuple[Layout, list[Array]]:
    """Return the layout of a request, and its arrays. MmeError: INVALID_ARGUMENT: an input is no tensor."""
    rows, arrays = [], []
    for name, value in inputs.items():
        array = value if type(value) is np.ndarray else _array(name, value)
        data_type = BY_DTYPE.get(array.dtype)
        if data_type is None or data_type is BYTES:
            data_type, array = _converted(name, array)
        rows.append((name, data_type, array.shape))
        arrays.append(array)
    return layout_of(tuple(rows), outputs), arrays


def _array(name: str, value: Any) -> Array:
    """A tensor of another library shares its memory by DLPack; numbers and strings are copied."""
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    try:
        array = np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
        # numpy's own strings lose zeros at their ends
        return np.asarray(value, np.object_) if array.dtype.kind in "SU" else array
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise invalid_argument(f"input '{name}' is no array that the host can read: {error}") from None


def _converted(name: str, array: Array) -> tuple[DataType, Array]:
    if array.dtype.kind in "OSU":
        flat = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
        if wrong := next((type(each).__name__ for each in flat if not isinstance(each, bytes)), ""):
            raise invalid_argument(f"input '{name}' has an element of type {wrong}: expected str or bytes")
        return BYTES, np.array(flat, np.object_).reshape(array.shape)
    data_type = BY_DTYPE_NAME.get(array.dtype.name)  # in any byte order
    if data_type is None:
        raise invalid_argument(f"input '{name}' has elements of type {array.dtype}, which no model takes")
    return data_type, array.view(np.uint16) if data_type is BF16 else array.astype(data_type.dtype)
