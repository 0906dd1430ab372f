"""TensorFlow's SavedModels in folders of their versions answer as SageMaker's TensorFlow container has them answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_handlers.python.script import saved_models

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.python.script.context import Context


def predict_fn(data: Mapping[str, Any], model: saved_models.SavedModels, context: Context) -> dict[str, Any]:
    """What TensorFlow Serving would answer, of the model and version that the client names."""
    return model.predict(data, saved_models.said_by(context))


def output_fn(prediction: Mapping[str, Any], accept: str) -> tuple[bytes, str]:
    """That as JSON."""
    return saved_models.answer(prediction, accept)
