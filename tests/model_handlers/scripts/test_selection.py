"""SageMaker's selectable inference: what of a booster's prediction an answer holds."""

import json
import math

import numpy as np
import pytest

from model_handlers.scripts.content_types import UnsupportedFormatError
from model_handlers.scripts.default_script import SELECTABLE
from model_handlers.scripts.xgboost import Selection, answer

NONE = "nothing of the kind"
ONE = np.array([0.75], np.float32)  # as a float of 32 bits, it is itself
SEVERAL = np.array([[0.25, 0.5, 0.25]], np.float32)
ROWS = [
    f'{{"predicted_score": null, "predicted_label": {label}, "probabilities": {both}}}'
    for label, both in ((1, [0.25, 0.75]), (0, [0.75, 0.25]))
]
# objective → its prediction of a row, the number of classes, and each key in the order of SELECTABLE.
EXPECTED = {
    "reg:squarederror": (ONE, 0, [NONE] * 6 + [0.75]),
    "binary:logistic": (ONE, 0, [1, [0, 1], 0.75, [0.25, 0.75], 0.75, [0.25, 0.75], NONE]),
    "binary:logitraw": (-ONE, 0, [0, [0, 1], NONE, NONE, -0.75, [1.75, -0.75], NONE]),
    "binary:hinge": (np.ones(1, np.float32), 0, [1.0, [0, 1], NONE, NONE, 1.0, [0.0, 1.0], NONE]),
    "multi:softmax": (np.full(1, 2, np.float32), 3, [2.0, [0, 1, 2], NONE, NONE, 2.0, [-1.0, 2.0], NONE]),
    "multi:softprob": (SEVERAL, 3, [1, [0, 1, 2], 0.5, [0.25, 0.5, 0.25], 0.5, [0.25, 0.5, 0.25], NONE]),
}


@pytest.mark.parametrize("objective", EXPECTED)
def test_each_objective_has_what_the_container_gives_of_it(objective):
    """As numbers of Python's; what it has nothing for is NaN."""
    prediction, classes, values = EXPECTED[objective]
    (row,) = Selection(prediction, SELECTABLE, objective, classes).rows

    assert list(row) == list(SELECTABLE)
    for key, value in zip(SELECTABLE, values, strict=True):
        assert math.isnan(row[key]) if value is NONE else (row[key], type(row[key])) == (value, type(value)), key


@pytest.mark.parametrize(
    ("accept", "lines", "literal", "expected"),
    [
        ("text/csv", False, False, 'nan,1,"[0.25, 0.75]"\nnan,0,"[0.75, 0.25]"'),
        ("*/*", True, False, 'nan,1,"[0.25, 0.75]"\nnan,0,"[0.75, 0.25]"\n'),
        (
            "application/json",
            False,
            True,
            f'{{"predictions": [{ROWS[0]}, {ROWS[1]}]}}'.replace("null", "NaN"),
        ),
        (
            "application/jsonlines",
            True,
            False,
            f"{ROWS[0]}\n{ROWS[1]}\n",
        ),
    ],
)
def test_answers_are_written_as_the_container_writes_them(accept, lines, literal, expected):
    """In CSV a line a row, in the order of the keys; in JSON objects."""
    keys = ("predicted_score", "predicted_label", "probabilities")
    chosen = Selection(np.array([0.75, 0.25], np.float32), keys, "binary:logistic", 0)
    body, content_type = answer(chosen, accept, lines=lines, literal=literal)
    text = body if isinstance(body, str) else bytes(body).decode()

    assert content_type == accept.replace("*/*", "text/csv")
    if "json" not in content_type:
        assert text == expected
    else:
        said, wanted = ([json.loads(line) for line in each.splitlines()] for each in (text, expected))
        assert str(said) == str(wanted)
        assert text.endswith("\n") == (content_type == "application/jsonlines")


def test_what_can_not_be_chosen_or_written_is_told():
    """An objective that predicts something else, and a content type that no selection has."""
    with pytest.raises(ValueError, match="objective 'rank:pairwise' has nothing that SAGEMAKER_INFERENCE_OUTPUT"):
        Selection(ONE, SELECTABLE, "rank:pairwise", 0)
    with pytest.raises(UnsupportedFormatError):
        answer(Selection(ONE, SELECTABLE, "reg:tweedie", 0), "application/x-npy", lines=False)
