"""Models that answer of their own accord, in processes of their own: each request gets its responses once, in order."""

import json
import logging
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from unasked_models import Once, Unasked

from model_handlers.errors import Kind, MmeError
from model_handlers.metrics import METRICS
from model_handlers.model_calls import Override
from model_handlers.requests import ModelRequest, ModelResponse
from model_handlers.tensor import FP32
from model_handlers.worker.channel import Channel
from model_handlers.worker.limits import Deadlines
from model_handlers.worker.policies import LIMIT
from tests.responders import Responses
from tests.waiting import PATIENCE, eventually


class Client(Responses):
    """Takes the responses to one request, and tells them in short."""

    def end(self):
        """What came, once the last has come: numbers, and the error if there was one."""
        super().end()
        return self.told()

    def told(self):
        """What came so far."""
        return [told(response) for response in self.got if response is not None]


def told(response):
    """A response in short."""
    if isinstance(response, ModelResponse):
        array = response.outputs["y"]
        assert (array == array[0]).all()
        return float(array[0])
    return response


def request(deed, client=None):
    """A request that has this done."""
    return ModelRequest({"x": np.zeros(1, "f4")}, ("y",), deed, responder=client or Client())


def execute(handler, *deeds):
    """A batch of such requests: the batch's answers in short, and the clients."""
    clients = [Client() for _ in deeds]
    answers = handler.execute_requests([request(deed, client) for deed, client in zip(deeds, clients, strict=True)])
    return [told(answer) for answer in answers], clients


def ask(handler, deed):
    """The batch's answer to one request."""
    [answer] = handler.execute_requests([request(deed)])
    return told(answer)


# -- responses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["stream", "later"])
def test_responses_come_in_order_and_end_once(start, deed):
    """None, one or many, before the batch is answered or after it."""
    handler = start(Unasked)
    answers, clients = execute(handler, f"{deed} 0", f"{deed} 1", f"{deed} 500")

    assert answers == [None, None, None]
    assert [client.end() for client in clients] == [[], [0], list(range(500))]
    assert [client.ends for client in clients] == [1, 1, 1]
    assert clients[2].got[3].parameters == {"n": 3}
    assert handler.open_requests == 0


@pytest.mark.parametrize("size", [1, 16 << 10, (16 << 10) + 1, 1 << 20])
def test_responses_of_any_size(start, size):
    """Small ones lie in the frame, larger ones in memory of their own, which goes with them."""
    _, [client] = execute(start(Unasked), f"large {size}")

    assert client.end() == [0, 1, 2, 3, 4]
    assert {response.outputs["y"].size for response in client.got} == {size}
    with pytest.raises(ValueError, match="read-only"):
        client.got[0].outputs["y"][0] = 1


def test_responses_outlive_the_process(start):
    """Memory of a response is its own."""
    handler = start(Unasked)
    _, [client] = execute(handler, "large 100000")
    client.end()
    handler.close()

    assert client.told() == [0, 1, 2, 3, 4]


