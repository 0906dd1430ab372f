"""`mme deploy` and `mme update`: an endpoint on SageMaker, made or changed, and what stands around it.

What can be known beforehand is checked beforehand; `--dry-run` prints the calls and makes none. When a call fails in
the middle, what was made is listed: `mme delete` takes that down of a new endpoint, the next update of one that serves.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import secrets
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from container.settings.kinds import ASYNCHRONOUS
from container.ship import checks, endpoint
from container.ship.aws import Aws
from container.ship.deployment import (
    TAG,
    Call,
    Deployment,
    attendance,
    blue_green,
    check_name,
    creation,
    parse_capacity,
    renewal,
    resource_id,
)
from container.ship.flags import pairs
from container.ship.instance_types import check_instance_type, host_image, next_host_image
from container.ship.inventory import alarm_names, is_ours, superseded, tags_of
from container.ship.watching import rollback_alarms
from model_handlers.errors import MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

_TOP_MODELS = "20"  # that the dashboard draws a line for
_TARGET_INVOCATIONS = 600.0


def run(arguments: argparse.Namespace) -> int:
    """Make an endpoint.

    Raises:
        MmeError: an argument is wrong, AWS refuses, or the endpoint does not come up.
    """
    aws = Aws(arguments.region or "")
    check_name(arguments.name)
    wanted = _asked_for(arguments)
    checks.check_environment(wanted.environment, multi_model=wanted.multi_model)
    offline = arguments.dry_run and not aws.signed_in
    wanted = _checked(aws, wanted, any_type=arguments.any_instance_type, offline=offline)
    if not offline and endpoint.find(aws, wanted.name) is not None:
        raise invalid_argument(f"endpoint '{wanted.name}' exists: change it with `mme update`, or take another name")
    stamp = _stamp()
    before, after = creation(wanted, stamp), attendance(wanted, aws.region)
    if offline:
        print("deploy: note: without credentials nothing was looked up on AWS", file=sys.stderr)
    if arguments.dry_run:
        return _show([*before, *after])
    remedy = f"take it down with: mme delete {wanted.name}"
    _make(aws, before, remedy)
    if arguments.no_wait:
        if after:
            print("scaling, alarms and dashboard are not made, since they need an endpoint in service", file=sys.stderr)
        return 0
    try:
        endpoint.wait_in_service(aws, wanted.name, f"{wanted.name}-{stamp}")
    except KeyboardInterrupt:
        print(f"\nit goes on without you; {remedy}", file=sys.stderr)
        raise
    _make(aws, after, remedy)
    print(f"endpoint {wanted.name} is in service; try: mme invoke {wanted.name}{_target_flag(wanted)} --json FILE")
    return 0


def run_update(arguments: argparse.Namespace) -> int:
    """Bring something new behind an endpoint, which serves without a gap.

    Raises:
        MmeError: an argument is wrong, AWS refuses, or the new one does not come up, in which case the old one stays.
    """
    aws = Aws(arguments.region or "")
    now = endpoint.find(aws, check_name(arguments.name))
    if now is None:
        raise invalid_argument(f"there is no endpoint '{arguments.name}' in {aws.region}: make it with `mme deploy`")
    wanted = _changed(arguments, _deployed(aws, now))
    wanted = _checked(aws, wanted, any_type=arguments.any_instance_type)
    bells = [name for name in rollback_alarms(wanted.name) if name in alarm_names(aws, wanted.name)]
    if not 0 <= arguments.canary <= 50:
        raise invalid_argument(f"--canary {arguments.canary} is not between 1 and 50 percent")
    stamp = _stamp()
    calls = renewal(wanted, stamp, blue_green(arguments.canary, arguments.bake_seconds, bells))
    if arguments.dry_run:
        return _show(calls)
    _make(aws, calls, f"'{wanted.name}' serves what it served, and the next `mme update` that succeeds takes that down")
    if arguments.no_wait:
        return 0
    endpoint.wait_in_service(aws, wanted.name, f"{wanted.name}-{stamp}")
    if not arguments.keep_old:
        for call in superseded(aws, wanted.name, f"{wanted.name}-{stamp}"):
            aws.call(call.service, call.operation, call.parameters)
            print(f"deleted {call.made()}")
    print(f"endpoint {wanted.name} serves the new configuration")
    return 0


def _asked_for(arguments: argparse.Namespace) -> Deployment:
    multi_model, data = _models(arguments)
    return Deployment(
        name=arguments.name,
        image=arguments.image or "",
        role=arguments.role or "",
        model_data=data,
        multi_model=multi_model,
        instance_type=arguments.instance_type or "",
        instances=arguments.instances or 1,
        environment={
            **({"MME_EMF_TOP_MODELS": _TOP_MODELS} if arguments.dashboard else {}),
            **(ASYNCHRONOUS if arguments.async_output else {}),
            **pairs("--env", arguments.env),
        },
        labels=pairs("--tag", arguments.tag),
        subnets=tuple(arguments.subnet or ()),
        security_groups=tuple(arguments.security_group or ()),
        cache=not arguments.no_model_cache,
        volume_gb=arguments.volume_gb,
        startup_seconds=arguments.startup_seconds,
        host_image=host_image(arguments.instance_type or "", arguments.host_image or ""),
        async_output=arguments.async_output or "",
        **_around(arguments),
    )


def _models(arguments: argparse.Namespace) -> tuple[bool, str]:
    """Whether there are many models, and where."""
    if bool(arguments.models) == bool(arguments.single):
        raise invalid_argument("say where models are: --models s3://bucket/prefix for many, --single ARCHIVE for one")
    return bool(arguments.models), arguments.models or arguments.single


def _around(arguments: argparse.Namespace) -> dict[str, Any]:
    """What stands around the endpoint."""
    if arguments.target_invocations and not arguments.autoscale:
        raise invalid_argument("--target-invocations needs --autoscale LEAST..MOST")
    return {
        "capacity": parse_capacity(arguments.autoscale) if arguments.autoscale else None,
        "target_invocations": arguments.target_invocations or _TARGET_INVOCATIONS,
        "alarms": arguments.alarms or bool(arguments.alarm_topic),
        "alarm_topic": arguments.alarm_topic or "",
        "dashboard": arguments.dashboard,
    }


def _checked(aws: Aws, wanted: Deployment, *, any_type: bool, offline: bool = False) -> Deployment:
    """The same with role and models as SageMaker wants them; what it would refuse is refused.

    Offline, only what is wrong in itself.
    """
    if not wanted.instance_type:
        raise invalid_argument("no instance type: give --instance-type, such as ml.g5.xlarge")
    known = aws.client("sagemaker").meta.service_model.shape_for("ProductionVariantInstanceType").enum
    if not any_type:
        check_instance_type(wanted.instance_type, known, multi_model=wanted.multi_model)
    if bool(wanted.subnets) != bool(wanted.security_groups):
        raise invalid_argument("--subnet and --security-group need each other")
    if wanted.async_output and wanted.multi_model:
        raise invalid_argument("--async-output needs --single: SageMaker has no asynchronous multi-model endpoints")
    checks.check_image(wanted.image, aws.region)
    role = checks.checked_role(wanted.role, None if offline else aws)
    data = checks.checked_models(wanted.model_data, None if offline else aws, multi_model=wanted.multi_model)
    return replace(wanted, role=role, model_data=data)


def _deployed(aws: Aws, now: Mapping[str, Any]) -> Deployment:
    """What is behind the endpoint now."""
    name = str(now["EndpointName"])
    if not is_ours(aws, str(now["EndpointArn"]), name):
        raise invalid_argument(f"endpoint '{name}' was not made by `mme deploy`, and stays as it is")
    config = aws.call("sagemaker", "describe_endpoint_config", {"EndpointConfigName": now["EndpointConfigName"]})
    variant = config["ProductionVariants"][0]
    model = aws.call("sagemaker", "describe_model", {"ModelName": variant["ModelName"]})
    container = model.get("PrimaryContainer") or model["Containers"][0]
    network = model.get("VpcConfig", {})
    cache = container.get("MultiModelConfig", {}).get("ModelCacheSetting", "Enabled")
    scaled = aws.call(
        "application-autoscaling",
        "describe_scalable_targets",
        {"ServiceNamespace": "sagemaker", "ResourceIds": [resource_id(name)]},
    )
    targets = scaled["ScalableTargets"]
    return Deployment(
        name=name,
        image=container["Image"],
        role=model["ExecutionRoleArn"],
        model_data=container["ModelDataUrl"],
        multi_model=container.get("Mode") == "MultiModel",
        instance_type=variant["InstanceType"],
        instances=now["ProductionVariants"][0].get("DesiredInstanceCount") or variant["InitialInstanceCount"],
        environment=container.get("Environment", {}),
        cache=cache == "Enabled",
        volume_gb=variant.get("VolumeSizeInGB", 0),
        startup_seconds=variant.get("ContainerStartupHealthCheckTimeoutInSeconds", 0),
        host_image=variant.get("InferenceAmiVersion", ""),
        async_output=config.get("AsyncInferenceConfig", {}).get("OutputConfig", {}).get("S3OutputPath", ""),
        capacity=(targets[0]["MinCapacity"], targets[0]["MaxCapacity"]) if targets else None,
        labels={key: value for key, value in tags_of(aws, str(now["EndpointArn"])).items() if key != TAG},
        subnets=tuple(network.get("Subnets", ())),
        security_groups=tuple(network.get("SecurityGroupIds", ())),
    )


def _changed(arguments: argparse.Namespace, now: Deployment) -> Deployment:
    """The deployment with what the arguments change."""
    if arguments.models and arguments.single:
        raise invalid_argument("--models and --single exclude each other")
    changes: dict[str, Any] = {
        "image": arguments.image,
        "role": arguments.role,
        "model_data": arguments.models or arguments.single,
        "instance_type": arguments.instance_type,
        "instances": arguments.instances,
    }
    changes = {field: value for field, value in changes.items() if value}
    if arguments.models or arguments.single:
        changes["multi_model"] = bool(arguments.models)
    if arguments.host_image:
        changes["host_image"] = host_image(arguments.instance_type or now.instance_type, arguments.host_image)
    elif arguments.instance_type:
        changes["host_image"] = next_host_image(arguments.instance_type, (now.instance_type, now.host_image))
    if environment := pairs("--env", arguments.env):
        changes["environment"] = {**now.environment, **environment}
    if not changes:
        raise invalid_argument("nothing changes: give a new --image, --models, --instance-type, --env or --instances")
    wanted = replace(now, **changes)
    if arguments.env:  # what it has already has started a container
        checks.check_environment(wanted.environment, multi_model=wanted.multi_model)
    return wanted


def _show(calls: Sequence[Call]) -> int:
    """The calls as boto3 would make them."""
    for call in calls:
        print(f"{call.service} {call.operation}\n{json.dumps(call.parameters, indent=2)}")
    return 0


def _make(aws: Aws, calls: Sequence[Call], remedy: str) -> None:
    """The calls in their order; a failure names what was made before it, and what becomes of that."""
    made: list[str] = []
    for call in calls:
        try:
            aws.call(call.service, call.operation, call.parameters)
        except MmeError as error:
            left = f"\nmade so far: {', '.join(made)}; {remedy}" if made else ""
            raise MmeError(error.kind, f"{error.message}{left}") from error
        made.append(call.made())
        print(f"made {call.made()}")


def _target_flag(wanted: Deployment) -> str:
    return " --target ARCHIVE" if wanted.multi_model else ""


def _stamp() -> str:
    """What tells a model and configuration from all others of the endpoint, in the order of time."""
    return f"{datetime.now(UTC):%Y%m%d%H%M%S}-{secrets.token_hex(2)}"
