"""Batches sent without waiting: answers are taken when they are there, and whatever else is heard is left to a thread."""

import errno
import os
import select
import socket
import threading

import numpy as np
import psutil
import pytest
from isolated_models import Misbehaves, RequestsMisbehave, Texts

from model_handlers.config.model_config import DynamicBatching, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import ModelRequest
from model_handlers.worker.memory import Segment
from tests.waiting import eventually

X = np.arange(4, dtype="f4")


class Ears:
    """Keeps the descriptors that it was told."""

    def __init__(self):
        self.told = []

    def __call__(self, descriptors):
        """See `model_handlers.base.Watch`."""
        self.told.append(descriptors)

    def hear(self):
        """Wait until there is something."""
        poll = select.poll()
        for descriptor in self.told[-1]:
            poll.register(descriptor, select.POLLIN)
        assert poll.poll(60_000)


@pytest.fixture
def ears():
    """What a loop would be told to look after."""
    return Ears()


def request(deed="", x=X, **inputs):
    """One that makes the model do something."""
    return ModelRequest({"x": x, **inputs}, ("y", "seen"), deed)


def heard(handler, ears, *requests):
    """Send a batch and wait until something is heard. A new process may have to wait for those who buried the last."""
    eventually(lambda: handler.send_requests(requests, ears), "a process that takes it")
    ears.hear()


def refused(handler, ears, *requests):
    """Whether nothing was sent, nothing is owed, and a thread gets the batch done."""
    if handler.send_requests(requests, ears):
        return False
    return len(handler.execute_requests(requests)) == len(requests)


def test_answers_are_taken_when_they_are_there(start, ears):
    """A sent batch has the same answers as an executed one, and is heard on descriptors that stay the same."""
    handler = start(RequestsMisbehave)
    requests = [request("a"), request("b", X + 1), request("bad")]
    for _ in range(3):
        heard(handler, ears, *requests)
        first, second, error = handler.take_answers()
        assert np.array_equal(first.outputs["y"], X * 2)
        assert np.array_equal(second.outputs["y"], X * 2 + 2)
        assert second.outputs["seen"].tolist() == [b"b [] 0 y,seen"]
        assert (error.kind, error.message) == (Kind.INVALID_ARGUMENT, "this one is bad")
    assert len(handler.execute_requests(requests)) == 3
    assert len(set(map(id, ears.told))) == 1
    assert handler.patience == 60


@pytest.mark.parametrize(("count", "at_once"), [(1000, True), (20_000, False)])
def test_many_strings_are_for_a_thread_to_take(start, ears, count, at_once):
    """Each of them has to be made, which would keep the event loop; few are made there."""
    handler = start(Texts)
    for _ in range(2):
        heard(handler, ears, request(x=np.array([count], "f4")))
        answers = handler.take_answers()
        assert (answers is not None) is at_once
        [answer] = answers or handler.await_answers()
        assert answer.outputs["y"].tolist() == [b"text"] * count


def test_nothing_is_taken_before_it_is_there(start, ears):
    """Who takes too early gets nothing, and the answers when they have come."""
    handler = start(RequestsMisbehave)
    assert handler.send_requests([request("hang")], ears)
    assert handler.take_answers() is None
    psutil.Process(handler.child.pid).kill()
    with pytest.raises(MmeError, match="SIGKILL"):
        handler.await_answers()


def test_what_befalls_the_batch_is_raised(start, ears):
    """An exception of a model that batches is raised where its answers are taken; the process lives on."""
    handler = start(
        RequestsMisbehave, config=ModelConfig("m", max_batch_size=8, dynamic_batching=DynamicBatching((8,)))
    )
    first = handler.child.pid
    heard(handler, ears, request("raise"))
    with pytest.raises(MmeError, match="ZeroDivisionError"):
        handler.take_answers()
    heard(handler, ears, request())
    assert len(handler.take_answers()) == 1
    assert handler.child.pid == first


def test_answers_that_find_no_memory_are_lost_alone(start, ears, monkeypatch):
    """The system's refusal to map them is raised where they are taken; the next batch is sent as any other."""

    def full(_segment, _size):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    handler = start(RequestsMisbehave)
    heard(handler, ears, request())
    with monkeypatch.context() as patched:
        patched.setattr(Segment, "follow", full)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            handler.take_answers()
    assert handler.open_requests == 0
    heard(handler, ears, request())
    assert len(handler.take_answers()) == 1


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([request(x=np.zeros(20_000, "f4"))], id="one large tensor"),
        pytest.param([request(x=np.zeros(5_000, "f4")) for _ in range(4)], id="many small ones"),
        pytest.param([request(text=np.array([b"x" * 70_000], object))], id="a long string"),
        pytest.param([ModelRequest({"x": X}, ("y",), "x" * 70_000)], id="a long id"),
    ],
)
def test_large_batches_are_not_sent(start, ears, batch):
    """What would take the event loop long to copy is left to a thread."""
    handler = start(RequestsMisbehave)
    assert refused(handler, ears, *batch)


