"""What crosses between the serving process and a worker: messages, tensors beside them, batches of requests. PURE.

Control messages cross on a stream socket, tensors in shared memory. Nothing out of a worker is trusted, since a model
can write to any descriptor it finds: a message that is none, or a tensor outside its segment, is a `ProtocolError`,
after which the worker is not spoken to again.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import PUT_BACK, ModelRequest, ModelResponse
from model_handlers.tensor import BY_DTYPE, BY_NAME, BYTES, decode_bytes_elements, encode_bytes_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from model_handlers.tensor import Array, DataType

    Message = dict[str, Any]
    Place = list[Any]  # [datatype, offset, bytes, shape]
    Answer = ModelResponse | MmeError | None


# JSON: by orjson, or by the standard library where a model's own environment has no orjson. Both write what both read.


def plain_dumps(value: Any) -> bytes:
    """A value as bytes. Raises TypeError, ValueError: JSON has no form for it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def plain_loads(data: memoryview) -> Any:
    return json.loads(bytes(data))


dumps: Callable[[Any], bytes] = plain_dumps
loads: Callable[[memoryview], Any] = plain_loads
try:
    import orjson
except ImportError:
    pass
else:
    dumps, loads = orjson.dumps, orjson.loads


MAX_MESSAGE = 16 << 20  # tensors do not travel in messages; what a client can fill is ids and parameters
MAX_ERROR = 256 << 10  # characters of an error's sentence
_ALIGNMENT = 64
_HEAD = 4
_INDEX_BITS = 20  # requests of a batch
_MAX_RANK = 64  # numpy's own limit
_FEW_BYTES = 16 << 10
_bytes_of = np.ndarray.tobytes  # a masked array has one of its own, which fills in
_LITTLE = sys.byteorder == "little"


class ProtocolError(Exception):
    """The other side sent what no side of ours sends."""


# On the stream socket, length counting the object alone:
#
# +----------------+---------------------------+
# | length, 4 B LE | one JSON object, UTF-8    |
# +----------------+---------------------------+
#
# serving process → worker    {"do": "load", …}   {"do": "run", "batch": n, …}   {"do": "rest", …}   {"do": "close"}
# worker → serving process    {"loaded": …}       {"ran": n, …}                  {"rested": true}    (ends)
def encode_message(message: Message) -> bytes:
    """One message as bytes. MmeError: TOO_LARGE beyond MAX_MESSAGE, INVALID_ARGUMENT where JSON has no form."""
    try:
        body = dumps(message)
    except (TypeError, ValueError) as error:
        raise MmeError(Kind.INVALID_ARGUMENT, f"a value can't be handed to the model's process: {error}") from None
    if len(body) > MAX_MESSAGE:
        raise MmeError(
            Kind.TOO_LARGE,
            f"ids, parameters and tensor descriptions of a batch take {len(body)} bytes, at most {MAX_MESSAGE} can be "
            "handed to the model's process",
        )
    return len(body).to_bytes(_HEAD, "little") + body


