"""Models of XGBoost as SageMaker's own container takes them: their file, bodies as its matrices, and answers.

Bodies are rows of features without a label: in RecordIO records lie one after another, each behind a magic number and
its length and filled up to four bytes, a message whose feature `values` is a row: numbers, or numbers with the columns
that they are of. Where a client has chosen (selectable inference, which Autopilot sets up), an answer is a mapping of
the chosen keys for each row; a key that the objective of the model has nothing for is NaN. The library is imported when
the first of them is needed.
"""

from __future__ import annotations

import importlib
import json
import pickle
import struct
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.scripts.content_types import (
    CSV,
    JSON,
    JSON_LINES,
    READS,
    MalformedBodyError,
    UnsupportedFormatError,
    check_features,
    decode,
    encode,
    floats,
    media_type,
    number,
    preferred,
    table_of,
    text_of,
    written,
)
from model_handlers.scripts.default_script import PICKLED
from model_handlers.system.importing import is_installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


LIBSVM = ("text/libsvm", "text/x-libsvm")
RECORDIO = "application/x-recordio-protobuf"

_OF_CLASSES = ("multi:softmax", "binary:hinge")  # objectives whose predictions are numbers of classes
_SEPARATORS = ",;\t| "
_OF_PROTOBUF = (RECORDIO,) if is_installed("google.protobuf") else ()  # a model's own environment may lack it
_ALL = (*LIBSVM, *_OF_PROTOBUF, *READS)
_WRITES = (CSV, JSON, JSON_LINES)


class Folds:
    """The boosters of a cross-validation, which predict together: their mean, or the class that most of them say."""

    def __init__(self, boosters: Sequence[Any]) -> None:
        self._boosters = boosters
        self._votes = objective_of(boosters[0])[0] in _OF_CLASSES

    def save_config(self) -> str:
        config: str = self._boosters[0].save_config()
        return config

    def num_features(self) -> int:
        features: int = self._boosters[0].num_features()
        return features

    def predict(self, rows: Any) -> Any:
        predictions = np.array([predict(booster, rows) for booster in self._boosters])
        if not self._votes:
            return predictions.mean(0)
        return importlib.import_module("scipy.stats").mode(predictions, keepdims=False).mode


def load(files: Sequence[Path]) -> Any:
    """The booster in a file, or those in several as one model. Raises what the library or pickle says of it."""
    boosters = [_loaded(file) for file in files]
    return boosters[0] if len(boosters) == 1 else Folds(boosters)


def _loaded(file: Path) -> Any:
    content = file.read_bytes()
    if content.startswith(PICKLED):
        return pickle.loads(content)  # noqa: S301 - the customer's own, as the code beside a model would be
    booster = _xgboost().Booster()
    booster.load_model(bytearray(content))  # a path it would judge by its suffix, and there is none
    return booster


def objective_of(booster: Any) -> tuple[str, int]:
    """What a booster was trained for, and how many classes that tells apart; 0 for no such number."""
    learner = json.loads(booster.save_config())["learner"]
    return learner["objective"]["name"], int(learner["learner_model_param"].get("num_class") or 0)


def is_booster(model: Any) -> bool:
    """Whether a model is one, or several, and no estimator in scikit-learn's style."""
    xgboost = sys.modules.get("xgboost")
    return isinstance(model, Folds) or (xgboost is not None and isinstance(model, xgboost.Booster))


def matrix(body: bytes | str, content_type: object, features: int = 0) -> Any:
    """The rows of a body, as XGBoost's matrix: of CSV, LIBSVM and RecordIO, or of an array in JSON or numpy's format.

    `features` is how many the model has, 0 where that is unknown. Raises UnsupportedFormatError or MalformedBodyError.
    """
    kind = media_type(content_type)
    try:
        with np.errstate(over="ignore"):
            rows = _rows(body, kind, content_type, features)
            _check_numbers(rows)
    except MalformedBodyError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise MalformedBodyError(f"the body is not rows of numbers in {content_type}: {error}") from error
    columns = rows.shape[1]
    if kind in LIBSVM and features and columns > features:
        raise MalformedBodyError(
            f"a row of the body has column {columns - 1}, counted from 0, and the model {features} features"
        )
    check_features(rows, features)
    return _xgboost().DMatrix(rows)


