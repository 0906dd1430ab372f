"""How weights are held: what the operator and a model's author ask for, and what a loaded model does. PURE."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig

PARAMETER = "MME_WEIGHTS"


class Weights(Enum):
    """What is asked for."""

    AUTO = "auto"  # mapped, and packed while it is hot
    MAPPED = "mapped"  # always mapped: as little memory as can be
    PACKED = "packed"  # packed from the start: as quick as can be
    PLAIN = "plain"  # read from the model's own file; nothing is kept on disk beside it


class Tier(Enum):
    """What a loaded model does."""

    PLAIN = "plain"
    MAPPED = "mapped"
    PACKED = "packed"


def weights_of(config: ModelConfig, default: Weights) -> Weights:
    """What a model's configuration asks for, else what the operator does.

    Raises:
        MmeError: INVALID_MODEL for what does not exist.
    """
    text = config.parameters.get(PARAMETER)
    if text is None:
        return default
    try:
        return Weights(text.strip().lower())
    except ValueError:
        choices = ", ".join(f"'{weights.value}'" for weights in Weights)
        raise invalid_model(
            f"model '{config.name}': parameter '{PARAMETER}' must be one of {choices}, got '{text}'"
        ) from None
