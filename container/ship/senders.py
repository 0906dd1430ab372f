"""How a request gets to a model: over plain HTTP, or through boto3 to SageMaker or to `mme local`.

A sender takes a request, a target model and an inference id, and gives the answer; it may be called from many threads.
Whoever names `mme local` by its URL alone is understood: it tells what it is.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from container.ship.aws import aws_errors
from container.ship.client import (
    LOCAL_NAME,
    Answer,
    Identity,
    checked_url,
    identity_of,
    local_endpoint,
    post,
    sentence_of,
)
from container.ship.flags import DEFAULT_URL
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from container.ship.requests import Request

    Sender = Callable[[Request, str, str], Answer]

_ANSWERS = frozenset(  # what a running endpoint says of a request
    {"InternalFailure", "ModelError", "ModelNotReadyException", "ServiceUnavailable", "ValidationError"}
)


def sender_of(arguments: argparse.Namespace, connections: int = 1) -> Sender:
    """The sender that the arguments name, for so many threads.

    Raises:
        MmeError: INVALID_ARGUMENT when they contradict each other.
    """
    if arguments.name and arguments.endpoint:
        raise invalid_argument(f"two endpoints: '{arguments.name}' and --endpoint '{arguments.endpoint}'")
    if arguments.local and arguments.url:
        raise invalid_argument("--local is the Runtime API and --url plain HTTP: give one of them")
    identity = identity_of(arguments)
    endpoint = arguments.name or arguments.endpoint or (LOCAL_NAME if arguments.local else "")
    url = arguments.local or arguments.url or ""
    if not endpoint:
        url = checked_url(url or DEFAULT_URL)
        local = local_endpoint(url, arguments.timeout, identity)
        if local is None:
            return _plain(url, arguments.timeout, identity)
        endpoint = local.name
        print(
            f"{url} is `mme local`, which speaks the Runtime API: asked through boto3, as by --local", file=sys.stderr
        )
    if url:
        url = checked_url(url, "--local" if arguments.local else "--url")
    elif identity:
        raise invalid_argument("--ca and --key-file are for a server of --url or --local: AWS knows you by credentials")
    return _runtime(endpoint, url, identity, arguments, connections)


def _plain(url: str, timeout: float, identity: Identity) -> Sender:
    """Over HTTP, as SageMaker asks a container."""

    def send(request: Request, target: str, inference_id: str) -> Answer:
        headers = {
            "Content-Type": request.content_type,
            "Accept": request.accept,
            "X-Amzn-SageMaker-Target-Model": target,
            "X-Amzn-SageMaker-Inference-Id": inference_id,
        }
        given = {name: value for name, value in headers.items() if value}
        return post(f"{url}/invocations", request.body, given, timeout, identity)

    return send


def _runtime(endpoint: str, url: str, identity: Identity, arguments: argparse.Namespace, connections: int) -> Sender:
    """Through boto3: on AWS, or at `url`, which needs no credentials and no region."""
    timeout = arguments.timeout
    with aws_errors("sagemaker-runtime"):
        session = boto3.session.Session(region_name=arguments.region)
        config = Config(read_timeout=timeout, retries={"total_max_attempts": 1}, max_pool_connections=connections)
        local: dict[str, Any] = {}
        if url:
            local = {"endpoint_url": url, "region_name": session.region_name or "us-east-1"}
            if identity.ca is not None:
                local["verify"] = str(identity.ca)
            if identity.key or session.get_credentials() is None:
                config = config.merge(Config(signature_version=UNSIGNED))
        client = session.client("sagemaker-runtime", config=config, **local)

    def show_key(request: Any, **_: Any) -> None:
        request.headers["Authorization"] = identity.authorization

    if identity.key:
        client.meta.events.register("before-send.sagemaker-runtime", show_key)

    def send(request: Request, target: str, inference_id: str) -> Answer:
        given = {
            "TargetModel": target,
            "InferenceId": inference_id,
            "ContentType": request.content_type,
            "Accept": request.accept,
        }
        with aws_errors(f"endpoint '{endpoint}'"):
            try:
                response = client.invoke_endpoint(
                    EndpointName=endpoint, Body=request.body, **{key: value for key, value in given.items() if value}
                )
                return Answer(response["ResponseMetadata"]["HTTPHeaders"], response["Body"].read())
            except ClientError as error:
                raise _refusal(error, error.response) from error

    return send


def _refusal(error: Exception, answer: Mapping[str, Any]) -> Exception:
    """The model's own sentence where there is one, else what SageMaker says; AWS's refusals stay what they are."""
    code = answer["Error"].get("Code", "")
    if code not in _ANSWERS:
        return error
    original = answer.get("OriginalMessage")
    message = sentence_of(original.encode()) if original else answer["Error"].get("Message")
    return MmeError(Kind.UNAVAILABLE, f"{code}: {message}")
