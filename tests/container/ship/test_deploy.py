"""`mme deploy`, `update` and `delete`, against moto: what is made, what is refused, what is taken down."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from container.settings import read_settings
from tests.container.ship.conftest import IMAGE, refusal

CPU = "ml.m5.xlarge"


@pytest.fixture
def models(account):
    """A prefix with an archive."""
    account.client("s3").put_object(Bucket="models", Key="bert/a.tar.gz", Body=b"x")
    return "s3://models/bert"


@pytest.fixture
def deploy(mme, models):
    """A function that deploys with what is needed, and what else is given."""

    def run(name, *more, **changes):
        flags = {"models": models, "image": IMAGE, "role": "runner", "instance_type": CPU, **changes}
        pairs = [(f"--{flag.replace('_', '-')}", value) for flag, value in flags.items() if value]
        return mme("deploy", name, *(word for pair in pairs for word in pair), *more)

    return run


def made(account):
    """Models, configurations, endpoints, alarms, dashboards, and scalable targets that there are."""
    sagemaker, cloudwatch = account.backend("sagemaker"), account.backend("cloudwatch")
    targets = [name for each in account.backend("applicationautoscaling").targets.values() for name in each]
    kinds = (sagemaker._models, sagemaker.endpoint_configs, sagemaker.endpoints, cloudwatch.alarms)
    return (*map(list, kinds), list(cloudwatch.dashboards), targets)


NOTHING = ([], [], [], [], [], [])


def host_image(said):
    """What a dry run has the hosts be made of."""
    found = re.search(r'"InferenceAmiVersion": "(.*)"', said.out)
    return found and found[1]


def test_a_multi_model_endpoint_is_made(account, deploy):
    """Model, configuration and endpoint under names that belong together, and it is in service."""
    said = deploy("bert", "--env", "MME_LOG_LEVEL=debug")

    assert said.code == 0, said.err
    ((model,), (config,), endpoints, *_) = made(account)
    assert model == config
    assert endpoints == ["bert"]
    described = account.client("sagemaker").describe_model(ModelName=model)
    container = described["PrimaryContainer"]
    assert (container["Mode"], container["ModelDataUrl"]) == ("MultiModel", "s3://models/bert/")
    assert container["Environment"] == {"MME_ENDPOINT_NAME": "bert", "MME_LOG_LEVEL": "debug"}
    assert described["ExecutionRoleArn"] == "arn:aws:iam::123456789012:role/runner"
    assert "mme invoke bert --target ARCHIVE" in said.out


def test_a_single_model_is_deployed_on_any_type(account, deploy):
    """Also with several GPUs, and asynchronously: then a request may take the hour that SageMaker waits at most."""
    said = deploy("one", models="", single="s3://models/bert/a.tar.gz", instance_type="ml.p3.8xlarge",
                  async_output="s3://models/out")  # fmt: skip

    assert said.code == 0, said.err
    ((model,), *_) = made(account)
    container = account.client("sagemaker").describe_model(ModelName=model)["PrimaryContainer"]
    assert (container["Mode"], container["ModelDataUrl"]) == ("SingleModel", "s3://models/bert/a.tar.gz")
    assert read_settings(container["Environment"]).request_timeout == 3600


def test_scaling_alarms_and_dashboard_stand_around_it_and_go_with_it(account, deploy, mme):
    """All of them are made, delete lists them, and takes down these and nothing else."""
    assert deploy("bert-2", "--alarms").code == 0
    mine = account.client("cloudwatch")
    mine.put_metric_alarm(AlarmName="mme-bert-mine", Namespace="n", MetricName="m", Statistic="Sum", Period=60,
                          EvaluationPeriods=1, Threshold=1, ComparisonOperator="GreaterThanThreshold")  # fmt: skip
    others = made(account)

    topic = "arn:aws:sns:us-east-1:123456789012:ops"
    said = deploy("bert", "--autoscale", "1..4", "--target-invocations", "200", "--alarm-topic", topic, "--dashboard")
    assert said.code == 0, said.err
    *_, alarms, dashboards, targets = made(account)
    assert len(alarms) == len(others[3]) + 7
    assert (dashboards, targets) == (["mme-bert"], ["endpoint/bert/variant/AllTraffic"])
    listed = mme("delete", "bert", "--dry-run").out.splitlines()
    assert len(listed) == 2 + 7 + 1 + 3
    assert mme("delete", "bert").code == 2, "nobody can be asked"
    deleted = mme("delete", "bert", "--yes")
    assert deleted.code == 0, deleted.err
    assert made(account) == others
    again = mme("delete", "bert", "--yes")
    assert again.code == 2
    assert "there is no such endpoint" in again.err


def test_the_dashboard_draws_what_there_is(account, deploy):
    """Every chart names metrics of this endpoint; those of GPUs only where there are some."""
    assert deploy("bert", "--dashboard", instance_type="ml.p3.2xlarge").code == 0
    body = account.client("cloudwatch").get_dashboard(DashboardName="mme-bert")["DashboardBody"]

    charts = [widget["properties"] for widget in json.loads(body)["widgets"] if widget["type"] == "metric"]
    text = json.dumps([chart["metrics"] for chart in charts])
    for metric in ("ModelCacheHit", "LoadedModelCount", "ModelLoadingTime", "ModelLatency", "GPUMemoryUtilization"):
        assert f'"{metric}"' in text
    assert "mme,EndpointName,VariantName,TargetModel" in text
    assert {chart["region"] for chart in charts} == {"us-east-1"}


def test_a_dry_run_prints_the_calls_and_makes_none(account, deploy):
    """Each with its service, its operation and parameters that botocore's model takes."""
    said = deploy("bert", "--autoscale", "1..4", "--alarms", "--dashboard", "--dry-run", instance_type="ml.g5.xlarge")

    assert said.code == 0, said.err
    headings = [line for line in said.out.splitlines() if line.startswith(("sagemaker ", "application", "cloudwatch "))]
    assert headings[:3] == ["sagemaker create_model", "sagemaker create_endpoint_config", "sagemaker create_endpoint"]
    assert headings[3:5] == [
        "application-autoscaling register_scalable_target", "application-autoscaling put_scaling_policy",
    ]  # fmt: skip
    assert {heading.split()[1] for heading in headings[5:]} == {"put_metric_alarm", "put_dashboard"}
    assert made(account) == NOTHING


