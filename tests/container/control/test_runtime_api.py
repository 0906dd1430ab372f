"""The SageMaker Runtime API as plain boto3 sees it: a real client, a real WSGI server, a real engine."""

import io
import json
import re

import boto3
import numpy as np
import pytest
import tritonclient.http as triton
from botocore.config import Config
from botocore.exceptions import ClientError

from container.settings import Mode
from tests.serve.integrity import check_integrity

JSON = "application/json"


@pytest.fixture(scope="module")
def clients():
    """A function that makes clients which try once."""
    made = []

    def client(port):
        made.append(
            boto3.session.Session().client(
                "sagemaker-runtime",
                endpoint_url=f"http://127.0.0.1:{port}",
                region_name="us-east-1",
                aws_access_key_id="test",
                aws_secret_access_key="test",
                config=Config(retries={"total_max_attempts": 1}, read_timeout=60),
            )
        )
        return made[-1]

    yield client
    for each in made:
        each.close()


@pytest.fixture
def client(server, clients):
    """boto3 against our HTTP server."""
    return clients(server.port)


@pytest.fixture
def document(json_inputs):
    """What `twice` takes, as JSON."""
    return json.dumps({"inputs": json_inputs(X=[1, 2, 3, 4])}).encode()


def invoke(client, body, target="twice", **more):
    """InvokeEndpoint."""
    if target is not None:
        more["TargetModel"] = target
    return client.invoke_endpoint(EndpointName="demo", Body=body, **({"ContentType": JSON} | more))


def failure(function, *arguments, **options):
    """The error as boto3 raises it."""
    with pytest.raises(ClientError) as caught:
        function(*arguments, **options)
    return caught.value


def test_an_invocation_answers(client, document):
    """Body, content type, variant, custom attributes and a request id, as from SageMaker."""
    answer = invoke(client, document, CustomAttributes="trace=1", InferenceId="i-1", Accept=JSON)
    assert json.loads(answer["Body"].read())["outputs"][0]["data"] == [2, 4, 6, 8]
    assert answer["ContentType"] == JSON
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert answer["CustomAttributes"] == "trace=1"
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert re.fullmatch(r"[0-9a-f-]{36}", answer["ResponseMetadata"]["RequestId"])
    assert answer["ResponseMetadata"]["HTTPHeaders"]["server-timing"].startswith("cache;desc=")


def test_the_variant_that_is_asked_for_is_the_one_that_answers(client, document):
    """As on SageMaker; the other parameters that choose who answers are taken, and change nothing here."""
    answer = invoke(
        client, document, TargetVariant="Blue", TargetContainerHostname="first", EnableExplanations="`true`"
    )
    assert json.loads(answer["Body"].read())["outputs"][0]["data"] == [2, 4, 6, 8]
    assert answer["InvokedProductionVariant"] == "Blue"


def test_binary_tensors_go_both_ways(client):
    """With the bodies that tritonclient makes and the content type that Triton's users send."""
    tensor = triton.InferInput("X", [4], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2, 3, 4], np.float32), binary_data=True)
    wanted = triton.InferRequestedOutput("Y", binary_data=True)
    body, length = triton.InferenceServerClient.generate_request_body([tensor], outputs=[wanted])
    media_type = "application/vnd.sagemaker-triton.binary+json;json-header-size="

    answer = invoke(client, body, ContentType=f"{media_type}{length}")

    assert answer["ContentType"].startswith(media_type)
    result = triton.InferenceServerClient.parse_response_body(
        answer["Body"].read(), header_length=int(answer["ContentType"][len(media_type) :])
    )
    assert result.as_numpy("Y").tolist() == [2, 4, 6, 8]


def test_accept_asks_for_binary_data(client, document):
    """A client that sends JSON may ask for binary data by the parameter made for it."""
    answer = invoke(client, document, Accept="application/vnd.sagemaker-triton.binary+json")
    length = int(answer["ContentType"].rpartition("=")[2])
    assert np.frombuffer(answer["Body"].read()[length:], "<f4").tolist() == [2, 4, 6, 8]


