"""Manifests for KServe, Azure ML and CloudFormation: a server understands what they tell it, and their own loaders take them."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from container.cli import main
from container.settings import read_settings
from container.ship.endpoint import Deployment, creation, monitoring
from tests.contract.models import ONE, lay_out, plus, y
from tests.contract.server import SCRIPTS, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

DEPLOY = Path(__file__).parents[2] / "deploy"
KSERVE = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((DEPLOY / "kserve").glob("*.yaml"))}
AZUREML = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((DEPLOY / "azureml").glob("*.yml"))}
CONTAINERS = {
    "servingruntime": KSERVE["servingruntime"]["spec"]["containers"][0],
    "multimodel": KSERVE["multimodel"]["spec"]["predictor"]["containers"][0],
}
ROUTES = {
    **{
        f"kserve {name} {probe}": container[probe]["httpGet"]
        for name, container in CONTAINERS.items()
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        if probe in container
    },
    **{
        f"azureml {name} {route}": environment["inference_config"][route]
        for name, environment in {
            "environment": AZUREML["environment"],
            "deployment": AZUREML["deployment"]["environment"],
        }.items()
        for route in ("liveness_route", "readiness_route")
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server as Azure starts one: its models in a folder that was registered, and nothing else said."""
    folder = tmp_path_factory.mktemp("azure")
    lay_out(folder / "models" / "repository" / "plus", plus(1))
    with Server(folder / "server", {"AZUREML_MODEL_DIR": str(folder / "models")}) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_the_routes_of_health_are_the_servers(server, route):
    """They answer 200 once the models are there."""
    assert route["port"] == 8080
    assert server.ask("GET", route["path"]).status == 200


@pytest.mark.slow
def test_a_registered_model_is_served_without_code(server):
    """Azure hands every path below its scoring route on, and the folder that was registered is the repository."""
    assert AZUREML["environment"]["inference_config"]["scoring_route"]["path"] == "/"
    answer = server.ask("POST", "/v2/models/plus/infer", ONE)
    assert (answer.status, y(answer.json)) == (200, [2, 3, 4, 5])


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_containers_of_kserve_start(name, tmp_path):
    """The command, its flags and its variables are understood, the port is the probes', and the drain fits the grace."""
    container = CONTAINERS[name]
    arguments = main.make_parser().parse_args(container["args"])
    flags = {"MME_MODEL_REPOSITORY": arguments.model_repository, "MME_MODEL_STORE": arguments.model_store}
    given = {variable: value[0] if isinstance(value, list) else value for variable, value in flags.items() if value}
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    settings = read_settings({**environ, **given, "MME_PORT": arguments.port})

    assert settings.host == "0.0.0.0"
    assert [port["containerPort"] for port in container["ports"]] == [settings.port]
    service = KSERVE["multimodel" if name == "multimodel" else "inferenceservice"]["spec"]["predictor"]
    assert service["terminationGracePeriodSeconds"] > settings.drain_seconds
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits["memory"] == requests["memory"], "the budget is a share of the limit, so the limit has to be there"


