"""An endpoint on AWS as it is: whether it exists, how it gets on, and why it failed, by SageMaker and its log."""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from container.ship.aws import Aws

POLL_SECONDS = 10.0
_GOING_ON = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
_STREAMS, _LINES = 2, 20


def find(aws: Aws, name: str) -> Mapping[str, Any] | None:
    """What SageMaker says of the endpoint, None where there is none.

    Raises:
        MmeError: SageMaker can't be asked.
    """
    pages = aws.client("sagemaker").get_paginator("list_endpoints")
    rows = (row for page in aws.pages(pages, {"NameContains": name}) for row in page["Endpoints"])
    if not any(row["EndpointName"] == name for row in rows):
        return None
    return aws.call("sagemaker", "describe_endpoint", {"EndpointName": name})


def wait_in_service(aws: Aws, name: str, config: str) -> None:
    """Return when the endpoint serves `config`, telling about it meanwhile.

    Raises:
        MmeError: UNAVAILABLE when it failed, with SageMaker's reason and the end of the container's log.
    """
    began, shown = time.monotonic(), ""
    while True:
        state = aws.call("sagemaker", "describe_endpoint", {"EndpointName": name})
        status = str(state["EndpointStatus"])
        _tell(f"{name} is {status} ({time.monotonic() - began:.0f} s)", anew=status != shown)
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
    except MmeError:  # what failed is told already; its log is an extra
        return []
    return lines[-_LINES:]


def _tell(sentence: str, *, anew: bool) -> None:
    """A line for what is new; on a terminal it counts on meanwhile."""
    if sys.stderr.isatty():
        print("\n" if anew else "\r", sentence, sep="", end="", file=sys.stderr, flush=True)
    elif anew:
        print(sentence, file=sys.stderr, flush=True)
