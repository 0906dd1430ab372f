"""Handwritten digits, as a script for SageMaker's scikit-learn container: rows of 64 pixels in CSV, answers in JSON.

Runs wherever such scripts run, and needs nothing of mme. Of the four functions only model_fn has to be there: the
default ones read and write CSV, JSON and NPY, and call the model's predict.
"""

import io
import json
import os

import joblib
import numpy as np


def model_fn(model_dir):
    """The classifier that was trained, out of the archive that this script lies in."""
    return joblib.load(os.path.join(model_dir, "model.joblib"))


def input_fn(body, content_type):
    """Rows of 64 pixels, 0 to 16 each."""
    if not content_type.startswith("text/csv"):
        raise ValueError(f"send rows as text/csv, not as {content_type}")
    return np.loadtxt(io.StringIO(body), np.float32, delimiter=",", ndmin=2)


def predict_fn(rows, model):
    """The probability of each digit for each row."""
    return model.predict_proba(rows)


def output_fn(probabilities, accept):
    """The likeliest digit of each row and how sure the model is of it: JSON, whatever the client accepts."""
    digits = [{"label": int(row.argmax()), "probability": round(float(row.max()), 4)} for row in probabilities]
    return json.dumps({"digits": digits}), "application/json"