def predict(booster: Any, rows: Any) -> Any:
    """What the booster predicts, by the trees up to its best round where it knows one."""
    if isinstance(booster, Folds):
        return booster.predict(rows)
    best = booster.attr("best_iteration")
    rounds = (0, int(best) + 1) if best is not None else (0, 0)
    return booster.predict(rows, iteration_range=rounds, validate_features=False)


def answer(prediction: Any, accept: str, *, lines: bool, literal: bool = False) -> tuple[str | memoryview, str]:
    """The body of an answer and its content type: in CSV a value for each row, between commas or on lines.

    What has several values for each row, or some that were chosen, has a line for each, too; `lines` that are put
    together each have an end. Raises UnsupportedFormatError.
    """
    content_type = preferred(accept, _WRITES, CSV)
    if content_type is None:
        raise UnsupportedFormatError(accept, _WRITES)
    if content_type != CSV:
        document = prediction.document(content_type) if isinstance(prediction, Selection) else prediction
        return encode(document, content_type, literal=literal), content_type
    values = prediction.cells() if isinstance(prediction, Selection) else np.asarray(prediction)
    if values.ndim == 1:
        values = values.reshape((-1, 1) if lines else (1, -1))
    text = written(values.tolist())
    return (text if lines else text.removesuffix("\n")), CSV


def csv_to_dmatrix(body: bytes | str, dtype: Any = None) -> Any:  # noqa: ARG001 - its interface: XGBoost's is float32
    """Rows of CSV as XGBoost's matrix, where nothing between two separators is a missing value."""
    return _xgboost().DMatrix(_table(body))


def libsvm_to_dmatrix(body: bytes | str) -> Any:
    """Rows of LIBSVM as XGBoost's matrix, with or without a label in front."""
    return _xgboost().DMatrix(_sparse(body, 0))


def _rows(body: bytes | str, kind: str, content_type: object, features: int) -> Any:
    if kind not in _ALL:
        raise UnsupportedFormatError(content_type, _ALL)
    if kind == CSV:
        return _table(body)
    if kind in LIBSVM:
        return _sparse(body, features)
    if kind == RECORDIO:
        return recordio_rows(body.encode() if isinstance(body, str) else body, features)
    rows = decode(body, content_type)
    return floats(np.atleast_2d(rows)) if isinstance(rows, np.ndarray) else rows


def _check_numbers(rows: Any) -> None:
    # What the library would refuse with a stack of its own, and what is no row of numbers at all.
    if len(rows.shape) != 2:
        raise ValueError(f"they have {len(rows.shape)} dimensions")
    values = rows if isinstance(rows, np.ndarray) else np.asarray(rows.data)
    if values.dtype.kind not in "biuf":
        raise ValueError("they hold what is no number")
    if np.isinf(values.astype(np.float32, copy=False)).any():
        raise ValueError("a number is infinite, or too large")


def _table(body: bytes | str) -> NDArray[np.float32]:
    # As the container does: the first row says what stands between cells, and a gap is a missing value.
    first = next(iter(text_of(body).strip("\r\n").splitlines()), "")
    return floats(table_of(body, next((each for each in _SEPARATORS if each in first), ",")))


def _sparse(body: bytes | str, features: int) -> Any:
    # Absent values are missing ones; the first word of a line may be a label, and `#` begins a comment.
    lines = text_of(body).strip().split("\n")
    rows = [_pairs(line, at) for at, line in enumerate(lines, 1) if line.strip()[:1] != "#" and lines != [""]]
    if not rows:
        raise ValueError("it holds no row")
    pairs = [(row, column, value) for row, each in enumerate(rows) for column, value in each.items()]
    if not pairs:  # a column of CSV looks like this, and each of its rows would be answered alike
        raise ValueError("it holds labels, or CSV, and not one pair column:value")
    width = max([features, *(column + 1 for _, column, _ in pairs)])
    at, columns, values = zip(*pairs, strict=True)
    sparse = importlib.import_module("scipy.sparse")
    return sparse.csr_matrix((np.array(values, np.float64), (at, columns)), shape=(len(rows), width))


