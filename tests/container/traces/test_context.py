"""Which trace a request's headers name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.traces.context import Origin, origin

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
