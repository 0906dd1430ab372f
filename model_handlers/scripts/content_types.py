"""The forms of a body that the default functions read and write (JSON, its lines, CSV, numpy's own two), and failures.

They read what Amazon's toolkits read. Nothing is unpickled, since that would run whatever code a client sends. A row
means the same whatever its neighbours are, so CSV is rows of cells, always two-dimensional, and a cell means what it
would mean alone: a number, NaN where it is empty, else text; `#` is a character, and quotes quote. What JSON calls null
is NaN among numbers, both ways. PURE.

A failure is the model's own (500, with its traceback), unless it says otherwise: no such content type (415, or 406 for
that of the answer), no memory (507), or a status that the script gave it by an error of Amazon's toolkits. That reaches
SageMaker's clients as it is, but for 404 and 409, which speak of models alone on its routes.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import re
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_argument, out_of_memory
from model_handlers.python.author_code import is_memory, printable, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Reader = Callable[[bytes | str], Any]


ANY = "*/*"
ATTRIBUTES_HEADER = "X-Amzn-SageMaker-Custom-Attributes"


def preferred(accept: str, written: Sequence[str], otherwise: str) -> str | None:
    """The media type that the client likes best of those that can be `written`, None where it likes none of them.

    `otherwise` is taken where it likes all alike; of equal q-values the first is liked best.
    """
    for wanted in _by_quality(accept):
        if wanted in written:
            return wanted
        if wanted == ANY:
            return otherwise if otherwise in written else written[0]
        if wanted.endswith("/*"):
            matches = [each for each in written if each.startswith(wanted[:-1])]
            if matches:
                return otherwise if otherwise in matches else matches[0]
    return None


def presumed(accept: str, otherwise: str) -> str:
    """The media type of an answer that was written for this header and does not say what it is."""
    if "," not in accept and "*" not in accept:
        return accept
    return next((wanted for wanted in _by_quality(accept) if "*" not in wanted), otherwise)


def _by_quality(accept: str) -> list[str]:
    ranges = [_range(part) for part in accept.split(",")]
    return [wanted for wanted, quality in sorted(ranges, key=lambda each: -each[1]) if wanted and quality > 0]


def _range(part: str) -> tuple[str, float]:
    media, *parameters = (piece.strip().lower() for piece in part.split(";"))
    quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
    try:
        return media, float(quality)
    except ValueError:
        return media, 0.0


_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan)", re.ASCII | re.IGNORECASE
)
_BYTE_ORDER_MARK = "\ufeff"


def text_of(body: bytes | str) -> str:
    """A body as text, without a byte order mark. Raises ValueError."""
    text = body if isinstance(body, str) else bytes(body).decode()
    if "\0" in text:
        raise ValueError("it holds a NUL byte, as no text does")
    return text.removeprefix(_BYTE_ORDER_MARK)


def cells_of(body: bytes | str, separator: str = ",") -> list[list[str]]:
    """The rows of a body, all of as many cells; an empty line between rows may be one or none, and is a ValueError."""
    text = text_of(body).strip("\r\n")
    if not text.strip():
        raise ValueError("it holds no row")
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # documents are longer than Python's 128 KiB
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True):
            if not row:
                raise ValueError(f'the line behind row {len(rows)} is empty: write an empty cell as ""')
            if rows and len(row) != len(rows[0]):
                first, this = len(rows[0]), len(row)
                raise ValueError(
                    f"its rows are not all of one length: row 1 has {first} cells, row {len(rows) + 1} has {this}"
                )
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"row {len(rows) + 1}: {error}") from None
    return rows


def number(word: str) -> float | None:
    """The number that a word is, None where it is none, or larger than any. Of digits, as everywhere but in Python."""
    if not _NUMBER.fullmatch(word.strip()):
        return None
    try:
        value = float(word)
    except ValueError:  # a separator such as U+001F is space to `strip` alone
        return None
    return None if value in (np.inf, -np.inf) and "n" not in word.lower() else value


def value_of(cell: str) -> float | str:
    if not cell or cell.isspace():
        return np.nan
    value = number(cell)
    return cell if value is None else value


def table_of(body: bytes | str, separator: str = ",") -> NDArray[Any]:
    """The rows of a body as an array: of 64-bit floats where all cells are numbers or empty, else of objects."""
    rows = cells_of(body, separator)
    values = [[value_of(cell) for cell in row] for row in rows]
    if any(isinstance(value, str) for row in values for value in row):
        return np.array(values, np.object_)
    return np.array(values, np.float64)


def written(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV: cells with a comma, a quote or the end of a line are quoted."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


JSON = "application/json"
CSV = "text/csv"
JSON_LINES = "application/jsonlines"
NPY = "application/x-npy"
NPZ = "application/x-npz"
MOST_UNPACKED = 256 << 20  # bytes of a small body in NPZ
TEXT = (JSON, CSV)  # which a script's functions get as str, all others as bytes

_NO_CELL = "OSV"  # numpy's kinds of what is neither a number nor text
_NUMBERS = {int, float, bool, type(None)}


class UnsupportedFormatError(Exception):
    """No such content type is read, or written, but `types` are. Scripts know the name from Amazon's toolkits."""

    def __init__(self, content_type: object, types: tuple[str, ...] = ()) -> None:
        self.types = types
        super().__init__(f"Content type {content_type} is not supported by this framework.")


