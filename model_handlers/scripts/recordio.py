"""SageMaker's `application/x-recordio-protobuf`: rows of features as Amazon's algorithms read them. PURE.

Records lie one after another, each behind a magic number and its length and filled up to four bytes. A record is a
message whose feature `values` is a row: numbers, or numbers with the columns that they are of.
"""

from __future__ import annotations

import importlib
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from model_handlers.proto.record_pb2 import Record

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("<II")
_MAGIC = 0xCED7230A
_LENGTH = (1 << 29) - 1  # the bits of a length; those above tell of records in parts, which Amazon's do not have
_FEATURES = "values"


def rows_of(body: bytes, features: int = 0) -> Any:
    """The rows as an array, or as a sparse matrix where records say columns.

    Args:
        body: the records.
        features: columns of rows that say some of theirs and not how many they have.

    Raises:
        ValueError: they are no such records, or not all of one length.
    """
    tensors = [_tensor(content) for content in _records(memoryview(body))]
    if not tensors:
        raise ValueError("it holds no record")
    if not any(_is_sparse(tensor) for tensor in tensors):
        if len({len(tensor.values) for tensor in tensors}) > 1:
            raise ValueError("its rows are not all of one length")
        return np.array([tensor.values for tensor in tensors], np.float32)
    return _sparse(tensors, features)


def _records(body: memoryview) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        if len(body) - place < _HEADER.size:
            raise ValueError("its last record is cut off")
        magic, length = _HEADER.unpack_from(body, place)
        end = place + _HEADER.size + length
        if magic != _MAGIC or length > _LENGTH or end > len(body):
            raise ValueError(f"at byte {place} there is no whole record")
        yield bytes(body[place + _HEADER.size : end])
        place = end + -length % 4


def _tensor(content: bytes) -> Any:
    try:
        record = Record.FromString(content)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    if _FEATURES not in record.features:
        raise ValueError(f"a record has no feature '{_FEATURES}'")
    value = record.features[_FEATURES]
    kind = value.WhichOneof("value")
    if kind is None:
        raise ValueError(f"the feature '{_FEATURES}' of a record is no numbers")
    tensor = getattr(value, kind)
    if tensor.keys and len(tensor.keys) != len(tensor.values):
        raise ValueError("a record has not as many values as columns")
    if len(set(tensor.keys)) != len(tensor.keys):
        raise ValueError("a record has a column twice")
    if len(tensor.shape) > 1 or (tensor.shape and not _is_sparse(tensor) and tensor.shape[0] != len(tensor.values)):
        raise ValueError(f"a record has {len(tensor.values)} values, and is of shape {list(tensor.shape)}")
    return tensor


def _is_sparse(tensor: Any) -> bool:
    """Whether a row says some of its columns, or how many there are and none."""
    return bool(tensor.keys) or (bool(tensor.shape) and not tensor.values)


def _sparse(tensors: list[Any], features: int) -> Any:
    widths = {tensor.shape[0] for tensor in tensors if tensor.shape}
    widths |= {len(tensor.values) for tensor in tensors if not _is_sparse(tensor)}
    if len(widths) > 1:
        raise ValueError("its rows are not all of one length")
    width = max([*widths, *(() if widths else (features, *(key + 1 for each in tensors for key in each.keys)))])
    rows = np.repeat(np.arange(len(tensors)), [len(tensor.values) for tensor in tensors])
    columns = [column for tensor in tensors for column in (tensor.keys or range(len(tensor.values)))]
    values = np.array([value for tensor in tensors for value in tensor.values], np.float32)
    csr_matrix = importlib.import_module("scipy.sparse").csr_matrix
    return csr_matrix((values, (rows, columns)), shape=(len(tensors), width))
