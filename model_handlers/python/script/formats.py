"""The forms of a body that the default functions read and write: JSON, CSV, and numpy's own two. PURE.

They read what Amazon's toolkits read, into the same arrays, with one exception: nothing is unpickled, since that would
run whatever code a client sends. JSON is the standard library's, because the toolkits' is, and clients know its NaN.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

JSON = "application/json"
CSV = "text/csv"
NPY = "application/x-npy"
NPZ = "application/x-npz"
MOST_UNPACKED = 256 << 20  # bytes of a small body in NPZ
TEXT = (JSON, CSV)  # which a script's functions get as str, all others as bytes

_NO_CELL = "OSV"  # numpy's kinds of what is neither a number nor text
_NOT_WHOLE = ".eEnN"  # a number written with one of these is no integer


class UnsupportedFormatError(Exception):
    """No such content type is read, or written. Scripts know it by this name, from Amazon's toolkits.

    Attributes:
        types: what is read or written instead, () for what is of any model.
    """

    def __init__(self, content_type: object, types: tuple[str, ...] = ()) -> None:
        self.types = types
        super().__init__(f"Content type {content_type} is not supported by this framework.")


class MalformedBodyError(ValueError):
    """The body is not what its content type says."""


def media_type(content_type: object) -> str:
    """A content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower() if isinstance(content_type, str) else ""


def decode(body: bytes | str, content_type: object) -> Any:
    """What is in a body: an array; the dictionary itself of a JSON object; a sparse matrix.

    Raises:
        UnsupportedFormatError: no such content type is read.
        MalformedBodyError: it can't be read as that.
    """
    reader = _READERS.get(media_type(content_type))
    if reader is None:
        raise UnsupportedFormatError(content_type)
    try:
        return reader(body)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise MalformedBodyError(f"the body is not {content_type}: {error}") from error


def encode(prediction: Any, content_type: object) -> str | memoryview:
    """A prediction (array, number, or lists and dictionaries of those) as the body of an answer.

    Raises:
        UnsupportedFormatError: no such content type is written.
        TypeError, ValueError: the prediction can't be written as that.
    """
    writer = _WRITERS.get(media_type(content_type))
    if writer is None:
        raise UnsupportedFormatError(content_type)
    return writer(prediction)


def _from_json(body: bytes | str) -> Any:
    document = json.loads(body)
    return document if isinstance(document, dict) else np.array(document)


def _from_csv(body: bytes | str) -> Any:
    text = body if isinstance(body, str) else body.decode()
    if not text.strip():
        raise ValueError("it holds no row")
    dtype = float if any(mark in text for mark in _NOT_WHOLE) else np.int64
    try:
        return np.loadtxt(io.StringIO(text), dtype, delimiter=",")
    except (ValueError, OverflowError):  # words, or gaps: slower, and each column gets a type of its own
        return np.genfromtxt(io.StringIO(text), dtype=None, delimiter=",", encoding="utf-8")


def _from_npy(body: bytes | str) -> Any:
    """As `np.load`, but for the memory that a header may claim: there is no more than what came."""
    stream = io.BytesIO(_as_bytes(body))
    shape, fortran_order, dtype = _npy_header(stream)
    flat = np.frombuffer(stream.getbuffer()[stream.tell() :], dtype)
    return np.array(flat.reshape(shape, order="F" if fortran_order else "C"))


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, fortran_order, dtype = readers[version](stream)
    except Exception as error:  # of numpy, and of Python's parser and tokenizer, which read the header
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if dtype.hasobject or any(dim < 0 for dim in shape):
        raise ValueError(f"it holds {dtype} of shape {shape}, and Python objects are not unpickled")
    return shape, fortran_order, dtype


def _from_npz(body: bytes | str) -> Any:
    try:
        sparse = importlib.import_module("scipy.sparse")
    except ImportError:
        raise UnsupportedFormatError(f"{NPZ} (scipy is not installed)") from None
    try:
        _check_archive(_as_bytes(body))
        return sparse.load_npz(io.BytesIO(_as_bytes(body)))
    except Exception as error:  # of zip, zlib, numpy and scipy
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _check_archive(body: bytes) -> None:
    """Refuse an archive of arrays that are more than it says, or more than a body of its size is unpacked to."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        members = archive.infolist()
        size, most = sum(member.file_size for member in members), max(MOST_UNPACKED, 2 * len(body))
        if size > most:
            raise ValueError(f"it unpacks to {size} bytes, at most {most}")
        for member in members:
            with archive.open(member) as stream:
                shape, _, dtype = _npy_header(stream)
            if math.prod(shape) * dtype.itemsize > member.file_size:
                raise ValueError(f"{member.filename:.100} has not as many bytes as its shape {shape} says")


def _as_bytes(body: bytes | str) -> bytes:
    if isinstance(body, str):
        raise TypeError("it came as text")
    return body


def _to_json(prediction: Any) -> str:
    return json.dumps(prediction, default=_listed)


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _to_csv(prediction: Any) -> str:
    array = np.asarray(prediction)
    if not array.ndim and array.dtype.kind in _NO_CELL:  # a dictionary, bytes, None: Python's form of it is no CSV
        raise TypeError(f"a {type(prediction).__name__} can't be written as {CSV}")
    text = io.StringIO()
    np.savetxt(text, np.atleast_1d(array), delimiter=",", fmt="%s")
    return text.getvalue()


def _to_npy(prediction: Any) -> memoryview:
    stream = io.BytesIO()
    np.save(stream, prediction, allow_pickle=False)
    return stream.getbuffer()


_READERS: dict[str, Callable[[bytes | str], Any]] = {JSON: _from_json, CSV: _from_csv, NPY: _from_npy, NPZ: _from_npz}
_WRITERS: dict[str, Callable[[Any], str | memoryview]] = {JSON: _to_json, CSV: _to_csv, NPY: _to_npy}

READS = tuple(_READERS)
WRITES = tuple(_WRITERS)
