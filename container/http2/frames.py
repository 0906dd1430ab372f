"""Frames of HTTP/2 as bytes, and the header blocks that a server sends. PURE.

    +------------------------+--------+--------+--------------------------+-----------
    | length of payload, 24  | type 8 | flags 8| 0 and stream, 32         | payload …
    +------------------------+--------+--------+--------------------------+-----------

What we send of headers is never indexed and never Huffman-coded: the same few bytes each time, made once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = 9  # bytes before the payload

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
LAST_HEADERS = END_HEADERS | END_STREAM
PADDED = 0x8
WITH_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

DEFAULT_TABLE = 4_096  # bytes of what headers of before say
NO_TABLE = b"\x20"  # in front of a header block: none is used from here on
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
SMALLEST_FRAME_SIZE, LARGEST_FRAME_SIZE = 1 << 14, (1 << 24) - 1


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class Fault(Exception):  # noqa: N818 - the protocol's errors have codes; this is what the other side did
    """The other side broke the protocol."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


class ConnectionFault(Fault):
    """So that the connection ends."""


class StreamFault(Fault):
    """On one stream, which ends; the others go on."""


class OversizedFault(StreamFault):
    """Headers that are larger than is taken, and could be read all the same."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return frame_head(len(payload), kind, flags, stream) + payload


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """What stands before a payload of so many bytes."""
    return (length << 16 | kind << 8 | flags).to_bytes(5, "big") + stream.to_bytes(4, "big")


def settings(values: dict[int, int]) -> bytes:
    """What we want of the other side."""
    return frame(
        SETTINGS, 0, 0, b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in values.items())
    )


def settings_of(payload: bytes) -> dict[int, int]:
    """What the other side wants; of one that is told twice the last.

    Raises:
        ConnectionFault: this can't be wanted.
    """
    if len(payload) % 6:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of another length than a multiple of 6")
    found = {
        int.from_bytes(payload[at : at + 2], "big"): int.from_bytes(payload[at + 2 : at + 6], "big")
        for at in range(0, len(payload), 6)
    }
    if found.get(INITIAL_WINDOW_SIZE, 0) > LARGEST_WINDOW:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "an initial window of more than 2^31 - 1 bytes")
    if not SMALLEST_FRAME_SIZE <= found.get(MAX_FRAME_SIZE, SMALLEST_FRAME_SIZE) <= LARGEST_FRAME_SIZE:
        raise ConnectionFault(
            ErrorCode.PROTOCOL_ERROR, "a largest frame of less than 16,384 bytes, or of more than 16,777,215"
        )
    if found.get(ENABLE_PUSH, 0) > 1:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH that is neither 0 nor 1")
    return found


def window_update(stream: int, more: int) -> bytes:
    """So many more bytes may be sent to us."""
    return frame(WINDOW_UPDATE, 0, stream, more.to_bytes(4, "big"))


def reset(stream: int, code: ErrorCode) -> bytes:
    """A stream is over."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def go_away(last: int, code: ErrorCode, why: str = "") -> bytes:
    """The connection is over, or no stream behind the last one will be served."""
    return frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + why.encode())


def header_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header fields as they are sent: each literally, names in lower case."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    size -= 127
    length = bytearray((127,))
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes(length) + text