def test_bodies_may_be_streams_and_need_no_content_type(client, document):
    """Whatever boto3 takes as a body; without a content type it is JSON."""
    answer = client.invoke_endpoint(EndpointName="demo", TargetModel="twice", Body=io.BytesIO(document))
    assert json.loads(answer["Body"].read())["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("broken", 400, "can't load model 'broken'"),
        ("fails", 500, "ONNX Runtime failed while running model 'fails'"),
        ("arithmetic", 400, "for model 'arithmetic'"),
    ],
)
def test_what_the_model_answers_with_an_error_is_a_model_error(target, status, words, client, document):
    """424 with the container's own status and body; a class of its own in boto3."""
    error = failure(invoke, client, document, target)
    assert isinstance(error, client.exceptions.ModelError)
    response = error.response
    assert response["Error"]["Code"] == "ModelError"
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert response["OriginalStatusCode"] == status
    assert words in json.loads(response["OriginalMessage"])["error"]
    kind = "server" if status >= 500 else "client"
    assert response["Error"]["Message"].startswith(f"Received {kind} error ({status}) from model with message")
    assert response["LogStreamArn"] == ""
    assert response["ResponseMetadata"]["RequestId"]


def test_no_json_is_the_models_error_too(client):
    """As on SageMaker, where the container would have said so."""
    error = failure(invoke, client, b"no json", CustomAttributes="trace=1")
    assert error.response["OriginalStatusCode"] == 400
    assert error.response["ResponseMetadata"]["HTTPHeaders"]["x-amzn-sagemaker-custom-attributes"] == "trace=1"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nobody.tar.gz", "'nobody.tar.gz' is not found"),
        (None, "TargetModel in boto3"),
        ("../x", "'../x' is not found"),
    ],
)
def test_an_unknown_or_missing_target_is_a_validation_error(target, words, client, document):
    """400, which no client tries again."""
    error = failure(invoke, client, document, target)
    assert error.response["Error"]["Code"] == "ValidationError"
    assert words in error.response["Error"]["Message"]
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_other_operations_are_refused_in_boto3s_own_form(client):
    """Async invocations."""
    later = failure(client.invoke_endpoint_async, EndpointName="demo", InputLocation="s3://b/k")

    assert later.response["Error"]["Code"] == "ValidationError"
    assert "endpoint 'demo' offers no async invocation" in later.response["Error"]["Message"]


def test_a_stream_without_a_model_is_refused(client):
    """That API has no TargetModel: an endpoint of many models can't know whom it is for."""
    error = failure(client.invoke_endpoint_with_response_stream, EndpointName="demo", Body=b"x")

    assert error.response["Error"]["Code"] == "ValidationError"
    assert "name one in the header" in error.response["Error"]["Message"]


async def loaded(engine, name):
    """Wait until the model is in memory."""
    async with engine.leased(name):
        pass


@pytest.mark.parametrize("raw", [False, True])
def test_a_load_that_takes_longer_than_the_client_may_wait_is_not_ready(raw, start, repository, clients, document):
    """429 after the patience, the load goes on, and the next try finds the model."""
    running = start(
        mode=Mode.REPOSITORY, model_repository=repository, load_models=("arithmetic",), request_timeout=0.05
    )
    client = clients(running.port)
    more = {"ContentType": "application/vnd.sagemaker-triton.binary+json;json-header-size=0"} if raw else {}
    with running.loads_held_up():
        error = failure(invoke, client, bytes(16) if raw else document, CustomAttributes="trace=1", **more)
        assert isinstance(error, client.exceptions.ModelNotReadyException)
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 429
        assert "'twice' is still being downloaded or loaded" in error.response["Error"]["Message"]
        assert error.response["ResponseMetadata"]["HTTPHeaders"]["x-amzn-sagemaker-custom-attributes"] == "trace=1"
        assert running.http("GET", "/ping").status == 200
    running.on_loop.run(loaded(running.engine, "twice"))
    assert invoke(client, bytes(16) if raw else document, **more)["Body"].read()
    running.on_loop.call(check_integrity, running.engine.cache)
    assert running.on_loop.call(lambda: running.engine.cache.entries["twice"].leases) == 0


def test_what_is_not_available_now_is_service_unavailable(start, repository, clients, document):
    """503, which boto3 tries again on its own: here a load that takes longer than loads may take."""
    running = start(
        mode=Mode.REPOSITORY,
        model_repository=repository,
        load_models=("arithmetic",),
        request_timeout=10,
        load_timeout=0.05,
    )
    client = clients(running.port)
    with running.loads_held_up():
        error = failure(invoke, client, document)
    assert error.response["Error"]["Code"] == "ServiceUnavailable"
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert "model 'twice' did not load within" in error.response["Error"]["Message"]


def test_too_little_memory_is_a_model_error_with_507_in_it(start, repository, clients, document):
    """boto3 never sees a raw 507, which it would not understand."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",), memory_budget=1)
    error = failure(invoke, clients(running.port), document)
    assert error.response["Error"]["Code"] == "ModelError"
    assert error.response["OriginalStatusCode"] == 507
