"""Which trace a request's headers name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.observe.trace_settings import TraceSettings
from container.observe.tracing import MODEL, REQUEST_ID, VERSION, FileTracer, Origin, Phase, origin

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BOTH = Origin(int(TRACE, 16), int(SPAN, 16), sampled=True)
ALONE = Origin(int(TRACE, 16), 0, sampled=True)
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": f"00-{TRACE}-{SPAN}-01"}, BOTH),
        ({"traceparent": f"00-{TRACE}-{SPAN}-00"}, Origin(*BOTH[:2], sampled=False)),
        ({"traceparent": f"cc-{TRACE}-{SPAN}-03-what-comes-later"}, BOTH),
        ({ATTRIBUTES: f"00-{TRACE}-{SPAN}-01"}, BOTH),
        ({ATTRIBUTES: f"tenant=a;traceparent=00-{TRACE}-{SPAN}-01;b=c"}, BOTH),
        ({ATTRIBUTES: f"trace_id={TRACE}"}, ALONE),
        ({ATTRIBUTES: f'{{"traceId": "{TRACE}"}}'}, ALONE),
        ({ATTRIBUTES: f"tenant: a, trace-id: {TRACE}"}, ALONE),
        ({ATTRIBUTES: f"tenant=a,TraceId={TRACE},b=c"}, ALONE),
        ({ATTRIBUTES: f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent={SPAN};Sampled=1"}, BOTH),
        ({ATTRIBUTES: f"Root=1-{TRACE[:8]}-{TRACE[8:]}"}, ALONE),
        ({"x-amzn-trace-id": f"Root=1-{TRACE[:8]}-{TRACE[8:]};Sampled=0"}, Origin(*ALONE[:2], sampled=False)),
        ({"traceparent": f"00-{TRACE}-{SPAN}-01", ATTRIBUTES: f"trace_id={SPAN * 2}"}, BOTH),
        ({"traceparent": "nonsense", ATTRIBUTES: f"trace_id={TRACE}"}, ALONE),
        ({}, None),
        ({"traceparent": ""}, None),
        ({"traceparent": f"ff-{TRACE}-{SPAN}-01"}, None),
        ({"traceparent": f"00-{'0' * 32}-{SPAN}-01"}, None),
        ({"traceparent": f"00-{TRACE}0-{SPAN}-01"}, None),
        ({"traceparent": f"00-{TRACE}-{SPAN}-0"}, None),
        ({ATTRIBUTES: "c000b4f9-df62-4c85-a0bf-7c525f9104a4"}, None),
        ({ATTRIBUTES: f"subtrace_id={TRACE}"}, None),
        ({ATTRIBUTES: f"trace_id={TRACE}00"}, None),
    ],
)
def test_a_trace_is_found_where_clients_can_put_it(headers, expected):
    """In W3C's header first; in custom attributes in any of three forms; a malformed one names none."""
    assert origin(headers) == expected


@given(st.text(max_size=200))
def test_no_text_is_too_odd(text):
    """Whatever clients send, it is an origin or none, and never an error."""
    found = origin({ATTRIBUTES: text})
    assert found is None or (0 < found.trace_id < 1 << 128 and 0 <= found.span_id < 1 << 64)


def test_a_step_may_be_called_as_a_part_of_a_request_is(tmp_path):
    """In the file it is a trace of its own, with its parts."""
    tracer = FileTracer(str(tmp_path / "t.json"), TraceSettings(on=True), 0.0)
    parts = [Phase(name, at, at + 1, {}) for at, name in enumerate(("queue", "batch", "compute", "scatter"), 1)]
    step = Phase("batch", 1, 5, {MODEL: "batch", VERSION: "1"}, parts, 1)
    came = {MODEL: "both", VERSION: "1", REQUEST_ID: "a"}
    tracer.write(None, Phase("infer", 0, 6, came, (Phase("load", 0, 1, {}), step), 1), 10, None)
    tracer.close()

    entries = json.loads((tmp_path / "t.json").read_bytes())
    assert [each for each in entries if "model_name" in each] == [
        {"id": 1, "model_name": "both", "model_version": 1, "request_id": "a"},
        {"id": 2, "model_name": "batch", "model_version": 1, "request_id": "a", "parent_id": 1},
    ]
    names = [[stamp["name"] for stamp in each["timestamps"]] for each in entries if "timestamps" in each]
    assert names[0][2:5] == ["REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE"]
    assert names[1][2:] == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END"]
