"""SageMaker's stateful sessions through boto3: each is a sequence to its model, for as long as it lasts."""

from __future__ import annotations

import json
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError

from tests.contract import scripts
from tests.contract.models import lay_out
from tests.contract.sequence_models import CONTROLS, IMPLICIT, ONE, PYTHON, TENSORS, accumulator
from tests.contract.server import Server, eventually, post

EXPIRES = r"; Expires=\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"
NEW = {"requestType": "NEW_SESSION"}
CLOSE = {"requestType": "CLOSE"}
SCRIPT = """
import json

def model_fn(model_dir, context):
    return {}

def transform_fn(heard, body, content_type, accept, context):
    session = context.get_request_header(0, "X-Amzn-SageMaker-Session-Id")
    heard.setdefault(session, []).append(json.loads(body))
    return json.dumps(heard[session]), "application/json"
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """`one` has a place for one sequence, which may be silent for 0.2 s; `python` is told ids as texts."""
    root = tmp_path_factory.mktemp("repository")
    one = "instance_group { count: 1 kind: KIND_CPU }\n"
    lay_out(
        root / "one",
        accumulator(),
        f"{one}sequence_batching {{ oldest {{ max_candidate_sequences: 1 }} {CONTROLS % 'TYPE_UINT64'} {IMPLICIT % ''} "
        "max_sequence_idle_microseconds: 200000 }",
    )
    lay_out(
        root / "python",
        PYTHON,
        f'backend: "python"\nmax_batch_size: 4\n{TENSORS}{one}sequence_batching {{ {CONTROLS % "TYPE_STRING"} }}',
    )
    scripts.lay_out(root / "script", textwrap.dedent(SCRIPT))
    lay_out(
        root / "whole",
        None,
        f'platform: "ensemble"\nmax_batch_size: 1\n{ONE}ensemble_scheduling {{ step {{ model_name: "one" '
        'input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }',
    )
    return root


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory):
    """A server whose sessions last."""
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_PING_MODE": "ready", "MME_MEMORY_BUDGET": "2GiB"}
    with Server(tmp_path_factory.mktemp("server"), environ) as server:
        yield server


def body(value, **parameters):
    """A request of one number."""
    return {
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [value]}],
        "outputs": [{"name": "Y"}],
        "parameters": parameters,
    }


@pytest.fixture
def invoke(server, runtime):
    """A function that invokes a model in a session, by boto3: the answer, and the document in it."""
    return invoking(runtime(server))


def invoking(client):
    """See `invoke`."""

    def call(model, document, session, **options):
        answer = client.invoke_endpoint(
            EndpointName="e",
            TargetModel=model,
            SessionId=session,
            ContentType="application/json",
            Body=json.dumps(document),
            **options,
        )
        return answer, json.loads(answer["Body"].read())

    return call


def total(answered):
    """The sum that a model answered."""
    return answered[1]["outputs"][0]["data"][0]


def begun(answered):
    """The id of the session that an answer tells of."""
    said = answered[0]["NewSessionId"]
    assert re.fullmatch(r"\d+" + EXPIRES, said)
    return said.partition(";")[0]


def refused(invoke, *args):
    """Why a request of a session is refused, as boto3 tells it."""
    with pytest.raises(ClientError) as caught:
        invoke(*args)
    response = caught.value.response
    assert (response["Error"]["Code"], response["OriginalStatusCode"]) == ("ModelError", 400)
    return json.loads(response["OriginalMessage"])["error"]


@pytest.mark.parametrize("model", ["one", "python", "whole"])
def test_a_session_is_a_sequence(invoke, model):
    """Its first request begins it; what the model keeps is there for the next ones, and gone with the session."""
    session = begun(first := invoke(model, body(1), "NEW_SESSION"))
    assert total(first) == 1
    assert [total(invoke(model, body(value), session)) for value in (2, 3)] == [3, 6]
    answer, document = invoke(model, CLOSE, session)
    assert (answer["ClosedSessionId"], document) == (session, {"sessionId": session})
    assert "begin another with NEW_SESSION" in refused(invoke, model, body(1), session)


def test_a_session_may_be_created_before_its_first_request(invoke):
    """By a body that says nothing else."""
    session = begun(created := invoke("one", NEW, "NEW_SESSION"))
    assert created[1] == {"sessionId": session}
    assert [total(invoke("one", body(value), session)) for value in (2, 3)] == [2, 5]
    invoke("one", CLOSE, session)


def test_a_script_is_told_whose_session_it_is(invoke):
    """As a header of the request, which its context has."""
    session = begun(first := invoke("script", {"a": 1}, "NEW_SESSION"))
    assert first[1] == [{"a": 1}]
    assert invoke("script", {"b": 2}, session)[1] == [{"a": 1}, {"b": 2}]
    assert invoke("script", CLOSE, session)[1] == {"sessionId": session}


def test_a_request_may_be_the_last_one(invoke):
    """It says so as in any sequence."""
    session = begun(invoke("one", body(1), "NEW_SESSION"))
    last = invoke("one", body(2, sequence_end=True), session)
    assert (total(last), last[0]["ClosedSessionId"]) == (3, session)
    assert "begin another" in refused(invoke, "one", body(1), session)


def test_both_headers_tell_of_a_new_session(server):
    """Of Amazon's containers some send one and some the other."""
    answer = server.ask(
        "POST",
        "/invocations",
        body(1, sequence_end=True),
        X_Amzn_SageMaker_Target_Model="one",
        X_Amzn_SageMaker_Session_Id="NEW_SESSION",
    )

    new = answer.headers["x-amzn-sagemaker-new-session-id"]
    assert re.fullmatch(r"\d+" + EXPIRES, new)
    assert answer.headers["x-amzn-sagemaker-session-id"] == new
    assert answer.headers["x-amzn-sagemaker-closed-session-id"] == new.partition(";")[0]