class MalformedBodyError(ValueError):
    """The body is not what its content type says."""


def media_type(content_type: object) -> str:
    """A content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower() if isinstance(content_type, str) else ""


def decode(body: bytes | str, content_type: object) -> Any:
    """What is in a body: an array; the dictionary itself of a JSON object; a sparse matrix. Raises as `read`."""
    return read(body, content_type, _READERS)


def read(body: bytes | str, content_type: object, readers: Mapping[str, Reader]) -> Any:
    """What the reader of the body's media type makes of it.

    Raises UnsupportedFormatError where there is none, MalformedBodyError where the body can't be read as that.
    """
    reader = readers.get(media_type(content_type))
    if reader is None:
        raise UnsupportedFormatError(content_type, tuple(readers))
    try:
        return reader(body)
    except MalformedBodyError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise MalformedBodyError(f"the body is not {content_type}: {error}") from error


def encode(prediction: Any, content_type: object, *, literal: bool = False) -> str | memoryview:
    """A prediction (array, number, or lists and dictionaries of those) as the body of an answer.

    With `literal` JSON says NaN and Infinity, which few parsers take, in place of null. Raises UnsupportedFormatError,
    or TypeError and ValueError where the prediction can't be written as that.
    """
    kind = media_type(content_type)
    if kind == JSON:
        return to_json(prediction, literal=literal)
    if kind == JSON_LINES:
        return _to_json_lines(prediction, literal=literal)
    writer = _WRITERS.get(kind)
    if writer is None:
        raise UnsupportedFormatError(content_type)
    return writer(prediction)


def floats(data: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers as 32-bit floats. Raises ValueError with the row and the column of what is no such number."""
    if data.dtype.kind not in "biuf":
        data = _parsed(data)
    with np.errstate(over="ignore"):
        array = data.astype(np.float32)
    too_large = np.isinf(array) & ~np.isinf(data)
    if too_large.any():
        at = tuple(np.argwhere(too_large)[0].tolist())
        raise ValueError(f"{place(at)}: {data[at]} is infinite, or too large")
    return array


def place(at: Sequence[int]) -> str:
    """Where an element of an array lies, in words, counted from 1; what has one dimension is one row."""
    if len(at) > 2:
        return f"at {list(at)}"
    row, column = [0, 0, *at][-2:]
    return f"row {row + 1}, column {column + 1}"


def features_of(model: Any) -> int:
    """How many features a row has that the model takes, 0 where it does not tell."""
    told = getattr(model, "n_features_in_", None)
    for name in ("num_features", "num_feature"):  # of XGBoost's boosters and LightGBM's
        if told is None and callable(getattr(model, name, None)):
            told = getattr(model, name)()
    return int(told) if isinstance(told, int | np.integer) else 0


def check_features(rows: Any, features: int) -> None:
    """Refuse rows of more or fewer numbers than the model has features, where both are known."""
    shape: Sequence[int] = getattr(rows, "shape", ())
    if features and len(shape) == 2 and shape[1] != features:
        raise MalformedBodyError(f"a row of the body has {shape[1]} numbers, and the model {features} features")


def _parsed(data: NDArray[Any]) -> NDArray[np.float64]:
    values = np.empty(data.size, np.float64)
    for index, element in enumerate(data.ravel().tolist()):
        numeric = element if isinstance(element, int | float) else None
        value = number(element) if isinstance(element, str) else numeric
        if value is None:
            at = tuple(each.item() for each in np.unravel_index(index, data.shape))
            raise ValueError(f"{place(at)}: {element!r:.80} is no number")
        values[index] = value
    return values.reshape(data.shape)


def json_lines(body: bytes | str) -> list[Any]:
    """The documents of a body's lines; empty ones at its end are none. Raises ValueError."""
    lines = text_of(body).rstrip().split("\n")
    documents = []
    for at, line in enumerate(lines, 1):
        try:
            documents.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {at}: {error}") from error
    return documents


def to_json(document: Any, *, literal: bool = False) -> str:
    """A document with arrays as JSON: what is no finite number is null, or as Python and Triton write it."""
    if literal:
        return json.dumps(document, default=_listed)
    try:
        return json.dumps(document, default=_listed, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), default=_listed)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return _finite(value.tolist()) if hasattr(value, "tolist") else value


def _from_json(body: bytes | str) -> Any:
    document = json.loads(body)
    return document if isinstance(document, dict) else _array(document)


def _from_json_lines(body: bytes | str) -> Any:
    # A line a row, so that numbers on lines of their own are a column.
    return _array([line if isinstance(line, list | dict) else [line] for line in json_lines(body)])