def test_threads_answer_one_request(start):
    """What one thread sends keeps its order among what the others send."""
    _, [client] = execute(start(Unasked), "threads 100")
    got = client.end()

    assert len(got) == 800
    for number in range(8):
        assert [n for n in got if n // 1000 == number] == [1000 * number + i for i in range(100)]


def test_batches_go_on_while_a_request_is_open(start):
    """A request that waits for its responses keeps no other from being executed, and is answered by a later batch."""
    handler = start(Unasked)
    _, [held] = execute(handler, "hold")
    for number in range(20):
        assert ask(handler, f"answer {number}") == number
    assert held.got == []
    execute(handler, "release 3")

    assert held.end() == [0, 1, 2]


def test_a_batch_may_answer_some_and_leave_others_open(start):
    """Each request of a batch is answered in its own way."""
    answers, clients = execute(start(Unasked), "answer 5", "later 2", "answer 6")

    assert answers == [5, None, 6]
    assert clients[1].end() == [0, 1]
    assert clients[0].got == clients[2].got == []


def test_an_error_comes_behind_the_responses_before_it(start):
    """A batch that raises ends each request behind what that has got; those that got nothing have the error at once."""
    for _ in range(20):  # the batch's answer and the frames come on two sockets
        answers, [first, second] = execute(start_once(start, Unasked), "stream 1", "partial")

        assert answers == [None, None]
        assert first.end() == [0]
        *responses, error = second.end()
        assert responses == [0, 1]
        assert (error.kind, error.message) == (Kind.OUT_OF_MEMORY, "no room for a third")
        assert (first.ends, second.ends) == (1, 1)


_STARTED = {}


def start_once(start, handler_class):
    """One handler for all rounds of a test."""
    if id(start) not in _STARTED:
        _STARTED.clear()
        _STARTED[id(start)] = start(handler_class)
    return _STARTED[id(start)]


def test_a_batch_that_raises_before_any_response(start):
    """Is the error of all its requests, and none is open."""
    handler = start(Unasked)
    with pytest.raises(MmeError, match="not this one") as raised:
        execute(handler, "hold", "raise")

    assert raised.value.kind is Kind.UNSUPPORTED
    assert handler.open_requests == 0
    assert ask(handler, "answer 1") == 1


@pytest.mark.parametrize("handler_class", [Unasked, Once])
def test_a_request_is_answered_once(start, handler_class):
    """Whichever of a response of its own accord and the batch's comes first is the answer, the other is none."""
    handler = start(handler_class)
    for _ in range(50):
        [answer], [client] = execute(handler, "twice")
        if answer is None:
            assert client.end() == [1]
        else:
            assert answer == 2
            assert client.got == []
    assert handler.open_requests == 0


def test_one_response_is_all_where_the_model_is_not_decoupled(start):
    """Though the process says that more will come: nobody would take them."""
    handler = start(Once)
    _, [client] = execute(handler, "stream 3")

    assert client.end() == [0]
    assert ask(handler, "counts") == 0
    assert len(client.got) == 1
    assert handler.open_requests == 0


def test_a_response_that_cannot_be_sent_is_the_last(start):
    """An array without a data type ends the request with an error that says so."""
    handler = start(Unasked)
    _, [client] = execute(handler, "unsendable")
    first, error = client.end()

    assert first == 0
    assert error.kind is Kind.EXECUTION_FAILED
    assert "complex64" in error.message
    assert ask(handler, "counts") == 0
    assert client.ends == 1


def test_nothing_is_kept_of_requests_that_are_over(start):
    """Neither in the process, which may have been told of clients that left, nor here."""
    handler = start(Unasked)
    for deed in ("stream 2", "later 2", "answer 1", "cancelled", "twice"):
        _, [client] = execute(handler, deed)
        if deed.split()[0] in {"stream", "later"}:
            client.end()
        client.leave()
    with pytest.raises(MmeError):
        execute(handler, "raise")

    assert ask(handler, "counts") == 0
    assert handler.open_requests == 0


def test_senders_that_are_collected_in_the_middle_of_sending(start):
    """A collection of garbage at any point of a send may send, too: nothing waits for itself."""
    _, [client] = execute(start(Unasked, MME_EXECUTION_TIMEOUT="30"), "collect")

    assert client.end() == [0] or client.told() == []
    assert client.ends == 1


def test_forked_copies_say_nothing(start):
    """A copy of the process answers nothing, is told nothing and can ask nothing, and waits for none of it."""
    _, [client] = execute(start(Unasked), "fork")

    assert client.end() == [0]


# -- clients that leave ------------------------------------------------------------------------------------------------


def test_a_model_learns_that_a_client_left(start):
    """One that looks stops, and one that asked to be told is told; others of its requests go on."""
    handler = start(Unasked)
    flooding = threading.Thread(target=execute_for, args=(handler, "flood", flooded := Client()))
    flooding.start()
    flooded.wait(100)
    flooded.leave()
    flooding.join(PATIENCE)
    assert flooded.end() == list(range(len(flooded.got) - 1))

    _, [watched, other] = execute(handler, "watch", "watch")
    watched.leave()
    assert watched.end() == [7]
    assert other.got == []
    other.leave()
    assert other.end() == [7]


def execute_for(handler, deed, client):
    """On a thread."""
    handler.execute_requests([request(deed, client)])


def test_who_left_before_the_model_asked_is_known_when_it_asks(start):
    """The first look of a process waits until it knows; it takes a thread, and models that never look have none."""
    handler = start(Unasked)
    assert ask(handler, "threads-running") == 0
    client = Client()
    client.leave()
    [answer] = handler.execute_requests([request("cancelled", client)])
    assert told(answer) == 1
    assert ask(handler, "cancelled") == 0
    assert ask(handler, "threads-running") == 1


def test_a_model_that_never_looks_is_told_nothing(start, monkeypatch):
    """However many clients leave, nothing is sent that nobody reads."""
    posted = []
    monkeypatch.setattr(Channel, "post", lambda _, frame: posted.append(frame))
    handler = start(Unasked)
    clients = [execute(handler, "hold")[1][0] for _ in range(200)]
    for client in clients:
        client.leave()

    assert posted == []
    assert not any(client.watched for client in clients)


# -- the end of the process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deed", "words"), [("exit 3", "ended with exit code 3 while it executed a batch"), ("stream-exit 4", "code 4")]
)
def test_death_in_a_batch(start, deed, words):
    """Every open request is told, those of earlier batches too, behind what they have got."""
    handler = start(Unasked)
    _, [held] = execute(handler, "hold")
    client = Client()
    with pytest.raises(MmeError, match=words) as raised:
        handler.execute_requests([request(deed, client)])

    assert raised.value.kind is Kind.EXECUTION_FAILED
    *responses, error = client.end()
    assert responses == ([0] if deed.startswith("stream") else [])
    assert error is raised.value
    assert held.end() == [error]
    assert (client.ends, held.ends) == (1, 1)
    assert handler.open_requests == 0
    assert ask(handler, "answer 1") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda n: n.name)
