"""Tensor elements as JSON: strict both ways, so that a number never silently becomes another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.tensor import BOOL, BYTES, element_count

if TYPE_CHECKING:
    from model_handlers.tensor import Array, DataType

_MAX_DEPTH = 64  # numpy's limit of dimensions
# What elements must be, by the kind of numpy dtype that carries them. To Python, true is a number; to the protocol not.
_ELEMENTS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "O": {str}}


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
    if not _element_types(data, name) <= _ELEMENTS[data_type.dtype.kind]:
        raise _not_elements(data_type, name)
    array = _strings(data, name) if data_type is BYTES else _numbers(data, data_type, name)
    count = element_count(shape)
    if array.size != count:
        raise invalid_argument(
            f"Shape does not match true shape of 'data' field: input '{name}' has shape {list(shape)}, "
            f"which is {count} elements, but 'data' holds {array.size}"
        )
    return array.reshape(shape)


def _element_types(data: list[Any], name: str, depth: int = 1) -> set[type]:
    """The types of all elements, however deep they lie."""
    types = set(map(type, data))
    if list in types:
        if depth == _MAX_DEPTH:
            raise invalid_argument(f"'data' of input '{name}' is nested deeper than {_MAX_DEPTH} arrays; send it flat")
        types.remove(list)
        for item in data:
            if type(item) is list:
                types |= _element_types(item, name, depth + 1)
    return types


def _numbers(data: list[Any], data_type: DataType, name: str) -> Array:
    try:
        with np.errstate(over="raise"):
            return np.array(data, dtype=data_type.dtype)
    except ValueError:
        raise _uneven(name) from None
    except (OverflowError, FloatingPointError):
        raise _not_elements(data_type, name) from None


def _strings(data: list[Any], name: str) -> Array:
    try:
        elements = np.array(data, dtype=np.object_).ravel().tolist()
    except ValueError:
        raise _uneven(name) from None
    if list in set(map(type, elements)):
        raise _uneven(name)
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = [element.encode() for element in elements]
    return array


def _uneven(name: str) -> MmeError:
    return invalid_argument(f"'data' of input '{name}' is nested unevenly; send it flat or as full rows")


def _not_elements(data_type: DataType, name: str) -> MmeError:
    expected = "true and false" if data_type is BOOL else "strings" if data_type is BYTES else "numbers in its range"
    return invalid_argument(f"'data' of input '{name}' holds elements that are not {data_type.name}; send {expected}")


def array_to_json(array: Array, data_type: DataType, name: str) -> Any:
    """What orjson (with its numpy option) writes as the flat `data` of an output.

    Raises:
        MmeError: UNSUPPORTED for a type or a number that JSON can't carry, or bytes that are not text.
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


def refuse_nonfinite(array: Array, name: str) -> None:
    """Refuse what orjson would write as null.

    Raises:
        MmeError: UNSUPPORTED when the array holds NaN or an infinity.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise MmeError(
            Kind.UNSUPPORTED,
            f"output '{name}' holds NaN or infinity, which JSON can't carry; ask for it in the binary data format",
        )


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
