"""`mme deploy`, `mme update` and `mme delete`: an endpoint on SageMaker and what stands around it.

What can be known beforehand is checked beforehand; `--dry-run` prints the calls, or a CloudFormation template, and
makes nothing. When a call fails in the middle, what was made is listed: `mme delete` takes that down of a new
endpoint, the next update of one that serves.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import os
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from container.cli import Command, add_region, number, pairs, whole
from container.ship import account
from container.ship.aws import Aws
from container.ship.endpoint import (
    TAG,
    ApiCall,
    Deployment,
    blue_green,
    check_name,
    creation,
    monitoring,
    parse_capacity,
    resource_id,
    rollback_alarms,
    template,
    update,
)
from model_handlers.errors import MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

_TOP_MODELS = "20"  # that the dashboard draws a line for
_DEPLOY_EXAMPLES = """\
examples:
  mme deploy bert --models s3://my-bucket/models --role SageMakerRole --instance-type ml.g5.xlarge \\
      --image 123456789012.dkr.ecr.eu-central-1.amazonaws.com/mme:0.1.0
      a multi-model endpoint; waits until it is in service, and tells why if it fails
  mme deploy bert ... --autoscale 1..4 --target-invocations 600 --alarms --dashboard
      with scaling, CloudWatch alarms and a CloudWatch dashboard
  mme deploy bert ... --dry-run
      the API calls, word for word, and none of them made
  mme deploy bert ... --dry-run --format cloudformation > bert.json
      the same endpoint as a template, for `aws cloudformation deploy`
  mme deploy one --single s3://my-bucket/models/bert-0.tar.gz ...
      an endpoint of a single model, on any instance type
"""
_UPDATE_EXAMPLES = """\
examples:
  mme update bert --image 123456789012.dkr.ecr.eu-central-1.amazonaws.com/mme:2
      the rest stays as it is; requests move to the new instances when they are healthy, and none is lost
  mme update bert --instance-type ml.g5.2xlarge --canary 10 --bake-seconds 600
      a tenth of the capacity first; the alarms of `mme deploy --alarms` call it back
"""
_DELETE_EXAMPLES = """\
examples:
  mme delete bert --dry-run       what was made for it, whole or half made
  mme delete bert --yes           take that down, and nothing else; archives in S3 stay
