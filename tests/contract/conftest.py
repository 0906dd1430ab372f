"""What the contract tests share: an S3 on loopback, one that can be made to wait, and servers."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config

from tests.aws import moto_server
from tests.contract.forked import Forker
from tests.contract.gate import Gate
from tests.contract.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CREDENTIALS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


def pytest_collection_modifyitems(items):
    """Each of these needs a server."""
    for item in items:
        if item.nodeid.startswith("tests/contract/"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def forker() -> Iterator[Forker]:
    """Who begins servers, but those of tests that want `begun_by_exec`."""
    with Forker() as forker:
        Server.forker = forker
        yield forker
        Server.forker = None


@pytest.fixture(scope="module")
def begun_by_exec() -> Iterator[None]:
    """Servers of this module are begun as people begin them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "forker", None)
        yield


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The endpoint of an S3 server."""
    with moto_server() as url:
        yield url


@pytest.fixture(scope="session")
def s3(s3_url):
    """A client to fill buckets with."""
    client = boto3.client("s3", endpoint_url=s3_url, **_CREDENTIALS)
    yield client
    client.close()


@pytest.fixture(scope="module")
def bucket(s3) -> str:
    """The name of a new bucket."""
    name = f"models-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="module")
def gate(s3_url) -> Iterator[Gate]:
    """An S3 endpoint before the other one, whose downloads wait when they are told to."""
    with Gate(s3_url) as gate:
        yield gate


@pytest.fixture(scope="session")
def aws() -> Callable[[str], dict[str, str]]:
    """The environment of a process whose S3 is at that endpoint."""

    def environment(endpoint: str) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    return environment


@pytest.fixture(scope="session")
def runtime() -> Iterator[Callable[[Server], object]]:
    """Plain boto3 clients of the SageMaker Runtime, each for one server."""
    with ExitStack() as open_clients:

        def client(server: Server) -> object:
            made = boto3.client(
                "sagemaker-runtime",
                endpoint_url=server.url,
                config=Config(retries={"total_max_attempts": 1}, max_pool_connections=60),
                **_CREDENTIALS,
            )
            open_clients.callback(made.close)
            return made

        yield client


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., Server]]:
    """A function that starts a server for one test."""
    with ExitStack() as running:

        def start(environ: dict[str, str], **options) -> Server:
            return running.enter_context(Server(tmp_path / f"server-{uuid.uuid4().hex[:6]}", environ, **options))

        yield start
