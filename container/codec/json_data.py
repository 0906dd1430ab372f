"""Tensor elements as JSON: strict both ways, so that a number never silently becomes another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.tensor import BOOL, BYTES, element_count

if TYPE_CHECKING:
    from model_handlers.tensor import Array, DataType

_FLOATS = "f"
_INTEGERS = "iu"


def array_from_json(data: Any, data_type: DataType, shape: tuple[int, ...], name: str) -> Array:
    """The array of an input's `data`, nested or flat, row-major.

    Raises:
        MmeError: INVALID_ARGUMENT naming the input, when the elements are of another type or number.
    """
    if not data_type.json:
        raise invalid_argument(
            f"receiving {data_type.name} data via JSON is not supported. "
            f"Please use the binary data format for input '{name}'"
        )
    if not isinstance(data, list):
        raise invalid_argument(f"'data' of input '{name}' must be an array")
    array = _strings(data, name) if data_type is BYTES else _numbers(data, data_type, name)
    count = element_count(shape)
    if array.size != count:
        raise invalid_argument(
            f"Shape does not match true shape of 'data' field: input '{name}' has shape {list(shape)}, "
            f"which is {count} elements, but 'data' holds {array.size}"
        )
    return array.reshape(shape)


def _numbers(data: list[Any], data_type: DataType, name: str) -> Array:
    try:
        array = np.array(data)
    except ValueError:
        raise invalid_argument(f"'data' of input '{name}' is nested unevenly; send it flat or as full rows") from None
    kind = array.dtype.kind
    want = data_type.dtype.kind
    if array.size == 0 and kind != "O":
        return array.astype(data_type.dtype)
    if data_type is BOOL:
        fits = kind == "b"
    elif want == _FLOATS:
        fits = kind in "fiu"
    else:
        fits = kind in _INTEGERS and _in_range(array, data_type)
    if not fits:
        raise invalid_argument(
            f"'data' of input '{name}' holds elements that are not {data_type.name}; "
            f"send {'true and false' if data_type is BOOL else 'numbers in its range'}"
        )
    return array.astype(data_type.dtype)


def _in_range(array: Array, data_type: DataType) -> bool:
    limits = np.iinfo(data_type.dtype)
    return int(array.min()) >= limits.min and int(array.max()) <= limits.max


def _strings(data: list[Any], name: str) -> Array:
    elements: list[bytes] = []
    _flatten(data, elements, name)
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def _flatten(data: list[Any], elements: list[bytes], name: str) -> None:
    for item in data:
        if isinstance(item, str):
            elements.append(item.encode())
        elif isinstance(item, list):
            _flatten(item, elements, name)
        else:
            raise invalid_argument(f"'data' of input '{name}' must hold strings, since its datatype is BYTES")


def array_to_json(array: Array, data_type: DataType, name: str) -> Any:
    """What orjson (with its numpy option) writes as the flat `data` of an output.

    Raises:
        MmeError: UNSUPPORTED for a type that JSON can't carry, or bytes that are not text.
    """
    if not data_type.json:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"sending {data_type.name} data via JSON is not supported. "
            f"Please use the binary data format for output '{name}'",
        )
    if data_type is BYTES:
        return [_text(element, name) for element in array.ravel().tolist()]
    return np.ascontiguousarray(array).ravel()


def _text(element: Any, name: str) -> str:
    if isinstance(element, str):
        return element
    try:
        return bytes(element).decode()
    except UnicodeDecodeError:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"output '{name}' holds bytes that are not UTF-8 text; ask for it in the binary data format",
        ) from None
