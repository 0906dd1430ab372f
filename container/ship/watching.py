"""What watches an endpoint in CloudWatch: alarms, and a dashboard of SageMaker's metrics and the container's own. PURE.

Latencies of SageMaker are microseconds. What only many models have is left out for an endpoint of one, and what only
GPUs have for instances without.
"""

from __future__ import annotations

import json
from typing import Any

from container.ship.instance_types import has_accelerator

_INVOCATIONS = "AWS/SageMaker"
_INSTANCES = "/aws/sagemaker/Endpoints"
_OURS = "mme"  # where the container's own metrics go by default
_LATENCY_LIMIT = 5_000_000  # microseconds
_WIDTH, _HEIGHT, _COLUMNS = 8, 6, 3
VARIANT = "AllTraffic"  # an endpoint's only one
MARK = "Made by `mme deploy`"


def alarms(endpoint: str, instance_type: str, *, multi_model: bool) -> list[dict[str, Any]]:
    """Parameters of PutMetricAlarm, but for actions and tags."""
    rows: list[tuple[str, str, str, str, float, str, str]] = [
        ("5xx", _INVOCATIONS, "Invocation5XXErrors", "Sum", 5, "Greater", "the endpoint fails requests"),
        ("model-errors", _INVOCATIONS, "InvocationModelErrors", "Sum", 5, "Greater", "models answer with errors"),
        (
            "latency",
            _INVOCATIONS,
            "ModelLatency",
            "p99",
            _LATENCY_LIMIT,
            "Greater",
            "the slowest answers take over 5 s",
        ),
        ("memory", _INSTANCES, "MemoryUtilization", "Maximum", 95, "Greater", "an instance has no memory left"),
        ("disk", _INSTANCES, "DiskUtilization", "Maximum", 85, "Greater", "an instance's disk is nearly full"),
    ]
    if has_accelerator(instance_type):
        text = "a GPU has no memory left"
        rows.append(("gpu-memory", _INSTANCES, "GPUMemoryUtilization", "Maximum", 97, "Greater", text))
    if multi_model:
        text = "most requests wait for a load: too little memory for the models in use"
        rows.append(("cache", _INVOCATIONS, "ModelCacheHit", "Average", 0.5, "Less", text))
        text = "models leave as fast as they come"
        rows.append(("unloads", _INVOCATIONS, "ModelUnloadingTime", "SampleCount", 60, "Greater", text))
    return [_alarm(endpoint, *row) for row in rows]


def rollback_alarms(endpoint: str) -> list[str]:
    """The names of the alarms that call an update back."""
    return [_alarm_name(endpoint, kind) for kind in ("5xx", "model-errors")]


def alarm_prefix(endpoint: str) -> str:
    """What the names of an endpoint's alarms begin with; another endpoint's may too."""
    return f"mme-{endpoint}-"


def _alarm_name(endpoint: str, kind: str) -> str:
    return f"{alarm_prefix(endpoint)}{kind}"


def _alarm(
    endpoint: str,
    kind: str,
    namespace: str,
    metric: str,
    statistic: str,
    limit: float,
    side: str,
    why: str,
) -> dict[str, Any]:
    how = {"ExtendedStatistic": statistic} if statistic.startswith("p") else {"Statistic": statistic}
    return {
        "AlarmName": _alarm_name(endpoint, kind),
        "AlarmDescription": f"{endpoint}: {why}. {MARK}.",
        "Namespace": namespace,
        "MetricName": metric,
        "Dimensions": [{"Name": "EndpointName", "Value": endpoint}, {"Name": "VariantName", "Value": VARIANT}],
        **how,
        "Period": 60,
        "EvaluationPeriods": 5,
        "DatapointsToAlarm": 3,
        "Threshold": float(limit),
        "ComparisonOperator": f"{side}ThanThreshold",
        "TreatMissingData": "notBreaching",
    }


def dashboard_body(endpoint: str, region: str, instance_type: str, *, multi_model: bool) -> str:
    """The body of PutDashboard."""
    at = ["EndpointName", endpoint, "VariantName", VARIANT]
    counts = ("Invocations", "Invocation4XXErrors", "Invocation5XXErrors", "InvocationModelErrors")
    latencies = [_metric(_INVOCATIONS, "ModelLatency", at, each) for each in ("p50", "p90", "p99")]
    gauges = [_metric(_INSTANCES, f"{name}Utilization", at, "Maximum") for name in _gauges(instance_type)]
    charts = [
        ("Requests", [_metric(_INVOCATIONS, name, at, "Sum") for name in counts]),
        ("Latency, µs", [*latencies, _metric(_INVOCATIONS, "OverheadLatency", at, "p50")]),
        ("Utilization, %", gauges),
    ]
    if multi_model:
        times = ("ModelLoadingWaitTime", "ModelDownloadingTime", "ModelLoadingTime", "ModelUnloadingTime")
        charts += [
            ("Model in memory when asked for", [_metric(_INVOCATIONS, "ModelCacheHit", at, "Average")]),
            ("Models in memory", [_metric(_INSTANCES, "LoadedModelCount", at, each) for each in ("Average", "Sum")]),
            ("Loading, µs", [_metric(_INVOCATIONS, name, at, "Average") for name in times]),
            ("Unloads", [_metric(_INVOCATIONS, "ModelUnloadingTime", at, "SampleCount")]),
            ("Loads that failed", [_metric(_OURS, "ModelLoadFailure", at, "Sum")]),
            ("Models asked for most: in memory", [_search(endpoint, "ModelCacheHit")]),
            ("Models asked for most: waiting, µs", [_search(endpoint, "ModelLoadingWaitTime")]),
        ]
    text = {"type": "text", "x": 0, "y": 0, "width": 24, "height": 1,
            "properties": {"markdown": f"**{endpoint}** · {MARK}"}}  # fmt: skip
    widgets = [_chart(number, title, metrics, region) for number, (title, metrics) in enumerate(charts)]
    return json.dumps({"widgets": [text, *widgets]})


def _gauges(instance_type: str) -> tuple[str, ...]:
    gauges = ("CPU", "Memory", "Disk")
    return (*gauges, "GPU", "GPUMemory") if has_accelerator(instance_type) else gauges


def _metric(namespace: str, name: str, at: list[str], statistic: str) -> list[Any]:
    return [namespace, name, *at, {"stat": statistic, "label": f"{name} {statistic}"}]


def _search(endpoint: str, metric: str) -> list[Any]:
    """The container's own metric, a line for each model that it names."""
    schema = f"{_OURS},EndpointName,VariantName,TargetModel"
    query = f'{{{schema}}} MetricName="{metric}" EndpointName="{endpoint}" VariantName="{VARIANT}"'
    return [{"expression": f"SEARCH('{query}', 'Average', 60)"}]


def _chart(number: int, title: str, metrics: list[list[Any]], region: str) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "type": "metric",
        "x": column * _WIDTH,
        "y": 1 + row * _HEIGHT,
        "width": _WIDTH,
        "height": _HEIGHT,
        "properties": {"title": title, "metrics": metrics, "region": region, "view": "timeSeries", "period": 60},
    }