def test_a_template_makes_what_the_calls_make(account, deploy):
    """CloudFormation makes the endpoint of it; moto knows no alarms and no scaling, which have the calls' parameters."""
    flags = ("--autoscale", "1..4", "--alarms", "--dashboard", "--tag", "team=search", "--dry-run")
    said = deploy("bert", *flags, "--format", "cloudformation", instance_type="ml.g4dn.xlarge")
    assert said.code == 0, said.err
    template = json.loads(said.out)
    printed = deploy("bert", *flags, instance_type="ml.g4dn.xlarge").out
    calls = [json.loads(text) for text in re.findall(r"^\{.*?^\}", printed, re.MULTILINE | re.DOTALL)]
    assert made(account) == NOTHING

    resources = template["Resources"]
    assert len(resources) == len(calls)
    assert resources["Endpoint"].pop("DependsOn") == ["Alarm5Xx", "AlarmModelErrors"]
    others = {name: resources.pop(name)["Properties"] for name in list(resources) if name.startswith(("Alarm", "Scal"))}
    assert others["Alarm5Xx"] == {**calls[5], "Tags": [{"Key": "team", "Value": "search"}]}
    assert others["ScalingPolicy"]["ScalingTargetId"] == {"Ref": "ScalableTarget"}
    account.client("cloudformation").create_stack(StackName="bert", TemplateBody=json.dumps(template))
    (model,), _, endpoints, _, dashboards, _ = made(account)
    assert (resources["Endpoint"]["Properties"]["EndpointName"], dashboards) == ("bert", ["mme-bert"])
    assert len(endpoints) == 1, "moto gives it a name of its own"
    described = account.client("sagemaker").describe_model(ModelName=model)
    assert described["PrimaryContainer"] == calls[0]["PrimaryContainer"]
    refused = deploy("bert", "--format", "cloudformation")
    assert (refused.code, "--dry-run" in refused.err) == (2, True)