def test_a_session_is_not_idle(invoke, server):
    """However long its model lets a sequence be silent: its place is its own until it is over, and then another's."""
    session = begun(invoke("one", body(1), "NEW_SESSION"))
    other = body(5, sequence_id=7, sequence_start=True, sequence_end=True)
    assert server.ask("POST", "/v2/models/one/infer", body(5, timeout=500_000, **other["parameters"])).status == 503
    assert total(invoke("one", body(1), session)) == 2
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(server.ask, "POST", "/v2/models/one/infer", other)
        eventually(lambda: server.metric("nv_inference_pending_request_count", model="one"), "a request that waits")
        invoke("one", CLOSE, session)
        assert answer.result().status == 200


def test_a_client_that_leaves_has_created_nothing(invoke, server):
    """Nobody knows the id of his session: it takes no place from others."""
    session = begun(invoke("one", body(1), "NEW_SESSION"))
    headers = {"X_Amzn_SageMaker_Target_Model": "one", "X_Amzn_SageMaker_Session_Id": "NEW_SESSION"}
    connection = server.connect().send(post("/invocations", body(1), **headers))
    eventually(lambda: server.metric("nv_inference_pending_request_count", model="one") == 1, "a request that waits")
    connection.reset()
    eventually(lambda: server.metric("nv_inference_pending_request_count", model="one") == 0, "its end")
    invoke("one", CLOSE, session)
    invoke("one", CLOSE, begun(invoke("one", body(1), "NEW_SESSION")))


def test_what_can_not_be_is_refused(invoke, server):
    """An id that nobody has, another model's session, a close of nothing, and a session that begins as a stream."""
    assert refused(invoke, "one", body(1), "12345") == (
        "session '12345' of model 'one' is not there: it was closed, was not used for 1200 s, or left memory with its "
        "model; begin another with NEW_SESSION"
    )
    session = begun(invoke("python", body(1), "NEW_SESSION"))
    assert "session" in refused(invoke, "one", body(1), session)
    assert "closed by its id" in refused(invoke, "one", CLOSE, "NEW_SESSION")
    invoke("python", CLOSE, session)
    streamed = server.ask(
        "POST",
        "/endpoints/e/invocations-response-stream",
        body(1),
        X_Amzn_SageMaker_Target_Model="one",
        X_Amzn_SageMaker_Session_Id="NEW_SESSION",
    )
    assert streamed.status == 424
    assert "can't be created on a streamed invocation" in streamed.json["Message"]


def test_a_request_that_fails_creates_nothing(invoke):
    """Neither a session nor a sequence: the place is free."""
    wrong = {"inputs": [{"name": "Q", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    assert "unexpected inference input 'Q'" in refused(invoke, "one", wrong, "NEW_SESSION")
    session = begun(invoke("one", NEW, "NEW_SESSION"))
    assert "unexpected inference input 'Q'" in refused(invoke, "one", wrong, session)
    assert total(invoke("one", body(4), session)) == 4
    invoke("one", CLOSE, session)


def test_a_session_ends_with_its_model(invoke, server, repository):
    """What the model knew is gone, and nobody is told that it were not."""
    new = begun(invoke("one", NEW, "NEW_SESSION"))
    for model in ("one", "whole"):  # an ensemble's model is that of its step
        session = begun(invoke(model, body(1), "NEW_SESSION"))
        assert server.ask("POST", "/v2/repository/models/one/unload").status == 200
        assert "left memory with its model" in refused(invoke, model, body(1), session)
        assert server.ask("POST", "/v2/repository/models/one/load").status == 200
    other = begun(invoke("whole", body(1), "NEW_SESSION"))
    with (repository / "whole" / "config.pbtxt").open("a") as config:
        config.write("# it is another one\n")
    assert server.ask("POST", "/v2/repository/models/whole/load").status == 200  # in its place
    assert "left memory with its model" in refused(invoke, "whole", body(1), other)
    assert total(invoke("one", body(5), new)) == 5  # which the model knew nothing of
    invoke("one", CLOSE, new)


def test_a_session_that_lies_unused_is_over(repository, serve, runtime):
    """After its time its place is another's, and its id means nothing."""
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "one", "SAGEMAKER_SESSIONS_EXPIRATION": "0.4"}
    server = serve({**environ, "MME_PING_MODE": "ready"})
    invoke = invoking(runtime(server))
    session = begun(invoke("one", body(1), "NEW_SESSION"))
    other = body(5, sequence_id=7, sequence_start=True, sequence_end=True)
    assert server.ask("POST", "/v2/models/one/infer", other).status == 200
    assert "was not used for 0.4 s" in refused(invoke, "one", body(1), session)