"""


def _add_deploy_flags(parser: argparse.ArgumentParser) -> None:
    _add_deployed(parser, otherwise="1", host_image="one for CUDA 13")
    parser.add_argument("--tag", metavar="NAME=VALUE", action="append", help="a tag for all that is made; repeatable")
    text = "in which the container is, with --security-group; repeatable"
    parser.add_argument("--subnet", dest="subnets", metavar="ID", action="append", help=text)
    text = "of the container; repeatable"
    parser.add_argument("--security-group", dest="security_groups", metavar="ID", action="append", help=text)
    parser.add_argument("--no-model-cache", action="store_true", help="unload each model after use: ModelCacheSetting")
    parser.add_argument("--volume-gb", type=whole(1, 512), default=0, metavar="GB", help="size of each instance's disk")
    text = "how long the container may take to be healthy, 60 to 3600"
    parser.add_argument("--startup-seconds", type=whole(60, 3600), default=0, metavar="SECONDS", help=text)
    parser.add_argument("--async-output", metavar="S3URI", help="an asynchronous endpoint; its answers go here")
    parser.add_argument("--autoscale", metavar="LEAST..MOST", help="scale between so many instances, as in 1..4")
    text = "requests a minute and instance that scaling aims at; default 600"
    parser.add_argument("--target-invocations", type=number(1, 1_000_000_000), default=0.0, metavar="N", help=text)
    parser.add_argument("--alarms", action="store_true", help="CloudWatch alarms: errors, latency, memory, thrashing")
    parser.add_argument("--alarm-topic", metavar="ARN", help="the SNS topic that they tell; means --alarms")
    parser.add_argument("--dashboard", action="store_true", help="a CloudWatch dashboard, called mme-NAME")
    text = "what --dry-run prints: the API calls (default), or a template of all that they make, for CloudFormation"
    parser.add_argument("--format", choices=("calls", "cloudformation"), default="calls", help=text)


def _add_update_flags(parser: argparse.ArgumentParser) -> None:
    _add_deployed(parser, otherwise="as many as there are", host_image="what it was, or one for CUDA 13")
    parser.add_argument("--canary", type=int, default=0, metavar="PERCENT", help="move so much capacity first, 1 to 50")
    text = "how long the first of the new ones are watched; default 60"
    parser.add_argument("--bake-seconds", type=whole(0, 3600), default=60, metavar="SECONDS", help=text)
    parser.add_argument("--keep-old", action="store_true", help="keep the old model and configuration")


def _add_deployed(parser: argparse.ArgumentParser, *, otherwise: str, host_image: str) -> None:
    """What both making and changing take; how many instances, and of which image, where nothing is said."""
    parser.add_argument("name", metavar="NAME", help="the endpoint")
    parser.add_argument("--models", metavar="S3URI", help="the prefix with the archives of a multi-model endpoint")
    parser.add_argument("--single", metavar="S3URI", help="the archive of an endpoint of one model")
    parser.add_argument("--image", metavar="URI", help="the container's image, in ECR")
    parser.add_argument("--instance-type", metavar="TYPE", help="such as ml.g5.xlarge")
    text = "try a type that is not on the list of those that SageMaker runs multi-model endpoints on"
    parser.add_argument("--any-instance-type", action="store_true", help=text)
    text = f"InferenceAmiVersion, which has the GPU's driver: {host_image} unless told, `default` for SageMaker's own"
    parser.add_argument("--host-image", metavar="NAME", help=text)
    parser.add_argument("--instances", type=whole(1, 1000), metavar="N", help=f"how many; default {otherwise}")
    parser.add_argument("--role", metavar="ARN|NAME", help="the IAM role that the container runs as")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", help="a variable for the container; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print the API calls and make none of them")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the endpoint is in service")
    add_region(parser)


def _add_delete_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the endpoint")
    parser.add_argument("--dry-run", action="store_true", help="list it and delete nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_region(parser)


def run(arguments: argparse.Namespace) -> int:
    aws = Aws(arguments.region or "")
    check_name(arguments.name)
    if arguments.format != "calls" and not arguments.dry_run:
        raise invalid_argument(f"--format {arguments.format} is what --dry-run prints: give both")
    spec = _asked_for(arguments)
    account.check_environment(spec.environment, multi_model=spec.multi_model)
    offline = arguments.dry_run and not aws.signed_in
    spec = _checked(aws, spec, any_type=arguments.any_instance_type, offline=offline)
    if not offline and account.find(aws, spec.name) is not None:
        raise invalid_argument(f"endpoint '{spec.name}' exists: change it with `mme update`, or take another name")
    stamp = _stamp()
    before, after = creation(spec, stamp), monitoring(spec, aws.region)
    if offline:
        print("deploy: note: without credentials nothing was looked up on AWS", file=sys.stderr)
    if arguments.format == "cloudformation":
        print(json.dumps(template(spec, aws.region), indent=2))
        return 0
    if arguments.dry_run:
        return _show([*before, *after])
    remedy = f"take it down with: mme delete {spec.name}"
    _make(aws, before, remedy)
    if arguments.no_wait:
        if after:
            print("scaling, alarms and dashboard are not made, since they need an endpoint in service", file=sys.stderr)
        return 0
    try:
        account.wait_in_service(aws, spec.name, f"{spec.name}-{stamp}")
    except KeyboardInterrupt:
        print(f"\nit goes on without you; {remedy}", file=sys.stderr)
        raise
    _make(aws, after, remedy)
    target = " --target ARCHIVE" if spec.multi_model else ""
    print(f"endpoint {spec.name} is in service; try: mme invoke {spec.name}{target} --json FILE")
    return 0


def run_update(arguments: argparse.Namespace) -> int:
    aws = Aws(arguments.region or "")
    now = account.find(aws, check_name(arguments.name))
    if now is None:
        raise invalid_argument(f"there is no endpoint '{arguments.name}' in {aws.region}: make it with `mme deploy`")
    spec = _changed(arguments, _deployed(aws, now))
    spec = _checked(aws, spec, any_type=arguments.any_instance_type)
    known = [*account.alarm_names(aws, spec.name)]
    alarms = [name for name in rollback_alarms(spec.name) if name in known]
    if not 0 <= arguments.canary <= 50:
        raise invalid_argument(f"--canary {arguments.canary} is not between 1 and 50 percent")
    stamp = _stamp()
    calls = update(spec, stamp, blue_green(arguments.canary, arguments.bake_seconds, alarms))
    if arguments.dry_run:
        return _show(calls)
    _make(aws, calls, f"'{spec.name}' serves what it served, and the next `mme update` that succeeds takes that down")
    if arguments.no_wait:
        return 0
    account.wait_in_service(aws, spec.name, f"{spec.name}-{stamp}")
    if not arguments.keep_old:
        _delete(aws, [*account.models_and_configs(aws, spec.name, keep=f"{spec.name}-{stamp}")])  # all, or nothing
    print(f"endpoint {spec.name} serves the new configuration")
    return 0


def _asked_for(arguments: argparse.Namespace) -> Deployment:
    from container.settings.schema import ASYNCHRONOUS  # noqa: PLC0415 - heavy

    if bool(arguments.models) == bool(arguments.single):
        raise invalid_argument("say where models are: --models s3://bucket/prefix for many, --single ARCHIVE for one")
    if arguments.target_invocations and not arguments.autoscale:
        raise invalid_argument("--target-invocations needs --autoscale LEAST..MOST")
    environment = {
        **({"MME_EMF_TOP_MODELS": _TOP_MODELS} if arguments.dashboard else {}),
        **(ASYNCHRONOUS if arguments.async_output else {}),
        **pairs("--env", arguments.env),
    }
    computed = {
        "environment": environment,
        "labels": pairs("--tag", arguments.tag),
        "cache": not arguments.no_model_cache,
        "host_image": account.host_image(arguments.instance_type or "", arguments.host_image or ""),
        "capacity": parse_capacity(arguments.autoscale) if arguments.autoscale else None,
        "alarms": arguments.alarms or bool(arguments.alarm_topic),
    }
    return Deployment(**_given(arguments) | computed)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Deployment that flags of the same names say; what is not said is left out."""
    names = [each.name for each in fields(Deployment)]
    given = {name: value for name in names if (value := getattr(arguments, name, None))}
    if data := arguments.models or arguments.single:
        given |= {"model_data": data, "multi_model": bool(arguments.models)}
    return given


