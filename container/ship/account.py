"""What there is in an account on AWS: what a deployment needs, checked before, and what was made, found by its tags.

SageMaker finds most of what is wrong itself, some minutes into a deployment; it serves several models of one container
on any CPU type and, with GPUs, on a short list of types with a single one. What this identity may not look at is left
to SageMaker. What can carry no tag is found by a mark in it. Each refusal says what to do.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import difflib
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from container.cli import ARCHIVE_SUFFIX
from container.ship.aws import DENIED, code_of, split_uri
from container.ship.endpoint import (
    MARK,
    SCALED,
    TAG,
    ApiCall,
    alarm_prefix,
    dashboard_name,
    has_accelerator,
    policy_name,
    resource_id,
)
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from container.ship.aws import Aws


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
        if code_of(error) in DENIED and found:
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
            found = aws.call("s3", "list_objects_v2", {"Bucket": bucket, "Prefix": key, "MaxKeys": 100})
            if not any(row["Key"].endswith(ARCHIVE_SUFFIX) for row in found.get("Contents", ())):
                reason = f"there is no {ARCHIVE_SUFFIX} in s3://{bucket}/{key}: put one there with `mme push`"
                raise invalid_argument(reason)
        return f"s3://{bucket}/{key}"
    if not key.endswith(ARCHIVE_SUFFIX):
        raise invalid_argument(f"--single '{uri}' is no {ARCHIVE_SUFFIX}; a prefix of several is for --models")
    place = {"Bucket": bucket, "Key": key}
    if aws is not None and aws.find("s3", "head_object", place, {"404", "NoSuchKey", "NotFound"}) is None:
        raise invalid_argument(f"there is no s3://{bucket}/{key}: put it there with `mme push`")
    return uri


POLL_SECONDS = 10.0
_GOING_ON = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
_STREAMS, _LINES = 2, 20


def find(aws: Aws, name: str) -> Mapping[str, Any] | None:
    """What SageMaker says of the endpoint, None where there is none."""
    rows = aws.rows("sagemaker", "list_endpoints", "Endpoints", {"NameContains": name})
    if not any(row["EndpointName"] == name for row in rows):
        return None
    return aws.call("sagemaker", "describe_endpoint", {"EndpointName": name})


def wait_in_service(aws: Aws, name: str, config: str) -> None:
    """Return when the endpoint serves `config`, reporting its status meanwhile."""
    began, shown = time.monotonic(), ""
    while True:
        state = aws.call("sagemaker", "describe_endpoint", {"EndpointName": name})
        status = str(state["EndpointStatus"])
        _report(f"{name} is {status} ({time.monotonic() - began:.0f} s)", is_new=status != shown)
        shown = status
        if status not in _GOING_ON:
            break
        time.sleep(POLL_SECONDS)
    if status == "InService" and state["EndpointConfigName"] == config:
        return
    rolled = " and went back to what it was" if status == "InService" else ""
    lines = [f"endpoint '{name}' is {status}{rolled}: {state.get('FailureReason', 'SageMaker gives no reason')}"]
    tail = log_tail(aws, name)
    lines += ["the end of the container's log:", *(f"  {line}" for line in tail)] if tail else []
    raise MmeError(Kind.UNAVAILABLE, "\n".join(lines))


def log_tail(aws: Aws, name: str) -> list[str]:
    """The last lines of the streams that were written last; none where there is no log, or it can't be read."""
    group = f"/aws/sagemaker/Endpoints/{name}"
    newest = {"logGroupName": group, "orderBy": "LastEventTime", "descending": True, "limit": _STREAMS}
    try:
        lines = []
        for stream in aws.call("logs", "describe_log_streams", newest)["logStreams"]:
            where = {"logGroupName": group, "logStreamName": stream["logStreamName"], "limit": _LINES}
            events = aws.call("logs", "get_log_events", {**where, "startFromHead": False})["events"]
            lines += [str(event["message"]).rstrip() for event in events]
    except MmeError:  # what failed is reported already; its log is an extra
        return []
    return lines[-_LINES:]


