"""Requests that cross together and are executed one by one: each for itself, and none the worse for its company."""

import inspect
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import psutil
import pytest
from isolated_models import OneArray, RequestsMisbehave, Table, TooFewAnswers
from unasked_models import Once

from model_handlers.config.model_config import DynamicBatching, ModelConfig, SequenceBatching
from model_handlers.errors import GivenBackError, Kind, MmeError, NotBegunError
from model_handlers.requests import PUT_BACK, ModelRequest, ModelResponse
from model_handlers.worker.fork_client import ChildDiedError
from model_handlers.worker.main import PROGRESS, OneByOne
from tests.responders import Responses

X = np.arange(4, dtype="f4")
BATCHED = ModelConfig("m", max_batch_size=8, dynamic_batching=DynamicBatching((8,)))


def requests(*deeds):
    """One for each deed, with somebody who waits for the responses."""
    return [ModelRequest({"x": X}, ("y", "seen"), deed, responder=Responses()) for deed in deeds]


def test_each_is_executed_for_itself(start):
    """A deed that only the first request of an execution can have done is done for each; what one raises is its own."""
    handler = start(RequestsMisbehave, UNHURRIED="1")
    first, raised, refused, last = handler.execute_requests(requests("a", "raise", "bad", "b"))

    assert [answer.outputs["seen"].tolist()[0].split()[0] for answer in (first, last)] == [b"a", b"b"]
    assert np.array_equal(last.outputs["y"], X * 2)
    assert (raised.kind, "ZeroDivisionError" in raised.message) == (Kind.INTERNAL, True)
    assert (refused.kind, refused.message) == (Kind.INVALID_ARGUMENT, "this one is bad")


def test_a_wrong_count_is_the_failure_of_one(start):
    """Each execution is to return one answer."""
    answers = start(TooFewAnswers, UNHURRIED="1").execute_requests(requests("a", "b"))
    assert [answer.message for answer in answers] == ["model 'm' gave 0 answers to 1 requests"] * 2


def test_models_that_batch_get_them_as_one(start):
    """Then what is raised, and a wrong count, befall all of them."""
    handler = start(RequestsMisbehave, config=BATCHED)
    assert len(handler.execute_requests(requests("a", "raise"))) == 2  # which nobody looks at behind the first
    with pytest.raises(MmeError, match="ZeroDivisionError"):
        handler.execute_requests(requests("raise", "a"))
    with pytest.raises(MmeError, match="0 answers to 2 requests"):
        start(TooFewAnswers, config=BATCHED).execute_requests(requests("a", "b"))


def test_a_death_costs_those_that_were_begun(start):
    """Those behind it were never begun, are told so, and are owed nothing by anybody else; then the model is alone."""
    handler = start(RequestsMisbehave, UNHURRIED="1")
    for _ in range(200):
        handler._pace.learn(1000, 1, 16)
    assert handler.together() == 32
    sent = requests("a", "exit 137", "b", "c")
    answers = handler.execute_requests(sent)

    assert [type(answer) for answer in answers[2:]] == [NotBegunError] * 2
    assert answers[0] is answers[1]
    assert "exit code 137" in answers[1].message
    assert [request.responder.ends for request in sent] == [1, 1, 0, 0]
    assert handler.together() == 1
    assert len(handler.execute_requests(requests("b", "c"))) == 2
    with pytest.raises(MmeError, match="exit code 137"):  # nobody is left
        handler.execute_requests(requests("a", "exit 137"))


def test_few_have_company_whose_answers_are_large(start):
    """The first would wait until all of them are written, which is no part of an execution."""
    handler = start(Table)
    for _ in range(100):
        handler.execute_requests(requests("a"))
    assert handler.together() == 1


def handler_folder(handler):
    """The folder that its model's file lies in."""
    return Path(handler._load["model_file"]).parent


def aside(handler, sent):
    """Execute on another thread; returns it, and what will be what came of it."""
    got = []
    thread = threading.Thread(target=lambda: got.extend(handler.execute_requests(sent)))
    thread.start()
    return thread, got


def test_who_is_answered_does_not_wait_for_a_slow_one(start):
    """What is answered already is sent on its own, and stays what it is though the process dies of the slow one."""
    handler = start(RequestsMisbehave)
    for _ in range(2):  # in the second round nobody looks yet, or looks still
        first, second, slow, _ = sent = requests("a", "bad", "hang", "b")
        thread, got = aside(handler, sent)
        [answer] = first.responder.end()
        assert np.array_equal(answer.outputs["y"], X * 2)
        assert [error.message for error in second.responder.end()] == ["this one is bad"]
        assert slow.responder.got == got == []
        psutil.Process(handler.child.pid).kill()
        thread.join()
        assert [type(answer) for answer in got] == [ChildDiedError] * 3 + [GivenBackError]
        assert [request.responder.ends for request in sent] == [1, 1, 1, 1]
        assert isinstance(first.responder.got[-1], ModelResponse)


