"""How the requests of a batch cross, and the answers to them: as columns where they are alike, else one by one.

PURE: requests in, the fields of a message and tensors to be written out, and back.

Theory of operation. Requests that the batcher joined send the same inputs and want the same outputs. Each of their
inputs crosses as one tensor, of which every request has its rows, and so does each output if the answers are alike:

    {"columns": {"INPUT": place, …}, "rows": [1, 2, 1], "outputs": ["OUTPUT", …]}      {"columns": …, "rows": …}

One request alone has its tensors whole, `rows` is null. What few requests have beside tensors is in `more`, by the
index of the request. Requests that differ, and answers that do, cross one by one in `requests` and `answers`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import PUT_BACK, ModelRequest, ModelResponse
from model_handlers.worker.framing import (
    ProtocolError,
    are_sizes,
    checked_parameters,
    error_fields,
    error_from,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from model_handlers.tensor import Array
    from model_handlers.worker.framing import Message, Packing

    Answer = ModelResponse | MmeError | None

_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # integers that JSON has on both sides


def pack_requests(requests: Sequence[ModelRequest], packing: Packing) -> Message:
    """The fields that tell a batch to the model's process, whose tensors go into `packing`.

    Raises:
        MmeError: a tensor that can't cross.
    """
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
    """The requests of a batch, without responders."""
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
    """The answers to a batch of `count` requests.

    Raises:
        ProtocolError, LookupError, TypeError, ValueError: this is not what `pack_answers` makes.
    """
    if "answers" in fields:
        answers: list[Answer] = [answer_from(answer, shared, model) for answer in fields["answers"]]
    else:
        answers = [ModelResponse(outputs) for outputs in _shares(fields, shared, model)]
    if len(answers) != count:
        raise ProtocolError(f"{len(answers)} answers to {count} requests")
    return answers


def answer_fields(response: ModelResponse, packing: Packing, model: str) -> Message:
    """The fields of one response.

    Raises:
        MmeError: EXECUTION_FAILED for a tensor or a parameter that can't cross.
    """
    parameters = _parameters(response, model)
    outputs = {
        name: packing.add(array, f"output '{name}' of model '{model}'") for name, array in response.outputs.items()
    }
    return {"outputs": outputs, "parameters": parameters}


def answer_from(fields: Message | None, shared: Array, model: str) -> Answer:
    """One answer that crossed for itself.

    Raises:
        ProtocolError, LookupError, TypeError, ValueError: this is no answer.
    """
    if fields is None:
        return None
    if "error" in fields:
        return error_from(fields["error"])
    if "again" in fields:
        return PUT_BACK
    return ModelResponse(_unpacked(fields["outputs"], shared, model), checked_parameters(fields["parameters"]))


def _parameters(response: ModelResponse, model: str) -> Message:
    """What a response has beside tensors, as JSON has it.

    Raises:
        MmeError: EXECUTION_FAILED where JSON has no form for it.
    """
    for name, value in response.parameters.items():
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
    """What a request has beside tensors, by the names of its attributes."""
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
    """What each request has of the columns."""
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
