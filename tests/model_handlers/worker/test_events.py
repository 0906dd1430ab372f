"""A model's end of its channel, in this process: what it sends, what it is told, and when it begins to listen."""

import socket
import threading
import time

import numpy as np
import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import ModelResponse
from model_handlers.worker import events as events_module
from model_handlers.worker.events import Events
from model_handlers.worker.memory import Frame, FrameReader
from tests.model_handlers.worker.asleep import times_asleep
from tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("nothing_held")


class Server:
    """The other side."""

    def __init__(self, end, other):
        self.end = end
        self.other = other
        self._reader = FrameReader()

    def next(self):
        """The next message."""
        while (frame := self._reader.next()) is None:
            assert self._reader.receive(self.end)
        return frame[0]

    def tell(self, message):
        """A frame."""
        self.end.sendall(Frame(message).data)

    def close(self):
        """Go away."""
        self.end.close()


@pytest.fixture
def paused(monkeypatch):
    """Set whenever a sender waits for memory that is under way."""
    waits = threading.Event()
    monkeypatch.setattr(events_module.time, "sleep", lambda _: (waits.set(), threading.Event().wait(0.001)))
    return waits


@pytest.fixture
def sides():
    """The model's and the server's."""
    theirs, ours = socket.socketpair()
    server = Server(ours, theirs)
    events = Events(theirs, "m")
    yield events, server
    server.close()
    for thread in threading.enumerate():
        if thread.name == "mme events":
            thread.join(PATIENCE)
    theirs.close()


def listening():
    """Whether any thread listens."""
    return any(thread.name == "mme events" for thread in threading.enumerate())


def aside(work, *args):
    """A thread that does it."""
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


def test_who_only_sends_does_without_a_thread(sides):
    """Responses need none."""
    events, server = sides
    events.responders(7, 1)[0].send(ModelResponse({}, {"a": 1}), final=True)

    assert server.next() == {"respond": 7, "final": True, "outputs": {}, "parameters": {"a": 1}}
    assert not listening()


def test_the_first_look_waits_for_what_the_server_knows(sides):
    """Later ones do not ask again; who is over is nobody's client any more."""
    events, server = sides
    events.responders(1, 1)[0]
    events.responders(2, 1)[0]
    looked = []
    looking = [aside(lambda: looked.append((events.is_cancelled(1), events.is_cancelled(2)))) for _ in range(3)]
    assert server.next() == {"hear": True}
    assert looked == []
    server.tell({"cancelled": 1})
    server.tell({"cancelled": 99})
    server.tell({"hears": True})
    for thread in looking:
        thread.join(PATIENCE)

    assert looked == [(True, False)] * 3
    events.forget([1])
    assert not events.is_cancelled(1)
    assert events.kept == 1  # the request 2


def test_who_asked_to_be_told_is_told_once(sides):
    """At once where it has happened; never once the request is over."""
    events, server = sides
    told = []
    for number in (1, 2, 3):
        events.responders(number, 1)[0]
    asking = aside(events.when_cancelled, 1, lambda: told.append(1))
    assert server.next() == {"hear": True}
    server.tell({"hears": True})
    asking.join(PATIENCE)
    events.when_cancelled(2, lambda: told.append(2))
    events.forget([2])
    for number in (1, 2, 3, 1):
        server.tell({"cancelled": number})
    done = threading.Event()
    events.expect(1, lambda *_: done.set())
    server.tell({"reply": 1, "final": True})
    assert done.wait(PATIENCE)
    events.when_cancelled(3, lambda: told.append(3))
    events.when_cancelled(2, lambda: told.append("never"))

    assert told == [1, 3]
    assert events.kept == 4  # two requests, each of them cancelled


def test_replies_are_taken_until_the_last(sides):
    """Those to a question that nobody asks any more, or never asked, are nobody's."""
    events, server = sides
    took, over = [], threading.Event()
    events.expect(1, lambda message, _: took.append((1, message["final"])))
    events.expect(2, lambda message, _: over.set() if message["final"] else took.append((2, False)))
    assert events.expect_no_more(1)
    assert not events.expect_no_more(1)
    for number, final in ((1, False), (2, False), (3, True), (2, False), (2, True)):
        server.tell({"reply": number, "final": final})
    assert over.wait(PATIENCE)

    assert took == [(2, False), (2, False)]
    assert events.kept == 0


