"""Requests submitted by an event loop: small batches are sent and answered there, all else is left to a thread."""

import errno
import os
import socket
import threading
from queue import SimpleQueue

import numpy as np
import psutil
import pytest
from isolated_models import RequestsMisbehave, Texts

from model_handlers.config.model_config import DynamicBatching, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.executor import Submission
from model_handlers.requests import ModelRequest
from model_handlers.worker.memory import Segment
from tests.waiting import PATIENCE, eventually

X = np.arange(4, dtype="f4")


class Batch(Submission):
    """Requests of a test, and what became of them."""

    def __init__(self, requests):
        self.batch = requests
        self.answers = None
        self.where = None  # on which thread they came

    def to_requests(self):
        """See `Submission`."""
        return self.batch

    def answered(self, answers, _sent, _came):
        """See `Submission`."""
        self.answers, self.where = answers, threading.current_thread().name.partition("_")[0]


class Submitted:
    """A worker, to whose executor a loop submits batches."""

    def __init__(self, handler, home):
        self.handler = handler
        self.where = []  # on which threads batches' answers came
        self.executors = handler.executors([("m_0", handler)], home, limited=False)
        self._home = home
        self._over = SimpleQueue()

    def submit(self, *requests):
        """Have a batch executed, and wait for nothing."""
        [executor] = self.executors.each
        self._home.loop.call_soon_threadsafe(executor.submit, Batch(requests), self._ended)

    def _ended(self, _executor, batch):
        self._over.put(batch)

    def end(self):
        """The answers to it; what befell the batch is raised."""
        batch = self._over.get(timeout=PATIENCE)
        self.where.append(batch.where)
        if isinstance(batch.answers, Exception):
            raise batch.answers
        return batch.answers

    def __call__(self, *requests):
        """The answers to a batch."""
        self.submit(*requests)
        return self.end()

    def recovers(self):
        """Whether batches are sent by the loop again: what buries a process may be busy with that for a moment."""
        eventually(lambda: len(self(request())) == 1 and self.where[-1] == "loop")
        return True


@pytest.fixture
def submitted(start, home):
    """Starts a model."""
    made = []

    def submitted(handler_class, **arguments):
        made.append(Submitted(start(handler_class, **arguments), home))
        return made[-1]

    yield submitted
    for each in made:
        home.loop.call_soon_threadsafe(each.executors.end)


def request(deed="", x=X, **inputs):
    """One that makes the model do something."""
    return ModelRequest({"x": x, **inputs}, ("y", "seen"), deed)


def test_small_batches_are_answered_on_the_loop(submitted):
    """With the same answers as those that a thread has executed."""
    model = submitted(RequestsMisbehave)
    requests = [request("a"), request("b", X + 1), request("bad")]
    for _ in range(3):
        first, second, error = model(*requests)
        assert np.array_equal(first.outputs["y"], X * 2)
        assert np.array_equal(second.outputs["y"], X * 2 + 2)
        assert second.outputs["seen"].tolist() == [b"b [] 0 y,seen"]
        assert (error.kind, error.message) == (Kind.INVALID_ARGUMENT, "this one is bad")
    assert len(model.handler.execute_requests(requests)) == 3
    assert model.where == ["loop"] * 3


@pytest.mark.parametrize(("count", "where"), [(1000, "loop"), (20_000, "work")])
def test_many_strings_are_for_a_thread_to_take(submitted, count, where):
    """Each of them has to be made, which would keep the event loop; few are made there."""
    model = submitted(Texts)
    for _ in range(2):
        [answer] = model(request(x=np.array([count], "f4")))
        assert answer.outputs["y"].tolist() == [b"text"] * count
    assert model.where == [where] * 2


def test_what_befalls_the_batch_is_told(submitted):
    """An exception of a model that batches is that of its batch; the process lives on."""
    config = ModelConfig("m", max_batch_size=8, dynamic_batching=DynamicBatching((8,)))
    model = submitted(RequestsMisbehave, config=config)
    first = model.handler.child.pid
    with pytest.raises(MmeError, match="ZeroDivisionError"):
        model(request("raise"))
    assert len(model(request())) == 1
    assert model.handler.child.pid == first
    assert model.where == ["loop"] * 2


