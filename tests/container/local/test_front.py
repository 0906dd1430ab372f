"""What boto3 sees of an endpoint beside its models: checks, streams, throttling, asynchronous invocations."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import queue
import time
import urllib.error
import urllib.request

import boto3
import pytest
from botocore.exceptions import ClientError, EventStreamError

from container.cli import main
from container.local.async_invocations import AsyncInvocations
from container.local.container import RuntimeApiError
from container.local.front import Front, Throttle
from model_handlers.errors import MmeError
from tests.waiting import PATIENCE

LINES = b'{"n": 1}\n{"n": 2}\n'


def refusal(call, **parameters):
    """The error of a call: its code and message."""
    with pytest.raises(ClientError) as caught:
        call(**parameters)
    return caught.value.response["Error"]["Code"], caught.value.response["Error"]["Message"]


@pytest.mark.parametrize(
    ("multi", "parameters", "sentence"),
    [
        (
            True,
            {"EndpointName": "other", "TargetModel": "a.tar.gz"},
            "Endpoint other of account 000000000000 not found",
        ),
        (True, {"EndpointName": "mine"}, "missing a target model header"),
        (False, {"EndpointName": "mine", "TargetModel": "a.tar.gz"}, "is not a multi-model endpoint"),
        (False, {"EndpointName": "mine", "Body": bytes(25_000_001)}, "25000000 at most"),
    ],
)
def test_sagemakers_own_checks(start, multi, parameters, sentence):
    """A request that SageMaker refuses does not reach the container."""
    client = start(name="mine", multi=multi)
    code, message = refusal(client.invoke_endpoint, **{"Body": b"", **parameters})

    assert code == "ValidationError"
    assert sentence in message


def test_what_makes_endpoints_is_told_that_one_is_there(start):
    """A client of SageMaker's control plane that was pointed here."""
    url = start(name="mine", multi=True).meta.endpoint_url
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    client = boto3.client("sagemaker", endpoint_url=url, region_name="us-east-1", **keys)
    with contextlib.closing(client):
        code, message = refusal(client.describe_endpoint, EndpointName="mine")

    assert code == "ValidationException"
    assert "DescribeEndpoint is for the client 'sagemaker'" in message


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=str,
)
def test_pages_of_other_sites_are_refused(start, headers):
    """And names that lead here: an asynchronous invocation reads what the developer may read in S3."""
    url = f"{start(name='mine').meta.endpoint_url}/endpoints/mine/async-invocations"

    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, data=b"{}", headers=headers))

    with caught.value as answer:
        assert (answer.status, "MME_ALLOWED_HOSTS" in json.load(answer)["error"]) == (403, True)


def test_a_port_that_is_taken_is_told(start):
    """And how to say another."""
    port = start().meta.endpoint_url.rpartition(":")[2]

    async def listen():
        async with Front(None, None, None).listening("127.0.0.1", int(port)):
            pytest.fail("two listen at one port")

    with pytest.raises(MmeError, match="choose another --port, 0 takes a free one"):
        asyncio.run(listen())


def test_who_asks_a_container_is_told_what_is_asked_here(start):
    """By curl, as a server of one's own is asked."""
    url = f"{start(name='mine').meta.endpoint_url}/invocations"

    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, data=b"{}")

    with caught.value as answer:
        assert "an endpoint is asked at /endpoints/NAME/invocations" in json.load(answer)["Message"]


def test_one_model_is_invoked_as_it_is(start, contract):
    """Headers that SageMaker lets through arrive, others do not; custom attributes come back."""
    client = start(name="mine", multi=False)
    answer = client.invoke_endpoint(
        EndpointName="mine", Body=b"x", ContentType="text/csv", Accept="a/b", CustomAttributes="c", InferenceId="7"
    )

    assert answer["Body"].read() == LINES
    assert (answer["ContentType"], answer["InvokedProductionVariant"]) == ("application/jsonlines", "AllTraffic")
    ((_, headers),) = contract.seen
    sent = {name.lower(): value for name, value in headers.items()}
    assert (sent["content-type"], sent["accept"]) == ("text/csv", "a/b")
    assert sent["x-amzn-sagemaker-custom-attributes"] == "c"
    blue = client.invoke_endpoint(EndpointName="mine", Body=b"x", TargetVariant="Blue")
    assert blue["InvokedProductionVariant"] == "Blue"
    assert "authorization" not in sent


def test_sessions_are_the_containers(start, contract):
    """Its header comes back as boto3 knows it, and a session's id reaches it."""
    client = start(multi=False)
    answer = client.invoke_endpoint(EndpointName="any", Body=b"x", SessionId="NEW_SESSION")
    assert answer["Body"].read() == LINES
    assert answer["NewSessionId"].startswith("7; Expires=")

    client.invoke_endpoint(EndpointName="any", Body=b"x", SessionId="7")["Body"].read()
    assert contract.seen[-1][1]["X-Amzn-SageMaker-Session-Id"] == "7"


def test_an_answer_streams(start):
    """As an event stream; one that breaks off ends in boto3's error for that."""
    client = start(multi=False)

    def parts(body):
        answer = client.invoke_endpoint_with_response_stream(EndpointName="any", Body=body)
        assert answer["ContentType"] == "application/jsonlines"
        with contextlib.closing(answer["Body"]) as events:
            for event in events:
                yield event["PayloadPart"]["Bytes"]

    assert b"".join(parts(b"x")) == LINES
    with pytest.raises(EventStreamError, match="ModelStreamError"):
        collections.deque(parts(b"break"))
    call = client.invoke_endpoint_with_response_stream
    assert refusal(call, EndpointName="any", Body=b"fail")[0] == "ModelError"