def test_code_that_fails_when_it_is_told_keeps_nobody_from_being_told(sides, capfd):
    """It is printed, as of any thread of the model."""
    events, server = sides
    over = threading.Event()
    events.expect(1, lambda *_: 1 / 0)
    events.expect(2, lambda *_: over.set())
    server.tell({"reply": 1, "final": True})
    server.tell({"reply": 2, "final": True})

    assert over.wait(PATIENCE)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_servers_end_is_the_end_of_waiting(sides):
    """Who looks for the first time when nobody answers any more is not left waiting; what is sent goes nowhere."""
    events, server = sides
    events.responders(1, 1)[0]
    looking = aside(events.is_cancelled, 1)
    assert server.next() == {"hear": True}
    server.close()
    looking.join(PATIENCE)

    assert not looking.is_alive()
    events.send({"n": 1})


def test_memory_that_nobody_has_received_has_a_bound(sides, paused, monkeypatch):
    """A socket holds hundreds of frames, and each may stand for memory of any size."""
    monkeypatch.setattr(events_module, "_MOST_UNDER_WAY", 3 << 20)
    events, server = sides
    large = {"y": np.zeros(1 << 20, "u1")}
    sent = []

    def send():
        responder = events.responders(1, 1)[0]
        for number in range(10):
            responder.send(ModelResponse(large, {"n": number}), final=number == 9)
            sent.append(number)

    sender = aside(send)
    assert paused.wait(PATIENCE)
    assert sent == [0, 1, 2, 3]
    assert [server.next()["parameters"]["n"] for _ in range(10)] == list(range(10))
    sender.join(PATIENCE)
    assert sent == list(range(10))


def test_sending_waits_while_nobody_reads(sides):
    """And loses nothing, in the order of each thread."""
    events, server = sides
    responder = events.responders(1, 1)[0]

    def send():
        for number in range(300):
            responder.send(ModelResponse({"y": np.zeros(20_000 * (number % 2) + 1)}, {"n": number}), final=False)

    sending = aside(send)
    sending.join(0.2)
    assert sending.is_alive()
    assert [server.next()["parameters"]["n"] for _ in range(300)] == list(range(300))
    sending.join(PATIENCE)

    assert not sending.is_alive()


def test_what_cannot_be_sent_is_the_end_of_its_request(sides):
    """With an error in its place; a second one of the same kind would be nobody's."""
    events, server = sides
    responder = events.responders(1, 1)[0]
    responder.send(ModelResponse({}, {"a": object()}), final=False)
    message = server.next()

    assert (message["respond"], message["final"], message["error"]["kind"]) == (1, True, "EXECUTION_FAILED")
    assert events.kept == 0
    with pytest.raises(MmeError) as raised:
        events.send({"a": object()})
    assert raised.value.kind is Kind.INVALID_ARGUMENT


def test_who_asks_whether_the_model_is_ready_is_answered_though_it_can_not_be_asked(sides):
    """With a no, as where no thread can be had for it; nobody would ask again before the answer."""
    events, server = sides
    answers = [True]

    def ask(done):
        if not answers:
            raise RuntimeError("can't start new thread")
        done(answers.pop())

    events.answer_ready(ask)
    for ready in (True, False):
        server.tell({"ready": True})
        assert server.next() == {"ready": ready}


def test_who_listens_sleeps_on_while_a_question_is_read(sides):
    """Room on the socket is nothing to listen to."""
    events, server = sides
    events.expect(1, lambda *_: None)
    listener = next(thread for thread in threading.enumerate() if thread.name == "mme events")
    sleeps = times_asleep(listener)
    for _ in range(50):
        events.send({"ask": 1})
        assert server.next() == {"ask": 1}
        time.sleep(0.001)  # for who was woken to go to sleep again
    assert times_asleep(listener) == sleeps


def test_who_listens_ends_quietly_when_its_own_side_is_closed(sides, monkeypatch):
    """As when one of several models of a process goes."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    events, server = sides
    events.expect(1, lambda *_: None)
    listener = next(thread for thread in threading.enumerate() if thread.name == "mme events")
    times_asleep(listener)
    server.other.close()
    server.close()
    listener.join(PATIENCE)
    assert not listener.is_alive()
    assert raised == []
