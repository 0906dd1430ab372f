"""What `mme deploy` wants, and the API calls that make it. PURE.

A `Call` is what boto3 is asked, word for word: `--dry-run` prints these very values. All that can carry a tag carries
the endpoint's name in one, by which `mme delete` knows its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from container.ship.watching import VARIANT, alarms, dashboard_body
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterator

TAG = "mme:endpoint"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_LONGEST_NAME = 43  # of SageMaker's 63, since the names of model and configuration have a stamp behind it
_NAMES = (
    "PolicyName",
    "AlarmName",
    "AlarmNames",
    "DashboardName",
    "DashboardNames",
    "ResourceId",
    "EndpointName",
    "EndpointConfigName",
    "ModelName",
)
_SCALE_IN_SECONDS, _SCALE_OUT_SECONDS = 600, 300


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an AWS API: boto3's service and operation, and the parameters."""

    service: str
    operation: str
    parameters: dict[str, Any]

    def made(self) -> str:
        """What it makes, for people."""
        noun = self.operation.partition("_")[2].replace("_", " ")
        return f"{noun} {next(self._names(), '')}"

    def _names(self) -> Iterator[str]:
        """What its parameters call it; of several names the most particular one first."""
        for key in _NAMES:
            value = self.parameters.get(key)
            if value:
                yield value[0] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is wanted.

    Attributes:
        name: the endpoint's.
        image, role: the container's image, and the role that it runs as.
        model_data: the S3 prefix of many models, or the archive of one.
        multi_model: which of both.
        instance_type, instances: the machines.
        environment: variables of the container.
        cache: whether SageMaker keeps models that were used; see ModelCacheSetting.
        volume_gb, startup_seconds: 0 leaves them to SageMaker.
        host_image: that of the machines, which has their GPU's driver: InferenceAmiVersion; "" leaves it to SageMaker.
        async_output: where asynchronous answers go; "" for an endpoint in real time.
        capacity: least and most instances to scale between; None scales not.
        target_invocations: a minute and instance, that scaling aims at.
        alarms, alarm_topic, dashboard: what watches it, and the SNS topic that alarms tell.
        labels: tags of the person's own, on all that is made.
        subnets, security_groups: of the network that the container is in; none leaves it outside.
    """

    name: str
    image: str
    role: str
    model_data: str
    instance_type: str
    multi_model: bool = True
    instances: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    cache: bool = True
    volume_gb: int = 0
    startup_seconds: int = 0
    host_image: str = ""
    async_output: str = ""
    capacity: tuple[int, int] | None = None
    target_invocations: float = 0.0
    alarms: bool = False
    alarm_topic: str = ""
    dashboard: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()

    def tags(self) -> list[dict[str, str]]:
        """The tags of all that is made."""
        return [{"Key": key, "Value": value} for key, value in {**self.labels, TAG: self.name}.items()]


def check_name(name: str) -> str:
    """The name itself if an endpoint may have it.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise invalid_argument(
            f"'{name}' can't be the name of an endpoint: letters, digits and single dashes, {_LONGEST_NAME} at most"
        )
    return name


def parse_capacity(text: str) -> tuple[int, int]:
    """Least and most of `1..4`.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    found = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise invalid_argument(f"--autoscale '{text}' is not LEAST..MOST, as in 1..4")
    return int(found[1]), int(found[2])


def creation(wanted: Deployment, stamp: str) -> list[Call]:
    """The calls that make the endpoint, in order; `stamp` tells this model and configuration from others."""
    return [*_configuration(wanted, stamp), _create_endpoint(wanted, stamp)]


def renewal(wanted: Deployment, stamp: str, traffic: dict[str, Any]) -> list[Call]:
    """The calls that bring a new model and configuration behind an endpoint, its traffic moving as `traffic` says."""
    update = {
        "EndpointName": wanted.name,
        "EndpointConfigName": f"{wanted.name}-{stamp}",
        "RetainAllVariantProperties": wanted.capacity is not None,
        "DeploymentConfig": traffic,
    }
    return [*_configuration(wanted, stamp), Call("sagemaker", "update_endpoint", update)]


def blue_green(canary_percent: int, bake_seconds: int, rollback_alarms: list[str]) -> dict[str, Any]:
    """A DeploymentConfig: all traffic at once, or a part of it first; back again when an alarm rings."""
    routing: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": bake_seconds}
    if canary_percent:
        size = {"Type": "CAPACITY_PERCENT", "Value": canary_percent}
        routing = {"Type": "CANARY", "CanarySize": size, "WaitIntervalInSeconds": bake_seconds}
    config: dict[str, Any] = {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing}}
    if rollback_alarms:
        config["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in rollback_alarms]}
    return config


def attendance(wanted: Deployment, region: str) -> list[Call]:
    """The calls for what stands around an endpoint that is in service: scaling, alarms, a dashboard."""
    calls = []
    if wanted.capacity:
        calls += _scaling(wanted, wanted.capacity)
    if wanted.alarms:
        actions = [wanted.alarm_topic] if wanted.alarm_topic else []
        for alarm in alarms(wanted.name, wanted.instance_type, multi_model=wanted.multi_model):
            parameters = {**alarm, "AlarmActions": actions, "OKActions": actions, "Tags": wanted.tags()}
            calls.append(Call("cloudwatch", "put_metric_alarm", parameters))
    if wanted.dashboard:
        body = dashboard_body(wanted.name, region, wanted.instance_type, multi_model=wanted.multi_model)
        parameters = {"DashboardName": dashboard_name(wanted.name), "DashboardBody": body}
        calls.append(Call("cloudwatch", "put_dashboard", parameters))
    return calls


def dashboard_name(endpoint: str) -> str:
    """The name of an endpoint's dashboard."""
    return f"mme-{endpoint}"


