"""What is traced, as Triton's clients change it."""

from __future__ import annotations

import pytest

from container.trace_settings import TraceSettings
from model_handlers.errors import Kind, MmeError

FIRST = TraceSettings(on=True, rate=50, count=-1)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, TraceSettings(on=True, rate=7, count=3)),
        ({"trace_level": ["OFF"]}, TraceSettings(on=False, rate=7, count=3)),
        ({"trace_level": "OFF"}, TraceSettings(on=False, rate=7, count=3)),
        ({"trace_level": []}, TraceSettings(on=False, rate=7, count=3)),
        ({"trace_level": None, "trace_rate": None, "trace_count": None}, FIRST),
        ({"trace_rate": "1", "trace_count": 0}, TraceSettings(on=True, rate=1, count=0)),
        ({"trace_mode": "opentelemetry", "log_frequency": "0", "trace_file": None}, TraceSettings(True, 7, 3)),
    ],
)
def test_what_is_wanted_is_changed_and_the_rest_stays(wanted, expected):
    """Texts and numbers alike; null is what there was at first."""
    assert TraceSettings(on=True, rate=7, count=3).changed(wanted, FIRST) == expected


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [
        ({"trace_rate": "x"}, Kind.INVALID_ARGUMENT, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": "0"}, Kind.INVALID_ARGUMENT, "value is out of range"),
        ({"trace_count": "-2"}, Kind.INVALID_ARGUMENT, "value is out of range"),
        ({"trace_count": []}, Kind.INVALID_ARGUMENT, "Unable to parse 'trace_count'"),
        ({"trace_level": ["TENSORS"]}, Kind.UNSUPPORTED, "no tensors are traced"),
        ({"trace_level": ["TIMESTAMPS", "TENSORS"]}, Kind.UNSUPPORTED, "no tensors are traced"),
        ({"trace_level": [{}]}, Kind.UNSUPPORTED, "no tensors are traced"),
        ({"trace_file": "/x"}, Kind.UNSUPPORTED, "trace file location can not be updated through network protocol"),
        ({"trace_mode": "triton"}, Kind.UNSUPPORTED, "trace_mode is 'opentelemetry' here"),
        ({"rate": "1"}, Kind.INVALID_ARGUMENT, "trace setting 'rate' is none of trace_level, trace_rate"),
    ],
)
def test_what_can_not_be_is_refused_in_tritons_words(wanted, kind, words):
    """Where it has any."""
    with pytest.raises(MmeError) as raised:
        FIRST.changed(wanted, FIRST)
    assert raised.value.kind is kind
    assert words in raised.value.message


def test_a_server_that_traces_nothing_says_so(server):
    """Triton's clients read it; what would trace is refused with what is missing."""
    assert server.http("GET", "/v2/trace/setting").json["trace_level"] == ["OFF"]
    assert server.http("GET", "/v2/models/twice/trace/setting").json["trace_level"] == ["OFF"]
    reply = server.http("POST", "/v2/trace/setting", {}, b'{"trace_level": ["TIMESTAMPS"]}')
    assert (reply.status, "MME_TRACE_URL" in reply.json["error"]) == (501, True)
