"""Answers that a script's generator writes piece by piece."""

import numpy as np
import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import ModelRequest

STREAM = """
import json

def model_fn(model_dir): return []
def transform_fn(model, body, content_type, accept, context):
    if body == "typed":
        context.set_response_content_type(0, "text/event-stream")
    if body == "early":
        raise ValueError("before the first piece")
    if body == "closed":
        yield json.dumps(model)
        return
    try:
        for piece in ("a", b"b", bytearray(b"c"), {"d": 1}) if body != "none" else ():
            yield piece
            if body == "late":
                raise ValueError("after the first piece")
    finally:
        model.append(body)
"""


class Recorder:
    """A responder that keeps what it is sent, and may have been left."""

    def __init__(self, left_after=None):
        self.sent = []
        self._left_after = left_after

    def send(self, response, *, final):
        """Keep it."""
        self.sent.append((response, final))

    def is_cancelled(self):
        """Whether the client has left."""
        return self._left_after is not None and len(self.sent) >= self._left_after

    def when_cancelled(self, tell):
        """Nobody is told."""


def ask(loaded, body="", responder=None):
    """What the handler returns for one request."""
    array = np.frombuffer(body.encode(), np.uint8)
    (answer,) = loaded.handler.execute_requests([ModelRequest({"BODY": array}, ("BODY",), responder=responder)])
    return answer


def bodies(recorder):
    """The bodies that were sent."""
    return [response.outputs["BODY"].tobytes() for response, _ in recorder.sent if response is not None]


def test_each_piece_is_sent_as_it_comes(scripts):
    """Text, bytes, and what becomes JSON; then the news that it was the last."""
    loaded, recorder = scripts.load(STREAM), Recorder()

    assert ask(loaded, "x", recorder) is None
    assert loaded.handler.config.decoupled
    assert bodies(recorder) == [b"a", b"b", b"c", b'{"d": 1}']
    assert [final for _, final in recorder.sent] == [False] * 4 + [True]
    assert recorder.sent[0][0].parameters == {"content_type": "application/json"}


def test_a_generator_may_say_what_it_writes(scripts):
    """What it sets before its first piece is the content type."""
    recorder = Recorder()
    ask(scripts.load(STREAM), "typed", recorder)

    assert recorder.sent[0][0].parameters == {"content_type": "text/event-stream"}


def test_an_answer_without_pieces_is_empty(scripts):
    """It is one answer, of no bytes."""
    recorder = Recorder()
    answer = ask(scripts.load(STREAM), "none", recorder)

    assert answer.outputs["BODY"].tobytes() == b""
    assert recorder.sent == []


def test_what_goes_wrong_before_the_first_piece_is_an_error_of_its_own(scripts):
    """With a status, as for any other answer."""
    recorder = Recorder()
    error = ask(scripts.load(STREAM), "early", recorder)

    assert isinstance(error, MmeError)
    assert error.kind is Kind.EXECUTION_FAILED
    assert recorder.sent == []


def test_what_goes_wrong_later_ends_the_pieces(scripts):
    """The error is the last that is sent."""
    recorder = Recorder()
    assert ask(scripts.load(STREAM), "late", recorder) is None

    error, final = recorder.sent[-1]
    assert [piece.outputs["BODY"].tobytes() for piece, _ in recorder.sent[:-1]] == [b"a"]
    assert final
    assert "after the first piece" in error.message


def test_a_generator_is_closed_when_its_client_has_left(scripts):
    """No piece is sent after that, and its `finally` runs."""
    loaded, recorder = scripts.load(STREAM), Recorder(left_after=2)
    ask(loaded, "left", recorder)

    assert bodies(recorder) == [b"a", b"b"]
    assert recorder.sent[-1] == (None, True)
    again = Recorder()
    ask(loaded, "closed", again)
    assert bodies(again) == [b'["left"]']


def test_without_anybody_to_send_pieces_to_they_are_one_answer(scripts):
    """Joined, as for models whose function returns a generator and says nothing of it."""
    assert ask(scripts.load(STREAM), "x").outputs["BODY"].tobytes() == b'abc{"d": 1}'


RETURNS = """
def model_fn(model_dir): return 1
def transform_fn(model, body, content_type, accept):
    return (piece for piece in "abc"), "text/plain"
"""


def test_a_generator_that_is_returned_is_one_answer(scripts):
    """Only a function that is a generator itself makes a decoupled model, which some routes can't ask."""
    recorder = Recorder()
    answer = ask(scripts.load(RETURNS), "x", recorder)

    assert answer.outputs["BODY"].tobytes() == b"abc"
    assert recorder.sent == []


def test_a_configuration_may_have_it_sent_piece_by_piece(scripts):
    """model_transaction_policy { decoupled: true } is for functions that return generators."""
    loaded, recorder = scripts.load(RETURNS, decoupled=True), Recorder()

    assert ask(loaded, "x", recorder) is None
    assert bodies(recorder) == [b"a", b"b", b"c"]
    assert recorder.sent[0][0].parameters == {"content_type": "text/plain"}


@pytest.mark.parametrize("body", ["x", ""])
def test_a_decoupled_model_may_answer_at_once(scripts, body):
    """What is no generator is the one answer."""
    source = "def model_fn(model_dir): return 1\ndef transform_fn(m, body, c, a): return body"
    recorder = Recorder()

    assert ask(scripts.load(source, decoupled=True), body, recorder).outputs["BODY"].tobytes() == body.encode()
    assert recorder.sent == []