def test_throttling(start):
    """Requests beyond the rate get the error that boto3 retries."""
    client = start(rate=0.001, multi=False)
    client.invoke_endpoint(EndpointName="any", Body=b"x")["Body"].read()

    assert refusal(client.invoke_endpoint, EndpointName="any", Body=b"x") == ("ThrottlingException", "Rate exceeded")


def test_a_throttle_fills_up_again():
    """By its rate, to its rate, and a rate of 0 throttles nobody."""
    throttle = Throttle(2.0, now=0.0)

    assert [throttle.admits(now) for now in (0.0, 0.0, 0.0, 0.5, 0.5, 9.0, 9.0, 9.0)] == [
        True, True, False, True, False, True, True, False,
    ]  # fmt: skip
    assert all(Throttle(0.0, 0.0).admits(0.0) for _ in range(9))


def test_asynchronous_invocations_read_and_write_s3(start, s3):
    """Accepted at once; the answer, or the error, is an object where the answer to the call says."""
    told = []
    client = start(
        multi=False, background=lambda endpoint: AsyncInvocations(endpoint, s3, "s3://models/out", "", 1, told.append)
    )
    locations = []
    for body in (b"x", b"fail"):
        s3.put_object(Bucket="models", Key="in", Body=body)
        answer = client.invoke_endpoint_async(EndpointName="any", InputLocation="s3://models/in", InferenceId="7")
        assert answer["InferenceId"] == "7"
        locations.append((answer["OutputLocation"], answer["FailureLocation"]))
        deadline = time.monotonic() + PATIENCE
        while len(told) < len(locations):
            assert time.monotonic() < deadline
            refusal(client.invoke_endpoint, EndpointName="any", Body=b"fail")
    s3.put_object(Bucket="models", Key="in", Body=b"x")

    def content(uri):
        return s3.get_object(Bucket="models", Key=uri.removeprefix("s3://models/"))["Body"].read()

    assert content(locations[0][0]) == LINES
    assert json.loads(content(locations[1][1])) == {"error": '{"error": "it broke"}'}


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("InputLocation", "file.json", "InputLocation 'file.json' is not an s3:// URI"),
        ("InputLocation", "s3:///in", "InputLocation 's3:///in' is not an s3:// URI"),
        ("RequestTTLSeconds", "soon", "RequestTTLSeconds 'soon' is not a number of seconds"),
        ("InvocationTimeoutSeconds", "-1", "InvocationTimeoutSeconds '-1' is not a number of seconds"),
        ("InvocationTimeoutSeconds", "nan", "InvocationTimeoutSeconds 'nan' is not a number of seconds"),
    ],
)
def test_an_asynchronous_invocation_that_can_never_be_made_is_refused(name, value, sentence):
    """At once, rather than accepted and never heard of again."""
    background = AsyncInvocations(None, None, "s3://models/out", "", 1, pytest.fail)
    asked = {"InputLocation": "s3://models/in", name: value}
    headers = {f"x-amzn-sagemaker-{key}".lower(): text for key, text in asked.items()}
    with pytest.raises(RuntimeApiError) as caught:
        background.accept("", headers)

    assert (caught.value.name, caught.value.message) == ("ValidationError", sentence)


def test_an_asynchronous_invocation_whose_end_can_be_written_nowhere_is_told(start, s3):
    """To whoever looks at the terminal: what went wrong first, and why its client will never know."""
    told = queue.Queue()
    s3.put_object(Bucket="models", Key="in", Body=b"x")
    client = start(multi=False, background=lambda endpoint: AsyncInvocations(endpoint, s3, "out", "", 1, told.put))
    client.invoke_endpoint_async(EndpointName="any", InputLocation="s3://models/in", InferenceId="7")

    failed, lost = told.get(timeout=60), told.get(timeout=60)
    assert failed.startswith("async 7: failed, 'out/")
    assert lost.startswith("async 7: out/")
    assert "is not a place in S3: write s3://bucket/prefix" in lost


def test_an_endpoint_without_an_output_takes_no_asynchronous_invocations(start):
    """And says which flag is missing."""
    code, message = refusal(start(multi=False).invoke_endpoint_async, EndpointName="any", InputLocation="s3://b/k")

    assert code == "ValidationError"
    assert "--async-output" in message


@pytest.mark.parametrize("command", [("invoke", "--url"), ("bench",)])
@pytest.mark.parametrize("name", ["", "mine"])
def test_clients_of_plain_http_are_told_what_it_is(start, capsys, command, name):
    """`mme invoke` and `mme bench` that are given its URL alone ask through boto3, by the one name that it answers to."""
    client = start(name=name)
    levels = ("--concurrency", "1", "--seconds", "0.1") if command == ("bench",) else ()
    code = main.main([*command, client.meta.endpoint_url, "--target", "a.tar.gz", "--json", "{}", *levels])

    told = capsys.readouterr()
    assert code == 0, told.err
    assert "is `mme local`, which speaks the Runtime API: asked through boto3, as by --local" in told.err
