"""From a model file to a live endpoint and back, by the commands themselves: AWS is moto's, the endpoint `mme local`."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager

import boto3
import pytest
from botocore.exceptions import ClientError

from container.cli import main
from tests.contract import models
from tests.contract.server import PATIENCE, clean_environment, eventually

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/mme:1"
LISTENING = re.compile(r"local: Listening at: (http://\S+)")
MEGABYTES = 8
ROOM_FOR_A_FEW = {"MME_MEMORY_BUDGET": "60MB", "MME_WEIGHTS": "plain"}  # the weights of all are the same
OURS = shlex.join([sys.executable, "-P", "-m", "container.cli.main", "serve"])


@pytest.fixture
def environment(aws, s3_url, monkeypatch):
    """The environment of all commands: an account in which S3, SageMaker, IAM and CloudWatch are moto's."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "MME_", "SAGEMAKER_"))]:
        monkeypatch.delenv(name)
    given = {**aws(s3_url), "AWS_ENDPOINT_URL": s3_url}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


def mme(*arguments):
    """Run a command here, which has to go well."""
    assert main.main([str(argument) for argument in arguments]) == 0


@contextmanager
def local(folder, environment, *arguments):
    """`mme local` in a process of its own; its address."""
    cache = f"--env=MME_CACHE_DIR={folder / 'cache'}"
    (folder / "container").mkdir()  # as people call a folder of theirs
    (folder / "container" / "__init__.py").write_text("raise SystemExit('the wrong container')\n")
    command = [sys.executable, "-P", "-m", "container.cli.main", "local", *map(str, arguments), cache, "--port", "0"]
    log = folder / "local.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=clean_environment(folder, **environment), cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )

    def listening():
        assert process.poll() is None, log.read_text()
        return LISTENING.search(log.read_text())

    try:
        yield eventually(listening, "the line that says where the endpoint listens")[1]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
        print(log.read_text())  # noqa: T201 - pytest shows it beside a failure
    assert code == 0


@pytest.fixture
def runtime(environment):
    """A function that makes boto3's client of an endpoint on this machine."""
    clients = []

    def client(url):
        clients.append(boto3.session.Session().client("sagemaker-runtime", endpoint_url=url))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def test_pack_push_deploy_invoke_delete(environment, s3, bucket, tmp_path, runtime, monkeypatch, capsys):
    """A fleet of models becomes an endpoint; its namesake here evicts and reloads them; nothing is left in the end."""
    iam, sagemaker = (boto3.session.Session().client(service) for service in ("iam", "sagemaker"))
    iam.create_role(RoleName="rehearsal", AssumeRolePolicyDocument="{}")
    (tmp_path / "bert.onnx").write_bytes(models.plus(1, MEGABYTES))
    monkeypatch.chdir(tmp_path)
    mme("pack", "bert.onnx", "--copies", "9")
    archives = [f"bert-{number}.tar.gz" for number in range(9)]
    mme("push", *archives, f"s3://{bucket}/models")
    mme("deploy", "rehearsal", "--models", f"s3://{bucket}/models", "--image", IMAGE, "--role", "rehearsal",
        "--instance-type", "ml.m5.xlarge", "--dashboard", "--alarms")  # fmt: skip
    assert sagemaker.describe_endpoint(EndpointName="rehearsal")["EndpointStatus"] == "InService"

    flags = [f"--env={name}={value}" for name, value in {**ROOM_FOR_A_FEW, "MME_HOST": "127.0.0.1"}.items()]
    source = (f"s3://{bucket}/models", "--endpoint", "rehearsal", "--emulate-platform", OURS, *flags)
    with local(tmp_path, environment, *source) as url:
        client = runtime(url)
        for target in (*archives, archives[0]):
            answer = client.invoke_endpoint(
                EndpointName="rehearsal",
                TargetModel=target,
                Body=json.dumps(models.ONE),
                ContentType="application/json",
            )
            assert models.y(json.load(answer["Body"])) == [2, 3, 4, 5]
        with pytest.raises(ClientError, match="Endpoint other of account"):
            client.invoke_endpoint(EndpointName="other", TargetModel=archives[0], Body=b"")
        with pytest.raises(client.exceptions.ModelError, match="client error"):
            client.invoke_endpoint(EndpointName="rehearsal", TargetModel=archives[0], Body=b"{}")
        capsys.readouterr()
        mme("invoke", "rehearsal", "--local", url, "--target", archives[1], "--json", json.dumps(models.ONE))
        assert models.y(json.loads(capsys.readouterr().out)) == [2, 3, 4, 5]
        mme("models", "--url", url)
        shown = capsys.readouterr()
        assert f"{url} is `mme local`: its container is asked, http://127.0.0.1:" in shown.err
        assert archives[1] in shown.out
    log = (tmp_path / "local.log").read_text()
    assert f"unloaded {archives[0]}: the container had no memory" in log
    assert log.count(f"loaded {archives[0]}: download") == 2

    mme("delete", "rehearsal", "--yes")
    assert sagemaker.list_endpoints(NameContains="rehearsal")["Endpoints"] == []
    left = sagemaker.list_models()["Models"]  # other tests' as well: moto looks at no name here
    assert not [model for model in left if "rehearsal" in model["ModelName"]]
    assert len(s3.list_objects_v2(Bucket=bucket, Prefix="models/")["Contents"]) == 9, "archives stay"
    for each in (iam, sagemaker):
        each.close()


