"""What the Runtime API answers when it can't answer: the errors of SageMaker, as boto3 reads them. PURE.

boto3 takes an error's class from a header and the rest from the body; the sentences are those of SageMaker where they
are known.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from container.inference.errors import RUNTIME_STATUSES

_MAX_MESSAGE = 2048  # what SageMaker keeps of an error body
_ACCOUNT = "000000000000"
# boto3's model of the service has no shape for being throttled, which every service of AWS may answer.
_STATUSES = {**RUNTIME_STATUSES, "ThrottlingException": 400}


class RuntimeApiError(Exception):
    """An error of the Runtime API.

    Attributes:
        name: its class in boto3's eyes.
        message: the sentence.
        facts: what else its body has.
    """

    def __init__(self, name: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.name = name
        self.message = message
        self.facts = facts

    @property
    def status(self) -> int:
        """The HTTP status."""
        return _STATUSES[self.name]

    def headers(self) -> dict[str, str]:
        """Header lines of the answer."""
        return {
            "Content-Type": "application/json",
            "x-amzn-errortype": self.name,
            "x-amzn-RequestId": str(uuid.uuid4()),
        }

    def body(self) -> bytes:
        """The body of the answer."""
        return json.dumps({"Message": self.message[:_MAX_MESSAGE], **self.facts}).encode()


def model_error(status: int, original: str, endpoint: str) -> RuntimeApiError:
    """A container's error, wrapped as SageMaker wraps it; status 0 means that it said nothing in time."""
    original = original[:_MAX_MESSAGE]
    side = "client" if 400 <= status < 500 else "server"
    logs = f"/aws/sagemaker/Endpoints/{endpoint}"
    return RuntimeApiError(
        "ModelError",
        f'Received {side} error ({status}) from model with message "{original}". '
        f"See the log of `mme local`, which on AWS is the log group {logs}, for more information.",
        ErrorCode="CLIENT_ERROR_FROM_MODEL" if side == "client" else "INTERNAL_FAILURE_FROM_MODEL",
        OriginalStatusCode=status,
        OriginalMessage=original,
        LogStreamArn=f"arn:aws:logs:us-east-1:{_ACCOUNT}:log-group:{logs}",
    )


def not_ready(target: str) -> RuntimeApiError:
    """A model that is on its way longer than a request waits."""
    return RuntimeApiError(
        "ModelNotReadyException", f"Model {target} is still being downloaded or loaded. Retry your request."
    )


def timed_out(endpoint: str) -> RuntimeApiError:
    """The container took longer than SageMaker waits."""
    return model_error(
        0,
        "Your invocation timed out while waiting for a response from container model. Review the latency metrics for "
        "each container in Amazon CloudWatch, resolve the issue, and try again.",
        endpoint,
    )


def no_endpoint(name: str) -> RuntimeApiError:
    """Another endpoint than the one here."""
    return RuntimeApiError("ValidationError", f"Endpoint {name} of account {_ACCOUNT} not found.")


_ASKED = "an endpoint is asked at /endpoints/NAME/invocations, and GET / tells where its container listens"


def no_operation(method: str, path: str, operation: str) -> RuntimeApiError:
    """A request for something else; `operation` is what AWS's clients call it, "" where none says."""
    service, _, name = operation.partition(".")
    if service != "SageMaker":
        return RuntimeApiError("ValidationError", f"{method} {path} is no operation of the Runtime API: {_ASKED}")
    return RuntimeApiError(
        "ValidationError",
        f"{name} is for the client 'sagemaker', and `mme local` answers the client 'sagemaker-runtime' alone: there is "
        "one endpoint here, which runs already; invoke that, and make models and endpoints on AWS",
        __type="ValidationException",
    )


def no_target(request_id: str) -> RuntimeApiError:
    """A multi-model endpoint, and no TargetModel."""
    return RuntimeApiError(
        "ValidationError",
        f"Request {request_id} is missing a target model header, please specify the target model when invoking a "
        "multi-model endpoint.",
    )


def target_not_wanted(endpoint: str) -> RuntimeApiError:
    """A TargetModel, and no multi-model endpoint."""
    return RuntimeApiError(
        "ValidationError",
        f"Endpoint {endpoint} is not a multi-model endpoint and does not support target model header.",
    )


def throttled() -> RuntimeApiError:
    """Too many requests."""
    return RuntimeApiError("ThrottlingException", "Rate exceeded")
