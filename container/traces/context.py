"""Which trace a request belongs to, as its headers tell. PURE.

traceparent                            W3C's header, from clients that reach this server themselves
X-Amzn-SageMaker-Custom-Attributes     SageMaker hands on no other header of a client's; anywhere in it one of
                                       00-<trace id>-<span id>-01                       a traceparent
                                       Root=1-<time>-<id>;Parent=<span id>;Sampled=1    what AWS X-Ray says
                                       trace_id=<trace id>                              32 hexadecimal digits
X-Amzn-Trace-Id                        X-Ray's header, from load balancers
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEADERS = ("traceparent", "x-amzn-sagemaker-custom-attributes", "x-amzn-trace-id")
_SAMPLED = 1  # the bit of W3C's flags

_W3C = re.compile(r"(?<![0-9a-f-])(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?![0-9a-f])")
_ROOT = re.compile(r"\bRoot=1-([0-9a-f]{8})-([0-9a-f]{24})\b")
_PARENT = re.compile(r"\bParent=([0-9a-f]{16})\b")
_NOT_SAMPLED = re.compile(r"\bSampled=0\b")
_TRACE_ID = re.compile(r"\btrace[-_]?id\"?\s*[=:]\s*\"?([0-9a-f]{32})\b", re.IGNORECASE)


class Origin(NamedTuple):
    """What a request says of its trace.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits, of the span that it was made in; 0 where it names none.
        sampled: whether that trace is recorded.
    """

    trace_id: int
    span_id: int
    sampled: bool


def origin(headers: Mapping[str, str]) -> Origin | None:
    """The trace that a request belongs to, None where no header tells; ids of zeros only are none.

    Args:
        headers: by lower-case name.
    """
    for name in _HEADERS:
        text = headers.get(name)
        found = _origin_in(text) if text else None
        if found is not None and found.trace_id:
            return found
    return None


def _origin_in(text: str) -> Origin | None:
    if match := _W3C.search(text):
        return Origin(int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & _SAMPLED))
    if match := _ROOT.search(text):
        parent = _PARENT.search(text)
        return Origin(int(match[1] + match[2], 16), int(parent[1], 16) if parent else 0, not _NOT_SAMPLED.search(text))
    if match := _TRACE_ID.search(text):
        return Origin(int(match[1], 16), 0, sampled=True)
    return None
