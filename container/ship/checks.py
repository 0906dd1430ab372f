"""What is checked before anything is made: role, image, models, instance type. Each refusal says what to do.

SageMaker finds most of these itself, some minutes into a deployment; it serves several models of one container on any
CPU type and, with GPUs, on a short list of types with a single one. What this identity may not look at is left to
SageMaker.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from container.cli.command import ARCHIVE_SUFFIX
from container.ship.aws import code_of, split_uri
from model_handlers.errors import MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from container.ship.aws import Aws

_ACCELERATED = re.compile(r"ml\.(p\d|g\d|inf|trn|dl)")
_SIZES = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")
MULTI_MODEL_GPU = (
    "ml.p2.xlarge",
    "ml.p3.2xlarge",
    *(f"ml.g4dn.{size}" for size in _SIZES),
    *(f"ml.g5.{size}" for size in _SIZES),
)
# With GPUs that CUDA 13 runs on. Left to itself SageMaker gives the first of them a driver for CUDA 11.4.
_CUDA_13 = re.compile(r"ml\.(g4dn|g5|g6e?|g7e|p4de?|p5(e|en)?|p6-b200)\.")
_CUDA_13_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"  # its driver is 580, the first for CUDA 13
SAGEMAKERS_OWN = "default"


def has_accelerator(instance_type: str) -> bool:
    return bool(_ACCELERATED.match(instance_type))


def host_image(instance_type: str, asked: str) -> str:
    """The InferenceAmiVersion for instances whose container may be mme's for GPUs; "" leaves it to SageMaker.

    Args:
        instance_type: as in `ml.g5.xlarge`.
        asked: what a person wants, `default` for SageMaker's own choice; "" for what suits CUDA 13.
    """
    if asked:
        return "" if asked == SAGEMAKERS_OWN else asked
    return _CUDA_13_AMI if _CUDA_13.match(instance_type) else ""


def next_host_image(instance_type: str, had: tuple[str, str]) -> str:
    """The InferenceAmiVersion for other instances of an endpoint: what was chosen for GPUs stays with GPUs."""
    old_type, old_image = had
    chosen = has_accelerator(old_type) and old_image != host_image(old_type, "")
    return old_image if chosen and has_accelerator(instance_type) else host_image(instance_type, "")


def check_instance_type(instance_type: str, known: Collection[str], *, multi_model: bool) -> None:
    """Refuse a type that SageMaker would refuse; without `known` ones any may exist."""
    if known and instance_type not in known:
        close = difflib.get_close_matches(instance_type, known, 1, 0.5)
        advice = f"did you mean '{close[0]}'?" if close else "they are called as in ml.g5.xlarge"
        raise invalid_argument(f"SageMaker has no instance type '{instance_type}': {advice}")
    if multi_model and has_accelerator(instance_type) and instance_type not in MULTI_MODEL_GPU:
        raise invalid_argument(
            f"SageMaker runs no multi-model endpoint on '{instance_type}': take a CPU type, or one of the types with a "
            f"single GPU that it does ({', '.join(MULTI_MODEL_GPU)}); --single serves one model on any type, and "
            "--any-instance-type asks SageMaker itself"
        )


_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/(?:.*/)?([^/]+)")
_ECR = re.compile(r"\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/.+")
_ANY_ACCOUNT = "123456789012"
_UNSEEN = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"})


def checked_role(role: str, aws: Aws | None) -> str:
    """The ARN of a role that exists, as far as this identity may know; its bare name will do."""
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
    """Refuse variables with which the container would not start, which SageMaker tells ten minutes later."""
    from container.settings import SettingsError, read_settings  # noqa: PLC0415 - all settings, 100 ms
    from container.settings.schema import DEFAULT_PORT  # noqa: PLC0415

    given = {**environment, **({"SAGEMAKER_MULTI_MODEL": "true"} if multi_model else {})}
    try:
        settings = read_settings(given)
    except SettingsError as error:
        sentences = "\n".join(f"the container would not start: {each}" for each in error.problems)
        raise invalid_argument(sentences) from error
    if settings.port != DEFAULT_PORT:
        raise invalid_argument(
            f"the container would not be heard at port {settings.port}: SageMaker calls {DEFAULT_PORT}, leave it out"
        )


def check_image(image: str, region: str) -> None:
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
    """The URI as SageMaker wants it: a prefix with a slash behind it, or an archive that is there."""
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
