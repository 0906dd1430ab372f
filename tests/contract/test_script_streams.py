"""Scripts whose answers are written piece by piece, behind a real server."""

from __future__ import annotations

import contextlib
import http.client
import json

import botocore.exceptions
import pytest

from tests.contract import scripts
from tests.contract.server import Server, eventually, post


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of one such script."""
    folder = scripts.lay_out(tmp_path_factory.mktemp("streams") / "model", scripts.STREAMS)
    with Server(tmp_path_factory.mktemp("server"), {"MME_MODEL_DIR": str(folder)}) as server:
        yield server


@pytest.fixture
def connection(server):
    """A connection of http.client's."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    yield connection
    connection.close()


def told(**what):
    """A body that tells the script what to do."""
    return json.dumps(what).encode()


def test_a_piece_arrives_before_the_next_is_written(connection, tmp_path):
    """Over /invocations, in chunks, with the content type that the generator said."""
    file = tmp_path / "go on"
    connection.request("POST", "/invocations", told(pieces=3, wait_at=1, file=str(file)))
    response = connection.getresponse()

    assert (response.status, response.headers["Content-Type"]) == (200, "text/x-pieces")
    assert response.headers["Transfer-Encoding"] == "chunked"
    assert response.read(len(b"piece 0;")) == b"piece 0;"
    file.touch()
    assert response.read() == b"piece 1;piece 2;"


def test_no_piece_at_all_is_an_empty_answer(server):
    """With the content type that the generator said."""
    answer = server.ask("POST", "/invocations", told(pieces=0))

    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"] == "text/x-pieces"


def test_a_failure_before_the_first_piece_is_an_error(server):
    """With its status and its words."""
    answer = server.ask("POST", "/invocations", told(pieces=3, fail_at=0))

    assert answer.status == 500
    assert "ValueError: in the middle" in answer.error


def test_a_failure_later_leaves_the_body_unfinished(connection, server):
    """What has arrived stays, and the client sees that it is not all; the next request is answered."""
    connection.request("POST", "/invocations", told(pieces=3, fail_at=2))
    response = connection.getresponse()

    with pytest.raises(http.client.IncompleteRead) as caught:
        response.read()
    assert caught.value.partial == b"piece 0;piece 1;"
    assert server.ask("POST", "/invocations", told(pieces=1)).body == b"piece 0;"


def test_boto3_gets_an_event_for_each_piece(server, runtime):
    """invoke_endpoint_with_response_stream; invoke_endpoint gets them all at once."""
    client = runtime(server)

    streamed = client.invoke_endpoint_with_response_stream(EndpointName="e", Body=told(pieces=3))
    assert streamed["ContentType"] == "text/x-pieces"
    parts = [event["PayloadPart"]["Bytes"] for event in streamed["Body"]]
    assert parts == [b"piece 0;", b"piece 1;", b"piece 2;"]
    whole = client.invoke_endpoint(EndpointName="e", Body=told(pieces=3))
    assert whole["Body"].read() == b"piece 0;piece 1;piece 2;"


def test_boto3_is_told_of_a_failure_in_the_middle(server, runtime):
    """As the error that ends an event stream."""
    streamed = runtime(server).invoke_endpoint_with_response_stream(EndpointName="e", Body=told(pieces=3, fail_at=1))

    with (
        contextlib.closing(streamed["Body"]) as events,
        pytest.raises(botocore.exceptions.EventStreamError, match="in the middle"),
    ):
        list(events)


def test_a_client_that_leaves_ends_the_generator(server, tmp_path):
    """Its `finally` runs, though it had more to write than anybody would wait for."""
    left = tmp_path / "left"
    connection = server.connect()
    connection.send(post("/invocations", told(pieces=1_000_000, pause=0.005, left=str(left))))
    eventually(lambda: connection.socket.recv(4096), "the first pieces")
    connection.reset()

    eventually(left.exists, "the end of the generator")
    assert server.ask("POST", "/invocations", told(pieces=1)).body == b"piece 0;"


def test_a_route_of_one_answer_refuses_the_model(server):
    """KServe's infer can't carry what may come in pieces, and says which routes can."""
    body = list(told(pieces=1))
    request = {"inputs": [{"name": "BODY", "shape": [len(body)], "datatype": "UINT8", "data": body}]}

    answer = server.ask("POST", "/v2/models/model/infer", request)

    assert answer.status == 501
    assert "/invocations" in answer.error
