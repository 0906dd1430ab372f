"""What `mme local` answers when it can't answer: the errors of SageMaker, as boto3 reads them. PURE.

The sentences are SageMaker's where they are known; their form is the server's own (`container.inference.errors`).
"""

from __future__ import annotations

from typing import Any

from container.inference.errors import header_pairs, model_error_body, runtime_answer

_ACCOUNT = "000000000000"


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

    def answer(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, headers and body."""
        status, headers, body = runtime_answer(self.name, {"Message": self.message, **self.facts})
        return status, header_pairs(headers), body


def model_error(status: int, original: str, endpoint: str) -> RuntimeApiError:
    """A container's error, wrapped as SageMaker wraps it; status 0 means that it said nothing in time."""
    logs = f"/aws/sagemaker/Endpoints/{endpoint}"
    advice = f"See the log of `mme local`, which on AWS is the log group {logs}, for more information."
    body = model_error_body(status, original, advice, f"arn:aws:logs:us-east-1:{_ACCOUNT}:log-group:{logs}")
    return RuntimeApiError("ModelError", body.pop("Message"), **body)


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
