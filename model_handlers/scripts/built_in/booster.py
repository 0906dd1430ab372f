"""A model of SageMaker's XGBoost algorithm, which is `xgboost-model` and nothing else, answers as that does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_handlers.scripts import xgboost
from model_handlers.scripts.default_script import LINES

if TYPE_CHECKING:
    from model_handlers.scripts.host import Context


def output_fn(prediction: Any, accept: str, context: Context) -> tuple[str | memoryview, str]:
    """The predictions, in CSV between commas, or each on a line for a batch transform; or what was chosen of them."""
    return xgboost.answer(prediction, accept, lines=LINES in context.parameters, literal=context.literal)
