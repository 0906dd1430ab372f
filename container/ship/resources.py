"""An endpoint on AWS as it is: what there is of it, how it gets on, and why it failed.

What `mme deploy` has made is found by its tags, and by a mark in what can carry none.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from container.ship.aws import code_of
from container.ship.endpoint import MARK, SCALED, TAG, ApiCall, alarm_prefix, dashboard_name, policy_name, resource_id
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from container.ship.aws import Aws


POLL_SECONDS = 10.0
_GOING_ON = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
_STREAMS, _LINES = 2, 20


def find(aws: Aws, name: str) -> Mapping[str, Any] | None:
    """What SageMaker says of the endpoint, None where there is none."""
    pages = aws.client("sagemaker").get_paginator("list_endpoints")
    rows = (row for page in aws.pages(pages, {"NameContains": name}) for row in page["Endpoints"])
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


def all_resources(aws: Aws, name: str) -> list[ApiCall]:
    """The calls that delete what was made for an endpoint, in an order in which nothing needs what is gone."""
    return [
        *_scaling(aws, name),
        *_alarms(aws, name),
        *_dashboard(aws, name),
        *_endpoint(aws, name),
        *_behind(aws, name),
    ]


def stale_resources(aws: Aws, name: str, current: str) -> list[ApiCall]:
    """The calls that delete models and configurations of an endpoint but those of the name `current`."""
    return [call for call in _behind(aws, name) if current not in call.parameters.values()]


def alarm_names(aws: Aws, name: str) -> list[str]:
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


def _alarms(aws: Aws, name: str) -> Iterator[ApiCall]:
    for alarm in alarm_names(aws, name):
        yield ApiCall("cloudwatch", "delete_alarms", {"AlarmNames": [alarm]})


def _dashboard(aws: Aws, name: str) -> Iterator[ApiCall]:
    try:
        body = aws.call("cloudwatch", "get_dashboard", {"DashboardName": dashboard_name(name)})["DashboardBody"]
    except MmeError as error:
        if code_of(error) in {"ResourceNotFound", "DashboardNotFoundError"}:
            return
        raise
    if MARK in body:
        yield ApiCall("cloudwatch", "delete_dashboards", {"DashboardNames": [dashboard_name(name)]})


def _endpoint(aws: Aws, name: str) -> Iterator[ApiCall]:
    state = find(aws, name)
    if state is not None and is_ours(aws, state["EndpointArn"], name):
        yield ApiCall("sagemaker", "delete_endpoint", {"EndpointName": name})


def _behind(aws: Aws, name: str) -> Iterator[ApiCall]:
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
                yield ApiCall("sagemaker", deletion, {f"{noun}Name": row[f"{noun}Name"]})
