"""A model of scikit-learn and rows that it has not seen. To import this takes a second."""

from __future__ import annotations

import io

import joblib
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

_DIGITS = load_digits()
ROWS = _DIGITS.data[500:540]
MODEL = LogisticRegression(max_iter=200).fit(_DIGITS.data[:500], _DIGITS.target[:500])


def dumped() -> bytes:
    """The model, as joblib writes it."""
    stream = io.BytesIO()
    joblib.dump(MODEL, stream)
    return stream.getvalue()
