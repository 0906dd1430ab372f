"""Arrays in, arrays out: what a caller hands over as tensors of the protocol, without a copy where none is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import invalid_argument
from model_handlers.tensor import BF16, BY_DTYPE, BYTES, DataType
from serve.request import layout_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.tensor import Array
    from serve.request import Layout


def tensors_of(inputs: Mapping[str, Any], outputs: tuple[str, ...]) -> tuple[Layout, list[Array]]:
    """Return the layout of a request, and its arrays.

    Raises:
        MmeError: INVALID_ARGUMENT for an input that is no tensor.
    """
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
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise invalid_argument(f"input '{name}' is no array that the host can read: {error}") from None


def _converted(name: str, array: Array) -> tuple[DataType, Array]:
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype.kind == "O":
        flat = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
        if wrong := next((type(each).__name__ for each in flat if not isinstance(each, bytes)), ""):
            raise invalid_argument(f"input '{name}' has an element of type {wrong}: expected str or bytes")
        encoded = np.empty(len(flat), np.object_)
        encoded[:] = flat
        return BYTES, encoded.reshape(array.shape)
    if array.dtype.name == "bfloat16":
        return BF16, array.view(np.uint16)
    if array.dtype.newbyteorder("=") in BY_DTYPE:
        array = array.astype(array.dtype.newbyteorder("="))
        return BY_DTYPE[array.dtype], array
    raise invalid_argument(f"input '{name}' has elements of type {array.dtype}, which no model takes")
