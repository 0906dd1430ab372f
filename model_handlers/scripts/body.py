"""What a model looks like that takes the body of a request as it came: one tensor in, one out, three words beside them.

SageMaker's own containers hand a script the body and its content type, and answer what the script makes of them. Here
such a model is an ordinary one with a tensor of bytes on both sides; content type and Accept header are parameters of
request and response, so that every protocol can ask it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig

BACKEND = "sagemaker"
BODY = "BODY"  # both tensors, UINT8: so many bytes
CONTENT_TYPE = "content_type"  # of the request's body, and of the response's
ACCEPT = "accept"  # what the client would like the response to be
CUSTOM_ATTRIBUTES = "custom_attributes"  # X-Amzn-SageMaker-Custom-Attributes of the request
SESSION_ID = "session_id"  # of the stateful session that the request is of
DEFAULT_TYPE = "application/json"

# Parameters of a configuration, by the variables that Amazon's containers have for them: the type of answers to clients
# that do not say what they accept, and the folder of a script that is not in its model's archive.
DEFAULT_ACCEPT = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
SUBMIT_DIRECTORY = "SAGEMAKER_SUBMIT_DIRECTORY"

# A parameter by the name of the setting: how JSON says what is no finite number, where that is not null.
NONFINITE = "MME_JSON_NONFINITE"
LITERAL = "literal"  # NaN, Infinity and -Infinity, as Triton and Python write them


def takes_body(config: ModelConfig) -> bool:
    """Whether the body of a request to this model is its input as it came."""
    return config.backend == BACKEND