def test_a_stack_is_its_own(account, deploy, mme):
    """What a template made is taken down with its stack: `mme delete` and `mme update` leave it alone."""
    said = deploy("bert", "--dry-run", "--format", "cloudformation")
    account.client("cloudformation").create_stack(StackName="bert", TemplateBody=said.out)
    (name,) = made(account)[2]

    assert "made by somebody else" in mme("delete", name, "--yes").err
    assert "was not made by `mme deploy`" in mme("update", name, "--instances", "2").err


@pytest.mark.parametrize(
    ("instance_type", "flags", "expected"),
    [
        ("ml.g5.xlarge", (), "al2023-ami-sagemaker-inference-gpu-4-1"),
        ("ml.g4dn.2xlarge", (), "al2023-ami-sagemaker-inference-gpu-4-1"),
        ("ml.g5.xlarge", ("--host-image", "al2-ami-sagemaker-inference-gpu-2"), "al2-ami-sagemaker-inference-gpu-2"),
        ("ml.g5.xlarge", ("--host-image", "default"), None),
        ("ml.p3.2xlarge", (), None),
        (CPU, (), None),
    ],
    ids=["g5", "g4dn", "named", "SageMaker's own", "a GPU that CUDA 13 leaves out", "CPU"],
)
def test_hosts_with_gpus_have_a_driver_for_the_image(deploy, instance_type, flags, expected):
    """Left to itself SageMaker gives them one that CUDA 13 does not run on."""
    said = deploy("bert", *flags, "--dry-run", instance_type=instance_type)

    assert said.code == 0, said.err
    assert host_image(said) == expected


@pytest.mark.parametrize(
    ("named", "flags", "expected"),
    [
        ("al2-ami-sagemaker-inference-gpu-2", ("--env", "A=1"), "al2-ami-sagemaker-inference-gpu-2"),
        ("al2-ami-sagemaker-inference-gpu-2", ("--instance-type", "ml.g5.xlarge"), "al2-ami-sagemaker-inference-gpu-2"),
        ("default", ("--instance-type", "ml.g5.xlarge"), None),
        ("", ("--instance-type", "ml.g5.xlarge"), "al2023-ami-sagemaker-inference-gpu-4-1"),
        ("al2-ami-sagemaker-inference-gpu-2", ("--instance-type", CPU), None),
        ("al2-ami-sagemaker-inference-gpu-2", ("--host-image", "default"), None),
    ],
    ids=["something else", "type", "type, with SageMaker's own", "type, with ours", "CPU", "SageMaker's own"],
)
def test_an_update_keeps_the_hosts_image_that_somebody_chose(deploy, mme, named, flags, expected):
    """Other instances with GPUs have it too, and where nobody chose one, what suits them."""
    chosen = ("--host-image", named) if named else ()
    assert deploy("bert", *chosen, instance_type="ml.g4dn.xlarge").code == 0

    said = mme("update", "bert", *flags, "--dry-run")
    assert said.code == 0, said.err
    assert host_image(said) == expected


