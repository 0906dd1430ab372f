"""The border to AWS: every error becomes one sentence with the next step."""

from __future__ import annotations

import pytest
from botocore import exceptions

from container.ship.account import MULTI_MODEL_GPU, check_instance_type
from container.ship.aws import aws_errors, code_of, split_uri
from model_handlers.errors import Kind, MmeError


def refused(code, status=400):
    """What botocore raises when AWS refuses."""
    answer = {"Error": {"Code": code, "Message": "because"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return exceptions.ClientError(answer, "CreateModel")


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (exceptions.NoCredentialsError(), Kind.INVALID_ARGUMENT, "sign in with `aws sso login`"),
        (exceptions.PartialCredentialsError(provider="env", cred_var="x"), Kind.INVALID_ARGUMENT, "sign in"),
        (exceptions.NoRegionError(), Kind.INVALID_ARGUMENT, "give --region"),
        (exceptions.ProfileNotFound(profile="p"), Kind.INVALID_ARGUMENT, "aws configure list-profiles"),
        (exceptions.UnauthorizedSSOTokenError(), Kind.INVALID_ARGUMENT, "have expired"),
        (exceptions.EndpointConnectionError(endpoint_url="u"), Kind.INVALID_ARGUMENT, "check the network and the region"),
        (exceptions.ParamValidationError(report="bad"), Kind.INVALID_ARGUMENT, "bad"),
        (exceptions.ReadTimeoutError(endpoint_url="u"), Kind.UNAVAILABLE, "u"),
        (refused("ExpiredTokenException"), Kind.INVALID_ARGUMENT, "have expired: sign in again"),
        (refused("ExpiredToken"), Kind.INVALID_ARGUMENT, "have expired: sign in again"),
        (refused("UnrecognizedClientException"), Kind.INVALID_ARGUMENT, "does not accept these credentials"),
        (refused("AccessDeniedException"), Kind.INVALID_ARGUMENT, "have CreateModel allowed"),
        (refused("NoSuchBucket"), Kind.INVALID_ARGUMENT, "`aws s3 mb`"),
        (refused("ResourceLimitExceeded"), Kind.INVALID_ARGUMENT, "Service Quotas"),
        (refused("ValidationException"), Kind.INVALID_ARGUMENT, "ValidationException: because"),
        (refused("ThrottlingException"), Kind.UNAVAILABLE, "try again"),
        (refused("InternalFailure", 500), Kind.UNAVAILABLE, "try again"),
    ],
)  # fmt: skip
def test_every_error_is_one_sentence(error, kind, sentence):
    """By its class or its code; what a person can mend is an invalid argument."""
    with pytest.raises(MmeError) as caught, aws_errors("sagemaker:create_model"):
        raise error

    assert caught.value.kind is kind
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message
    assert code_of(caught.value) == (getattr(error, "response", None) or {"Error": {"Code": ""}})["Error"]["Code"]


@pytest.mark.parametrize(
    ("uri", "place"),
    [("s3://bucket/a/b", ("bucket", "a/b")), ("s3://bucket", ("bucket", "")), ("s3://bucket/", ("bucket", ""))],
)
def test_uris_are_split(uri, place):
    """Into bucket and key."""
    assert split_uri(uri) == place


@pytest.mark.parametrize("uri", ["bucket/key", "s3:/bucket", "s3://", "s3://UPPER/x", "http://bucket/key", ""])
def test_what_is_no_uri_is_refused(uri):
    """With how to write it."""
    with pytest.raises(MmeError, match="s3://bucket/prefix"):
        split_uri(uri)


@pytest.mark.parametrize(
    ("instance_type", "multi_model", "fine"),
    [
        *((name, True, True) for name in MULTI_MODEL_GPU),
        ("ml.c5.xlarge", True, True),
        ("ml.g5.12xlarge", True, False),
        ("ml.g4dn.12xlarge", True, False),
        ("ml.p3.8xlarge", True, False),
        ("ml.inf2.xlarge", True, False),
        ("ml.trn1.2xlarge", True, False),
        ("ml.p5.48xlarge", False, True),
        ("ml.inf2.xlarge", False, True),
    ],
)
def test_instance_types(instance_type, multi_model, fine):
    """Many models need a CPU type or one of those with a single GPU; one model takes any."""
    if fine:
        check_instance_type(instance_type, (), multi_model=multi_model)
        return
    with pytest.raises(MmeError, match=instance_type):
        check_instance_type(instance_type, (), multi_model=multi_model)