def _checked(aws: Aws, spec: Deployment, *, any_type: bool, offline: bool = False) -> Deployment:
    """The same with role and models as SageMaker wants them; what it would refuse is refused.

    Offline, only what is wrong in itself.
    """
    if not spec.instance_type:
        raise invalid_argument("no instance type: give --instance-type, such as ml.g5.xlarge")
    known = aws.client("sagemaker").meta.service_model.shape_for("ProductionVariantInstanceType").enum
    if not any_type:
        account.check_instance_type(spec.instance_type, known, multi_model=spec.multi_model)
    if bool(spec.subnets) != bool(spec.security_groups):
        raise invalid_argument("--subnet and --security-group need each other")
    if spec.async_output and spec.multi_model:
        raise invalid_argument("--async-output needs --single: SageMaker has no asynchronous multi-model endpoints")
    account.check_image(spec.image, aws.region)
    role = account.checked_role(spec.role, None if offline else aws)
    data = account.checked_models(spec.model_data, None if offline else aws, multi_model=spec.multi_model)
    return replace(spec, role=role, model_data=data)


def _deployed(aws: Aws, now: Mapping[str, Any]) -> Deployment:
    name = str(now["EndpointName"])
    if not account.is_ours(aws, str(now["EndpointArn"]), name):
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
        labels={key: value for key, value in account.tags_of(aws, str(now["EndpointArn"])).items() if key != TAG},
        subnets=tuple(network.get("Subnets", ())),
        security_groups=tuple(network.get("SecurityGroupIds", ())),
    )


def _changed(arguments: argparse.Namespace, now: Deployment) -> Deployment:
    if arguments.models and arguments.single:
        raise invalid_argument("--models and --single exclude each other")
    changes = _given(arguments)
    if arguments.host_image:
        changes["host_image"] = account.host_image(arguments.instance_type or now.instance_type, arguments.host_image)
    elif arguments.instance_type:
        changes["host_image"] = account.next_host_image(arguments.instance_type, (now.instance_type, now.host_image))
    if arguments.env:
        changes["environment"] = now.environment | pairs("--env", arguments.env)
    if not changes.keys() - {"name"}:
        raise invalid_argument("nothing changes: give a new --image, --models, --instance-type, --env or --instances")
    spec = replace(now, **changes)
    if arguments.env:  # what it has already has started a container
        account.check_environment(spec.environment, multi_model=spec.multi_model)
    return spec


def _show(calls: Sequence[ApiCall]) -> int:
    for call in calls:
        print(f"{call.service} {call.operation}\n{json.dumps(call.parameters, indent=2)}")
    return 0


def _make(aws: Aws, calls: Sequence[ApiCall], remedy: str) -> None:
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


def _stamp() -> str:
    """What tells a model and configuration from all others of the endpoint, in the order of time."""
    return f"{datetime.now(UTC):%Y%m%d%H%M%S}-{os.urandom(2).hex()}"


def run_delete(arguments: argparse.Namespace) -> int:
    aws = Aws(arguments.region or "")
    name = check_name(arguments.name)
    calls = [*account.all_resources(aws, name)]
    if not calls:
        theirs = "it was made by somebody else, and stays" if account.find(aws, name) else "there is no such endpoint"
        raise invalid_argument(f"`mme deploy` has made nothing for '{name}' in {aws.region}: {theirs}")
    for call in calls:
        print(call.made())
    if arguments.dry_run:
        return 0
    if not arguments.yes:
        _ask(len(calls))
    _delete(aws, calls)
    return 0


def _delete(aws: Aws, calls: Iterable[ApiCall]) -> None:
    for call in calls:
        aws.call(call.service, call.operation, call.parameters)
        print(f"deleted {call.made()}")


def _ask(count: int) -> None:
    if not sys.stdin.isatty():
        raise invalid_argument("nobody can be asked here: --yes deletes what is listed")
    print(f"delete these {count}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise invalid_argument("nothing was deleted")


COMMANDS = (
    Command("deploy", "make an endpoint on SageMaker", _DEPLOY_EXAMPLES, _add_deploy_flags, run),
    Command(
        "update",
        "bring something new behind an endpoint, without a gap",
        _UPDATE_EXAMPLES,
        _add_update_flags,
        run_update,
    ),
    Command("delete", "take down what `mme deploy` made", _DELETE_EXAMPLES, _add_delete_flags, run_delete),
)