def test_a_dry_run_needs_no_account(mme, monkeypatch, tmp_path):
    """Without credentials the calls are printed too, and what is wrong in itself is refused."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    flags = ("--models", "s3://models/bert", "--image", IMAGE, "--role", "runner", "--region", "us-east-1")

    said = mme("deploy", "bert", *flags, "--instance-type", "ml.g5.xlarge", "--dry-run")
    assert said.code == 0, said.err
    assert '"ModelDataUrl": "s3://models/bert/"' in said.out
    assert "nothing was looked up" in said.err
    assert mme("deploy", "bert", *flags, "--instance-type", "ml.g5.12xlarge", "--dry-run").code == 2
    said = mme("deploy", "bert", *flags, "--instance-type", "ml.g5.xlarge")
    assert (said.code, "no AWS credentials" in said.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("bert", {"role": ""}, "no role: give --role"),
        ("bert", {"role": "nobody"}, "role 'nobody' does not exist"),
        ("bert", {"role": "a/b"}, "is no role"),
        ("bert", {"image": ""}, "no image: give --image"),
        ("bert", {"image": "mme:latest"}, "is not in ECR"),
        ("bert", {"image": IMAGE.replace("us-east-1", "eu-west-1")}, "is in region eu-west-1"),
        ("bert", {"instance_type": ""}, "no instance type"),
        ("bert", {"instance_type": "ml.m5.xlrage"}, "did you mean 'ml.m5.xlarge'?"),
        ("bert", {"instance_type": "ml.p4d.24xlarge"}, "runs no multi-model endpoint on 'ml.p4d.24xlarge'"),
        ("bert", {"instance_type": "ml.g5.12xlarge"}, "ml.g5.2xlarge"),
        ("bert", {"models": ""}, "--models s3://bucket/prefix for many"),
        ("bert", {"models": "s3://models/none"}, "there is no .tar.gz in s3://models/none/"),
        ("bert", {"models": "s3://models/bert/a.tar.gz"}, "--single s3://models/bert/a.tar.gz"),
        ("bert", {"models": "s3://nobody-has-this/p"}, "the bucket does not exist"),
        ("bert", {"models": "", "single": "s3://models/none.tar.gz"}, "put it there with `mme push`"),
        ("bert", {"autoscale": "4..1"}, "is not LEAST..MOST"),
        ("bert", {"target_invocations": "5"}, "needs --autoscale"),
        ("bert", {"async_output": "s3://models/out"}, "--async-output needs --single"),
        ("bert", {"env": "X"}, "--env 'X' is not NAME=VALUE"),
        ("bert", {"env": "MME_MEMORY_BUDGT=2GB"}, "would not start: MME_MEMORY_BUDGT: there is no such variable"),
        ("bert", {"env": "MME_LOAD_MODEL=a"}, "with SAGEMAKER_MULTI_MODEL=true SageMaker decides what is loaded"),
        ("bert", {"env": "MME_PORT=9000"}, "would not be heard at port 9000: SageMaker calls 8080"),
        ("bert", {"tag": "X"}, "--tag 'X' is not NAME=VALUE"),
        ("bert", {"subnet": "subnet-1"}, "need each other"),
        ("b_ert", {}, "can't be the name of an endpoint"),
        ("bert", {"region": "mars-1"}, "is not the name of a region"),
        ("bert", {"region": "us-gov-east"}, "is not the name of a region"),
    ],
)
def test_bad_input_is_one_sentence_and_makes_nothing(account, deploy, name, changes, sentence):
    """With the next step, and exit code 2."""
    said = deploy(name, **changes)

    assert said.code == 2
    (line,) = said.err.splitlines()
    assert sentence in line
    assert made(account) == NOTHING


def test_a_name_that_is_taken(account, deploy):
    """Is refused before anything is made."""
    deploy("bert")
    before = made(account)
    said = deploy("bert")

    assert said.code == 2
    assert "`mme update`" in said.err
    assert made(account) == before


def test_a_region_without_the_service(account, deploy, answered, monkeypatch):
    """Names regions that have it."""
    monkeypatch.setattr(
        "boto3.session.Session.get_available_regions",
        lambda _self, service, _partition="aws": ["us-east-1", "us-east-2"] if service == "s3" else ["us-east-2"],
    )
    said = deploy("bert")

    assert said.code == 2
    assert "region 'us-east-1' has no sagemaker: choose one of us-east-2" in said.err


@pytest.mark.parametrize(
    ("operation", "code", "sentence"),
    [
        ("iam.GetRole", "ExpiredToken", "have expired: sign in again"),
        ("s3.ListObjectsV2", "AccessDenied", "have ListObjectsV2 allowed"),
        ("sagemaker.ListEndpoints", "UnrecognizedClientException", "does not accept these credentials"),
    ],
)
def test_an_account_that_refuses(account, deploy, answered, operation, code, sentence):
    """One sentence with the next step, and nothing is made."""
    answered(operation, refusal(code, 403))
    said = deploy("bert")

    assert said.code == 2
    (line,) = said.err.splitlines()
    assert sentence in line
    assert made(account) == NOTHING


def test_a_role_that_may_not_be_looked_at_is_left_to_sagemaker(account, deploy, answered):
    """Its ARN is taken as it is."""
    answered("iam.GetRole", refusal("AccessDenied", 403))

    assert deploy("bert", role="arn:aws:iam::123456789012:role/path/other").code == 0


def test_no_region_at_all(account, deploy, monkeypatch):
    """Says how to choose one."""
    monkeypatch.delenv("AWS_DEFAULT_REGION")

    assert "no AWS region is chosen: give --region" in deploy("bert").err


def test_what_was_half_made_is_listed_and_can_be_deleted(account, deploy, mme, answered):
    """A call that fails in the middle names what was made before it, and delete takes that down."""
    answered("sagemaker.CreateEndpoint", refusal("ResourceLimitExceeded", message="ml.m5.xlarge: 0 instances"))
    said = deploy("bert")

    assert said.code == 2
    quota, left = said.err.splitlines()
    assert "exceeds a quota" in quota
    assert "made so far: model bert-" in left
    assert left.endswith("take it down with: mme delete bert")
    assert mme("delete", "bert", "--yes").code == 0
    assert made(account) == NOTHING


def test_why_an_endpoint_failed(account, deploy, answered):
    """SageMaker's reason and the end of the container's log."""
    logs = account.client("logs")
    group = "/aws/sagemaker/Endpoints/bert"
    logs.create_log_group(logGroupName=group)
    logs.create_log_stream(logGroupName=group, logStreamName="AllTraffic/i-1")
    event = {"timestamp": time.time_ns() // 1_000_000, "message": "MME_PROT: there is no such variable"}
    logs.put_log_events(logGroupName=group, logStreamName="AllTraffic/i-1", logEvents=[event])

    def fail(_):
        endpoint = next(iter(account.backend("sagemaker").endpoints.values()))
        endpoint.endpoint_status, endpoint.failure_reason = "Failed", "The primary container did not pass the ping."

    answered("sagemaker.CreateEndpoint", fail, after=True)
    said = deploy("bert")

    assert said.code == 1
    assert "endpoint 'bert' is Failed: The primary container did not pass the ping." in said.err
    assert "MME_PROT: there is no such variable" in said.err


def test_an_update_brings_a_new_configuration_and_takes_the_old_one_down(account, deploy, mme, answered):
    """By blue/green, watched by the alarms of the endpoint; what is not named stays as it was."""
    network = ("--subnet", "subnet-1", "--security-group", "sg-1", "--security-group", "sg-2")
    deploy("bert", "--alarms", "--env", "A=1", "--tag", "team=search", *network)
    before = made(account)
    seen = []

    def update(body):
        seen.append(json.loads(body))
        (endpoint,) = account.backend("sagemaker").endpoints.values()
        endpoint.endpoint_config_name = seen[0]["EndpointConfigName"]
        return 200, {"EndpointArn": "arn"}

    answered("sagemaker.UpdateEndpoint", update)
    image = IMAGE.replace("mme:1", "mme:2")
    refused = mme("update", "bert", "--env", "MME_LOG_LEVEL=loud")
    said = mme("update", "bert", "--image", image, "--canary", "10", "--env", "B=2")

    assert refused.code == 2
    assert "the container would not start: --log-level/MME_LOG_LEVEL='loud'" in refused.err
    assert said.code == 0, said.err
    ((model,), (config,), endpoints, *_) = made(account)
    assert (model, config) == (seen[0]["EndpointConfigName"],) * 2
    assert model != before[0][0]
    assert endpoints == ["bert"]
    sagemaker = account.client("sagemaker")
    described = sagemaker.describe_model(ModelName=model)
    assert described["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1", "sg-2"]}
    tags = sagemaker.list_tags(ResourceArn=described["ModelArn"])["Tags"]
    assert tags == [{"Key": "team", "Value": "search"}, {"Key": "mme:endpoint", "Value": "bert"}]
    container = described["PrimaryContainer"]
    assert container["Image"] == image
    assert container["Environment"] == {"MME_ENDPOINT_NAME": "bert", "A": "1", "B": "2"}
    traffic = seen[0]["DeploymentConfig"]["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]
    assert traffic["CanarySize"] == {"Type": "CAPACITY_PERCENT", "Value": 10}
    alarms = seen[0]["DeploymentConfig"]["AutoRollbackConfiguration"]["Alarms"]
    assert alarms == [{"AlarmName": "mme-bert-5xx"}, {"AlarmName": "mme-bert-model-errors"}]


def test_an_update_that_fails_leaves_the_endpoint_alone(account, deploy, mme, answered):
    """It tells nobody to delete an endpoint that serves; what was half made goes with the next one that succeeds."""
    deploy("bert")
    (endpoint,) = account.backend("sagemaker").endpoints.values()
    refused = [refusal("ResourceLimitExceeded", message="ml.m5.xlarge: 2 instances")]

    def update(body):
        if refused:
            return refused.pop()(body)
        endpoint.endpoint_config_name = json.loads(body)["EndpointConfigName"]
        return 200, {"EndpointArn": "arn"}

    answered("sagemaker.UpdateEndpoint", update)
    said = mme("update", "bert", "--instances", "2")

    assert said.code == 2
    assert "made so far: model bert-" in said.err
    assert "mme delete" not in said.err
    assert "'bert' serves what it served, and the next `mme update` that succeeds takes that down" in said.err
    assert len(made(account)[0]) == 2
    assert mme("update", "bert", "--instances", "2").code == 0
    ((model,), (config,), *_) = made(account)
    assert model == config == endpoint.endpoint_config_name


def test_an_update_takes_nothing_down_before_all_of_it_is_listed(account, deploy, mme, answered):
    """Where AWS lists configurations and refuses to list models, both stay, for the next update."""
    deploy("bert")
    (endpoint,) = account.backend("sagemaker").endpoints.values()

    def update(body):
        endpoint.endpoint_config_name = json.loads(body)["EndpointConfigName"]
        return 200, {"EndpointArn": "arn"}

    answered("sagemaker.UpdateEndpoint", update)
    answered("sagemaker.ListModels", refusal("AccessDeniedException"))
    said = mme("update", "bert", "--instances", "2")

    assert said.code == 2
    assert "deleted" not in said.out
    assert [len(each) for each in made(account)[:2]] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("none", "--instances", "2"), "there is no endpoint 'none' in us-east-1"),
        (("theirs", "--instances", "2"), "was not made by `mme deploy`"),
        (("bert",), "nothing changes"),
        (("bert", "--instance-type", "ml.p4d.24xlarge"), "runs no multi-model endpoint"),
        (("bert", "--instances", "2", "--canary", "60"), "is not between 1 and 50 percent"),
    ],
)
def test_updates_that_are_refused(account, deploy, mme, arguments, sentence):
    """One sentence, exit code 2, and nothing is made."""
    deploy("bert")
    sagemaker = account.client("sagemaker")
    config = made(account)[1][0]
    sagemaker.create_endpoint(EndpointName="theirs", EndpointConfigName=config)
    before = made(account)

    said = mme("update", *arguments)
    assert said.code == 2
    assert sentence in said.err
    assert made(account) == before


def test_an_endpoint_of_somebody_else_stays(account, deploy, mme):
    """Delete finds nothing of its own and says so."""
    deploy("bert")
    account.client("sagemaker").create_endpoint(EndpointName="theirs", EndpointConfigName=made(account)[1][0])
    said = mme("delete", "theirs", "--yes")

    assert said.code == 2
    assert "made by somebody else" in said.err
    assert "theirs" in made(account)[2]