def test_kserves_service_names_the_runtime_beside_it():
    """By its name, in one of its formats and protocols."""
    model, runtime = KSERVE["inferenceservice"]["spec"]["predictor"]["model"], KSERVE["servingruntime"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {known["name"] for known in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert CONTAINERS["servingruntime"]["name"] == "kserve-container", "the name by which KServe finds it"


def test_azures_variables_are_the_servers():
    """Those of the deployment, and the environment is the one beside it."""
    deployment, environment = AZUREML["deployment"], AZUREML["environment"]
    assert read_settings(deployment["environment_variables"]).host == "0.0.0.0"
    assert deployment["endpoint_name"] == AZUREML["endpoint"]["name"]
    for key in ("name", "version", "image", "inference_config"):
        assert deployment["environment"][key] == environment[key]


@pytest.mark.parametrize("name", AZUREML)
def test_azures_own_loader_takes_the_file(name):
    """Without a field unknown to its schema. Skipped where azure-ai-ml is not installed."""
    sdk = pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is not installed")
    kind = {"environment": "environment", "endpoint": "online_endpoint", "deployment": "online_deployment"}[name]
    loaded = getattr(sdk, f"load_{kind}")(DEPLOY / "azureml" / f"{name}.yml")
    assert loaded.name == AZUREML[name]["name"]


def unknown(document: object, kind: str, packages: tuple[ModuleType, ...], path: str = "") -> Iterator[str]:
    """The fields of a document that its type does not have, with their values' types, by the tables in generated code."""
    if inner := re.fullmatch(r"(?:list\[|dict\(str, )(.*)[\])]", kind):
        values = document.values() if isinstance(document, dict) else document
        for value in values:
            yield from unknown(value, inner[1], packages, f"{path}[]")
        return
    model = next((getattr(package, kind) for package in packages if hasattr(package, kind)), None)
    if model is None:
        expected = {"str": str, "int": int, "bool": bool}.get(kind, object)
        if not isinstance(document, expected):
            yield f"{path}: {document!r} is no {kind}"
        return
    fields = {shown: model.openapi_types[name] for name, shown in model.attribute_map.items()}
    for name, value in document.items():
        if name not in fields:
            yield f"{path}.{name}"
        else:
            yield from unknown(value, fields[name], packages, f"{path}.{name}")


@pytest.mark.parametrize("name", KSERVE)
def test_kserves_own_models_know_every_field(name):
    """At every depth, Kubernetes' fields too, with values of their types. Skipped where kserve is not installed."""
    kserve = pytest.importorskip("kserve.models", reason="kserve is not installed")
    packages = (kserve, importlib.import_module("kubernetes.client"))
    document = KSERVE[name]
    version = document["apiVersion"].rpartition("/")[2].capitalize()
    assert list(unknown(document, f"{version}{document['kind']}", packages)) == []


class _Template(yaml.SafeLoader):
    """Reads what CloudFormation fills in as its plain argument."""


_Template.add_multi_constructor("!", lambda _loader, _tag, node: node.value)
CLOUDFORMATION = DEPLOY / "cloudformation" / "endpoint.yml"


def test_cloudformation_makes_what_deploy_makes():
    """The same properties of container, variant and scaling; and the variables are the server's."""
    resources = {
        name: resource["Properties"]
        for name, resource in yaml.load(CLOUDFORMATION.read_text(), _Template)["Resources"].items()  # noqa: S506 - it is ours
    }
    deployment = Deployment(
        name="bert", image="image", role="role", model_data="s3://b/p/", multi_model=True, instance_type="ml.m5.xlarge",
        instances=1, capacity=(1, 4), target_invocations=600.0, host_image="ami",
    )  # fmt: skip
    model, config, _ = (call.parameters for call in creation(deployment, "stamp"))
    container, (variant,) = model["PrimaryContainer"], config["ProductionVariants"]
    assert set(resources["Model"]["PrimaryContainer"]) == set(container)
    assert set(resources["Model"]["PrimaryContainer"]["Environment"]) == set(container["Environment"])
    read_settings(resources["Model"]["PrimaryContainer"]["Environment"])
    (ours,) = resources["Configuration"]["ProductionVariants"]
    assert set(ours) - {"InitialVariantWeight"} == set(variant)
    target, policy = (call.parameters for call in monitoring(deployment, "us-east-1"))
    assert resources["Target"]["ScalableDimension"] == target["ScalableDimension"]
    tracking = {**policy["TargetTrackingScalingPolicyConfiguration"], "TargetValue": "InvocationsPerMinute"}
    assert resources["Scaling"]["TargetTrackingScalingPolicyConfiguration"] == tracking


@pytest.mark.long
def test_cloudformations_own_schemas_know_every_property():
    """As cfn-lint brings them, which moto needs as well."""
    command = [f"{SCRIPTS}/cfn-lint", "--region", "eu-central-1", "--", str(CLOUDFORMATION)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_images_carry_the_projects_version():
    """What is copied starts the version that it was checked with."""
    version = re.search(r"^version = (.*)$", (DEPLOY.parent / "setup.cfg").read_text(), re.MULTILINE)[1]
    images = re.findall(r"(?:image: |Image=)(\S+)", "".join(path.read_text() for path in DEPLOY.rglob("*.y*ml")))
    assert {image.rpartition(":")[2] for image in images} == {version}