def test_death_between_batches(start, number):
    """Open requests are told at once, with the signal; the next batch finds a new process."""
    handler = start(Unasked)
    _, clients = execute(handler, "hold", "hold")
    first = killed(handler, number)

    for client in clients:
        [error] = client.end()
        assert f"was killed by {number.name} while it had requests to answer" in error.message
    assert ask(handler, "answer 1") == 1
    assert handler.child.pid != first


def killed(handler, number):
    """Kill the process; its id."""
    pid = handler.child.pid
    os.kill(pid, number)
    return pid


def test_death_while_nothing_is_open(start, caplog):
    """Is noticed when it happens, and costs no request."""
    handler = start(Unasked)
    assert ask(handler, "answer 1") == 1
    with caplog.at_level(logging.ERROR, "mme.isolation"):
        killed(handler, signal.SIGKILL)
        eventually(lambda: any("while it executed nothing" in record.message for record in caplog.records))

    assert ask(handler, "answer 1") == 1


def test_a_process_that_owes_responses_for_too_long_is_ended(start):
    """Clients that wait are told, and the next batch finds a new process; one that left is not waited for."""
    handler = start(Unasked, MME_EXECUTION_TIMEOUT="0.2")
    first = handler.child.pid
    _, [held, left] = execute(handler, "hold", "hold")
    eventually(lambda: handler.opened.due() <= time.monotonic())
    handler.opened.end_overdue()

    [error] = held.end()
    assert error.kind is Kind.TIMED_OUT
    assert "gave no answer within 0.2 s, while it had requests to answer" in error.message
    assert left.end() == [error]
    assert not psutil.pid_exists(first)
    _, [left] = execute(handler, "hold")
    left.leave()
    assert handler.opened.due() == float("inf")


def test_each_response_gives_a_decoupled_model_its_time_again(start):
    """A batch may take longer than MME_EXECUTION_TIMEOUT as long as responses keep coming."""
    handler = start(Unasked, MME_EXECUTION_TIMEOUT="0.5")
    _, [client] = execute(handler, "drip 8")

    assert client.end() == list(range(8))


def test_close_ends_open_requests(start):
    """Each is told that its model was unloaded, behind what the model still said."""
    handler = start(Unasked)
    _, [held] = execute(handler, "hold")
    handler.close()

    [error] = held.end()
    assert (error.kind, error.message) == (Kind.UNAVAILABLE, "model 'm' was unloaded")
    assert handler.open_requests == 0


def test_restarts_after_deaths_between_batches_have_a_budget(start):
    """A model that dies after each batch is not started for ever, and the error tells of its last death."""
    handler = start(Unasked)
    for _ in range(LIMIT + 1):
        _, [client] = execute(handler, "hold")
        killed(handler, signal.SIGKILL)
        client.end()
    with pytest.raises(MmeError, match=r"died too often.*SIGKILL while it had requests to answer") as raised:
        execute(handler, "answer 1")

    assert raised.value.kind is Kind.UNAVAILABLE


