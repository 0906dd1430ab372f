"""The configuration of a model that takes bodies, which is the same for all of them. PURE."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from model_handlers.body import BACKEND, BODY
from model_handlers.errors import invalid_model
from model_handlers.tensor import UINT8, TensorSpec

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig

_SPECS = (TensorSpec(BODY, UINT8, (-1,)),)


def with_body(config: ModelConfig) -> ModelConfig:
    """A configuration with those two tensors, which it may name itself or leave out.

    Raises:
        MmeError: INVALID_MODEL when it says that the model looks otherwise.
    """
    for what, specs in (("input", config.inputs), ("output", config.outputs)):
        if specs not in {(), _SPECS}:
            raise invalid_model(
                f"model '{config.name}': a model of backend '{BACKEND}' has one {what}, {BODY} of TYPE_UINT8 and dims "
                f"[ -1 ]; leave '{what}' out of its configuration"
            )
    if config.max_batch_size:
        raise invalid_model(
            f"model '{config.name}': a model of backend '{BACKEND}' gets one request at a time; leave 'max_batch_size' "
            "out of its configuration"
        )
    return replace(config, inputs=_SPECS, outputs=_SPECS)