def _report(sentence: str, *, is_new: bool) -> None:
    """A line for what is new; on a terminal it counts on meanwhile."""
    if sys.stderr.isatty():
        print("\n" if is_new else "\r", sentence, sep="", end="", file=sys.stderr, flush=True)
    elif is_new:
        print(sentence, file=sys.stderr, flush=True)


def is_ours(aws: Aws, arn: str, name: str) -> bool:
    """Whether a resource of SageMaker's carries the endpoint's tag."""
    return tags_of(aws, arn).get(TAG) == name


def tags_of(aws: Aws, arn: str) -> dict[str, str]:
    """The tags of a resource of SageMaker's; those of AWS's own are left out."""
    tags = aws.call("sagemaker", "list_tags", {"ResourceArn": arn})["Tags"]
    return {row["Key"]: row["Value"] for row in tags if not row["Key"].startswith("aws:")}


def all_resources(aws: Aws, name: str) -> Iterator[ApiCall]:
    """The calls that delete what was made for an endpoint, in an order in which nothing needs what is gone."""
    yield from _scaling(aws, name)
    for alarm in alarm_names(aws, name):
        yield ApiCall("cloudwatch", "delete_alarms", {"AlarmNames": [alarm]})
    yield from _dashboard(aws, name)
    state = find(aws, name)
    if state is not None and is_ours(aws, state["EndpointArn"], name):
        yield ApiCall("sagemaker", "delete_endpoint", {"EndpointName": name})
    yield from models_and_configs(aws, name)


def alarm_names(aws: Aws, name: str) -> Iterator[str]:
    wanted = {"AlarmNamePrefix": alarm_prefix(name), "AlarmTypes": ["MetricAlarm"]}
    for row in aws.rows("cloudwatch", "describe_alarms", "MetricAlarms", wanted):
        tags = aws.call("cloudwatch", "list_tags_for_resource", {"ResourceARN": row["AlarmArn"]})["Tags"]
        if {"Key": TAG, "Value": name} in tags:
            yield row["AlarmName"]


def _scaling(aws: Aws, name: str) -> Iterator[ApiCall]:
    """Our policy; the target with it, unless another policy needs that."""
    service = "application-autoscaling"
    target = {**SCALED, "ResourceId": resource_id(name)}
    policies = [row["PolicyName"] for row in aws.call(service, "describe_scaling_policies", target)["ScalingPolicies"]]
    ours = policy_name(name)
    if ours in policies:
        yield ApiCall(service, "delete_scaling_policy", {**target, "PolicyName": ours})
        if policies == [ours]:
            yield ApiCall(service, "deregister_scalable_target", target)


def _dashboard(aws: Aws, name: str) -> Iterator[ApiCall]:
    dashboard, absent = dashboard_name(name), {"ResourceNotFound", "DashboardNotFoundError"}
    found = aws.find("cloudwatch", "get_dashboard", {"DashboardName": dashboard}, absent)
    if found is not None and MARK in found["DashboardBody"]:
        yield ApiCall("cloudwatch", "delete_dashboards", {"DashboardNames": [dashboard]})


def models_and_configs(aws: Aws, name: str, keep: str = "") -> Iterator[ApiCall]:
    """The calls that delete endpoint configurations, then models, of an endpoint; not those that are called `keep`."""
    for listing, noun, deletion in (
        ("list_endpoint_configs", "EndpointConfig", "delete_endpoint_config"),
        ("list_models", "Model", "delete_model"),
    ):
        for row in aws.rows("sagemaker", listing, f"{noun}s", {"NameContains": name}):
            if row[f"{noun}Name"] != keep and is_ours(aws, row[f"{noun}Arn"], name):
                yield ApiCall("sagemaker", deletion, {f"{noun}Name": row[f"{noun}Name"]})
