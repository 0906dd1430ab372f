"""AWS as moto plays it, in the environment of the commands, and the commands as people run them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace

import boto3
import botocore.session
import pytest
from moto.backends import get_backend

from container.cli import main
from tests.aws import moto_server

ACCOUNT = "123456789012"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/mme:1"


@pytest.fixture(scope="module")
def aws_url():
    """A server that plays AWS."""
    with moto_server() as url:
        yield url


def core_session(loader):
    """What a session of boto3's is made of, with what was read before of its services' models."""
    core = botocore.session.get_session()
    core.register_component("data_loader", loader)
    return core


class Account:
    """An account with clients of one's own."""

    def __init__(self, url, loader):
        self._url = url
        self._clients = {}
        self._session = boto3.session.Session(botocore_session=core_session(loader))

    def client(self, service):
        """A client, always the same one."""
        if service not in self._clients:
            self._clients[service] = self._session.client(
                service, endpoint_url=self._url, region_name="us-east-1",
                aws_access_key_id="test", aws_secret_access_key="test",
            )  # fmt: skip
        return self._clients[service]

    def backend(self, service):
        """What moto holds of a service."""
        return get_backend(service)[ACCOUNT]["us-east-1"]

    def close(self):
        """Leave."""
        for client in self._clients.values():
            client.close()


@pytest.fixture(scope="module")
def clients(aws_url, loader):
    """The account, whatever is in it."""
    account = Account(aws_url, loader)
    yield account
    account.close()


@pytest.fixture
def account(aws_url, clients, monkeypatch, tmp_path):
    """The account with a bucket called models and a role called runner, which the environment of the commands names."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": aws_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("container.ship.account.POLL_SECONDS", 0.01)
    for service in ("s3", "sagemaker", "cloudformation", "cloudwatch", "iam", "applicationautoscaling", "logs"):
        get_backend(service).reset()
    clients.client("s3").create_bucket(Bucket="models")
    clients.client("iam").create_role(RoleName="runner", AssumeRolePolicyDocument="{}")
    return clients


@dataclass
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def mme(capsys):
    """A function that runs a command."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main.main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def loader():
    """What boto3 reads of its services' models, once for all sessions: SageMaker's takes a third of a second."""
    return botocore.session.get_session().get_component("data_loader")


@pytest.fixture(autouse=True)
def handlers(monkeypatch, loader):
    """Handlers of botocore's events in the commands' sessions: (event, function) each."""
    registered = []
    make = boto3.session.Session
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    class Session(make):
        def __init__(self, **options):
            super().__init__(**{"botocore_session": core_session(loader), **options})
            for event, handler in registered:
                self.events.register(event, handler)

    monkeypatch.setattr(boto3.session, "Session", Session)
    return registered


@pytest.fixture
def answered(handlers):
    """A function that has AWS answer an operation otherwise, once boto3 has validated its parameters."""

    def answer(operation, answers, *, after=False):
        """Have `answers(parameters)` give (status, parsed answer); `operation` as in sagemaker.UpdateEndpoint."""

        def before_call(model, params, **_):
            status, parsed = answers(params["body"])
            parsed.setdefault("ResponseMetadata", {"HTTPStatusCode": status})
            return SimpleNamespace(status_code=status), parsed

        def after_call(**_):
            answers(None)

        handlers.append((f"after-call.{operation}", after_call) if after else (f"before-call.{operation}", before_call))

    return answer


def refusal(code, status=400, message="because"):
    """An answer for `answered`: AWS refuses."""
    return lambda _: (status, {"Error": {"Code": code, "Message": message}})