# -- children that misbehave -------------------------------------------------------------------------------------------

NONSENSE = {
    "bytes ffffffff": "a message of 4294967295 bytes",
    "bytes 0200000041414141": "not JSON",
    "bytes 020000005b5d": "not an object",
    "say {}": "a frame about nothing",
    'say {"respond": 1}': "'final'",
    'say {"respond": [], "final": true}': "unhashable",
    'say {"respond": 1, "final": false, "outputs": 3, "parameters": {}}': "'int' object has no attribute",
    'say {"respond": 1, "final": false, "outputs": {"y": ["FP32", 0, 8, [2]]}, "parameters": {}}': "outside its segment",
    'say {"respond": 1, "final": false, "outputs": {}, "parameters": [1]}': "parameters of a response that are none",
    'say {"respond": 1, "final": false, "outputs": {}, "parameters": {"a": []}}': "parameters of a response",
    'say {"respond": 1, "final": true, "error": {"kind": "NONE", "message": ""}}': "an error without kind",
    'say {"payload": -1}': "a payload of -1 bytes",
    'say {"payload": 65537}': "a payload of 65537 bytes",
    'say {"payload": "x"}': "a payload of x bytes",
    'say {"segment": 8}': "without the descriptor",
    "unsealed": "could still",
    "descriptors 40": "of which no frame speaks",
    'say {"call": 1}': "a frame of another form: KeyError('model')",
    'say {"call": {}, "model": "m"}': "KeyError('correlation_id')",
    'say {"ask": 1, "what": "dance", "model": "m"}': "a question about nothing",
    'say {"ask": 1, "what": "ready", "model": "m", "version": []}': "int()",
    'say {"metrics": [[7, 1, 0]]}': "KeyError(7)",
    'say {"metrics": [[7, -1, 0, ["a", "", "counter", {}, []]]]}': "a counter that comes to -1",
    'say {"drop": []}': "a frame of another form: TypeError",
}


@pytest.mark.parametrize("deed", NONSENSE)
def test_nonsense_ends_the_process(start, deed):
    """What is no frame, or says nothing that makes sense, is told by its words; the next batch finds a new process."""
    handler = start(Unasked)
    handler.outside = Server()
    first = handler.child.pid
    _, [held, client] = execute(handler, "hold", deed)

    [error] = held.end()
    assert error.kind is Kind.EXECUTION_FAILED
    assert "was ended, since it sent" in error.message
    assert NONSENSE[deed] in error.message
    assert client.end() == [error]
    assert ask(handler, "answer 1") == 1
    assert not psutil.pid_exists(first)


def test_a_batch_buries_a_process_that_said_nonsense(start, monkeypatch):
    """Whoever executes next does not wait for the thread that would."""
    handler = start(Unasked)
    left = threading.Event()
    monkeypatch.setattr(handler.opened, "_on_death", left.set)
    first = handler.child.pid
    _, [held] = execute(handler, "say {}")
    assert left.wait(PATIENCE)
    assert held.got == []

    assert ask(handler, "answer 1") == 1
    assert "a frame about nothing" in held.end()[0].message
    assert handler.child.pid != first


def test_nonsense_from_a_process_that_hangs(start, monkeypatch):
    """Ends with its batch's deadline; who was open before it is told as well."""
    handler = start(Unasked)
    _, [held] = execute(handler, "hold")
    with monkeypatch.context() as patched:
        patched.setattr(handler.process, "deadlines", Deadlines(execution=0.3))
        with pytest.raises(MmeError, match=r"gave no answer within 0\.3 s"):
            execute(handler, "stuck")

    assert "gave no answer" in held.end()[0].message
    assert ask(handler, "answer 1") == 1


def test_what_was_counted_arrives_though_its_answer_does_not(start):
    """An answer that is too large for a message takes along what the model counted; what it counts later builds on it."""
    handler = start(Once)
    with pytest.raises(MmeError) as raised:
        ask(handler, "count 17000000")
    ask(handler, "count 1")

    assert raised.value.kind is Kind.TOO_LARGE
    eventually(lambda: [r.value for family, rs in METRICS.read() if family.name == "t_asked" for r in rs] == [2])


