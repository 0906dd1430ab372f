"""KServe v2 inference responses: a JSON header, and tensors in JSON or as binary data behind it; and what that costs.

The head of a binary response says the same for every request of one form, but for the id, so it is kept with that
form's `OutputOptions`. Bytes that are sent from where they lie cost nothing. What is copied into shared memory, split
into strings, or written as JSON, costs by its size: a long response is written by a thread.

Triton's classification extension shows an output as its highest values, each with its place and its name:

    [[0.1, 0.7, 0.2]]  →  [["0.700000:1:dog", "0.200000:2:bird"]]      the two highest of three classes
    [[1, 7, 2]]        →  [["7:1:dog", "2:2:bird"]]                    whole numbers are written whole
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from container.codec.json_data import array_to_json, parameters_to_json, with_literals
from container.codec.request import OutputOptions, write_output
from container.steps.shared_memory import AT_ONCE
from model_handlers.errors import invalid_argument
from model_handlers.tensor import BYTES, encode_bytes_elements
from serve.request import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from container.steps.shared_memory import Place
    from model_handlers.tensor import Array, DataType


_FEW = 64  # strings, whose lengths are looked at
_STRING = 256  # bytes that could be copied while a string is written
_NUMBER = 32  # and while a number is written as text, or takes its place among the classes


def takes_long(response: InferenceResponse, options: OutputOptions) -> bool:
    """Whether writing a response as a client wants it would keep others waiting."""
    effort = 0
    for name, data_type, array in response.outputs:
        if data_type is BYTES:
            effort += _strings(array)
        elif name in options.places:
            effort += array.nbytes
        elif name in options.classes or not options.outputs.get(name, options.binary):
            effort += array.size * _NUMBER
    return effort > AT_ONCE


def _strings(array: Array) -> int:
    count: int = array.size
    if count > _FEW:
        return count * _STRING
    return count * _STRING + sum(len(element) for element in array.flat if isinstance(element, bytes | str))


_MAX_HEADS = 64  # heads remembered for one form of request: its outputs mostly have one shape
_LARGE = 1 << 16  # bytes from which an output is sent from where it lies instead of copied


def encode(
    response: InferenceResponse, options: OutputOptions, *, literal: bool = False
) -> tuple[list[bytes | memoryview], int | None]:
    """The parts of a response's body (one, for one small output), and the length of its JSON header.

    The length is None if no binary data follow. A `literal` JSON says NaN and Infinity, as Triton's, in place of null.

    Raises:
        MmeError: UNSUPPORTED when an output or a parameter can't be written as the client asked; see also
            `shared.write_output`.
    """
    described: list[tuple[Any, ...]] = []
    data: list[bytes | memoryview] = []
    plain = False
    for name, data_type, array in response.outputs:
        if not options.outputs.get(name, options.binary):
            plain = True
        elif data_type is BYTES:
            part: bytes | memoryview = encode_bytes_elements(array)
            data.append(part)
            described.append((name, data_type, array.shape, len(part)))
        else:
            data.append(raw(array, data_type))
            described.append((name, data_type, array.shape))
    if plain or options.heads is None or response.parameters:
        head = _head(response, options, data, response.id, literal=literal)
    else:
        # Names and types too: a model may come back under its name with other outputs.
        key = (response.model_name, response.model_version, *described)
        known = options.heads.get(key)
        if known is None:
            if len(options.heads) >= _MAX_HEADS:
                options.heads.clear()
            known = options.heads[key] = _head(response, options, data, "", literal=literal)
        head = known if not response.id else b'{"id":%b,%b' % (orjson.dumps(response.id), known[1:])
    if not data:
        return [head], None
    if len(data) == 1 and type(data[0]) is bytes:  # one part is sent without being measured and joined
        return [head + data[0]], len(head)
    return [head, *data], len(head)


_LINE = OutputOptions(binary=False)


def encode_line(response: InferenceResponse, places: dict[str, Place] | None = None, *, literal: bool = False) -> bytes:
    """A response as a line of an answer that is `application/jsonlines`: the JSON that would be an answer of its own.

    Raises:
        MmeError: UNSUPPORTED when an output or a parameter can't be written as JSON; see `shared.write_output`.
    """
    options = _LINE
    if places:
        options = OutputOptions(binary=False)
        options.places = places
    parts, _ = encode(response, options, literal=literal)
    return b"".join((*parts, b"\n"))


def tensor_bytes(array: Array, data_type: DataType) -> bytes | memoryview:
    return encode_bytes_elements(array) if data_type is BYTES else raw(array, data_type)


def raw(array: Array, data_type: DataType) -> bytes | memoryview:
    """The little-endian bytes of a tensor that is not BYTES; a large one's lie where it lies."""
    if array.dtype != data_type.dtype:
        array = array.astype(data_type.dtype)
    if array.nbytes < _LARGE:
        return array.tobytes()
    return np.ascontiguousarray(array).data.cast("B")