def _pairs(line: str, at: int) -> dict[int, float]:
    words = line.partition("#")[0].split()
    if not words:
        raise ValueError(f"line {at} is empty")
    pairs: dict[int, float] = {}
    for index, word in enumerate(words):
        column, colon, value = word.partition(":")
        if (not colon and index == 0 and number(word) is not None) or (column == "qid" and value.isdecimal()):
            continue
        said = number(value)
        if not colon or said is None or not (column.isascii() and column.isdecimal()):
            raise ValueError(f"line {at}: '{word:.80}' is no pair column:value")
        if int(column) in pairs:
            raise ValueError(f"line {at} has column {int(column)} twice")
        pairs[int(column)] = said
    return pairs


def _xgboost() -> Any:
    return importlib.import_module("xgboost")


_HEADER = struct.Struct("<II")
_MAGIC = 0xCED7230A
_LENGTH = (1 << 29) - 1  # the bits of a length; those above tell of records in parts, which Amazon's do not have
_FEATURES = "values"


def recordio_rows(body: bytes, features: int = 0) -> Any:
    """The rows as an array, or as a sparse matrix where records say columns. Raises ValueError."""
    tensors = [_tensor(content) for content in _records(memoryview(body))]
    if not tensors:
        raise ValueError("it holds no record")
    if not any(_is_sparse(tensor) for tensor in tensors):
        if len({len(tensor.values) for tensor in tensors}) > 1:
            raise ValueError("its rows are not all of one length")
        return np.array([tensor.values for tensor in tensors], np.float32)
    return _sparse_records(tensors, features)


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
    # a model's own environment may lack protobuf
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    from model_handlers.proto.record_pb2 import Record  # noqa: PLC0415

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
    # It says some of its columns, or how many there are and none.
    return bool(tensor.keys) or (bool(tensor.shape) and not tensor.values)


def _sparse_records(tensors: list[Any], features: int) -> Any:
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


_SCORE = ("predicted_score",)
_RAW = ("predicted_label", "labels", "raw_score", "raw_scores")
_PROBABLE = (*_RAW, "probability", "probabilities")
_KEYS = {
    "reg:squarederror": _SCORE,
    "reg:linear": _SCORE,
    "reg:logistic": _SCORE,
    "reg:absoluteerror": _SCORE,
    "reg:gamma": _SCORE,
    "reg:tweedie": _SCORE,
    "binary:logistic": _PROBABLE,
    "binary:logitraw": _RAW,
    "binary:hinge": _RAW,
    "multi:softmax": _RAW,
    "multi:softprob": _PROBABLE,
}
_SECOND_CLASS = {"binary:logistic": 0.5, "binary:logitraw": 0}  # the scores beyond which a row is of it


class Selection:
    """Predictions of rows, and what of them was chosen: in `rows`, key → value of each, in the order of `keys`.

    `classes` is how many the booster tells apart, 0 for none. Raises ValueError for an objective without choices.
    """

    def __init__(self, predictions: Any, keys: Iterable[str], objective: str, classes: int) -> None:
        there = _KEYS.get(objective)
        if there is None:
            raise ValueError(f"objective '{objective}' has nothing that SAGEMAKER_INFERENCE_OUTPUT could choose")
        self.keys = tuple(keys)
        chosen = any(key in there for key in self.keys)
        made = [_values(row, objective, classes) if chosen else {} for row in np.asarray(predictions)]
        self.rows = [{key: values[key] if key in there else np.nan for key in self.keys} for values in made]

    def document(self, content_type: str) -> Any:
        return {"predictions": self.rows} if content_type == JSON else self.rows

    def cells(self) -> NDArray[Any]:
        return np.array([[str(row[key]) for key in self.keys] for row in self.rows], np.object_)


def _values(row: Any, objective: str, classes: int) -> dict[str, Any]:
    """What the prediction of one row may be told as; `classes` is the number of them."""
    if objective == "multi:softprob":
        label, score, scores = int(np.argmax(row)), row.max().item(), row.tolist()
    else:
        score = row.item()
        label = int(score > _SECOND_CLASS[objective]) if objective in _SECOND_CLASS else score
        scores = [1.0 - score, score]
    return {
        "predicted_label": label,
        "labels": [0, 1] if objective.startswith("binary:") else list(range(classes)),
        "probability": score,
        "probabilities": scores,
        "raw_score": score,
        "raw_scores": scores,
        "predicted_score": score,
    }