def test_answers_to_unknown_requests_are_nobodys(start):
    """Numbers that nobody knows, in any form, change nothing."""
    handler = start(Unasked)
    _, [held, client] = execute(handler, "hold", "unknown")

    assert client.end() == [0, 1]
    assert held.got == []
    assert ask(handler, "answer 1") == 1


@pytest.mark.parametrize("argument", ["", " too"])
def test_a_process_that_hangs_up_is_ended(start, argument):
    """Whether it answered its batch or not: nothing that it says of its own accord could be heard."""
    handler = start(Unasked)
    first = handler.child.pid
    _, [held, client] = execute(handler, "hold", f"hang-up{argument}")

    assert "was ended, since it closed its connection" in held.end()[0].message
    assert argument or "closed its connection" in client.end()[0].message
    assert ask(handler, "answer 1") == 1
    assert not psutil.pid_exists(first)


def test_a_flood_keeps_nobody_waiting(start):
    """While one model sends without end, others are answered, and so are its own other requests."""
    flooding, other = start(Unasked), start(Unasked)
    thread = threading.Thread(target=execute_for, args=(flooding, "flood", client := Client()))
    thread.start()
    client.wait(1000)
    for _ in range(20):
        _, [answered] = execute(other, "later 3")
        assert answered.end() == [0, 1, 2]
    client.leave()
    thread.join(PATIENCE)

    assert client.end() == list(range(len(client.got) - 1))


# -- calls -------------------------------------------------------------------------------------------------------------


class Server:
    """An `Outside` of few models. Keeps what it was asked."""

    def __init__(self):
        self.calls = []
        self.asked = []
        self.came = threading.Semaphore(0)

    def infer(self, call, responder):
        """`other` doubles, `mixed` answers much and little, `stream` goes on until it is told not to, `never` never answers."""
        self.calls.append((call, responder))
        if call.model == "other":
            [(_, _, array)] = call.inputs
            responder.send(ModelResponse({"y": array * 2}, {}, {"y": FP32}), final=True)
        elif call.model == "stream":
            responder.send(ModelResponse({"y": np.zeros(1, "f4")}), final=False)
        elif call.model == "mixed":
            for number in range(20):
                size = 300_000 if number % 3 == 0 else 2
                responder.send(ModelResponse({"y": np.full(size, number, "f4")}), final=False)
            responder.send(None, final=True)
        elif call.model != "never":
            responder.send(MmeError(Kind.UNKNOWN_MODEL, f"no model '{call.model}'"), final=True)
        self.came.release()

    def load(self, model, override, callers, done):
        """Everything can be loaded."""
        self.asked.append(("load", model, override, callers))
        done(True)

    def unload(self, model, dependents, callers, done):
        """Nothing can be unloaded."""
        self.asked.append(("unload", model, dependents, callers))
        done(MmeError(Kind.UNKNOWN_MODEL, f"no model '{model}'"))

    def is_ready(self, model, version, done):
        """`other` is."""
        self.asked.append(("ready", model, version))
        done(model == "other")


def calls(handler, deed):
    """What the model tells of its call."""
    [answer] = handler.execute_requests([request(deed)])
    return answer.outputs["told"].item().decode()


def test_calls_cross(start):
    """A call comes with its tensors and facts, and the names of those who wait; its answer goes back."""
    handler = start(Unasked)
    handler.outside = Server()

    assert json.loads(calls(handler, "call other")) == [[0, 2, 4]]
    [(call, _)] = handler.outside.calls
    assert (call.model, call.version, call.outputs, call.decoupled) == ("other", None, (), False)
    [(name, kind, array)] = call.inputs
    assert (name, kind, array.tolist()) == ("x", FP32, [0, 1, 2])
    assert call.callers == ("m",)
    assert json.loads(calls(handler, "call nobody")) == ["UNKNOWN_MODEL: no model 'nobody'"]


def test_callers_are_those_of_every_open_request(start):
    """Who waits for any of them waits for the caller: it could not be answered meanwhile."""
    handler = start(Unasked)
    handler.outside = Server()
    for callers in (("a", "b"), ("c", "b")):
        handler.execute_requests([ModelRequest({}, ("y",), "hold", callers=callers, responder=Client())])
    calls(handler, "call other")

    assert handler.outside.calls[0][0].callers == ("a", "b", "c", "m")


