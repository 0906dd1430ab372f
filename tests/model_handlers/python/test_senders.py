"""Response senders: decoupled models and others that answer of their own accord, in this process and in their own."""

import contextlib
import gc
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.errors import Kind, MmeError
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelRequest, ModelResponse
from model_handlers.worker.start import start_isolated
from tests.responders import Responses

pytestmark = pytest.mark.usefixtures("fork_server")
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
CONFIG = """
max_batch_size: 8
dynamic_batching {}
input [ { name: "A" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
MODEL = Path(__file__).with_name("sender_model.py").read_text()
ASYNC = MODEL.replace("    def execute", "    async def execute").replace(
    "        answers = []\n", "        answers = []\n        await asyncio.sleep(0)\n"
)


def told(answer):
    """A response in short: its numbers, its words, or the error."""
    if not isinstance(answer, ModelResponse):
        return answer
    [array] = answer.outputs.values()
    if array.dtype != object:
        return array[0].tolist()
    return array[0, 0].decode() if isinstance(array[0, 0], bytes) else array[0, 0]


def end(client):
    """What the client of a request got in all, in short."""
    return [told(answer) for answer in client.end() if answer is not None]


class Placed:
    """Loads models in this process or in their own."""

    def __init__(self, models, placement):
        self.placement = placement
        self._models = models
        self._started = []

    def load(self, source=MODEL, *, decoupled=True, **parameters):
        """The handler."""
        told = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in parameters.items())
        config, file = self._models.write(source, CONFIG + told + (DECOUPLED if decoupled else ""))
        if self.placement == "inline":
            handler = PythonHandler.load(config, file, CPU, "m_0_0")
        else:
            handler = start_isolated(PythonHandler, config, file, CPU, "m_0_0")
        self._started.append(handler)
        return handler

    def close(self, handler):
        """Before the end of the test."""
        self._started.remove(handler)
        handler.close()

    def close_all(self):
        """What is left."""
        while self._started:
            self._started.pop().close()


@pytest.fixture(params=["inline", "process"])
def placed(models, request, home):
    """Either placement."""
    placed = Placed(models, request.param)
    yield placed
    placed.close_all()


def request(deed, client, outputs=("OUT",), **fields):
    """A request that has this done."""
    return ModelRequest({"A": np.ones((1, 2), np.float32)}, outputs, deed, responder=client, **fields)


def send(handler, *deeds, **fields):
    """A batch: what it answered, and its clients."""
    clients = [Responses() for _ in deeds]
    answers = handler.execute_requests(
        [request(deed, client, **fields) for deed, client in zip(deeds, clients, strict=True)]
    )
    return [told(answer) for answer in answers], clients


def got(handler, deed, **fields):
    """What the client of one request gets."""
    [answer], [client] = send(handler, deed, **fields)
    return end(client) if answer is None else [answer]


def words(handler):
    """What the model was told before."""
    [answer] = got(handler, "told", outputs=("TEXT",))
    return answer


# -- decoupled models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [MODEL, ASYNC], ids=["def", "async def"])
def test_a_decoupled_model_sends_any_number_of_responses(placed, source):
    """None, one with the flag of the last, several with the flag alone behind them; each once, in order."""
    handler = placed.load(source)

    assert handler.config.decoupled
    assert got(handler, "nothing") == []
    assert got(handler, "one") == [[1]]
    assert got(handler, "some") == [[0], [1], [2], [3], [4]]
    answers, clients = send(handler, "some", "nothing", "one")
    assert answers == [None] * 3
    assert [end(client) for client in clients] == [[[0], [1], [2], [3], [4]], [], [[1]]]
    assert [client.ends for client in clients] == [1, 1, 1]


def test_responses_carry_parameters(placed):
    """Those of each are its own."""
    _, [client] = send(placed.load(), "some")
    end(client)

    assert [dict(answer.parameters) for answer in client.got[:5]] == [{"index": number} for number in range(5)]


def test_responses_may_be_sent_after_execute_returned(placed):
    """From a thread, while other batches are executed."""
    handler = placed.load()
    _, [client] = send(handler, "aside")
    assert got(handler, "one") == [[1]]
    assert client.got == []
    assert got(handler, "open_gate") == [[1]]

    assert end(client) == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("source", [MODEL, pytest.param(ASYNC, marks=pytest.mark.long)], ids=["def", "async def"])
def test_a_request_whose_sender_was_let_go_has_had_its_last_response(placed, source):
    """Whether anything was sent or not, and though only a collection finds the sender."""
    handler = placed.load(source)

    assert got(handler, "silent") == []
    assert got(handler, "dropped") == [[1], [2]]
    gc.disable()
    try:
        _, [client] = send(handler, "cycle")
    finally:
        gc.enable()
    assert got(handler, "collect") == [[1]]
    gc.collect()
    assert end(client) == [[1]]


def test_nothing_may_be_sent_behind_the_last_response(placed):
    """Neither a response nor the flag again."""
    handler = placed.load()
    assert got(handler, "after_final") == [[1]]

    closed = "TritonModelException: Unable to send response. Response sender has been closed."
    assert words(handler) == f'["{closed}", "{closed}", "{closed}"]'


def test_what_is_no_response_is_refused(placed):
    """The model is told, and can go on."""
    handler = placed.load()
    assert got(handler, "wrong") == [[1]]
    told = words(handler)

    assert told.count("Inference Response object must be provided when the response flags is set to zero.") == 2
    assert "TritonModelException: Unable to send response. Unsupported flag provided. Got 7, " in told
    assert "Expected an InferenceResponse, got <class 'int'>" in told
    assert got(handler, "same") == [[1]]


def test_an_error_may_have_responses_behind_it(placed):
    """It has the code that the model gave it; only what is said to be the last response is."""
    first, error, second = got(placed.load(), "fails")

    assert (first, second) == ([1], [2])
    assert (error.kind, error.message) == (Kind.UNAVAILABLE, "not today")


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("unknown_output", "unexpected inference output 'OTHER', its outputs are: OUT, TEXT"),
        ("wrong_type", "returned output 'OUT' as BYTES, expected FP32"),
    ],
)
def test_a_response_that_does_not_fit_the_model_is_an_error(placed, deed, words):
    """That of its request alone."""
    handler = placed.load()
    _, [client, other] = send(handler, deed, "one")
    [error] = end(client)

    assert error.kind is Kind.EXECUTION_FAILED
    assert words in error.message
    assert end(other) == [[1]]


@pytest.mark.parametrize("source", [MODEL, ASYNC], ids=["def", "async def"])
@pytest.mark.parametrize(("deed", "words"), [("raises", "ValueError: no third"), ("exits", "SystemExit: 3")])
def test_what_execute_raises_comes_behind_what_it_sent(placed, source, deed, words):
    """To those who have not had their last response; the model goes on."""
    handler = placed.load(source)
    clients = [Responses() for _ in range(3)]
    batch = [request(each, client) for each, client in zip(["one", deed, "one"], clients, strict=True)]
    failure = None
    try:
        handler.execute_requests(batch)
    except MmeError as error:
        failure = error
    done, failed, never = (end(client) for client in clients)

    assert done == [[1]]
    assert failed[:-1] == ([[0], [1]] if deed == "raises" else [])
    assert [error.message for error in never] == [failed[-1].message]
    assert failed[-1].kind is Kind.EXECUTION_FAILED
    assert f"Failed to process the request(s) for model 'm_0_0', message: {words}" in failed[-1].message
    assert failure is None or failure.message == failed[-1].message
    assert got(handler, "one") == [[1]]


@pytest.mark.parametrize("source", [MODEL, ASYNC], ids=["def", "async def"])
def test_a_decoupled_model_must_return_none(placed, source):
    """Anything else is the error of those who have not had their last response."""
    handler = placed.load(source)
    clients = [Responses() for _ in range(2)]
    batch = [request(each, client) for each, client in zip(["returns", "one"], clients, strict=True)]
    with contextlib.suppress(MmeError):
        handler.execute_requests(batch)
    returned, one = (end(client) for client in clients)

    # The request went when execute let go of it: the end of its sender may have come first.
    assert one == [[1]]
    assert [error.message for error in returned] in (
        [],
        ["Python model 'm_0_0' is using the decoupled mode and the execute function must return None."],
    )
    assert got(handler, "one") == [[1]]


def test_a_decoupled_model_that_holds_its_requests_must_return_none(placed):
    """Then nobody has had their last response, and all are told."""
    source = MODEL.replace(
        "        while requests:\n", "        self.kept.append(list(requests))\n        while requests:\n"
    )
    handler = placed.load(source.replace("        for request in self.kept", "        for request in ()"))
    assert [error.message for error in got_or_raised(handler, "returns")] == [
        "Python model 'm_0_0' is using the decoupled mode and the execute function must return None."
    ]


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_decoupled_model_that_returns_its_responses_is_told_so(placed, word):
    """As who made it decoupled and left the rest as it was: its clients had an end, and no response."""
    handler = placed.load(
        f"class TritonPythonModel:\n    {word} execute(self, requests):\n        return [None for _ in requests]\n"
    )
    assert [error.message for error in got_or_raised(handler, "one")] == [
        "Python model 'm_0_0' is using the decoupled mode and the execute function must return None."
    ]


def got_or_raised(handler, deed):
    """What the client of one request gets, whichever way."""
    client = Responses()
    try:
        handler.execute_requests([request(deed, client)])
    except MmeError as error:
        return end(client) if client.got else [error]
    return end(client)


def test_many_threads_may_send(placed):
    """What each sends keeps its order."""
    numbers = [number for [number] in got(placed.load(), "many")]

    assert len(numbers) == 400
    for number in range(8):
        assert [n for n in numbers if n // 1000 == number] == [1000 * number + i for i in range(50)]


def test_large_responses(placed):
    """Of two megabytes each."""
    _, [client] = send(placed.load(), "large")
    end(client)

    assert [answer.outputs["OUT"].shape for answer in client.got[:3]] == [(1, 500_000)] * 3
    assert [answer.outputs["OUT"][0, -1] for answer in client.got[:3]] == [0, 1, 2]


def test_a_model_may_answer_in_finalize(placed):
    """What it lets go of there has had its last response."""
    handler = placed.load()
    _, [client] = send(handler, "kept")
    placed.close(handler)
    [first, *rest] = end(client)

    assert first == [9]
    assert rest == [] or rest[0].kind is Kind.UNAVAILABLE


def test_nobody_can_take_responses_where_there_is_no_responder(placed):
    """The model is told so."""
    handler = placed.load(decoupled=False)
    if placed.placement == "process":
        pytest.skip("a process always has somebody to tell")
    [error] = got_or_raised_without(handler)

    assert "Nobody takes responses to this request" in error.message


def got_or_raised_without(handler):
    """The same without a client."""
    try:
        return handler.execute_requests([request("one", None)])
    except MmeError as error:
        return [error]


# -- models that are not decoupled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [MODEL, ASYNC], ids=["def", "async def"])
def test_any_model_may_answer_by_a_sender(placed, source):
    """Once, with the flag of the last or without; the flag may follow by itself."""
    handler = placed.load(source, decoupled=False)

    assert got(handler, "one") == [[1]]
    assert got(handler, "then_final") == [[1]]
    answers, clients = send(handler, "one", "facts_plainly", "one")
    assert answers[0] is None
    assert answers[1] == [5]
    assert [end(clients[i]) for i in (0, 2)] == [[[1]], [[1]]]


def test_what_a_model_may_not_send_that_is_not_decoupled(placed):
    """The end before a response, and a second response, in Triton's words."""
    handler = placed.load(decoupled=False)
    assert got(handler, "twice") == [[1]]
    early, second, final, third, end = json.loads(words(handler))

    assert early.endswith("Non-decoupled model cannot send complete final before sending a response.")
    assert second.endswith("Unable to send response. Non-decoupled model cannot send more than one response.")
    assert final == "sent"
    assert third == second
    assert end.endswith("Unable to send response. Response sender has been closed.")


