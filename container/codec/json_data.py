"""Tensor elements as JSON: strict both ways, so that a number never silently becomes another.

NaN and infinities are written as null, which every parser takes, and null is NaN again where elements are of a floating
type. Where literals are asked for, they are written as Triton's parser, and Python's, know them: `NaN`, `Infinity`,
`-Infinity`. Those are read in any case.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from container.codec.json_numbers import NotNumbers, Numbers
from container.codec.request import LARGE, turn
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.tensor import BYTES, element_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.tensor import Array, DataType

_MAX_DEPTH = 64  # numpy's limit of dimensions
_PIECE = 1 << 15  # elements that are read or written at a time, in a millisecond or three
# What elements must be, or lists of them, by the kind of numpy dtype that carries them. To Python, true is a number; to
# the protocol not.
_ELEMENTS: dict[str, set[type]] = {
    "b": {bool, list},
    "i": {int, list},
    "u": {int, list},
    "f": {int, float, type(None), list},
    "O": {str, list},
}
# What Triton's parser calls what they should be, and how it reads to people.
_WORDS = {
    "b": ("boolean", "true and false"),
    "i": ("signed-integer", "numbers in its range"),
    "u": ("unsigned-integer", "numbers in its range"),
    "f": ("number", "numbers in its range"),
    "O": ("string", "strings"),
}


def array_from_json(data: Any, data_type: DataType, shape: tuple[int, ...], name: str) -> Array:
    """The array of an input's `data`, nested or flat, row-major: a list, or numbers that are yet to be read.

    Raises:
        NotNumbers: they can't be, or not all is well with them.
        MmeError: INVALID_ARGUMENT naming the input, when the elements are of another type or number.
    """
    what = f"'data' of input '{name}'"
    _refuse_halves(data_type, name)
    if isinstance(data, list):
        array = _elements(data, _element_types(data, what), data_type, what)
    elif isinstance(data, Numbers):
        array = _read(data, data_type, what)
    else:
        raise invalid_argument(f"{what} must be an array")
    count = element_count(shape)
    if array.size != count:
        raise invalid_argument(
            f"Shape does not match true shape of 'data' field: input '{name}' has shape {list(shape)}, "
            f"which is {count} elements, but 'data' holds {array.size}"
        )
    return array.reshape(shape)


def flat_array_from_json(data: list[Any], data_type: DataType, name: str) -> Array:
    """The one-dimensional array of an input whose elements come without a shape, and so must not be nested.

    A list of one element is as good as that element: as in Triton, the outer list alone says how many there are.

    Raises:
        MmeError: INVALID_ARGUMENT naming the input, when the elements are nested, or of another type or number.
    """
    _refuse_halves(data_type, name)
    types = set(map(type, data))
    if list in types:
        data = [_alone(item) for item in data]
        types = set(map(type, data))
    if list in types:
        raise _nested(name)
    return _elements(data, types, data_type, f"input '{name}'")


def _alone(item: Any) -> Any:
    """The one element of a list, however deep it lies; anything else as it is."""
    while type(item) is list and len(item) == 1:
        item = item[0]
    return item


def _refuse_halves(data_type: DataType, name: str) -> None:
    if not data_type.json:
        raise invalid_argument(
            f"receiving {data_type.name} data via JSON is not supported. "
            f"Please use the binary data format for input '{name}'"
        )


def _elements(data: list[Any], types: set[type], data_type: DataType, what: str) -> Array:
    if not types <= _ELEMENTS[data_type.dtype.kind]:
        raise _not_elements(data_type, what)
    if len(data) > _PIECE and list not in types:
        return _flat(data, data_type, what)
    return _array(data, data_type, what)


def _array(data: list[Any], data_type: DataType, what: str) -> Array:
    return _strings(data, what) if data_type is BYTES else _numbers(data, data_type, what)


def _flat(data: list[Any], data_type: DataType, what: str) -> Array:
    """As `_elements`, of a long list; on a thread others have their turn between pieces."""
    array = np.empty(len(data), data_type.dtype)
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        array[start : start + _PIECE] = _array(piece, data_type, what)
        if len(data) > LARGE // 2:  # else the event loop may read it, for each element takes two bytes of JSON
            turn()
    return array


def _read(numbers: Numbers, data_type: DataType, what: str) -> Array:
    """As `_elements`, slice by slice."""
    array, end = np.empty(numbers.count, data_type.dtype), 0
    for piece in numbers.slices():
        start, end = end, end + len(piece)
        try:
            array[start:end] = _elements(piece, set(map(type, piece)), data_type, what)
        except MmeError as error:
            raise NotNumbers(error.bare()) from None
        except ValueError:  # there are more than commas
            raise NotNumbers from None
    if end != numbers.count:
        raise NotNumbers
    return array


def _element_types(data: list[Any], what: str, depth: int = 1) -> set[type]:
    """The types of all elements, however deep they lie, and of the lists that they lie in."""
    types = set(map(type, data))
    if list in types:
        if depth == _MAX_DEPTH:
            raise invalid_argument(
                f"{what}: JSON nesting depth exceeds maximum allowed limit ({_MAX_DEPTH}); send it flat"
            )
        for item in data:
            if type(item) is list:
                types |= _element_types(item, what, depth + 1)
    return types


def _numbers(data: list[Any], data_type: DataType, what: str) -> Array:
    try:
        with np.errstate(over="raise"):
            return np.array(data, dtype=data_type.dtype)
    except ValueError:
        raise _uneven(what) from None
    except (OverflowError, FloatingPointError):
        raise _out_of_range(data_type, what) from None


def _strings(data: list[Any], what: str) -> Array:
    try:
        elements = np.array(data, dtype=np.object_).ravel().tolist()
    except ValueError:
        raise _uneven(what) from None
    if list in set(map(type, elements)):
        raise _uneven(what)
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = [element.encode() for element in elements]
    return array


def _nested(name: str) -> MmeError:
    return invalid_argument(f"input '{name}' is nested; send one element, or a flat list of them, row-major")


def _uneven(what: str) -> MmeError:
    return invalid_argument(f"{what} is nested unevenly; send it flat or as full rows")


def _not_elements(data_type: DataType, what: str) -> MmeError:
    wrong, expected = _WORDS[data_type.dtype.kind]
    return invalid_argument(
        f"{what} holds elements that are not {data_type.name}; send {expected}: attempt to access JSON non-{wrong} as "
        f"{wrong}"
    )


def _out_of_range(data_type: DataType, what: str) -> MmeError:
    _, expected = _WORDS[data_type.dtype.kind]
    return invalid_argument(f"{what} holds elements that are not {data_type.name}; send {expected}")


def array_to_json(array: Array, data_type: DataType, name: str, *, literal: bool) -> Any:
    """What orjson (with its numpy option) writes as the flat `data` of an output; a large one's is written already.

    It writes null for NaN and infinities in what is an array: see `with_literals`. What is written already has literals
    of them where `literal` says so.

    Raises:
        MmeError: INVALID_ARGUMENT for a type that JSON can't carry, UNSUPPORTED for bytes that are not text.
    """
    if not data_type.json:
        raise invalid_argument(
            f"sending {data_type.name} data via JSON is not supported. "
            f"Please use the binary data format for output '{name}'"
        )
    flat = np.ascontiguousarray(array).ravel()
    if flat.size > _PIECE:
        return _in_pieces(flat, data_type, name, literal=literal)
    return _texts(flat, name) if data_type is BYTES else flat


def _in_pieces(flat: Array, data_type: DataType, name: str, *, literal: bool) -> orjson.Fragment:
    """As `array_to_json`. orjson lets no other thread run while it writes; between pieces they have their turn."""
    pieces = []
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        pieces.append(_written(_texts(piece, name) if data_type is BYTES else piece, literal=literal)[1:-1])
        turn()
    pieces[0], pieces[-1] = b"[" + pieces[0], pieces[-1] + b"]"  # rather than copying all of them once more
    return orjson.Fragment(b",".join(pieces))


def with_literals(elements: Any) -> Any:
    """What `array_to_json` returned, such that orjson writes literals where it would write null."""
    if not isinstance(elements, np.ndarray) or elements.dtype.kind != "f" or np.isfinite(elements).all():
        return elements
    return orjson.Fragment(_written(elements, literal=True))


def one_to_json(elements: Any, *, literal: bool) -> orjson.Fragment:
    """The one element of what `array_to_json` returned: orjson writes not every kind of numpy's scalars."""
    return orjson.Fragment(_written(elements, literal=literal)[1:-1])


