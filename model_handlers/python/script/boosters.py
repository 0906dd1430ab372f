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

from model_handlers.importing import is_installed
from model_handlers.python.script.accept import preferred
from model_handlers.python.script.formats import (
    CSV,
    JSON,
    READS,
    MalformedBodyError,
    UnsupportedFormatError,
    decode,
    encode,
    media_type,
)
from model_handlers.python.script.no_script import PICKLED

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


class Folds:
    """The boosters of a cross-validation, which predict together: their mean, or the class that most of them say."""

    def __init__(self, boosters: Sequence[Any]) -> None:
        self._boosters = boosters
        objective = json.loads(boosters[0].save_config())["learner"]["objective"]["name"]
        self._votes = objective in _OF_CLASSES

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
        columns = rows.shape[1]
    except MalformedBodyError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise MalformedBodyError(f"the body is not rows of numbers in {content_type}: {error}") from error
    if features and not features - 1 <= columns <= features:  # as the container: a column for a label may be absent
        told = f"a row of the body has {columns} numbers"
        if kind in LIBSVM:
            told = f"a row of the body has column {columns - 1}, counted from 0"
        raise MalformedBodyError(f"{told}, and the model {features} features")
    return _xgboost().DMatrix(rows)


def predict(booster: Any, rows: Any) -> Any:
    """What the booster predicts, by the trees up to its best round where it knows one."""
    if isinstance(booster, Folds):
        return booster.predict(rows)
    best = booster.attr("best_iteration")
    rounds = (0, int(best) + 1) if best is not None else (0, 0)
    return booster.predict(rows, iteration_range=rounds, validate_features=False)


def answer(prediction: Any, accept: str, *, lines: bool) -> tuple[str | memoryview, str]:
    """The body of an answer and its content type: in CSV a value for each row, between commas or on lines.

    Raises:
        UnsupportedFormatError: the client accepts neither CSV nor JSON.
    """
    content_type = preferred(accept, (CSV, JSON), CSV)
    if content_type is None:
        raise UnsupportedFormatError(accept, (CSV, JSON))
    if content_type == JSON:
        return encode(prediction, JSON), JSON
    values = map(str, np.asarray(prediction).tolist())
    return ("".join(f"{value}\n" for value in values) if lines else ",".join(values)), CSV


def csv_to_dmatrix(body: bytes | str, dtype: Any = None) -> Any:  # noqa: ARG001 - its interface: XGBoost's is float32
    """Rows of CSV as XGBoost's matrix, where nothing between two separators is a missing value."""
    return _xgboost().DMatrix(_table(_text(body)))


def libsvm_to_dmatrix(body: bytes | str) -> Any:
    """Rows of LIBSVM as XGBoost's matrix, with or without a label in front."""
    return _xgboost().DMatrix(_sparse(_text(body), 0))


def _rows(body: bytes | str, kind: str, content_type: object, features: int) -> Any:
    if kind not in _ALL:
        raise UnsupportedFormatError(content_type, _ALL)
    if kind == CSV:
        return _table(_text(body))
    if kind in LIBSVM:
        return _sparse(_text(body), features)
    if kind == RECORDIO:
        recordio = importlib.import_module("model_handlers.python.script.recordio")
        return recordio.rows_of(body.encode() if isinstance(body, str) else body, features)
    rows = decode(body, content_type)
    return np.atleast_2d(rows) if isinstance(rows, np.ndarray) else rows


def _check_numbers(rows: Any) -> None:
    """Refuse what the library would refuse with a stack of its own."""
    values = rows if isinstance(rows, np.ndarray) else np.asarray(rows.data)
    if values.dtype.kind not in "biuf":
        raise ValueError("they hold what is no number")
    if np.isinf(values.astype(np.float32, copy=False)).any():
        raise ValueError("a number is infinite, or too large")


def _table(text: str) -> NDArray[np.float32]:
    lines = text.strip("\r\n").splitlines()
    separator = next((each for each in _SEPARATORS if lines and each in lines[0]), ",")
    rows = [[float(word.strip(' "') or "nan") for word in line.split(separator)] for line in lines]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("its rows are not all of one length" if rows else "it holds no row")
    return np.array(rows, np.float32)


def _sparse(text: str, features: int) -> Any:
    """Absent values are missing ones; a word without a colon is a label, or a comment's."""
    lines = text.strip().splitlines()
    if not lines:
        raise ValueError("it holds no row")
    pairs = [
        (row, int(column), float(value))
        for row, line in enumerate(lines)
        for column, colon, value in (word.partition(":") for word in line.partition("#")[0].split())
        if colon and column != "qid"
    ]
    width = max([features, *(column + 1 for _, column, _ in pairs)])
    rows, columns, values = zip(*pairs, strict=True) if pairs else ((), (), ())
    sparse = importlib.import_module("scipy.sparse")
    return sparse.csr_matrix((np.array(values, np.float32), (rows, columns)), shape=(len(lines), width))


def _text(body: bytes | str) -> str:
    return body if isinstance(body, str) else bytes(body).decode()


def _xgboost() -> Any:
    return importlib.import_module("xgboost")