def test_execute_may_return_none_where_senders_answer(placed):
    """All requests, or some: the others have an error."""
    handler = placed.load(decoupled=False, source=MODEL.replace("        return answers\n", "        return None\n"))

    assert got(handler, "one") == [[1]]
    answers, clients = send(handler, "one", "silent", "then_final")
    assert [end(clients[i]) for i in (0, 2)] == [[[1]], [[1]]]
    assert "Expected an 'InferenceResponse' object" in answers[1].message
    with pytest.raises(MmeError, match="Expected a list in the execute return, found type '<class 'NoneType'>'"):
        handler.execute_requests([request("silent", Responses())])


def test_a_response_behind_that_of_the_sender_is_none(placed, caplog):
    """What came first is the answer; the model's mistake is in its log."""
    handler = placed.load(decoupled=False)
    with caplog.at_level(logging.INFO, "mme.model"):
        for _ in range(10):
            assert got(handler, "both") == [[1]]
        placed.close(handler)

    assert any("execute returned a response to a request that its" in record.getMessage() for record in caplog.records)


def test_a_sender_is_closed_when_execute_answers(placed):
    """Asking for one is no obligation."""
    handler = placed.load(decoupled=False)

    assert got(handler, "asks_and_returns") == [[2]]
    assert got(handler, "taken_and_returned") == [[2]]
    assert got(handler, "use_taken") == [[1]]
    assert "Non-decoupled model cannot send more than one response." in words(handler)


