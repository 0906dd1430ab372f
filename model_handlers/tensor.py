"""Tensors as the protocol names them: data types, specs, shapes and the wire form of string elements.

A tensor in flight is a plain `numpy.ndarray`. Two data types have no numpy equivalent: BYTES is an object array of
`bytes`, and BF16 is carried as its bit pattern in `uint16`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Array = np.ndarray[Any, np.dtype[Any]]  # `numpy.typing.NDArray[Any]`, whose import takes milliseconds
MAX_DIMS = 32  # of a tensor: numpy's limit is 64, and no framework goes near either
MAX_ELEMENTS = 1 << 40  # of a tensor
_STRING = 256  # bytes, as which a string counts that is not looked at
_PIECE = 1 << 12  # strings that are joined at a time


@dataclass(frozen=True, slots=True, eq=False)
class DataType:
    """One row of the protocol's data type table."""

    name: str  # the name on the wire, for example `FP32`; `config.pbtxt` says `TYPE_FP32` (and `TYPE_STRING` for BYTES)
    number: int  # the value in the published ModelConfig message
    dtype: np.dtype[Any]  # the numpy dtype that carries it
    itemsize: int  # bytes an element, 0 where elements differ (BYTES)
    json: bool = True  # whether elements can be written as JSON

    @property
    def config_name(self) -> str:
        return "TYPE_STRING" if self is BYTES else f"TYPE_{self.name}"

    def __repr__(self) -> str:
        return self.name


def _row(name: str, number: int, dtype: str, *, json: bool = True) -> DataType:
    np_dtype = np.dtype(dtype)
    return DataType(name, number, np_dtype, 0 if dtype == "O" else np_dtype.itemsize, json)


BOOL = _row("BOOL", 1, "?")
UINT8 = _row("UINT8", 2, "u1")
UINT16 = _row("UINT16", 3, "<u2")
UINT32 = _row("UINT32", 4, "<u4")
UINT64 = _row("UINT64", 5, "<u8")
INT8 = _row("INT8", 6, "i1")
INT16 = _row("INT16", 7, "<i2")
INT32 = _row("INT32", 8, "<i4")
INT64 = _row("INT64", 9, "<i8")
FP16 = _row("FP16", 10, "<f2", json=False)
FP32 = _row("FP32", 11, "<f4")
FP64 = _row("FP64", 12, "<f8")
BYTES = _row("BYTES", 13, "O")
BF16 = _row("BF16", 14, "<u2", json=False)

DATA_TYPES = (BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BYTES, BF16)
BY_NAME = {data_type.name: data_type for data_type in DATA_TYPES}
BY_CONFIG_NAME = {data_type.config_name: data_type for data_type in DATA_TYPES}
BY_NUMBER = {data_type.number: data_type for data_type in DATA_TYPES}
# BF16 shares its dtype with UINT16, so an array alone says UINT16; the spec of the tensor tells them apart.
BY_DTYPE = {data_type.dtype: data_type for data_type in DATA_TYPES if data_type is not BF16}
# As numpy calls its types and frameworks of tensors call theirs: "float32".
BY_DTYPE_NAME = {row.dtype.name: row for row in DATA_TYPES if row not in (BYTES, BF16)} | {"bfloat16": BF16}