def _written(elements: Any, *, literal: bool) -> bytes:
    """A flat list or array of elements as JSON."""
    text = orjson.dumps(elements, option=orjson.OPT_SERIALIZE_NUMPY)
    if not literal or not isinstance(elements, np.ndarray) or elements.dtype.kind != "f" or b"null" not in text:
        return text
    words = [_word(value) for value in elements[~np.isfinite(elements)].tolist()]
    return b"".join([word + part for word, part in zip([b"", *words], text.split(b"null"), strict=True)])


def _word(value: float) -> bytes:
    """A number that orjson writes as null."""
    if math.isnan(value):
        return b"NaN"
    return b"Infinity" if value > 0 else b"-Infinity"


def _texts(flat: Array, name: str) -> list[str]:
    return [_text(element, name) for element in flat.tolist()]


def _text(element: Any, name: str) -> str:
    if not isinstance(element, bytes):  # as its binary form has it
        return str(element)
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"output '{name}' holds bytes that are not UTF-8 text; ask for it in the binary data format",
        ) from None


def parameters_to_json(parameters: Mapping[Any, Any], model: str) -> dict[str, Any]:
    """What orjson writes as a response's parameters.

    Raises:
        MmeError: UNSUPPORTED naming the parameter that is no text, boolean or number, or one that JSON can't carry.
    """
    for key, value in parameters.items():
        if not _is_parameter(key, value):
            raise MmeError(
                Kind.UNSUPPORTED,
                f"response parameter {key!r:.100} of model '{model}' is {value!r:.100}; make it a text, a boolean, an "
                "integer of at most 64 bits or a finite number",
            )
    return dict(parameters)


def _is_parameter(key: Any, value: Any) -> bool:
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    try:
        orjson.dumps({key: value})
    except TypeError:  # more than 64 bits, text that is none
        return False
    return True
