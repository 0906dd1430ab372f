"""TensorFlow's SavedModels in folders of their versions answer as SageMaker's TensorFlow container has them answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_handlers.scripts import tensorflow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.scripts.host import Context


def output_fn(prediction: Mapping[str, Any], accept: str, context: Context) -> tuple[bytes, str]:
    return tensorflow.answer(prediction, accept, literal=context.literal)
