"""Reading a JSON body, writing a JSON answer."""

import json

import pytest
from flask import Flask

from container.control.views import empty_answer, json_answer, json_body
from model_handlers.errors import Kind, MmeError

APP = Flask("test")


def read(data, **options):
    """A body as a view reads it."""
    with APP.test_request_context("/", method="POST", data=data):
        return json_body(**options)


def test_a_body_is_an_object():
    """Whatever its content type says."""
    assert read(b' {"a": [1, "\xc3\xa9"]} ') == {"a": [1, "é"]}


def test_no_body_is_an_empty_object_unless_one_is_required(refused_body):
    """Where all fields are optional."""
    assert read(b"") == {}
    assert "failed to parse the request JSON buffer" in refused_body(b"", required=True)


@pytest.fixture
def refused_body():
    """The sentence by which a body is refused."""

    def sentence(data, **options):
        with pytest.raises(MmeError) as caught:
            read(data, **options)
        assert caught.value.kind is Kind.INVALID_ARGUMENT
        return caught.value.message

    return sentence


@pytest.mark.parametrize("data", [b"{", b"{'a': 1}", b"\xff", b"NaN", b'{"a": NaN}', b"[" * 5000, b" "])
def test_what_is_no_json_is_refused(data, refused_body):
    """In one sentence, deep nesting included."""
    sentence = refused_body(data)
    assert sentence.startswith("failed to parse the request JSON buffer: ")
    assert "\n" not in sentence


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"x"', b"true"])
def test_json_that_is_no_object_is_refused(data, refused_body):
    """Every body of the contract is one."""
    assert refused_body(data) == "the body must be a JSON object"


def test_an_answer_is_compact_json_in_utf_8():
    """With its content type and status."""
    answer = json_answer({"a": "é", "b": (1, 2)}, 409)
    assert (answer.status_code, answer.content_type) == (409, "application/json")
    assert answer.data == '{"a":"é","b":[1,2]}'.encode()
    assert json.loads(answer.data)["b"] == [1, 2]


def test_an_answer_without_a_body_is_no_page():
    """Its status says all; the type is Triton's."""
    answer = empty_answer()
    assert (answer.status_code, answer.headers["Content-Type"], answer.get_data()) == (200, "text/plain", b"")
