"""Server-sent events, as the HTML standard defines them (`text/event-stream`). PURE."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")


def event(data: bytes) -> bytes:
    """An event with these data, UTF-8. Each line has a field of its own, which clients join with a line feed."""
    return b"".join(b"data: %b\n" % line for line in _LINE_END.split(data)) + b"\n"
