"""Four small classifiers, trained in seconds on data sets that ship with scikit-learn, converted to ONNX.

One of each family that teams deploy most: a neural network, a linear model, boosted trees and a forest. All have the
same interface, so that one client serves for all of them:

    features         FP32  [batch, number of features]
    label            INT64 [batch]                         index into the data set's class names
    probabilities    FP32  [batch, number of classes]

Everything is seeded: the same packages give the same models. Knows nothing of repositories, servers or requests;
`python -m examples.classifiers` trains all four and prints how well each does on the rows held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from skl2onnx import to_onnx  # type: ignore[import-untyped]
from skl2onnx.common.data_types import FloatTensorType  # type: ignore[import-untyped]
from sklearn import datasets  # type: ignore[import-untyped]
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from sklearn.neural_network import MLPClassifier  # type: ignore[import-untyped]
from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from onnx import ModelProto

HELD_OUT = 0.2  # share of rows that training never sees
OPSETS = {"": 20, "ai.onnx.ml": 3}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one classifier comes about: `load` gives scikit-learn's data set, `estimator` an untrained model."""

    load: Callable[[], Any]
    estimator: Callable[[], Any]


RECIPES: dict[str, Recipe] = {
    "digits": Recipe(
        datasets.load_digits,
        lambda: make_pipeline(StandardScaler(), MLPClassifier((64,), max_iter=300, random_state=0)),
    ),
    "iris": Recipe(datasets.load_iris, lambda: make_pipeline(StandardScaler(), LogisticRegression())),
    "wine": Recipe(datasets.load_wine, lambda: GradientBoostingClassifier(random_state=0)),
    "breast-cancer": Recipe(
        datasets.load_breast_cancer, lambda: RandomForestClassifier(n_estimators=100, random_state=0)
    ),
}


@dataclass(frozen=True, slots=True)
class Split:
    """A data set in two parts: rows to learn from and rows held out.

    Features are FP32 [rows, features], labels INT64 [rows], `classes` the labels' names in order.
    """

    train_features: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    held_out_features: NDArray[np.float32]
    held_out_labels: NDArray[np.int64]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Classifier:
    """A trained classifier.

    Attributes:
        accuracy: share of the held-out rows that it labels rightly.
        estimator: the scikit-learn model that `onnx` was converted from.
    """

    name: str
    split: Split
    estimator: Any
    onnx: ModelProto
    accuracy: float


def split_data(name: str) -> Split:
    """The data set of that classifier, always cut the same way, each class in proportion."""
    data = RECIPES[name].load()
    features, labels = data.data.astype(np.float32), data.target.astype(np.int64)
    train_x, held_x, train_y, held_y = train_test_split(
        features, labels, test_size=HELD_OUT, stratify=labels, random_state=0
    )
    return Split(train_x, train_y, held_x, held_y, tuple(str(label) for label in data.target_names))


@cache
def train(name: str) -> Classifier:
    """Train the classifier of that name and convert it; a second call answers the same one."""
    split = split_data(name)
    # The matrices are so small that BLAS's threads would wait for one another longer than they work.
    with threadpool_limits(1):
        estimator = RECIPES[name].estimator().fit(split.train_features, split.train_labels)
    width = split.train_features.shape[1]
    model = to_onnx(
        estimator,
        name=name,
        initial_types=[("features", FloatTensorType([None, width]))],
        # A list of dictionaries, scikit-learn's habit, is no tensor: ask for the plain matrix.
        options={"zipmap": False},
        target_opset=OPSETS,
    )
    accuracy = estimator.score(split.held_out_features, split.held_out_labels)
    return Classifier(name, split, estimator, model, float(accuracy))


def main() -> None:
    """Train all and print their accuracy."""
    for name in RECIPES:
        trained = train(name)
        rows = len(trained.split.held_out_labels)
        print(f"{name:14s} {trained.accuracy:6.1%} of {rows} rows held out   ({len(trained.split.classes)} classes)")


if __name__ == "__main__":
    main()