def test_nobody_waits_behind_a_slow_one(start):
    """Who is not begun yet is given back, the last first, and is not executed here; the slow one goes on."""
    handler = start(RequestsMisbehave)
    for _ in range(200):
        handler._pace.learn(1000, 1, 16)
    slow, *behind = requests("wait", "note", "note")
    thread, got = aside(handler, [slow, *behind])
    for request in behind:
        assert [type(answer) for answer in request.responder.end()] == [NotBegunError]
    assert slow.responder.got == got == []
    (handler_folder(handler) / "go").touch()
    thread.join()
    assert [type(answer) for answer in got] == [ModelResponse, GivenBackError, GivenBackError]
    assert [request.responder.ends for request in (slow, *behind)] == [0, 1, 1]
    assert not (handler_folder(handler) / "noted").exists()
    assert handler.together() == 1
    assert [type(answer) for answer in handler.execute_requests(requests("note", "a"))] == [ModelResponse] * 2


def test_the_first_is_never_given_back(monkeypatch):
    """However long the process takes to begin: it is to execute something, and is not asked in vain."""
    if not inspect.isfunction(OneByOne.run):
        pytest.skip("what is compiled takes no responder but a real one")
    executed = []

    class Responder:
        def put_back(self):
            executed.append("given back")

    def execute(request, _, last):
        executed.append((request, last))
        return request

    class Eager:
        def __init__(self, **_):
            self.start = process._give_back

    process = OneByOne(execute)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Eager)
        answers, _ = process.run("abc", [Responder()] * 3, np.zeros(PROGRESS.size, "u1"))
    assert answers == ["a", PUT_BACK, PUT_BACK]
    assert executed == ["given back", "given back", ("a", False)]


def test_the_last_answer_goes_with_its_batch():
    """Whoever looks in that very moment: it lies in the model's own array, which the next batch may write into."""
    if not inspect.isfunction(OneByOne.run):
        pytest.skip("what is compiled takes no responder but a real one")
    sent = []

    class Responder:
        def send(self, answer, *, final):
            sent.append((answer, final))

    class Watched(deque):
        def append(self, each):
            super().append(each)
            process.send_answered()

    process = OneByOne(lambda request, _, last: f"{request}, last: {last}")
    process._unsent = Watched()
    answers, _ = process.run("ab", [Responder()] * 2, np.zeros(PROGRESS.size, "u1"))
    assert answers == [None, "b, last: True"]
    assert sent == [("a, last: False", True)]


def test_answers_are_what_they_were_when_the_model_gave_them(start):
    """Though it writes the next one into the same array, as it may once it has been asked for that."""
    answers = start(OneArray, UNHURRIED="1").execute_requests(requests("a", "b", "c"))
    assert [answer.outputs["y"].tolist() for answer in answers] == [(X * count).tolist() for count in (1, 2, 3)]
    handler = start(OneArray)
    sent = requests("d", "hang", "e")
    thread, _ = aside(handler, sent)
    [early] = sent[0].responder.end()
    assert early.outputs["y"].tolist() == X.tolist()
    psutil.Process(handler.child.pid).kill()
    thread.join()


def test_a_copy_that_the_model_made_executes_nobody_else(start):
    """It came back from the model's code where that forked, and ends before the next request."""
    handler = start(RequestsMisbehave, UNHURRIED="1")
    assert len(handler.execute_requests(requests("note", "fork", "note", "note"))) == 4
    assert set((handler_folder(handler) / "noted").read_text().split()) == {str(handler.child.pid)}


def test_a_process_may_die_before_it_is_sent_anything(start):
    """What the one before it died of is over."""
    handler = start(RequestsMisbehave, UNHURRIED="1")
    with pytest.raises(ChildDiedError):
        handler.execute_requests(requests("exit 137"))
    with handler._lock:
        handler._revive()
    psutil.Process(handler.child.pid).kill()
    while handler.child.alive:
        time.sleep(0.01)
    assert [type(answer) for answer in handler.execute_requests(requests("a", "b"))] == [ModelResponse] * 2


def test_who_is_answered_does_not_wait_for_what_a_model_asks(start):
    """It may be what somebody does who waits for that answer. Nor is it asked for those behind, who are not begun."""

    class Outside:
        def infer(self, call, responder):
            self.call, self.ends_by_then = call, first.responder.ends
            responder.send(None, final=True)

    handler = start(Once, UNHURRIED="1")
    handler.outside = Outside()
    first, calling, last = sent = requests("answer 1", "call other", "answer 3")
    calling.callers, last.callers = ("ours",), ("theirs",)
    answers = handler.execute_requests(sent)

    assert handler.outside.ends_by_then == 1
    assert handler.outside.call.callers == ("ours", "m")
    assert handler.outside.call.waiting == (calling.responder,)
    assert answers[0] is None
    assert answers[1].outputs["told"].tolist() == [b'["end"]']
    assert answers[2].outputs["y"].tolist() == [3]
    assert [len(request.responder.got) for request in (first, calling, last)] == [1, 0, 0]


def test_one_by_one_is_what_neither_batches_nor_belongs_together():
    """By the configuration alone, which both sides know."""
    batching = DynamicBatching((8,))
    assert ModelConfig("m").one_by_one
    assert ModelConfig("m", max_batch_size=8).one_by_one
    assert ModelConfig("m", max_batch_size=1, dynamic_batching=batching).one_by_one
    assert not ModelConfig("m", max_batch_size=8, dynamic_batching=batching).one_by_one
    assert not ModelConfig("m", dynamic_batching=DynamicBatching((1,), preserve_ordering=True)).one_by_one
    assert not ModelConfig("m", decoupled=True).one_by_one
    assert not ModelConfig("m", sequence_batching=SequenceBatching()).one_by_one
