"""A model's own `parameters` on where it executes and how long that may take; MME_ keeps them from any framework's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Placement
from model_handlers.config.model_config import number
from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig

PLACEMENT = "MME_PLACEMENT"
EXECUTION_TIMEOUT = "MME_EXECUTION_TIMEOUT"
LOAD_TIMEOUT = "MME_LOAD_TIMEOUT"
_LOAD_SECONDS = 300.0
EXECUTION_SECONDS = 60.0  # as long as SageMaker itself waits for an answer of an endpoint


def placement_of(config: ModelConfig, usual: Placement) -> Placement:
    """Where a model's instances execute, by its configuration, else its traits. MmeError: INVALID_MODEL."""
    text = config.parameters.get(PLACEMENT)
    if text is None:
        return usual
    try:
        return Placement(text.strip().lower())
    except ValueError:
        choices = " or ".join(f"'{placement.value}'" for placement in Placement)
        raise invalid_model(f"model '{config.name}': parameter '{PLACEMENT}' must be {choices}, got '{text}'") from None


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after which a process that does not answer is ended."""

    # `execution` where a configuration does not say: the limit of a request. One for the process.
    usual_execution: ClassVar[float] = EXECUTION_SECONDS

    # from its start to the loaded model; and as long before that for the environment that a model brings
    load: float = _LOAD_SECONDS
    execution: float = EXECUTION_SECONDS  # one batch, from its start; of a decoupled model, from its last response
    close: float = 5.0  # the model's own clean-up when it is unloaded

    @classmethod
    def of(cls, config: ModelConfig) -> Deadlines:
        """The deadlines that a configuration asks for. MmeError: INVALID_MODEL for one that is no positive number."""
        return cls(
            _seconds(config, LOAD_TIMEOUT, _LOAD_SECONDS), _seconds(config, EXECUTION_TIMEOUT, cls.usual_execution)
        )


def _seconds(config: ModelConfig, key: str, default: float) -> float:
    return number(
        config, key, default, allowed=lambda value: 0 < value < math.inf, expected="a positive number of seconds"
    )
