"""Secrets of clients and operators, put in every place where one can stand, are in no line of the log at any level."""

from __future__ import annotations

import itertools
import json
import logging

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from tests.aws import moto_server
from tests.contract import models
from tests.contract.server import Server

pytestmark = pytest.mark.slow

SECRET = "s3cr3t"
FAILS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        raise RuntimeError("it failed")
"""
CONFIG = """
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
"""
FLAGS = f"""
--log-verbose=1 --allow-grpc=true --grpc-port=0
--http-restricted-api=model-repository:admin-key={SECRET}-http-key
--grpc-restricted-protocol=model-repository:admin-key={SECRET}-grpc-key
--http-header-forward-pattern=.* --grpc-header-forward-pattern=.*
"""


def numbered():
    """Secrets, each another one, so that a line that tells one says which."""
    return (f"{SECRET}-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that logs all that it can, of a store in S3, with secrets in its environment and its flags."""
    folder = tmp_path_factory.mktemp("secrets")
    with moto_server() as s3:
        environ = {
            "MME_MODEL_STORE": "s3://no-such-bucket/models",
            "AWS_ENDPOINT_URL_S3": s3,
            "AWS_ACCESS_KEY_ID": f"{SECRET}-id",
            "AWS_SECRET_ACCESS_KEY": f"{SECRET}-key",
            "AWS_SESSION_TOKEN": f"{SECRET}-token",
            "AWS_DEFAULT_REGION": "us-east-1",
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={SECRET}-otlp",
            "SAGEMAKER_TRITON_ADDITIONAL_ARGS": FLAGS.replace("\n", " "),
        }
        with Server(folder / "server", environ, ready=False) as server:
            yield server


@pytest.fixture(scope="module")
def repository_server(tmp_path_factory):
    """The same, of a repository with a model that fails and one that does not."""
    folder = tmp_path_factory.mktemp("secrets")
    models.lay_out(folder / "models/plus", models.plus(1), CONFIG)
    models.lay_out(folder / "models/fails", FAILS, CONFIG + '\nbackend: "python"')
    environ = {
        "MME_MODEL_REPOSITORY": str(folder / "models"),
        "MME_PING_MODE": "ready",
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS": FLAGS.replace("\n", " "),
    }
    with Server(folder / "server", environ) as server:
        yield server


def headers():
    """Every header that carries a secret."""
    secrets = numbered()
    names = (
        "Authorization",
        "Proxy-Authorization",
        "Cookie",
        "X-Amz-Security-Token",
        "X-Api-Key",
        "admin-key",
        "X-Amzn-SageMaker-Custom-Attributes",
        "X-Amzn-SageMaker-Session-Id",
    )
    return {name: next(secrets) for name in names}


def test_over_http_and_in_targets(repository_server):
    """Headers, queries and bodies of requests that succeed, fail, are refused and are no requests at all."""
    body = json.dumps({**models.ONE, "id": f"{SECRET}-id", "parameters": {"token": f"{SECRET}-parameter"}}).encode()
    for target in ("/v2/models/plus/infer", "/v2/models/fails/infer", "/v2/models/none/infer", "/invocations"):
        repository_server.ask("POST", f"{target}?X-Amz-Signature={SECRET}-query", body, **headers())
    for method, target in (("POST", "/v2/repository/models/plus/load"), ("GET", "/nowhere"), ("PUT", "/models/x")):
        repository_server.ask(method, f"{target}?token={SECRET}-query", b"{}", **headers())
    with repository_server.connect() as connection:
        connection.send(
            f"GET /ping HTTP/1.1\r\nHost: t\r\nAuthorization: {SECRET}\r\nbad header: {SECRET}\r\n\r\n".encode()
        )
        connection.answer()

    assert SECRET not in repository_server.log


def test_over_grpc(repository_server):
    """Metadata of calls that succeed, fail and are refused: the library that reads it tells of each field."""
    with InferenceServerClient(repository_server.grpc_address) as client:
        x = InferInput("X", [1, 4], "FP32")
        x.set_data_from_numpy(np.ones((1, 4), np.float32))
        metadata = {name.lower(): value for name, value in headers().items()}
        metadata["triton-grpc-protocol-admin-key"] = f"{SECRET}-wrong"
        client.infer("plus", [x], headers=metadata)
        for call in (
            lambda: client.infer("fails", [x], headers=metadata),
            lambda: client.infer("none", [x], headers=metadata),
            lambda: client.load_model("plus", headers=metadata),
        ):
            with pytest.raises(Exception, match=r"failed|not found|restricted"):
                call()
    with grpc.insecure_channel(repository_server.grpc_address) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/no.Service/Method")(b"", metadata=(("authorization", SECRET),), timeout=10)

    assert SECRET not in repository_server.log


def test_of_the_operator(server):
    """Credentials of S3, keys of restricted parts and of traces: none is logged at start or where S3 refuses."""
    answer = server.ask("POST", "/invocations", b"{}", **{"X-Amzn-SageMaker-Target-Model": "m.tar.gz"})

    assert answer.status >= 400
    assert SECRET.encode() not in answer.body
    assert SECRET not in server.log


def test_only_our_own_loggers_are_heard_below_info(repository_server):
    """By what the log says of itself: libraries tell of requests and their headers at debug level."""
    repository_server.ask("POST", "/v2/models/fails/infer", json.dumps(models.ONE).encode())
    lines = [json.loads(line) for line in repository_server.log.splitlines() if line.startswith("{")]
    below = {line["logger"] for line in lines if logging.getLevelNamesMapping()[line["level"].upper()] < logging.INFO}

    assert all(name == "gunicorn.error" or name.startswith("mme.") for name in below)
