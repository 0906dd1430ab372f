"""Frames of streamed answers: server-sent events (`text/event-stream`), and AWS event streams. PURE.

A frame of `application/vnd.amazon.eventstream`, as InvokeEndpointWithResponseStream answers:

    u32 length of the frame | u32 length of the headers | u32 CRC-32 of these 8 bytes
    headers | payload | u32 CRC-32 of everything before

Numbers are big-endian. A header is `u8 length, name, u8 7 (a string), u16 length, value`.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING
from zlib import crc32

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping


_LINE_END = re.compile(rb"\r\n|\r|\n")


def event(data: bytes) -> bytes:
    """An event with these data, UTF-8. Each line has a field of its own, which clients join with a line feed."""
    return b"".join(b"data: %b\n" % line for line in _LINE_END.split(data)) + b"\n"


_LENGTHS = struct.Struct(">II")
_CRC = struct.Struct(">I")
_STRING = 7
_OVERHEAD = _LENGTHS.size + 2 * _CRC.size
_MAX_FRAME = 16 << 20  # bytes, which is as much as AWS's clients take


def _header_lines(headers: Mapping[str, str]) -> bytes:
    lines = []
    for name, value in headers.items():
        key, text = name.encode(), value.encode()
        lines.append(struct.pack(f">B{len(key)}sBH{len(text)}s", len(key), key, _STRING, len(text), text))
    return b"".join(lines)


_PAYLOAD_PART = _header_lines(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
)
_MAX_PAYLOAD = _MAX_FRAME - _OVERHEAD - len(_PAYLOAD_PART)


def payload_part(data: bytes | memoryview) -> bytes:
    """The frame of a part of the answer; several frames where it is larger than clients take."""
    if len(data) <= _MAX_PAYLOAD:
        return _frame(_PAYLOAD_PART, data)
    starts = range(0, len(data), _MAX_PAYLOAD)
    return b"".join([_frame(_PAYLOAD_PART, data[start : start + _MAX_PAYLOAD]) for start in starts])


def exception(message: str) -> bytes:
    """The frame that ends an answer which failed after it had begun.

    boto3 raises an EventStreamError of the code ModelStreamError with that message.
    """
    headers = {":message-type": "exception", ":exception-type": "ModelStreamError", ":content-type": "application/json"}
    return _frame(_header_lines(headers), orjson.dumps({"Message": message, "ErrorCode": "StreamBroken"}))


def _frame(headers: bytes, payload: bytes | memoryview) -> bytes:
    lengths = _LENGTHS.pack(_OVERHEAD + len(headers) + len(payload), len(headers))
    frame = b"".join((lengths, _CRC.pack(crc32(lengths)), headers, payload))
    return frame + _CRC.pack(crc32(frame))