def _head(
    response: InferenceResponse,
    options: OutputOptions,
    data: Sequence[bytes | memoryview],
    request_id: str,
    *,
    literal: bool,
) -> bytes:
    sizes = iter([len(part) for part in data])
    outputs = []
    for name, data_type, array in response.outputs:
        item: dict[str, Any] = {"name": name, "datatype": data_type.name, "shape": array.shape}
        if name in options.places:
            write_output(options.places[name], name, tensor_bytes(array, data_type))
        elif options.outputs.get(name, options.binary):
            item["parameters"] = {"binary_data_size": next(sizes)}
        else:
            item["data"] = array_to_json(array, data_type, name, literal=literal)
        outputs.append(item)
    document: dict[str, Any] = {"id": request_id} if request_id else {}
    document |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        document["parameters"] = parameters_to_json(response.parameters, response.model_name)
    document["outputs"] = outputs
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if literal and b"null" in head:  # in data, or in a name
        for item in outputs:
            if "data" in item:
                item["data"] = with_literals(item["data"])
        head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return head


_MOST_ELEMENTS = 1_000_000


def classified(
    response: InferenceResponse, wanted: Mapping[str, int], labels: Mapping[str, Sequence[str]], *, batches: bool
) -> InferenceResponse:
    """The response with classes in place of tensors.

    So many classes of each element of the batch are `wanted` of an output, those with the highest values; `labels` are
    their names, as far as there are any; `batches` says whether the first dimension of outputs is the batch.

    Raises:
        MmeError: INVALID_ARGUMENT for an output that has no order, or is too large.
    """
    outputs = []
    for name, data_type, array in response.outputs:
        if name not in wanted:
            outputs.append((name, data_type, array))
            continue
        if array.dtype.kind not in "iuf" or data_type.name == "BF16":
            raise invalid_argument(
                f"class result not available for output '{name}' due to unsupported type '{data_type.name}'"
            )
        if array.size > _MOST_ELEMENTS:
            raise invalid_argument(f"output '{name}' has {array.size} elements: classification output tensor too large")
        rows = array.reshape(*(array.shape[:1] or (1,)), -1) if batches else array.reshape(1, -1)
        classes = _classes(rows, wanted[name], labels.get(name, ()))
        outputs.append((name, BYTES, classes if batches else classes[0]))
    shown = InferenceResponse(
        response.model_name, response.model_version, outputs, response.id, response.timings, response.parameters
    )
    shown.final = response.final
    return shown


def _classes(rows: Array, count: int, labels: Sequence[str]) -> Array:
    """[rows, classes], highest first; of equal values the first one first."""
    whole = rows.dtype.kind in "iu"
    falling = ~rows if whole else -rows.astype(np.float64)  # ~ turns the order of whole numbers round, and keeps each
    order = np.argsort(falling, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(rows, order, axis=1)
    texts = np.empty(order.size, dtype=np.object_)
    texts[:] = [
        f"{value if whole else f'{value:.6f}'}:{index}{_name(labels, index)}".encode()
        for value, index in zip(values.ravel().tolist(), order.ravel().tolist(), strict=True)
    ]
    return texts.reshape(order.shape)


def _name(labels: Sequence[str], index: int) -> str:
    """Of a class, behind a colon; "" for one without, whether its line is empty or there is none."""
    return f":{labels[index]}" if index < len(labels) and labels[index] else ""
