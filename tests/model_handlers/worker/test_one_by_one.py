"""Requests that cross together and are executed one by one: each for itself, and none the worse for its company."""

import inspect
import time
from collections import deque

import numpy as np
import psutil
import pytest
from isolated_models import OneArray, RequestsMisbehave, Table, TooFewAnswers
from unasked_models import Once

from model_handlers.config.model_config import DynamicBatching, ModelConfig, SequenceBatching
from model_handlers.errors import ChildDiedError, Kind, MmeError, NotBegunError
from model_handlers.requests import ModelRequest, ModelResponse
from model_handlers.worker.main import PROGRESS, OneByOne
from tests.responders import Responses

X = np.arange(4, dtype="f4")
BATCHED = ModelConfig("m", max_batch_size=8, dynamic_batching=DynamicBatching((8,)))


def requests(*deeds):
    """One for each deed, with somebody who waits for the responses."""
    return [ModelRequest({"x": X}, ("y", "seen"), deed, responder=Responses()) for deed in deeds]


def together(handler):
    """How many of many requests that wait it is sent at once."""
    return handler.opened.pace.together(time.perf_counter_ns())


def test_each_is_executed_for_itself(start):
    """A deed that only the first request of an execution can have done is done for each; what one raises is its own."""
    handler = start(RequestsMisbehave)
    first, raised, refused, last = handler.execute_requests(requests("a", "raise", "bad", "b"))

    assert [answer.outputs["seen"].tolist()[0].split()[0] for answer in (first, last)] == [b"a", b"b"]
    assert np.array_equal(last.outputs["y"], X * 2)
    assert (raised.kind, "ZeroDivisionError" in raised.message) == (Kind.INTERNAL, True)
    assert (refused.kind, refused.message) == (Kind.INVALID_ARGUMENT, "this one is bad")


def test_a_wrong_count_is_the_failure_of_one(start):
    """Each execution is to return one answer."""
    answers = start(TooFewAnswers).execute_requests(requests("a", "b"))
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
    handler = start(RequestsMisbehave)
    for _ in range(200):
        handler.opened.pace.learn(1000, 1, 16)
    assert together(handler) == 32
    sent = requests("a", "exit 137", "b", "c")
    answers = handler.execute_requests(sent)

    assert [type(answer) for answer in answers[2:]] == [NotBegunError] * 2
    assert answers[0] is answers[1]
    assert "exit code 137" in answers[1].message
    assert [request.responder.ends for request in sent] == [1, 1, 0, 0]
    assert together(handler) == 1
    assert len(handler.execute_requests(requests("b", "c"))) == 2
    with pytest.raises(MmeError, match="exit code 137"):  # nobody is left
        handler.execute_requests(requests("a", "exit 137"))


def test_few_have_company_whose_answers_are_large(start):
    """The first would wait until all of them are written, which is no part of an execution."""
    handler = start(Table)
    for _ in range(100):
        handler.execute_requests(requests("a"))
    assert together(handler) == 1


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
    answers = start(OneArray).execute_requests(requests("a", "b", "c"))
    assert [answer.outputs["y"].tolist() for answer in answers] == [(X * count).tolist() for count in (1, 2, 3)]


def test_a_copy_that_the_model_made_executes_nobody_else(start, tmp_path):
    """It came back from the model's code where that forked, and ends before the next request."""
    handler = start(RequestsMisbehave)
    assert len(handler.execute_requests(requests("note", "fork", "note", "note"))) == 4
    assert set((tmp_path / "noted").read_text().split()) == {str(handler.child.pid)}


def test_a_process_may_die_before_it_is_sent_anything(start):
    """What the one before it died of is over."""
    handler = start(RequestsMisbehave)
    with pytest.raises(ChildDiedError):
        handler.execute_requests(requests("exit 137"))
    with handler.process.lock:
        handler.process.revive()
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

    handler = start(Once)
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
