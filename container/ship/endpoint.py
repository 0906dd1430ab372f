"""What `mme deploy` makes, described once: an endpoint, its scaling, its alarms and its dashboard. PURE.

The description gives the API calls, word for word as boto3 is asked, and the CloudFormation template of the same: a
resource has the properties that its call has parameters. All that can carry a tag carries the endpoint's name in one,
by which `mme delete` knows its own; what a template makes does not, since it belongs to its stack.

Latencies of SageMaker are microseconds. Alarms and charts of what only many models have are left out for an endpoint of
one, and those of GPUs for instances without.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterator


_INVOCATIONS = "AWS/SageMaker"
_INSTANCES = "/aws/sagemaker/Endpoints"
_OURS = "mme"  # where the container's own metrics go by default
_WIDTH, _HEIGHT, _COLUMNS = 8, 6, 3
VARIANT = "AllTraffic"  # an endpoint's only one
MARK = "Made by `mme deploy`"
TAG = "mme:endpoint"
SCALED = {"ServiceNamespace": "sagemaker", "ScalableDimension": "sagemaker:variant:DesiredInstanceCount"}
_ACCELERATED = re.compile(r"ml\.(p\d|g\d|inf|trn|dl)")  # has GPUs or chips of AWS
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_LONGEST_NAME = 43  # of SageMaker's 63, since the names of model and configuration have a stamp behind it
_NAMES = (
    *("PolicyName", "AlarmName", "AlarmNames", "DashboardName", "DashboardNames", "ResourceId"),
    *("EndpointName", "EndpointConfigName", "ModelName"),
)
_SCALE_IN_SECONDS, _SCALE_OUT_SECONDS = 600, 300
_BAKE_SECONDS = 60  # that an update's new instances are watched


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One call of an AWS API: boto3's service and operation, and the parameters."""

    service: str
    operation: str
    parameters: dict[str, Any]

    def made(self) -> str:
        """The resource: its kind, and what the parameters call it, by the most particular of several names."""
        noun = self.operation.partition("_")[2].replace("_", " ")
        name = next(filter(None, map(self.parameters.get, _NAMES)), "")
        return f"{noun} {name[0] if isinstance(name, list) else name}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """An endpoint as it shall be."""

    name: str
    model_data: str  # the S3 prefix of many models, or the archive of one
    multi_model: bool = True
    image: str = ""
    role: str = ""
    instance_type: str = ""
    instances: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    cache: bool = True  # ModelCacheSetting
    volume_gb: int = 0  # 0 leaves it to SageMaker
    startup_seconds: int = 0  # the same
    host_image: str = ""  # InferenceAmiVersion, which has the GPU's driver; "" leaves it to SageMaker
    async_output: str = ""  # where asynchronous answers go; "" for an endpoint in real time
    capacity: tuple[int, int] | None = None  # least and most instances to scale between
    target_invocations: float = 600.0  # a minute and instance, that scaling aims at
    alarms: bool = False
    alarm_topic: str = ""  # of SNS
    dashboard: bool = False
    labels: dict[str, str] = field(default_factory=dict)  # tags of the person's own, on all that is made
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()

    def tags(self) -> list[dict[str, str]]:
        return [{"Key": key, "Value": value} for key, value in {**self.labels, TAG: self.name}.items()]


def has_accelerator(instance_type: str) -> bool:
    return bool(_ACCELERATED.match(instance_type))


def check_name(name: str) -> str:
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise invalid_argument(
            f"'{name}' can't be the name of an endpoint: letters, digits and single dashes, {_LONGEST_NAME} at most"
        )
    return name


def parse_capacity(text: str) -> tuple[int, int]:
    """Least and most of `1..4`."""
    found = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise invalid_argument(f"--autoscale '{text}' is not LEAST..MOST, as in 1..4")
    return int(found[1]), int(found[2])


def creation(spec: Deployment, stamp: str) -> list[ApiCall]:
    """The calls that make the endpoint, in order; `stamp` tells this model and configuration from others."""
    parameters = {"EndpointName": spec.name, "EndpointConfigName": f"{spec.name}-{stamp}", "Tags": spec.tags()}
    return [*_configuration(spec, stamp), ApiCall("sagemaker", "create_endpoint", parameters)]


def update(spec: Deployment, stamp: str, traffic: dict[str, Any]) -> list[ApiCall]:
    """The calls that bring a new model and configuration behind an endpoint, its traffic moving as `traffic` says."""
    parameters = {
        "EndpointName": spec.name,
        "EndpointConfigName": f"{spec.name}-{stamp}",
        "RetainAllVariantProperties": spec.capacity is not None,
        "DeploymentConfig": traffic,
    }
    return [*_configuration(spec, stamp), ApiCall("sagemaker", "update_endpoint", parameters)]


def blue_green(canary_percent: int, bake_seconds: int, rollback_alarms: list[str]) -> dict[str, Any]:
    """A DeploymentConfig: all traffic at once, or a part of it first; back again at an alarm."""
    routing: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": bake_seconds}
    if canary_percent:
        size = {"Type": "CAPACITY_PERCENT", "Value": canary_percent}
        routing = {"Type": "CANARY", "CanarySize": size, "WaitIntervalInSeconds": bake_seconds}
    config: dict[str, Any] = {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing}}
    if rollback_alarms:
        config["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in rollback_alarms]}
    return config


def monitoring(spec: Deployment, region: str) -> list[ApiCall]:
    """The calls for what stands around an endpoint that is in service: scaling, alarms, a dashboard."""
    calls = []
    if spec.capacity:
        calls += _scaling(spec, spec.capacity)
    if spec.alarms:
        actions = [spec.alarm_topic] if spec.alarm_topic else []
        for alarm in alarms(spec.name, spec.instance_type, multi_model=spec.multi_model):
            parameters = {**alarm, "AlarmActions": actions, "OKActions": actions, "Tags": spec.tags()}
            calls.append(ApiCall("cloudwatch", "put_metric_alarm", parameters))
    if spec.dashboard:
        body = dashboard_body(spec.name, region, spec.instance_type, multi_model=spec.multi_model)
        parameters = {"DashboardName": dashboard_name(spec.name), "DashboardBody": body}
        calls.append(ApiCall("cloudwatch", "put_dashboard", parameters))
    return calls


def dashboard_name(endpoint: str) -> str:
    return f"mme-{endpoint}"


def resource_id(endpoint: str) -> str:
    return f"endpoint/{endpoint}/variant/{VARIANT}"


def policy_name(endpoint: str) -> str:
    return f"mme-{endpoint}-invocations"


def _configuration(spec: Deployment, stamp: str) -> list[ApiCall]:
    name = f"{spec.name}-{stamp}"
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "ModelName": name,
        "InstanceType": spec.instance_type,
        "InitialInstanceCount": spec.instances,
    }
    choices = {
        "VolumeSizeInGB": spec.volume_gb,
        "ContainerStartupHealthCheckTimeoutInSeconds": spec.startup_seconds,
        "InferenceAmiVersion": spec.host_image,
    }
    variant |= {name: value for name, value in choices.items() if value}  # SageMaker decides what is not chosen
    config: dict[str, Any] = {"EndpointConfigName": name, "ProductionVariants": [variant], "Tags": spec.tags()}
    if spec.async_output:
        config["AsyncInferenceConfig"] = {"OutputConfig": {"S3OutputPath": spec.async_output}}
    model: dict[str, Any] = {
        "ModelName": name,
        "ExecutionRoleArn": spec.role,
        "PrimaryContainer": _container(spec),
        "Tags": spec.tags(),
    }
    if spec.subnets:
        model["VpcConfig"] = {"Subnets": list(spec.subnets), "SecurityGroupIds": list(spec.security_groups)}
    return [ApiCall("sagemaker", "create_model", model), ApiCall("sagemaker", "create_endpoint_config", config)]


def _container(spec: Deployment) -> dict[str, Any]:
    container: dict[str, Any] = {
        "Image": spec.image,
        "Mode": "MultiModel" if spec.multi_model else "SingleModel",
        "ModelDataUrl": spec.model_data,
        "Environment": {"MME_ENDPOINT_NAME": spec.name, **spec.environment},
    }
    if spec.multi_model:
        container["MultiModelConfig"] = {"ModelCacheSetting": "Enabled" if spec.cache else "Disabled"}
    return container


def _scaling(spec: Deployment, capacity: tuple[int, int]) -> list[ApiCall]:
    target = {**SCALED, "ResourceId": resource_id(spec.name)}
    policy = {
        "TargetValue": spec.target_invocations,
        "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
        "ScaleInCooldown": _SCALE_IN_SECONDS,
        "ScaleOutCooldown": _SCALE_OUT_SECONDS,
    }
    least, most = capacity
    tags = {**spec.labels, TAG: spec.name}
    named = {**target, "PolicyName": policy_name(spec.name), "PolicyType": "TargetTrackingScaling"}
    register = {**target, "MinCapacity": least, "MaxCapacity": most, "Tags": tags}
    put = {**named, "TargetTrackingScalingPolicyConfiguration": policy}
    service = "application-autoscaling"
    return [ApiCall(service, "register_scalable_target", register), ApiCall(service, "put_scaling_policy", put)]


# The resource of each call, and parameters that are no properties of it: names that CloudFormation makes up, so that it
# can replace a model, and what another resource says.
_RESOURCES = {
    "create_model": ("Model", "SageMaker::Model", ("ModelName",)),
    "create_endpoint_config": ("EndpointConfig", "SageMaker::EndpointConfig", ("EndpointConfigName",)),
    "create_endpoint": ("Endpoint", "SageMaker::Endpoint", ()),
    "register_scalable_target": ("ScalableTarget", "ApplicationAutoScaling::ScalableTarget", ("Tags",)),
    "put_scaling_policy": (
        "ScalingPolicy",
        "ApplicationAutoScaling::ScalingPolicy",
        ("ServiceNamespace", "ResourceId", "ScalableDimension"),
    ),
    "put_metric_alarm": ("Alarm", "CloudWatch::Alarm", ()),
    "put_dashboard": ("Dashboard", "CloudWatch::Dashboard", ()),
}


def template(spec: Deployment, region: str) -> dict[str, Any]:
    """The CloudFormation template of an endpoint: a resource for each call of `creation` and `monitoring`."""
    resources: dict[str, Any] = {}
    for call in (*creation(spec, ""), *monitoring(spec, region)):
        name, kind, left_out = _RESOURCES[call.operation]
        name += re.sub(r"\W", "", call.parameters.get("AlarmName", "").removeprefix(alarm_prefix(spec.name)).title())
        properties = {key: value for key, value in call.parameters.items() if key not in left_out}
        if isinstance(properties.get("Tags"), list):
            properties["Tags"] = [tag for tag in properties["Tags"] if tag["Key"] != TAG]
        resources[name] = {"Type": f"AWS::{kind}", "Properties": properties}
    variant = resources["EndpointConfig"]["Properties"]["ProductionVariants"][0]
    variant["ModelName"] = {"Fn::GetAtt": ["Model", "ModelName"]}
    resources["Endpoint"]["Properties"] |= {
        "EndpointConfigName": {"Fn::GetAtt": ["EndpointConfig", "EndpointConfigName"]},
        "RetainAllVariantProperties": spec.capacity is not None,
        "DeploymentConfig": blue_green(0, _BAKE_SECONDS, rollback_alarms(spec.name) if spec.alarms else []),
    }
    if spec.alarms:
        resources["Endpoint"]["DependsOn"] = ["Alarm5Xx", "AlarmModelErrors"]
    if spec.capacity:
        resources["ScalableTarget"]["DependsOn"] = "Endpoint"
        resources["ScalingPolicy"]["Properties"]["ScalingTargetId"] = {"Ref": "ScalableTarget"}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"{spec.name}, an endpoint of mme on SageMaker",
        "Resources": resources,
    }


_ALWAYS, _WITH_GPUS, _OF_MANY = "", "gpus", "many"  # which endpoints have an alarm or a chart
_ALARMS: tuple[tuple[str, str, str, str, float, str, str], ...] = (
    ("5xx", _ALWAYS, _INVOCATIONS, "Invocation5XXErrors Sum", 5, "Greater", "the endpoint fails requests"),
    ("model-errors", _ALWAYS, _INVOCATIONS, "InvocationModelErrors Sum", 5, "Greater", "models answer with errors"),
    ("latency", _ALWAYS, _INVOCATIONS, "ModelLatency p99", 5e6, "Greater", "the slowest answers take over 5 s"),
    ("memory", _ALWAYS, _INSTANCES, "MemoryUtilization Maximum", 95, "Greater", "an instance has no memory left"),
    ("disk", _ALWAYS, _INSTANCES, "DiskUtilization Maximum", 85, "Greater", "an instance's disk is nearly full"),
    ("gpu-memory", _WITH_GPUS, _INSTANCES, "GPUMemoryUtilization Maximum", 97, "Greater", "a GPU has no memory left"),
    ("cache", _OF_MANY, _INVOCATIONS, "ModelCacheHit Average", 0.5, "Less",
     "most requests wait for a load: too little memory for the models in use"),
    ("unloads", _OF_MANY, _INVOCATIONS, "ModelUnloadingTime SampleCount", 60, "Greater",
     "models leave as fast as they come"),
)  # fmt: skip


def alarms(endpoint: str, instance_type: str, *, multi_model: bool) -> Iterator[dict[str, Any]]:
    """Parameters of PutMetricAlarm, but for actions and tags."""
    wanted = {_ALWAYS: True, _WITH_GPUS: has_accelerator(instance_type), _OF_MANY: multi_model}
    for kind, of, namespace, what, limit, side, why in _ALARMS:
        metric, statistic = what.split()
        if wanted[of]:
            yield {
                "AlarmName": _alarm_name(endpoint, kind),
                "AlarmDescription": f"{endpoint}: {why}. {MARK}.",
                "Namespace": namespace,
                "MetricName": metric,
                "Dimensions": [{"Name": "EndpointName", "Value": endpoint}, {"Name": "VariantName", "Value": VARIANT}],
                "ExtendedStatistic" if statistic.startswith("p") else "Statistic": statistic,
                "Period": 60,
                "EvaluationPeriods": 5,
                "DatapointsToAlarm": 3,
                "Threshold": float(limit),
                "ComparisonOperator": f"{side}ThanThreshold",
                "TreatMissingData": "notBreaching",
            }


def rollback_alarms(endpoint: str) -> list[str]:
    """The names of the alarms that call an update back."""
    return [_alarm_name(endpoint, kind) for kind in ("5xx", "model-errors")]


def alarm_prefix(endpoint: str) -> str:
    """What the names of an endpoint's alarms begin with; another endpoint's may too."""
    return f"mme-{endpoint}-"


def _alarm_name(endpoint: str, kind: str) -> str:
    return f"{alarm_prefix(endpoint)}{kind}"


def dashboard_body(endpoint: str, region: str, instance_type: str, *, multi_model: bool) -> str:
    at = ["EndpointName", endpoint, "VariantName", VARIANT]
    counts = ("Invocations", "Invocation4XXErrors", "Invocation5XXErrors", "InvocationModelErrors")
    latencies = [_metric(_INVOCATIONS, "ModelLatency", at, each) for each in ("p50", "p90", "p99")]
    measured = ("CPU", "Memory", "Disk", *(("GPU", "GPUMemory") if has_accelerator(instance_type) else ()))
    gauges = [_metric(_INSTANCES, f"{name}Utilization", at, "Maximum") for name in measured]
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
