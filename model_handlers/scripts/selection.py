"""What SageMaker's XGBoost answers where a client has chosen: its selectable inference, which Autopilot sets up. PURE.

An answer is a mapping of the chosen keys for each row. A key that the objective of the model has nothing for is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.scripts.accept import preferred
from model_handlers.scripts.csv_text import written
from model_handlers.scripts.formats import CSV, JSON, JSON_LINES, UnsupportedFormatError, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Given = Callable[[Any, int], Any]  # a row's prediction and the number of classes → a value

_WRITES = (CSV, JSON, JSON_LINES)
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


class Selection:
    """Predictions of rows, and what of them was chosen.

    Args:
        predictions: what the booster made, a number or a row of numbers for each row.
        keys: what was chosen, in the order of an answer in CSV.
        objective: of the booster.
        classes: how many it tells apart, 0 for no such number.

    Attributes:
        rows: key → value of each row.

    Raises:
        ValueError: nothing can be chosen of such an objective.
    """

    def __init__(self, predictions: Any, keys: Iterable[str], objective: str, classes: int) -> None:
        there = _KEYS.get(objective)
        if there is None:
            raise ValueError(f"objective '{objective}' has nothing that SAGEMAKER_INFERENCE_OUTPUT could choose")
        self.keys = tuple(keys)
        several = objective == "multi:softprob"
        made = {**_OF_ALL, **(_OF_SEVERAL if several else _OF_ONE), **_LABELS.get(objective, {})}
        self.rows = [
            {key: made[key](row if several else row.item(), classes) if key in there else np.nan for key in self.keys}
            for row in np.asarray(predictions)
        ]

    def answer(self, accept: str, *, lines: bool, literal: bool = False) -> tuple[str | memoryview, str]:
        """The body of an answer and its content type; in CSV a line a row, which ends where lines are put together.

        Raises:
            UnsupportedFormatError: the client accepts neither CSV nor JSON, nor its lines.
        """
        content_type = preferred(accept, _WRITES, CSV)
        if content_type is None:
            raise UnsupportedFormatError(accept, _WRITES)
        if content_type == CSV:
            text = written([[str(row[key]) for key in self.keys] for row in self.rows])
            return (text if lines else text.removesuffix("\n")), CSV
        document = {"predictions": self.rows} if content_type == JSON else self.rows
        return encode(document, content_type, literal=literal), content_type


def _both(score: float, _classes: int) -> list[float]:
    return [1.0 - score, score]


_OF_ALL: dict[str, Given] = {"predicted_score": lambda score, _: score}
_OF_ONE: dict[str, Given] = {
    "predicted_label": lambda score, _: score,
    "labels": lambda _, classes: list(range(classes)),
    "probability": lambda score, _: score,
    "probabilities": _both,
    "raw_score": lambda score, _: score,
    "raw_scores": _both,
}
_OF_SEVERAL: dict[str, Given] = {
    "predicted_label": lambda row, _: int(np.argmax(row)),
    "labels": lambda _, classes: list(range(classes)),
    "probability": lambda row, _: row.max().item(),
    "probabilities": lambda row, _: row.tolist(),
    "raw_score": lambda row, _: row.max().item(),
    "raw_scores": lambda row, _: row.tolist(),
}
_BINARY: dict[str, Given] = {"labels": lambda _, __: [0, 1]}
_LABELS: dict[str, dict[str, Given]] = {
    "binary:logistic": {**_BINARY, "predicted_label": lambda score, _: int(score > 0.5)},
    "binary:logitraw": {**_BINARY, "predicted_label": lambda score, _: int(score > 0)},
    "binary:hinge": _BINARY,
}