class TensorFormat(Enum):
    """Whether an input is an image, and where its channels lie; clients are told, nothing changes."""

    NONE = 0
    NHWC = 1
    NCHW = 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A model's input or output as its configuration declares it; `metadata` as `config_json` reads it."""

    name: str  # the tensor's name
    data_type: DataType  # its element type
    format: TensorFormat = field(default=TensorFormat.NONE, kw_only=True, metadata={"only": "input"})
    dims: tuple[int, ...]  # its shape without the batch dimension; -1 is a dimension of any size
    # the shape that the framework sees instead of `dims`, or None
    reshape: tuple[int, ...] | None = field(default=None, metadata={"path": "reshape.shape"})
    # the path of a label file relative to the model directory, or ""
    label_filename: str = field(default="", kw_only=True, metadata={"only": "output"})
    # is_shape_tensor, is_non_linear_format_io: refused where they are set
    is_shape_tensor: bool = field(default=False, kw_only=True)
    # whether requests of other shapes may share a batch; the model sees all elements in one row
    allow_ragged_batch: bool = field(default=False, kw_only=True, metadata={"only": "input"})
    # whether a request may leave the input out
    optional: bool = field(default=False, kw_only=True, metadata={"only": "input"})
    is_non_linear_format_io: bool = field(default=False, kw_only=True)

    @property
    def is_scalar(self) -> bool:
        """Whether the model has no dimension for what clients may send as one element."""
        return self.dims == (1,) and self.reshape == ()

    @property
    def model_dims(self) -> tuple[int, ...]:
        return self.dims if self.reshape is None else self.reshape

    def model_shape(self, max_batch_size: int) -> tuple[int, ...]:
        return (-1, *self.model_dims) if max_batch_size > 0 else self.model_dims

    def shape(self, max_batch_size: int) -> tuple[int, ...]:
        return (-1, *self.dims) if max_batch_size > 0 else self.dims


def shape_matches(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(want in (have, -1) for have, want in zip(shape, expected, strict=True))


def refitted(array: Array, source: tuple[int, ...], target: tuple[int, ...], *, batches: bool) -> Array:
    """The array in the shape `target`; variable dimensions are the same, in order. ValueError: it does not fit."""
    if not array.shape and not target:  # a scalar, which clients may send as it is
        return array
    batch = array.shape[:1] if batches else ()
    sizes = zip(array.shape[len(batch) :], source, strict=True)
    variable = iter([size for size, dim in sizes if dim == -1])
    return array.reshape((*batch, *[next(variable) if dim == -1 else dim for dim in target]))


def element_count(shape: Iterable[int]) -> int:
    return math.prod(shape)


def size_of(array: Array) -> int:
    """Bytes of its elements; of strings those of each, not of the references that the array holds."""
    return sum(map(len, array.ravel().tolist())) if array.dtype.hasobject else array.nbytes


def estimated_size(array: Array) -> int:
    """The same without a look at strings, which count as if they were not short."""
    return array.size * _STRING if array.dtype.hasobject else array.nbytes


def decode_bytes_elements(buffer: bytes | memoryview, count: int, name: str, model: str) -> Array:
    """Split a BYTES tensor's wire form (4-byte LE length, element) into an array of `count` `bytes` objects.

    Raises MmeError: INVALID_ARGUMENT, when the buffer ends early or holds another number of elements.
    """
    view = memoryview(buffer)
    size, offset = len(view), 0
    elements: list[bytes] = []
    while offset < size:
        if size - offset < 4:
            raise invalid_argument(
                f"incomplete string length indicator for inference input '{name}' for model '{model}', "
                f"expecting 4 bytes but only {size - offset} bytes available. "
                "Please make sure the string length indicator is in one buffer."
            )
        (length,) = struct.unpack_from("<I", view, offset)
        offset += 4
        if length > size - offset:
            raise invalid_argument(
                f"incomplete string data for inference input '{name}' for model '{model}', "
                f"expecting string of length {length} but only {size - offset} bytes available"
            )
        elements.append(bytes(view[offset : offset + length]))
        offset += length
        if len(elements) > count:
            break
    if len(elements) != count:
        raise invalid_argument(
            f"expected {count} string elements for inference input '{name}' for model '{model}', "
            f"got {'more' if len(elements) > count else len(elements)}"
        )
    array = np.empty(count, dtype=np.object_)
    array[:] = elements
    return array


def encode_bytes_elements(array: Array) -> bytes:
    """The wire form of a BYTES tensor: each element, row-major, behind its 4-byte little-endian length."""
    flat = array.ravel(order="C")
    if flat.size <= _PIECE:
        return _encoded_elements(flat)
    # many parts are joined without a break, in which no other thread has its turn: so they are joined in pieces
    return b"".join([_encoded_elements(flat[start : start + _PIECE]) for start in range(0, flat.size, _PIECE)])


def _encoded_elements(flat: Array) -> bytes:
    parts: list[bytes] = []
    for element in flat.tolist():
        data = element if isinstance(element, bytes) else str(element).encode()
        parts += (len(data).to_bytes(4, "little"), data)
    return b"".join(parts)