def test_a_sender_that_was_let_go_without_a_response_is_an_error(placed):
    """The client waits for one; whether execute let go of it or a thread did, long after."""
    handler = placed.load(decoupled=False)
    _, [client] = send(handler, "let_go_later")
    for [error] in (got(handler, "let_go"), end_after(handler, client)):
        assert error.kind is Kind.EXECUTION_FAILED
        assert error.message == "model 'm': the response sender was dropped before it sent a response"


def end_after(handler, client):
    """What a client gets once the gate is open."""
    assert client.got == []
    assert got(handler, "open_gate") == [[1]]
    return end(client)


def test_no_response_and_no_sender_is_an_error(placed):
    """The error of the request alone."""
    handler = placed.load(decoupled=False)
    answers, [_, client] = send(handler, "silent", "one")

    assert "Expected an 'InferenceResponse' object" in answers[0].message
    assert end(client) == [[1]]


def test_what_was_sent_before_execute_raised_stands(placed):
    """The request has had its response; others of the batch have the error."""
    handler = placed.load(decoupled=False)
    clients = [Responses() for _ in range(2)]
    batch = [request(each, client) for each, client in zip(["sent_and_raised", "one"], clients, strict=True)]
    try:
        answers = handler.execute_requests(batch)
    except MmeError as error:
        answers = [None, error]

    assert end(clients[0])[0] == [1]
    assert answers[0] is None
    assert "ValueError: too late" in answers[1].message