def test_many_calls_at_once(start):
    """Each of them is answered."""
    handler = start(Unasked)
    handler.outside = Server()

    assert ask(handler, "call-many 200") == 200
    assert handler.open_calls == 0


def test_large_answers_keep_their_place_among_small_ones(start):
    """Though a thread writes them that is not the one that has them."""
    handler = start(Unasked)
    handler.outside = Server()
    answers = json.loads(calls(handler, "call mixed decoupled"))

    assert [answer[0] for answer in answers[:-1]] == list(range(20))
    assert [len(answer) for answer in answers[:4]] == [300_000, 2, 2, 300_000]
    assert answers[-1] == "end"


def test_calls_where_there_is_nobody_to_call(start):
    """Say so."""
    assert "can call no other model" in calls(start(Unasked), "call other")
    assert "can call no other model" in calls(start(Unasked), "ask ready other")


def test_questions_cross(start):
    """Loads, unloads and readiness: yes, no, or why not, on behalf of those who wait."""
    handler = start(Unasked)
    server = handler.outside = Server()

    assert calls(handler, "ask ready other") == "True"
    assert calls(handler, "ask ready nobody") == "False"
    assert calls(handler, "ask load other") == "True"
    assert calls(handler, "ask override other") == "True"
    assert calls(handler, "ask unload other") == "UNKNOWN_MODEL: no model 'other'"
    assert server.asked == [
        ("ready", "other", None),
        ("ready", "nobody", None),
        ("load", "other", None, ("m",)),
        ("load", "other", Override("{}", {"file:small": b"", "file:large": bytes(100_000)}), ("m",)),
        ("unload", "other", True, ("m",)),
    ]


def test_a_dropped_call_is_cancelled(start):
    """Whoever is called learns that nobody waits any more; what it still answers goes nowhere, here and there."""
    handler = start(Unasked)
    handler.outside = Server()
    assert ask(handler, "call-drop stream") == 0
    [(_, responder)] = handler.outside.calls
    eventually(responder.is_cancelled)
    responder.send(ModelResponse({"y": np.zeros(1, "f4")}), final=False)
    responder.send(None, final=True)

    assert handler.open_calls == 0
    assert ask(handler, "counts") == 0


def test_the_death_of_a_caller_cancels_its_calls(start):
    """Answers that come after it go nowhere, though the next process has calls of the same numbers."""
    handler = start(Unasked)
    server = handler.outside = Server()
    with pytest.raises(MmeError, match="exit code 9"):
        execute(handler, "call-exit never")
    [(_, first)] = server.calls
    assert first.is_cancelled()

    waiting = threading.Thread(target=execute_for, args=(handler, "call never", Client()))
    waiting.start()
    assert server.came.acquire(timeout=PATIENCE)
    assert server.came.acquire(timeout=PATIENCE)
    first.send(ModelResponse({"y": np.zeros(1, "f4")}), final=True)
    (_, second) = server.calls[1]
    assert (first.number, second.number) == (1, 1)
    assert not second.is_cancelled()
    assert handler.open_calls == 1
    second.send(ModelResponse({"y": np.zeros(1, "f4")}), final=True)
    waiting.join(PATIENCE)

    assert not waiting.is_alive()


def test_cancelled_callers_are_told_when_they_ask_late(start):
    """A responder that was dropped before anybody asked tells at once."""
    handler = start(Unasked)
    server = handler.outside = Server()
    with pytest.raises(MmeError):
        execute(handler, "call-exit never")
    told = []
    server.calls[0][1].when_cancelled(lambda: told.append(True))

    assert told == [True]


def test_an_answer_that_cannot_be_handed_over_is_an_error(start):
    """Whoever called is told, and who was called is told to stop."""
    handler = start(Unasked)
    server = handler.outside = Server()
    waiting = threading.Thread(target=lambda: told.append(calls(handler, "call never")))
    told = []
    waiting.start()
    assert server.came.acquire(timeout=PATIENCE)
    [(_, responder)] = server.calls
    responder.send(ModelResponse({"y": np.zeros(1, "c8")}), final=False)
    waiting.join(PATIENCE)

    assert "complex64" in told[0]
    assert responder.is_cancelled()
    assert handler.open_calls == 0
