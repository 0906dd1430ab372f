"""Models of XGBoost as SageMaker's own container takes them: their file, bodies as its matrices, and answers.

Bodies are rows of features without a label. The library is imported when the first of them is needed, by the process
that the model is in. PURE, but for the reading of a model's file.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.scripts.accept import preferred
from model_handlers.scripts.csv_text import number, table_of, text_of, written
from model_handlers.scripts.formats import (
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
)
from model_handlers.scripts.no_script import PICKLED
from model_handlers.system.importing import is_installed

if TYPE_CHECKING:
    from collections.abc import Sequence
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
        """The configuration of each of them, as XGBoost writes it."""
        config: str = self._boosters[0].save_config()
        return config

    def num_features(self) -> int:
        """How many features a row has."""
        features: int = self._boosters[0].num_features()
        return features

    def predict(self, rows: Any) -> Any:
        """What they predict."""
        predictions = np.array([predict(booster, rows) for booster in self._boosters])
        if not self._votes:
            return predictions.mean(0)
        return importlib.import_module("scipy.stats").mode(predictions, keepdims=False).mode


def load(files: Sequence[Path]) -> Any:
    """The booster in a file, or those in several as one model.

    Raises:
        Exception: what the library or pickle says of it.
    """
    boosters = [_loaded(file) for file in files]
    return boosters[0] if len(boosters) == 1 else Folds(boosters)


def _loaded(file: Path) -> Any:
    """A booster in one of XGBoost's formats, or pickled as older containers have it."""
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

    Args:
        body: what the client sent.
        content_type: what that is.
        features: how many the model has, 0 where that is not known.

    Raises:
        UnsupportedFormatError: no such content type is read.
        MalformedBodyError: it can't be read as that, or a row has not as many numbers as the model has features.
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

    What has several values for each row has a line for each, too.

    Raises:
        UnsupportedFormatError: the client accepts neither CSV nor JSON, nor its lines.
    """
    content_type = preferred(accept, _WRITES, CSV)
    if content_type is None:
        raise UnsupportedFormatError(accept, _WRITES)
    if content_type != CSV:
        return encode(prediction, content_type, literal=literal), content_type
    values = np.asarray(prediction)
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
        recordio = importlib.import_module("model_handlers.scripts.recordio")
        return recordio.rows_of(body.encode() if isinstance(body, str) else body, features)
    rows = decode(body, content_type)
    return floats(np.atleast_2d(rows)) if isinstance(rows, np.ndarray) else rows


def _check_numbers(rows: Any) -> None:
    """Refuse what the library would refuse with a stack of its own, and what is no row of numbers at all."""
    if len(rows.shape) != 2:
        raise ValueError(f"they have {len(rows.shape)} dimensions")
    values = rows if isinstance(rows, np.ndarray) else np.asarray(rows.data)
    if values.dtype.kind not in "biuf":
        raise ValueError("they hold what is no number")
    if np.isinf(values.astype(np.float32, copy=False)).any():
        raise ValueError("a number is infinite, or too large")


def _table(body: bytes | str) -> NDArray[np.float32]:
    """As the container does: the first row says what stands between cells, and a gap is a missing value."""
    first = next(iter(text_of(body).strip("\r\n").splitlines()), "")
    return floats(table_of(body, next((each for each in _SEPARATORS if each in first), ",")))


def _sparse(body: bytes | str, features: int) -> Any:
    """Absent values are missing ones; the first word of a line may be a label, and `#` begins a comment."""
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
    """The columns of one row, each with its value."""
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