def test_an_endpoint_of_one_model_streams_and_answers_asynchronously(environment, s3, bucket, tmp_path, runtime):
    """By boto3's three ways to ask it."""
    archive = models.pack(models.lay_out(tmp_path / "plus", models.plus(1)), tmp_path / "plus.tar.gz")
    body = json.dumps(models.ONE)
    s3.put_object(Bucket=bucket, Key="in.json", Body=body)

    with local(tmp_path, environment, archive, "--async-output", f"s3://{bucket}/out") as url:
        client = runtime(url)
        answer = client.invoke_endpoint(EndpointName="any", Body=body, ContentType="application/json")
        assert models.y(json.load(answer["Body"])) == [2, 3, 4, 5]
        answer = client.invoke_endpoint_with_response_stream(
            EndpointName="any", Body=body, ContentType="application/json"
        )
        with closing(answer["Body"]) as events:
            whole = b"".join(event["PayloadPart"]["Bytes"] for event in events)
        assert models.y(json.loads(whole)) == [2, 3, 4, 5]
        accepted = client.invoke_endpoint_async(
            EndpointName="any", InputLocation=f"s3://{bucket}/in.json", ContentType="application/json"
        )
        key = accepted["OutputLocation"].removeprefix(f"s3://{bucket}/")

        def output():
            found = s3.list_objects_v2(Bucket=bucket, Prefix=key).get("Contents")
            return found and s3.get_object(Bucket=bucket, Key=key)["Body"].read()

        assert models.y(json.loads(eventually(output, "the answer in S3"))) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("prefix", "sentence"),
    [
        ("{}/empty", "there is no archive (*.tar.gz) in s3://"),
        pytest.param("{}-none", "does not exist: create it", marks=pytest.mark.long),
    ],
)
def test_a_prefix_without_archives_is_told_at_once(environment, bucket, tmp_path, prefix, sentence):
    """The endpoint is there all the same: archives may come later."""
    with local(tmp_path, environment, f"s3://{prefix.format(bucket)}"):
        eventually(lambda: sentence in (tmp_path / "local.log").read_text(), sentence)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("./none",), 2, "is not a directory"),
        (("./none.tar.gz",), 1, "is not in the store"),
        ((".", "--emulate-platform", "no-such-command"), 2, "is it installed?"),
        ((".", "--emulate-platform", "false"), 1, "ended with exit code 1 before it was healthy"),
        ((".", "--emulate-platform", "http://127.0.0.1:9", "--startup-seconds", "0"), 1, "is not healthy after 0 s"),
        ((".", "--env", "X"), 2, "is not NAME=VALUE"),
    ],
)
def test_endpoints_that_do_not_start(tmp_path, monkeypatch, capsys, arguments, code, sentence):
    """One sentence, and nothing runs on."""
    monkeypatch.chdir(tmp_path)

    assert main.main(["local", *arguments, "--port", "0"]) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "arguments", "seconds"),
    [
        ({}, (), None),
        ({}, ("--async-output", "s3://bucket/answers"), "3600"),
        ({"MME_REQUEST_TIMEOUT": "90"}, ("--async-output", "s3://bucket/answers"), "90"),
        ({}, ("--async-output", "s3://bucket/answers", "--env", "MME_REQUEST_TIMEOUT=80"), "80"),
    ],
)
def test_the_container_of_an_asynchronous_endpoint_has_an_hour_for_a_request(
    tmp_path, monkeypatch, ours, arguments, seconds
):
    """As on the one that `mme deploy` makes, unless somebody says otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MME_REQUEST_TIMEOUT", raising=False)
    for name, text in ours.items():
        monkeypatch.setenv(name, text)
    (tmp_path / "tell.py").write_text("import json, os; json.dump(dict(os.environ), open('told', 'w'))")

    main.main(["local", ".", "--emulate-platform", f"{sys.executable} tell.py", "--port", "0", *arguments])

    assert json.loads((tmp_path / "told").read_text()).get("MME_REQUEST_TIMEOUT") == seconds


HEALTHY = """
import http.server
import sys


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_a_port_that_is_taken(tmp_path, monkeypatch, capsys):
    """One sentence, and the container is ended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthy.py").write_text(HEALTHY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        assert (
            main.main(["local", ".", "--emulate-platform", f"{sys.executable} healthy.py {{port}}", "--port", port])
            == 2
        )
    captured = capsys.readouterr()
    assert f"at 127.0.0.1:{port}: Address already in use; choose another --port" in captured.err
    assert captured.out == ""