def _array(document: Any) -> Any:
    # null is NaN, and a number beside text stays a number.
    array = np.array(document)
    if array.dtype.kind not in "OU":
        return array
    exact = np.array(document, np.object_)
    elements = exact.ravel().tolist()
    types = set(map(type, elements))
    if types == {str}:
        return array
    if types <= _NUMBERS:
        return np.array([math.nan if each is None else each for each in elements], np.float64).reshape(exact.shape)
    exact[np.array([each is None for each in elements]).reshape(exact.shape)] = math.nan
    return exact


def _from_npy(body: bytes | str) -> Any:
    # As `np.load`, but for the memory that a header may claim: there is no more than what came.
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


def _to_json_lines(prediction: Any, *, literal: bool) -> str:
    rows = prediction.tolist() if hasattr(prediction, "tolist") else prediction
    if not isinstance(rows, list | tuple):
        rows = [rows]
    return "".join(f"{to_json(row, literal=literal)}\n" for row in rows)


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _to_csv(prediction: Any) -> str:
    array = np.asarray(prediction)
    if not array.ndim and array.dtype.kind in _NO_CELL:  # a dictionary, bytes, None: Python's form of it is no CSV
        raise TypeError(f"a {type(prediction).__name__} can't be written as {CSV}")
    if array.ndim > 2:
        raise ValueError(f"an array of {array.ndim} dimensions can't be written as {CSV}")
    rows = array if array.ndim == 2 else array.reshape(-1, 1)
    return written(["" if cell is None else str(cell) for cell in row] for row in rows)


def _to_npy(prediction: Any) -> memoryview:
    stream = io.BytesIO()
    np.save(stream, prediction, allow_pickle=False)
    return stream.getbuffer()


_READERS: dict[str, Reader] = {
    JSON: _from_json,
    CSV: table_of,
    JSON_LINES: _from_json_lines,
    NPY: _from_npy,
    NPZ: _from_npz,
}
_WRITERS: dict[str, Callable[[Any], str | memoryview]] = {CSV: _to_csv, NPY: _to_npy}

READS = tuple(_READERS)
WRITES = (JSON, CSV, JSON_LINES, NPY)


# By name, since Amazon's own package may be the one that is installed.
_UNSUPPORTED = "UnsupportedFormatError"
_CURLS = "application/x-www-form-urlencoded"  # what curl -d calls a body
_WITH_STATUS = {"BaseInferenceToolkitError": "status_code", "PredictionException": "error_code"}
_KINDS = {
    406: Kind.NOT_ACCEPTABLE,
    413: Kind.TOO_LARGE,
    415: Kind.UNSUPPORTED_MEDIA_TYPE,
    503: Kind.UNAVAILABLE,
    507: Kind.OUT_OF_MEMORY,
}
_OF_MODELS = (404, 409)


def failed_call(function: str, error: BaseException, model: str) -> MmeError:
    if isinstance(error, MmeError):
        return error
    if is_memory(error):
        return out_of_memory(f"model '{model}' ran out of memory while {function} ran: {told(error)}")
    names = [each.__name__ for each in type(error).__mro__]
    if _UNSUPPORTED in names:
        refuse, types = (not_acceptable, WRITES) if function == "output_fn" else (unsupported_media_type, READS)
        return refuse(model, function, str(error).partition("\n")[0], getattr(error, "types", ()) or types)
    if isinstance(error, MalformedBodyError):
        return invalid_argument(printable(f"model '{model}': {error}"))
    status = next((getattr(error, field, None) for name, field in _WITH_STATUS.items() if name in names), None)
    if isinstance(status, int):
        return with_status(status, f"model '{model}': {getattr(error, 'message', error)}")
    return MmeError(Kind.EXECUTION_FAILED, f"model '{model}' failed while {function} ran: {told(error)}")


def with_status(status: int, sentence: str) -> MmeError:
    """The error of the kind that is nearest to an HTTP status, which it keeps."""
    kind = _KINDS.get(status, Kind.INVALID_ARGUMENT if status < 500 else Kind.EXECUTION_FAILED)
    said = status if 400 <= status < 600 and status not in _OF_MODELS else 0
    return MmeError(kind, printable(sentence), said)


def unsupported_media_type(model: str, function: str, reason: str, types: Sequence[str] = READS) -> MmeError:
    sentence = _unsupported(model, function, reason, "input_fn reads", types)
    if _CURLS in reason:
        sentence += f". curl says so unless told otherwise: -H 'Content-Type: {types[0]}'"
    return MmeError(Kind.UNSUPPORTED_MEDIA_TYPE, sentence)


def not_acceptable(model: str, function: str, reason: str, types: Sequence[str] = WRITES) -> MmeError:
    return MmeError(Kind.NOT_ACCEPTABLE, _unsupported(model, function, reason, "output_fn writes", types))


def _unsupported(model: str, function: str, reason: str, does: str, types: Sequence[str]) -> str:
    listed = f"{', '.join(types[:-1])} and {types[-1]}"
    name = does.partition(" ")[0]
    return printable(
        f"model '{model}': {reason} ({function}) The default {does} {listed}; implement {name} for other types"
    )
