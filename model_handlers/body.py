"""What a model looks like that takes the body of a request as it came: one tensor in, one out, three words beside them.

SageMaker's own containers hand a script the body and its content type, and answer what the script makes of them. Here
such a model is an ordinary one with a tensor of bytes on both sides; content type and Accept header are parameters of
request and response, so that every protocol can ask it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model
from model_handlers.tensor import UINT8, TensorSpec

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig

BACKEND = "sagemaker"
BODY = "BODY"  # both tensors: so many bytes
CONTENT_TYPE = "content_type"  # of the request's body, and of the response's
ACCEPT = "accept"  # what the client would like the response to be
CUSTOM_ATTRIBUTES = "custom_attributes"  # X-Amzn-SageMaker-Custom-Attributes, both ways
DEFAULT_TYPE = "application/json"

SPECS = (TensorSpec(BODY, UINT8, (-1,)),)


def takes_body(config: ModelConfig) -> bool:
    """Whether the body of a request to this model is its input as it came."""
    return config.backend == BACKEND


def with_body(config: ModelConfig) -> ModelConfig:
    """A configuration with those two tensors, which it may name itself or leave out.

    Raises:
        MmeError: INVALID_MODEL when it says that the model looks otherwise.
    """
    for what, specs in (("input", config.inputs), ("output", config.outputs)):
        if specs not in {(), SPECS}:
            raise invalid_model(
                f"model '{config.name}': a model of backend '{BACKEND}' has one {what}, {BODY} of TYPE_UINT8 and dims "
                f"[ -1 ]; leave '{what}' out of its configuration"
            )
    if config.max_batch_size or config.decoupled:
        field = "max_batch_size" if config.max_batch_size else "model_transaction_policy"
        raise invalid_model(
            f"model '{config.name}': a model of backend '{BACKEND}' gets one request at a time and answers it once; "
            f"leave '{field}' out of its configuration"
        )
    return replace(config, inputs=SPECS, outputs=SPECS)
