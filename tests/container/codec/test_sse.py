"""Server-sent events, read back by the standard's own steps."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container.codec.bodies import event


def events(stream):
    """The data of a stream's events, by the standard's algorithm: https://html.spec.whatwg.org/#event-stream-interpretation."""
    found, data = [], ""
    for line in re.split("\r\n|\n|\r", stream.decode())[:-1]:
        field, _, value = line.partition(":")
        if not line:
            if data:
                found.append(data.removesuffix("\n"))
            data = ""
        elif field == "data":
            data += value.removeprefix(" ") + "\n"
    return found


def test_an_event_is_one_line_of_data_and_an_empty_one():
    """The bytes that Triton's clients look for."""
    assert event(b'{"a": 1}') == b'data: {"a": 1}\n\n'


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_lines_have_fields_of_their_own(end):
    """Data over several lines stay one event, however the lines end, and a line end at the end is kept."""
    assert event(b"one" + end + b"two" + end) == b"data: one\ndata: two\ndata: \n\n"


def test_empty_data_are_an_event():
    """An event without data is dispatched, not dropped."""
    assert events(event(b"") + event(b"x")) == ["", "x"]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from("\r\n :"), max_size=20)))
def test_any_texts_arrive_as_they_were_sent(texts):
    """Any texts, one behind the other, come back in their order; line ends of any kind as line feeds."""
    stream = b"".join(event(text.encode()) for text in texts)
    assert events(stream) == [re.sub("\r\n|\r", "\n", text) for text in texts]
