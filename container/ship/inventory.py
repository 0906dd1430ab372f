"""What `mme deploy` has made for an endpoint: found by tags, and by a mark in what can carry none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.ship import endpoint
from container.ship.aws import code_of
from container.ship.deployment import DIMENSION, TAG, Call, dashboard_name, policy_name, resource_id
from container.ship.watching import MARK, alarm_prefix
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from container.ship.aws import Aws


def is_ours(aws: Aws, arn: str, name: str) -> bool:
    """Whether a resource of SageMaker's carries the endpoint's tag."""
    return tags_of(aws, arn).get(TAG) == name


def tags_of(aws: Aws, arn: str) -> dict[str, str]:
    """The tags of a resource of SageMaker's; those of AWS's own are left out."""
    tags = aws.call("sagemaker", "list_tags", {"ResourceArn": arn})["Tags"]
    return {row["Key"]: row["Value"] for row in tags if not row["Key"].startswith("aws:")}


def everything(aws: Aws, name: str) -> list[Call]:
    """The calls that delete what was made for an endpoint, in an order in which nothing needs what is gone."""
    return [
        *_scaling(aws, name),
        *_alarms(aws, name),
        *_dashboard(aws, name),
        *_endpoint(aws, name),
        *_behind(aws, name),
    ]


def superseded(aws: Aws, name: str, current: str) -> list[Call]:
    """The calls that delete models and configurations of an endpoint but those of the name `current`."""
    return [call for call in _behind(aws, name) if current not in call.parameters.values()]


def alarm_names(aws: Aws, name: str) -> list[str]:
    """The endpoint's alarms that are ours."""
    pages = aws.client("cloudwatch").get_paginator("describe_alarms")
    rows = [
        row
        for page in aws.pages(pages, {"AlarmNamePrefix": alarm_prefix(name), "AlarmTypes": ["MetricAlarm"]})
        for row in page.get("MetricAlarms", ())
    ]
    return [row["AlarmName"] for row in rows if _has_tag(aws, row["AlarmArn"], name)]


def _has_tag(aws: Aws, arn: str, name: str) -> bool:
    tags = aws.call("cloudwatch", "list_tags_for_resource", {"ResourceARN": arn})["Tags"]
    return {"Key": TAG, "Value": name} in tags


def _scaling(aws: Aws, name: str) -> Iterator[Call]:
    """Our policy; the target with it, unless somebody else's policy needs that."""
    service = "application-autoscaling"
    target = {"ServiceNamespace": "sagemaker", "ResourceId": resource_id(name), "ScalableDimension": DIMENSION}
    policies = [row["PolicyName"] for row in aws.call(service, "describe_scaling_policies", target)["ScalingPolicies"]]
    ours = policy_name(name)
    if ours in policies:
        yield Call(service, "delete_scaling_policy", {**target, "PolicyName": ours})
        if policies == [ours]:
            yield Call(service, "deregister_scalable_target", target)


def _alarms(aws: Aws, name: str) -> Iterator[Call]:
    for alarm in alarm_names(aws, name):
        yield Call("cloudwatch", "delete_alarms", {"AlarmNames": [alarm]})


def _dashboard(aws: Aws, name: str) -> Iterator[Call]:
    try:
        body = aws.call("cloudwatch", "get_dashboard", {"DashboardName": dashboard_name(name)})["DashboardBody"]
    except MmeError as error:
        if code_of(error) in {"ResourceNotFound", "DashboardNotFoundError"}:
            return
        raise
    if MARK in body:
        yield Call("cloudwatch", "delete_dashboards", {"DashboardNames": [dashboard_name(name)]})


def _endpoint(aws: Aws, name: str) -> Iterator[Call]:
    state = endpoint.find(aws, name)
    if state is not None and is_ours(aws, state["EndpointArn"], name):
        yield Call("sagemaker", "delete_endpoint", {"EndpointName": name})


def _behind(aws: Aws, name: str) -> Iterator[Call]:
    """Endpoint configurations, then models."""
    kinds: tuple[tuple[str, str, str, str], ...] = (
        ("list_endpoint_configs", "EndpointConfigs", "EndpointConfig", "delete_endpoint_config"),
        ("list_models", "Models", "Model", "delete_model"),
    )
    for listing, rows, noun, deletion in kinds:
        pages = aws.client("sagemaker").get_paginator(listing)
        found: list[dict[str, Any]] = [row for page in aws.pages(pages, {"NameContains": name}) for row in page[rows]]
        for row in found:
            if is_ours(aws, row[f"{noun}Arn"], name):
                yield Call("sagemaker", deletion, {f"{noun}Name": row[f"{noun}Name"]})