def test_what_can_not_be_sent_is_told_by_execution(start, ears):
    """A value that does not cross is nobody's concern until a thread executes the batch."""
    handler = start(RequestsMisbehave)
    odd = ModelRequest({"x": X}, ("y",), "a", {"key": object()})
    assert not handler.send_requests([odd], ears)
    assert not handler.send_requests([request(x=np.zeros(2, "c8"))], ears)
    with pytest.raises(MmeError, match="can't be handed to the model's process"):
        handler.execute_requests([odd])
    heard(handler, ears, request())
    assert len(handler.take_answers()) == 1


def test_nothing_is_sent_that_nobody_would_hear(start):
    """A loop that is out of descriptors leaves the batch to a thread."""

    def deaf(descriptors):
        raise OSError(24, "Too many open files")

    assert refused(start(RequestsMisbehave), deaf, request())


def test_nothing_is_sent_while_a_batch_is_under_way(start, ears, tmp_path):
    """One batch at a time, whichever threads have them done; nobody waits for another's."""
    handler = start(RequestsMisbehave)
    executing = threading.Thread(target=handler.execute_requests, args=([request("wait")],))
    executing.start()
    eventually((tmp_path / "waits").exists)
    assert not handler.send_requests([request()], ears)
    (tmp_path / "go").touch()
    executing.join()
    assert handler.send_requests([request("hang")], ears)
    assert not handler.send_requests([request()], ears)
    psutil.Process(handler.child.pid).kill()
    with pytest.raises(MmeError, match="SIGKILL"):
        handler.await_answers()


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("sigkill", "was killed by SIGKILL while it executed a batch"),
        (
            "os._exit",
            "ended with exit code 3 while it executed a batch; the last it wrote to standard error: first words",
        ),
        ("nonsense", "a message of 2147483647 bytes"),
        ("forge", "lies outside its segment"),
        ("close all", "was ended, since it closed its connection"),
    ],
)
def test_what_is_no_answer_is_for_a_thread(start, ears, caplog, deed, words):
    """A death or nonsense under way gives nothing to take; waiting tells what it was, and the next batch a new process."""
    handler = start(RequestsMisbehave)
    first = handler.child.pid
    heard(handler, ears, request(deed))
    assert handler.take_answers() is None
    with pytest.raises(MmeError, match=words) as raised:
        handler.await_answers()
    assert raised.value.kind is Kind.EXECUTION_FAILED
    assert handler.open_requests == 0
    assert not handler.send_requests([request()], ears)
    assert len(handler.execute_requests([request()])) == 1
    heard(handler, ears, request())
    assert len(handler.take_answers()) == 1
    assert handler.child.pid != first
    assert len(set(map(id, ears.told))) == 2
    caplog.clear()  # an error that was logged holds on to what it was found in


def test_a_death_is_heard_though_the_connection_stays_open(start, ears, tmp_path):
    """What the model started may hold its sockets: the end of its process is heard all the same."""
    handler = start(RequestsMisbehave)
    handler.execute_requests([request("leave behind")])
    left = int((tmp_path / "left").read_text())
    heard(handler, ears, request("sigkill"))
    assert handler.take_answers() is None
    with pytest.raises(MmeError, match="SIGKILL"):
        handler.await_answers()
    assert not psutil.pid_exists(left)


def test_patience_ends(start, ears):
    """Waiting ends when the batch's time is over, counted from when it was sent, and its process with it."""
    handler = start(RequestsMisbehave, MME_EXECUTION_TIMEOUT="0.2")
    assert handler.patience == 0.2
    first = handler.child.pid
    assert handler.send_requests([request("hang")], ears)
    with pytest.raises(MmeError, match=r"gave no answer within 0\.2 s"):
        handler.await_answers()
    assert not psutil.pid_exists(first)


def test_a_process_that_died_unheard_is_started_anew(start, ears):
    """A batch is not sent to a process that is gone; a thread executes it in a new one, and it does not fail."""
    handler = start(RequestsMisbehave)
    child = psutil.Process(handler.child.pid)
    child.kill()
    psutil.wait_procs([child], 60)
    assert refused(handler, ears, request())


def test_half_a_message_is_never_left(start, ears):
    """Where the system takes only a part of a message, its process is given up, and the batch done by a new one."""
    handler = start(RequestsMisbehave)
    first = handler.child.pid
    psutil.Process(first).suspend()  # it reads nothing meanwhile
    with socket.socket(fileno=os.dup(handler.child.descriptors[0])) as control:
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    assert refused(handler, ears, ModelRequest({"x": X}, ("y",), "x" * 60_000))
    assert handler.child.pid != first


def test_a_thread_may_take_what_the_loop_sent(start, ears):
    """Sending and waiting are for different threads, and closing waits for both."""
    handler = start(RequestsMisbehave)
    assert handler.send_requests([request()], ears)
    closing = threading.Thread(target=handler.close)
    closing.start()
    taken = []
    waiting = threading.Thread(target=lambda: taken.extend(handler.await_answers()))
    waiting.start()
    waiting.join()
    closing.join()
    assert np.array_equal(taken[0].outputs["y"], X * 2)
    assert not handler.send_requests([request()], ears)


def test_handlers_of_whole_batches_have_no_patience(start):
    """Tensors of a whole batch are never sent so."""
    assert start(Misbehaves).patience == 0