def resource_id(endpoint: str) -> str:
    """What scaling calls the endpoint's instances."""
    return f"endpoint/{endpoint}/variant/{VARIANT}"


def policy_name(endpoint: str) -> str:
    """The name of the scaling policy."""
    return f"mme-{endpoint}-invocations"


def _configuration(wanted: Deployment, stamp: str) -> list[Call]:
    name = f"{wanted.name}-{stamp}"
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "ModelName": name,
        "InstanceType": wanted.instance_type,
        "InitialInstanceCount": wanted.instances,
    }
    if wanted.volume_gb:
        variant["VolumeSizeInGB"] = wanted.volume_gb
    if wanted.startup_seconds:
        variant["ContainerStartupHealthCheckTimeoutInSeconds"] = wanted.startup_seconds
    if wanted.host_image:
        variant["InferenceAmiVersion"] = wanted.host_image
    config: dict[str, Any] = {"EndpointConfigName": name, "ProductionVariants": [variant], "Tags": wanted.tags()}
    if wanted.async_output:
        config["AsyncInferenceConfig"] = {"OutputConfig": {"S3OutputPath": wanted.async_output}}
    model: dict[str, Any] = {
        "ModelName": name,
        "ExecutionRoleArn": wanted.role,
        "PrimaryContainer": _container(wanted),
        "Tags": wanted.tags(),
    }
    if wanted.subnets:
        model["VpcConfig"] = {"Subnets": list(wanted.subnets), "SecurityGroupIds": list(wanted.security_groups)}
    return [Call("sagemaker", "create_model", model), Call("sagemaker", "create_endpoint_config", config)]


def _container(wanted: Deployment) -> dict[str, Any]:
    container: dict[str, Any] = {
        "Image": wanted.image,
        "Mode": "MultiModel" if wanted.multi_model else "SingleModel",
        "ModelDataUrl": wanted.model_data,
        "Environment": {"MME_ENDPOINT_NAME": wanted.name, **wanted.environment},
    }
    if wanted.multi_model:
        container["MultiModelConfig"] = {"ModelCacheSetting": "Enabled" if wanted.cache else "Disabled"}
    return container


def _create_endpoint(wanted: Deployment, stamp: str) -> Call:
    parameters = {
        "EndpointName": wanted.name,
        "EndpointConfigName": f"{wanted.name}-{stamp}",
        "Tags": wanted.tags(),
    }
    return Call("sagemaker", "create_endpoint", parameters)


def _scaling(wanted: Deployment, capacity: tuple[int, int]) -> list[Call]:
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource_id(wanted.name),
        "ScalableDimension": DIMENSION,
    }
    policy = {
        "TargetValue": wanted.target_invocations,
        "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
        "ScaleInCooldown": _SCALE_IN_SECONDS,
        "ScaleOutCooldown": _SCALE_OUT_SECONDS,
    }
    least, most = capacity
    return [
        Call(
            "application-autoscaling",
            "register_scalable_target",
            {**target, "MinCapacity": least, "MaxCapacity": most, "Tags": {**wanted.labels, TAG: wanted.name}},
        ),
        Call(
            "application-autoscaling",
            "put_scaling_policy",
            {
                **target,
                "PolicyName": policy_name(wanted.name),
                "PolicyType": "TargetTrackingScaling",
                "TargetTrackingScalingPolicyConfiguration": policy,
            },
        ),
    ]
