"""From what a library predicts to what a client gets, as FIL's parameters say. PURE.

`is_classifier` (`output_class` is its older name) asks for the class instead of its score, `predict_proba` for the
score of every class. Where a score is one number, that of the second of two classes, the first has the rest of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.errors import invalid_model
from model_handlers.parameters import number, switch

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig
    from model_handlers.tensor import Array
    from model_handlers.trees.forests import Forest

_DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of scores (n, columns).

    Attributes:
        columns: how many numbers a client gets for a row.
        classes: whether that is the class.
        both: whether the score of the first of two classes is worked out.
        threshold: scores beyond it mean the second of two classes.
    """

    columns: int
    classes: bool = False
    both: bool = False
    threshold: float = _DEFAULT_THRESHOLD

    def of(self, scores: Array) -> Array:
        """The output (n, columns) of FP32; (n,) of one column, since FIL leaves out dimensions of one."""
        if self.both:
            scores = np.concatenate([1 - scores, scores], axis=1)
        elif self.classes and scores.shape[1] == 1:
            scores = scores > self.threshold
        elif self.classes:
            scores = scores.argmax(axis=1, keepdims=True)
        output = scores.astype(np.float32, copy=False)
        return output.reshape(-1) if self.columns == 1 else output


def outcome_of(config: ModelConfig, forest: Forest) -> Outcome:
    """What the parameters ask for.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is not what it should be, or not possible with this model.
    """
    classes = switch(config, "is_classifier", default=switch(config, "output_class", default=False))
    threshold = number(config, "threshold", _DEFAULT_THRESHOLD)
    if switch(config, "predict_proba", default=False):
        if forest.columns == 1 and not forest.binary:
            raise invalid_model(
                f"model '{config.name}': parameter 'predict_proba' asks for the score of each class, but this model "
                "knows no classes: leave it out"
            )
        return Outcome(max(forest.columns, 2), both=forest.columns == 1)
    if classes and not forest.labels:
        return Outcome(1, classes=True, threshold=threshold)
    return Outcome(forest.columns)