def test_answers_that_find_no_memory_are_lost_alone(submitted, monkeypatch):
    """The system's refusal to map them is told; the next batch is sent as any other."""

    def full(_segment, _size):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    model = submitted(RequestsMisbehave)
    with monkeypatch.context() as patched:
        patched.setattr(Segment, "follow", full)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            model(request())
    assert model.handler.open_requests == 0
    assert len(model(request())) == 1
    assert model.where == ["loop"] * 2


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([request(x=np.zeros(20_000, "f4"))], id="one large tensor"),
        pytest.param([request(x=np.zeros(5_000, "f4")) for _ in range(4)], id="many small ones"),
        pytest.param([request(text=np.array([b"x" * 70_000], object))], id="a long string"),
        pytest.param([ModelRequest({"x": X}, ("y",), "x" * 70_000)], id="a long id"),
    ],
)
def test_large_batches_are_for_a_thread(submitted, batch):
    """What would take the event loop long to copy."""
    model = submitted(RequestsMisbehave)
    assert len(model(*batch)) == len(batch)
    assert model.where == ["work"]


def test_what_can_not_be_sent_is_told(submitted):
    """A value that does not cross; the process is as it was."""
    model = submitted(RequestsMisbehave)
    with pytest.raises(MmeError, match="can't be handed to the model's process"):
        model(ModelRequest({"x": X}, ("y",), "a", {"key": object()}))
    with pytest.raises(MmeError, match="which the protocol has no name for"):
        model(request(x=np.zeros(2, "c8")))
    assert len(model(request())) == 1


def test_nothing_is_sent_that_would_not_be_heard(submitted, monkeypatch):
    """A loop that is out of descriptors leaves the batch to a thread."""

    def full(_):
        raise OSError(errno.EMFILE, "Too many open files")

    model = submitted(RequestsMisbehave)
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", full)
        assert len(model(request())) == 1
    assert model.where == ["work"]
    assert model.recovers()


def test_nothing_is_sent_while_a_batch_is_under_way(submitted, tmp_path):
    """One batch at a time, whichever threads have them done; the loop waits for none."""
    model = submitted(RequestsMisbehave)
    executing = threading.Thread(target=model.handler.execute_requests, args=([request("wait")],))
    executing.start()
    eventually((tmp_path / "waits").exists)
    model.submit(request())
    (tmp_path / "go").touch()
    executing.join()
    assert len(model.end()) == 1
    assert model.where == ["work"]


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
def test_what_is_no_answer_is_for_a_thread(submitted, caplog, deed, words):
    """Of a death or nonsense under way it is told what it was, and the next batch finds a new process."""
    model = submitted(RequestsMisbehave)
    first = model.handler.child.pid
    with pytest.raises(MmeError, match=words) as raised:
        model(request(deed))
    assert raised.value.kind is Kind.EXECUTION_FAILED
    assert model.where == ["work"]
    assert model.handler.open_requests == 0
    assert len(model(request())) == 1
    assert model.handler.child.pid != first
    assert model.recovers()
    caplog.clear()  # an error that was logged holds on to what it was found in


def test_a_death_is_heard_though_the_connection_stays_open(submitted, tmp_path):
    """What the model started may hold its sockets: the end of its process is heard all the same."""
    model = submitted(RequestsMisbehave)
    model(request("leave behind"))
    left = int((tmp_path / "left").read_text())
    with pytest.raises(MmeError, match="SIGKILL"):
        model(request("sigkill"))
    assert not psutil.pid_exists(left)


def test_the_time_of_a_batch_ends(submitted):
    """Counted from when it was sent, and its process ends with it."""
    model = submitted(RequestsMisbehave, MME_EXECUTION_TIMEOUT="0.2")
    first = model.handler.child.pid
    with pytest.raises(MmeError, match=r"gave no answer within 0\.2 s"):
        model(request("hang"))
    assert not psutil.pid_exists(first)


def test_a_process_that_died_unheard_is_started_again(submitted):
    """A batch is not sent to a process that is gone; a thread executes it in a new one, and it does not fail."""
    model = submitted(RequestsMisbehave)
    child = psutil.Process(model.handler.child.pid)
    child.kill()
    psutil.wait_procs([child], 60)
    assert len(model(request())) == 1
    assert model.recovers()


def test_half_a_message_is_never_left(submitted):
    """Where the system takes only a part of a message, its process is given up, and the batch done by a new one."""
    model = submitted(RequestsMisbehave)
    first = model.handler.child.pid
    psutil.Process(first).suspend()  # it reads nothing meanwhile
    with socket.socket(fileno=os.dup(model.handler.child.descriptors[0])) as control:
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    assert len(model(ModelRequest({"x": X}, ("y",), "x" * 60_000))) == 1
    assert model.handler.child.pid != first


def test_an_end_waits_for_what_was_sent(submitted):
    """The answers come first; a batch behind the end is refused."""
    model = submitted(RequestsMisbehave)
    model.submit(request())
    eventually(lambda: model.handler.batches.number or model.where)
    model.handler.close()
    [answer] = model.end()
    assert np.array_equal(answer.outputs["y"], X * 2)
    with pytest.raises(MmeError, match="is unloaded"):
        model(request())
