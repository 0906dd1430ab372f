"""What is checked before anything is made: role, image, models, name. Each problem is a sentence and the next step.

SageMaker finds most of these itself, some minutes into a deployment. What this identity may not look at is left to it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from container.settings import Settings
from container.settings.kinds import DEFAULT_PORT, SettingsError
from container.ship.aws import code_of, split_uri
from model_handlers.errors import MmeError, invalid_argument
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from container.ship.aws import Aws

_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/(?:.*/)?([^/]+)")
_ECR = re.compile(r"\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/.+")
_ANY_ACCOUNT = "123456789012"
_UNSEEN = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"})


def checked_role(role: str, aws: Aws | None) -> str:
    """The ARN of a role that exists, as far as this identity may know; its bare name will do.

    Args:
        role: ARN or name.
        aws: whom to ask; None asks nobody.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if not role:
        raise invalid_argument(
            "no role: give --role, the ARN or name of a role that SageMaker may assume and that may read the models"
        )
    found = _ROLE.fullmatch(role)
    if not found and not re.fullmatch(r"[\w+=,.@-]{1,64}", role):
        raise invalid_argument(f"--role '{role}' is no role: write arn:aws:iam::123456789012:role/NAME, or its name")
    if aws is None:
        return role if found else f"arn:aws:iam::{_ANY_ACCOUNT}:role/{role}"
    try:
        arn: str = aws.call("iam", "get_role", {"RoleName": found[1] if found else role})["Role"]["Arn"]
    except MmeError as error:
        if code_of(error) in _UNSEEN and found:
            return role
        if code_of(error) == "NoSuchEntity":
            raise invalid_argument(
                f"role '{role}' does not exist: make it in IAM, for the service SageMaker"
            ) from error
        raise
    return role if found else arn


def check_environment(environment: Mapping[str, str], *, multi_model: bool) -> None:
    """Refuse variables with which the container would not start, which SageMaker tells ten minutes later.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    given = {**environment, **({"SAGEMAKER_MULTI_MODEL": "true"} if multi_model else {})}
    try:
        settings = Settings.from_environ(given)
    except SettingsError as error:
        sentences = "\n".join(f"the container would not start: {each}" for each in error.problems)
        raise invalid_argument(sentences) from error
    if settings.port != DEFAULT_PORT:
        raise invalid_argument(
            f"the container would not be heard at port {settings.port}: SageMaker calls {DEFAULT_PORT}, leave it out"
        )


def check_image(image: str, region: str) -> None:
    """Refuse an image that SageMaker can't pull.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if not image:
        raise invalid_argument("no image: give --image, the URI of one in ECR; buildspec.yml builds and pushes mme's")
    found = _ECR.fullmatch(image)
    if found is None:
        raise invalid_argument(
            f"--image '{image}' is not in ECR, and SageMaker pulls from nowhere else: push it to "
            f"123456789012.dkr.ecr.{region}.amazonaws.com/NAME:TAG"
        )
    if found[1] != region:
        raise invalid_argument(f"--image '{image}' is in region {found[1]}, and the endpoint would be in {region}")


def checked_models(uri: str, aws: Aws | None, *, multi_model: bool) -> str:
    """The URI as SageMaker wants it: a prefix with a slash behind it, or an archive that is there.

    Args:
        uri: as it was given.
        aws: whom to ask what is there; None asks nobody.
        multi_model: which of both it should be.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    bucket, key = split_uri(uri)
    if multi_model:
        if key.endswith(ARCHIVE_SUFFIX):
            raise invalid_argument(f"--models '{uri}' is one archive: give the prefix it is in, or --single {uri}")
        key = f"{key.rstrip('/')}/" if key.strip("/") else ""
        if aws is not None:
            _check_prefix(aws, bucket, key)
        return f"s3://{bucket}/{key}"
    if not key.endswith(ARCHIVE_SUFFIX):
        raise invalid_argument(f"--single '{uri}' is no {ARCHIVE_SUFFIX}; a prefix of several is for --models")
    if aws is not None:
        _check_archive(aws, bucket, key)
    return uri


def _check_prefix(aws: Aws, bucket: str, prefix: str) -> None:
    found = aws.call("s3", "list_objects_v2", {"Bucket": bucket, "Prefix": prefix, "MaxKeys": 100})
    if not any(row["Key"].endswith(ARCHIVE_SUFFIX) for row in found.get("Contents", ())):
        raise invalid_argument(f"there is no {ARCHIVE_SUFFIX} in s3://{bucket}/{prefix}: put one there with `mme push`")


def _check_archive(aws: Aws, bucket: str, key: str) -> None:
    try:
        aws.call("s3", "head_object", {"Bucket": bucket, "Key": key})
    except MmeError as error:
        if code_of(error) in {"404", "NoSuchKey", "NotFound"}:
            raise invalid_argument(f"there is no s3://{bucket}/{key}: put it there with `mme push`") from error
        raise