class MessageSplitter:
    """Cuts the bytes of a stream into messages."""

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""
        self._at = 0  # what lies before was taken: a piece may hold hundreds of messages, and is not copied for each

    def feed(self, data: bytes) -> None:
        if self._at == len(self._buffer):
            self._buffer, self._at = data, 0  # as a rule a whole message, which is then read where it lies
            return
        if self._at or isinstance(self._buffer, bytes):
            self._buffer, self._at = bytearray(memoryview(self._buffer)[self._at :]), 0
        self._buffer += data

    def has_over(self, size: int) -> bool:
        """Return whether the next message is there, and takes more bytes than that."""
        here = len(self._buffer) - self._at - _HEAD
        return here > size and here >= self._length() > size

    def next(self) -> Message | None:
        """The next whole message, None while there is none. Raises ProtocolError: what came is no message."""
        start = self._at + _HEAD
        if len(self._buffer) < start:
            return None
        length = self._length()
        if length > MAX_MESSAGE:
            raise ProtocolError(f"a message of {length} bytes, at most {MAX_MESSAGE} are allowed")
        end = start + length
        if len(self._buffer) < end:
            return None
        try:
            message = loads(memoryview(self._buffer)[start:end])
        except ValueError as error:
            raise ProtocolError(f"a message that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ProtocolError("a message that is not an object")
        self._cut(end)
        return message

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes as they are, None while there are not so many."""
        end = self._at + size
        if len(self._buffer) < end:
            return None
        data = bytes(memoryview(self._buffer)[self._at : end])
        self._cut(end)
        return data

    def _length(self) -> int:
        return int.from_bytes(self._buffer[self._at : self._at + _HEAD], "little")

    def _cut(self, end: int) -> None:
        self._at = end
        if end == len(self._buffer):
            self._buffer, self._at = b"", 0


def request_number(batch: int, index: int) -> int:
    """What both sides call a request of a batch; no two of one process are called the same."""
    return batch << _INDEX_BITS | index


def error_fields(error: MmeError) -> Message:
    """An error, to cross by name."""
    message = error.message
    shown = message if len(message) <= MAX_ERROR else f"{message[:MAX_ERROR]} …"
    return {"kind": error.kind.name, "message": shown, **({"said": error.said} if error.said else {})}


def error_from(fields: Any) -> MmeError:
    """The error that crossed. Raises ProtocolError: there is no such error."""
    try:
        return MmeError(Kind[fields["kind"]], str(fields["message"]), int(fields.get("said", 0)))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ProtocolError(f"an error without kind or message: {str(fields)[:200]}") from None


def checked_parameters(fields: Any) -> dict[str, str | int | float]:
    """A response's parameters that crossed. Raises ProtocolError: they are something else."""
    if not isinstance(fields, dict) or not all(isinstance(value, str | int | float) for value in fields.values()):
        raise ProtocolError(f"parameters of a response that are none: {str(fields)[:200]}")
    return fields


# A segment holds a batch, inputs in front, outputs behind them, each tensor at a multiple of 64 bytes:
#
# 0        64           128                                   at                      end         size
# +--------+------------+-----+-------------------------------+-----------+-----------+-----------+
# | in 0   | in 1       | pad | in 2 (BYTES: length, data …)  | out 0     | out 1     | unused    |
# +--------+------------+-----+-------------------------------+-----------+-----------+-----------+
# written by the serving process, read in place by the worker written by the worker, read in place
#
# A place is `[datatype, offset, bytes, shape]`. An output that is an untouched input has the input's place. BYTES
# tensors lie in their wire form and are taken apart by the reader.
class Packing:
    """Finds places for arrays from `start` on, then writes them; arrays in the `shared` bytes keep their places."""

    def __init__(self, start: int = 0, shared: Array | None = None) -> None:
        self.end = self._start = start
        self._shared = shared
        self._arrays: list[tuple[int, int, np.dtype[Any], Sequence[Array]]] = []

    def add(self, array: Array, subject: str) -> Place:
        """A place for an array, `subject` in errors. MmeError: EXECUTION_FAILED: no array that can cross."""
        if not isinstance(array, np.ndarray):
            raise MmeError(Kind.EXECUTION_FAILED, f"{subject} is {type(array).__name__}, not a numpy array")
        shape = list(array.shape)
        if array.dtype.kind in "OSU":
            elements = np.frombuffer(_elements(array, subject), np.uint8)
            return self._place(BYTES, [elements], elements.nbytes, shape)
        data_type = _data_type(array, subject)
        if self.has(array) and _plain(array):
            assert self._shared is not None  # noqa: S101 - it has the array
            return [data_type.name, array.ctypes.data - self._shared.ctypes.data, array.nbytes, shape]
        return self._place(data_type, [array], array.nbytes, shape)

    def add_joined(self, arrays: Sequence[Array], subject: str) -> Place:
        """A place for arrays of one dtype behind one another, along their first dimensions. Raises as `add`."""
        first = arrays[0]
        if first.dtype.kind in "OSU":
            return self.add(np.concatenate(arrays), subject)
        rows = sum([array.shape[0] for array in arrays])
        nbytes = sum([array.nbytes for array in arrays])
        return self._place(_data_type(first, subject), arrays, nbytes, [rows, *first.shape[1:]])

    def has(self, array: Any) -> bool:
        """Return whether an array lies in the bytes that both sides have."""
        return self._shared is not None and isinstance(array, np.ndarray) and array.base is self._shared

    def clear(self) -> None:
        self.end = self._start
        self._arrays.clear()

    def _place(self, data_type: DataType, arrays: Sequence[Array], nbytes: int, shape: list[int]) -> Place:
        offset = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = offset + nbytes
        if nbytes:
            self._arrays.append((offset, nbytes, _little(arrays[0].dtype), arrays))
        return [data_type.name, offset, nbytes, shape]

    def contents(self) -> Iterator[tuple[int, memoryview]]:
        """The offset of every place, and its bytes; those of arrays with strides, and of joined ones, are copied."""
        for offset, _, little, arrays in self._arrays:
            plain = np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), little)
            yield offset, plain.reshape(-1).view(np.uint8).data

    def write(self, memory: memoryview) -> None:
        """Copy every array to its place; `memory` has at least `end` bytes. One copy, whatever the strides."""
        for offset, nbytes, little, arrays in self._arrays:
            if nbytes <= _FEW_BYTES and little == arrays[0].dtype:  # copied twice: numpy takes longer to prepare
                memory[offset : offset + nbytes] = b"".join([_bytes_of(array) for array in arrays])
                continue
            target = np.frombuffer(memory, little, nbytes // little.itemsize, offset)
            if len(arrays) == 1:
                np.copyto(target.reshape(arrays[0].shape), arrays[0])
            else:
                np.concatenate(arrays, out=target.reshape(-1, *arrays[0].shape[1:]))


def _elements(array: Array, subject: str) -> bytes:
    try:
        return encode_bytes_elements(array)
    except MemoryError:
        raise
    except Exception as error:  # halves of characters; what is no string says what it is by code of its author
        raise MmeError(Kind.EXECUTION_FAILED, f"{subject} has an element that is no text: {error}") from error


def _data_type(array: Array, subject: str) -> DataType:
    data_type = BY_DTYPE.get(array.dtype) or BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if data_type is None:
        raise MmeError(Kind.EXECUTION_FAILED, f"{subject} has dtype {array.dtype}, which the protocol has no name for")
    return data_type


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative and _LITTLE else dtype.newbyteorder("<")


def _plain(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative


def unpack(shared: Array, place: Any, name: str, model: str) -> Array:
    """The array at a place: a view of the segment's bytes, for BYTES a copy. ProtocolError: no array can lie there."""
    try:
        data_type, offset, nbytes, shape = place
        data_type = BY_NAME[data_type]
    except (TypeError, ValueError, KeyError):
        raise ProtocolError(f"tensor '{name}' is described by {str(place)[:200]}") from None
    if not are_sizes([offset, nbytes]) or not _is_shape(shape) or offset + nbytes > shared.nbytes:
        raise ProtocolError(f"tensor '{name}' at {str(place)[:200]} lies outside its segment of {shared.nbytes} bytes")
    count = math.prod(shape)
    if data_type is BYTES:
        try:
            return decode_bytes_elements(shared[offset : offset + nbytes].data, count, name, model).reshape(shape)
        except MmeError as error:
            raise ProtocolError(error.message) from None
    if nbytes != count * data_type.itemsize or offset % data_type.itemsize:
        raise ProtocolError(f"tensor '{name}' of {data_type} {shape} is said to take {nbytes} bytes at {offset}")
    return np.ndarray(shape, data_type.dtype, shared, offset)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= _MAX_RANK and are_sizes(shape)


def are_sizes(numbers: list[Any]) -> bool:
    for number in numbers:  # noqa: SIM110 - twice as fast as a generator, for each tensor of each batch
        if type(number) is not int or number < 0:
            return False
    return True


_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # integers that JSON has on both sides


# Joined requests send the same inputs and want the same outputs, so each input crosses as one tensor, of which every
# request has its rows, and so does each output if the answers are alike:
#
# {"columns": {"INPUT": place, …}, "rows": [1, 2, 1], "outputs": ["OUTPUT", …]}      {"columns": …, "rows": …}
#
# One request alone has its tensors whole, `rows` is null. What few requests have beside tensors is in `more`, by the
# index of the request. Requests that differ, and answers that do, cross one by one in `requests` and `answers`.
def pack_requests(requests: Sequence[ModelRequest], packing: Packing) -> Message:
    """The fields that tell a batch to the worker; tensors go into `packing`. MmeError: a tensor that can't cross."""
    first = requests[0]
    rows = _rows([request.inputs for request in requests])
    if rows is None or any(request.outputs != first.outputs for request in requests):
        return {"requests": [_request(request, packing) for request in requests]}
    more = {str(index): fields for index, request in enumerate(requests) if (fields := _more(request))}
    return {
        "columns": _columns([request.inputs for request in requests], packing, "input"),
        "rows": rows or None,
        "outputs": first.outputs,
        "more": more,
    }


def unpack_requests(fields: Message, shared: Array, model: str) -> list[ModelRequest]:
    if "requests" in fields:
        return [
            ModelRequest(_unpacked(each["inputs"], shared, model), tuple(each["outputs"]), **each["more"])
            for each in fields["requests"]
        ]
    outputs, more = tuple(fields["outputs"]), fields["more"]
    requests = [ModelRequest(inputs, outputs) for inputs in _shares(fields, shared, model)]
    for index, values in more.items():
        for name, value in values.items():
            setattr(requests[int(index)], name, value)
    return requests


def pack_answers(answers: Sequence[Answer], packing: Packing, model: str) -> Message:
    """The fields that tell the answers to a batch, whose tensors go into `packing`."""
    outputs = [answer.outputs for answer in answers if type(answer) is ModelResponse and not answer.parameters]
    rows = _rows(outputs) if len(outputs) == len(answers) else None
    if rows is not None and not (rows and any(map(packing.has, outputs[0].values()))):  # what is there is not joined
        try:
            return {"columns": _columns(outputs, packing, "output", f" of model '{model}'"), "rows": rows or None}
        except MmeError:  # of one of them: the others' answers are good
            packing.clear()
    return {"answers": [_answer(answer, packing, model) for answer in answers]}


def unpack_answers(fields: Message, shared: Array, count: int, model: str) -> list[Answer]:
    """Answers to `count` requests. ProtocolError, LookupError, TypeError, ValueError: not as `pack_answers` makes."""
    if "answers" in fields:
        answers: list[Answer] = [answer_from(answer, shared, model) for answer in fields["answers"]]
    else:
        answers = [ModelResponse(outputs) for outputs in _shares(fields, shared, model)]
    if len(answers) != count:
        raise ProtocolError(f"{len(answers)} answers to {count} requests")
    return answers


def check_tensors(answers: Sequence[Answer], requests: Sequence[ModelRequest]) -> None:
    """Raises ProtocolError: a request has neither all tensors that it wants nor an error, though none come unasked."""
    for answer, request in zip(answers, requests, strict=True):
        if isinstance(answer, MmeError):
            continue
        if answer is None or any(name not in answer.outputs for name in request.outputs):
            raise ProtocolError(f"an answer without all of {', '.join(request.outputs)}")


def answer_fields(response: ModelResponse, packing: Packing, model: str) -> Message:
    """The fields of one response. Raises MmeError: EXECUTION_FAILED for a tensor or a parameter that can't cross."""
    parameters = _parameters(response, model)
    outputs = {
        name: packing.add(array, f"output '{name}' of model '{model}'") for name, array in response.outputs.items()
    }
    return {"outputs": outputs, "parameters": parameters}


def answer_from(fields: Message | None, shared: Array, model: str) -> Answer:
    """One answer that crossed for itself. ProtocolError, LookupError, TypeError, ValueError: this is no answer."""
    if fields is None:
        return None
    if "error" in fields:
        return error_from(fields["error"])
    if "again" in fields:
        return PUT_BACK
    return ModelResponse(_unpacked(fields["outputs"], shared, model), checked_parameters(fields["parameters"]))


def _parameters(response: ModelResponse, model: str) -> Message:
    """What a response has beside tensors. MmeError: EXECUTION_FAILED where JSON has no form for it."""
    parameters: Mapping[Any, object] = response.parameters  # names too are an author's, and may be anything
    for name, value in parameters.items():
        wrong = (_wrong_text(name) if isinstance(name, str) else f"has a name of {type(name)}") or _wrong_value(value)
        if wrong:
            raise MmeError(Kind.EXECUTION_FAILED, f"parameter {name!a} of a response of model '{model}' {wrong}")
    return {
        name: float(value) if isinstance(value, float) else value  # numpy's are no others
        for name, value in response.parameters.items()
    }


def _wrong_value(value: Any) -> str:
    """What is wrong with a parameter's value, "" for nothing."""
    if isinstance(value, str):
        return _wrong_text(value)
    if isinstance(value, int):
        return "" if _SMALLEST <= value <= _LARGEST else "is an integer of more than 64 bits"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"is {value}, expected a finite number"
    return f"is {type(value)}, expected a string, number or boolean"


def _wrong_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has halves of characters: {error}"
    return ""


def _request(request: ModelRequest, packing: Packing) -> Message:
    inputs = {name: packing.add(array, f"input '{name}'") for name, array in request.inputs.items()}
    return {"inputs": inputs, "outputs": request.outputs, "more": _more(request)}


def _more(request: ModelRequest) -> Message:
    more: Message = {}
    if request.id:
        more["id"] = request.id
    if request.parameters:
        more["parameters"] = dict(request.parameters)
    if request.timeout_us:
        more["timeout_us"] = request.timeout_us
    if request.correlation_id:
        more["correlation_id"] = request.correlation_id
    if request.flags:
        more["flags"] = request.flags
    if request.trace:
        more["trace"] = request.trace
    return more


def _answer(answer: Answer, packing: Packing, model: str) -> Message | None:
    if answer is None:
        return None
    if isinstance(answer, MmeError):
        return {"error": error_fields(answer)}
    if answer is PUT_BACK:
        return {"again": True}
    try:
        return answer_fields(answer, packing, model)
    except MmeError as error:  # what can't be sent is the fault of this request alone
        return {"error": error_fields(error)}


def _rows(tensors: Sequence[Mapping[str, Array]]) -> list[int] | None:
    """How many rows each has of columns that hold them all; [] for one alone, None where there are no such columns."""
    if len(tensors) == 1:
        return []
    if not tensors[0] or not all(map(_has_rows, tensors[0].values())):
        return None
    kinds = [(name, array.dtype, array.shape[1:]) for name, array in tensors[0].items()]
    rows: list[int] = []
    for each in tensors:
        if len(each) != len(kinds):
            return None
        count = -1
        for name, dtype, shape in kinds:
            array = each.get(name)
            if array is None or not _has_rows(array) or array.dtype != dtype:
                return None
            length, *rest = array.shape
            if tuple(rest) != shape or (count >= 0 and length != count):
                return None
            count = length
        rows.append(count)
    return rows


def _has_rows(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.ndim > 0


def _columns(tensors: Sequence[Mapping[str, Array]], packing: Packing, what: str, of: str = "") -> Message:
    if len(tensors) == 1:
        return {name: packing.add(array, f"{what} '{name}'{of}") for name, array in tensors[0].items()}
    return {name: packing.add_joined([each[name] for each in tensors], f"{what} '{name}'{of}") for name in tensors[0]}


def _shares(fields: Message, shared: Array, model: str) -> Iterator[dict[str, Array]]:
    columns, rows = _unpacked(fields["columns"], shared, model), fields["rows"]
    if rows is None:
        yield columns
        return
    if not are_sizes(rows):
        raise ProtocolError(f"rows that are none: {str(rows)[:200]}")
    total = sum(rows)
    for array in columns.values():
        if array.ndim == 0 or len(array) != total:
            raise ProtocolError(f"columns of other lengths than {total}")
    start = 0
    for count in rows:
        end = start + count
        yield {name: array[start:end] for name, array in columns.items()}
        start = end


def _unpacked(places: Any, shared: Array, model: str) -> dict[str, Array]:
    return {name: unpack(shared, place, name, model) for name, place in places.items()}
