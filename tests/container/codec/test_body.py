"""Requests and answers of models that take a body as it came."""

import numpy as np
import pytest

from container.codec.request import body_of, body_request, content_type_of
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32, UINT8
from serve.request import InferenceResponse


def request_of(body, *said):
    """A request of these headers."""
    return body_request(body, *said, on_complete=lambda *_: None)


def response_of(array, name="BODY", data_type=UINT8, **parameters):
    """A response of one tensor."""
    return InferenceResponse("m", "1", [(name, data_type, array)], parameters=parameters)


@pytest.mark.parametrize("body", [b"", b"\x00\xff", b"x" * 100_000])
def test_a_body_becomes_a_tensor_where_it_lies(body):
    """One UINT8 tensor of as many elements as bytes, which are not copied."""
    request = request_of(body, "text/csv", "a/b", "c=1")

    (array,) = request.inputs
    assert request.layout.inputs == (("BODY", UINT8, (len(body),)),)
    assert array.tobytes() == body
    assert not body or np.shares_memory(array, np.frombuffer(body, np.uint8))
    assert request.parameters == {"content_type": "text/csv", "accept": "a/b", "custom_attributes": "c=1"}


def test_headers_that_did_not_come_are_not_said():
    """The model decides what nobody said."""
    assert request_of(b"1", "", "", "").parameters == {}


def test_an_answer_is_sent_from_where_it_lies():
    """The body is a view of the tensor."""
    array = np.arange(10, dtype=np.uint8)

    assert body_of(response_of(array)).tobytes() == bytes(range(10))
    assert np.shares_memory(np.frombuffer(body_of(response_of(array)), np.uint8), array)


def test_an_answer_may_be_empty():
    """No bytes at all are a body, too."""
    assert body_of(response_of(np.zeros(0, np.uint8))).tobytes() == b""


@pytest.mark.parametrize(
    ("array", "name", "data_type"),
    [
        (np.zeros(2, np.float32), "BODY", FP32),
        (np.zeros(2, np.uint8), "Y", UINT8),
        (np.zeros((4, 4), np.uint8)[:, 1], "BODY", UINT8),
    ],
)
def test_an_answer_that_is_no_body_is_our_failure(array, name, data_type):
    """The tensor has another name, type or form."""
    with pytest.raises(MmeError) as caught:
        body_of(response_of(array, name, data_type))

    assert caught.value.kind is Kind.INTERNAL


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        ({"content_type": "text/csv; charset=utf-8"}, b"text/csv; charset=utf-8"),
        ({}, b"application/json"),
        ({"content_type": ""}, b"application/json"),
        ({"content_type": "a/b\r\nSet-Cookie: c=1"}, b"a/b  Set-Cookie: c=1"),
        ({"content_type": "a/\u2713"}, b"a/?"),
        ({"content_type": 7}, b"7"),
    ],
)
def test_the_content_type_is_what_the_model_said(said, sent):
    """Whatever a model says fits into one line of a header."""
    assert content_type_of(response_of(np.zeros(1, np.uint8), **said)) == sent