def test_a_response_from_a_thread_after_execute_returned(placed):
    """Such a model, too, may take its time."""
    handler = placed.load(decoupled=False)
    _, [client] = send(handler, "aside")
    assert client.got == []
    assert got(handler, "open_gate") == [[1]]

    assert end(client) == [[0]]


# -- what a request tells ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("correlation_id", [0, 2**64 - 1, "a sequence"])
def test_a_request_tells_its_sequence_and_parameters(placed, decoupled, correlation_id):
    """Id, correlation id, flags, timeout, parameters and wanted outputs, as they were sent."""
    handler = placed.load(decoupled=decoupled)
    fields = {
        "correlation_id": correlation_id,
        "flags": 3,
        "timeout_us": 9,
        "parameters": {"a": 1, "b": "ä", "c": True},
    }
    [answer] = got(handler, "facts", outputs=("TEXT",), **fields)

    assert json.loads(answer) == {
        "id": "facts",
        "correlation_id": correlation_id,
        "flags": 3,
        "timeout": 9,
        "parameters": {"a": 1, "b": "ä", "c": True},
        "outputs": ["TEXT"],
        "cancelled": [False, False],
    }


def test_a_model_learns_that_its_client_left(placed):
    """By request and by sender; sending to nobody is fine."""
    handler = placed.load()
    _, [client] = send(handler, "until_cancelled")
    client.wait(60)
    client.leave()

    assert end(client)[-4:] == [[2], [2], [2], [3]]
