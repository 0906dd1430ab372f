"""Handwritten digits, as a script for SageMaker's scikit-learn container: rows of 64 pixels in CSV, answers in JSON.

The default `input_fn` reads the body; the rest is below. Runs wherever such scripts run, and needs nothing of mme.
"""

import json
import os

import joblib


def model_fn(model_dir):
    """The classifier that was trained, out of the archive that this script lies in."""
    return joblib.load(os.path.join(model_dir, "model.joblib"))


def predict_fn(rows, model):
    """The probability of each digit for each row; one row of CSV arrives without a second dimension."""
    return model.predict_proba(rows.reshape(-1, model.n_features_in_))


def output_fn(probabilities, accept):
    """The likeliest digit of each row and how sure the model is of it: JSON, whatever the client accepts."""
    digits = [{"label": int(row.argmax()), "probability": round(float(row.max()), 4)} for row in probabilities]
    return json.dumps({"digits": digits}), "application/json"
