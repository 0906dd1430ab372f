"""Frames of HTTP/2 as bytes, and blocks of headers: those that a server sends, and those that clients send. PURE.

    +------------------------+--------+--------+--------------------------+-----------
    | length of payload, 24  | type 8 | flags 8| 0 and stream, 32         | payload …
    +------------------------+--------+--------+--------------------------+-----------

What we send of headers is never indexed and never Huffman-coded: the same few bytes each time, made once.

What clients send is read by hpack, and remembered: most blocks are the same bytes again and again. A block means what
the table of headers makes of it that both sides keep. A block that leaves this table as it is means the same next time,
unless another one changes the table in between. It is measured before it is read, since hpack reads all of it at once:
how many fields it has, how often it resizes the table, and how much of it is Huffman-coded, which takes the longest.

What breaks the rules of RFC 9113, sections 8.2 and 8.3, or says too much, ends the stream that it came on, since the
table is what it should be. What can't be read, or is too large to be, ends the connection.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.hpack import encode_integer

if TYPE_CHECKING:
    from collections import deque
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
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_ALL = frozenset({SETTINGS, PING, GOAWAY})  # not of a stream

DEFAULT_TABLE = 4_096  # bytes of what headers of before say
NO_TABLE = b"\x20"  # in front of a header block: none is used from here on
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
SMALLEST_FRAME_SIZE, LARGEST_FRAME_SIZE = 1 << 14, (1 << 24) - 1


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
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


def check(kind: int, number: int, size: int) -> None:
    """Refuse a frame beside data and headers that has another size than its kind has, or another stream."""
    if kind == PUSH_PROMISE or (number and kind in _OF_ALL) or (kind == PRIORITY and not number):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} for stream {number}")
    if size != _SIZES.get(kind, size) or (kind == GOAWAY and size < 8):
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} of {size} bytes")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frame_head(len(payload), kind, flags, stream) + payload


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """What stands before a payload of so many bytes."""
    return (length << 16 | kind << 8 | flags).to_bytes(5, "big") + stream.to_bytes(4, "big")


def settings(values: dict[int, int]) -> bytes:
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
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def go_away(last: int, code: ErrorCode, why: str = "") -> bytes:
    """The connection is over, or no stream behind the last one will be served."""
    return frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + why.encode())


def header_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header fields as they are sent: each literally, names in lower case."""
    parts: list[bytes | bytearray] = []
    for name, value in fields:
        parts += (b"\0", encode_integer(len(name), 7), name, encode_integer(len(value), 7), value)
    return b"".join(parts)


Fields = tuple[tuple[bytes, bytes], ...]

LARGEST = 64 << 10  # bytes of all that a block says, as RFC 9113 counts them: 32 beside those of each field
LARGEST_READ = 4 * LARGEST  # and of what is read before it is refused
MOST_FIELDS = 100  # of a block; more are read, up to four times as many, for the table's sake
_MOST_READ = 4 * MOST_FIELDS
_MOST_UPDATES = 2  # of the table's size, in front of a block (RFC 7541, section 4.2)
_MOST_CODED = 16 << 10  # bytes in Huffman's code, which take 0.7 µs each
_LONGEST_INTEGER = 8
_FIELD = 32
_NAME = re.compile(rb"[!-9;-@\[-~]+")
_REQUIRED = frozenset({b":method", b":scheme", b":path"})
_PSEUDO = _REQUIRED | {b":authority"}
_OF_CONNECTIONS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_SPACE = b" \t"
_LENGTH = re.compile(rb"[0-9]{1,18}")
_MOST = 128  # blocks that are remembered, and lists of names
_LONGEST = 1 << 10  # bytes of one


class HeaderBlocks:
    """Those of one connection, in their order."""

    def __init__(self) -> None:
        self.length: int | None = None  # what the content-length of the last block says, None where it has none
        self._decoder = Decoder(LARGEST_READ)
        self._known: dict[bytes, Fields] = {}
        self._good: set[tuple[bytes, ...]] = set()  # names in their order; values differ more often

    def read(self, block: bytes) -> Fields:
        """Its names and values.

        Raises:
            StreamFault: it breaks the rules, or says more than is taken.
            ConnectionFault: it is none, or says far too much; what comes after it can't be read.
        """
        self.length = None
        fields = self._known.get(block)
        if fields is not None:
            return fields
        _measure(block)
        size, count, first = self._state()
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers of more than 256 KiB") from error
        except (HPACKError, ValueError, IndexError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"headers that can't be read: {error}") from error
        size_now, count_now, first_now = self._state()
        changed = size_now != size or count_now != count or first_now is not first
        if changed or len(self._known) >= _MOST:
            self._known.clear()
        self._check(fields)
        if not changed and self.length is None and len(block) <= _LONGEST:
            self._known[block] = fields
        return fields

    def _check(self, fields: Fields) -> None:
        names = tuple([name for name, _ in fields])
        values = b"".join([value for _, value in fields])
        size = sum(map(len, names))
        if size + len(values) + _FIELD * len(names) > LARGEST:
            raise OversizedFault(ErrorCode.ENHANCE_YOUR_CALM, "headers of more than 64 KiB")
        if len(names) > MOST_FIELDS:
            raise OversizedFault(ErrorCode.ENHANCE_YOUR_CALM, f"more than {MOST_FIELDS} headers")
        if names not in self._good:
            _check_names(names)
            if len(self._good) >= _MOST:
                self._good.clear()
            if size <= _LONGEST:
                self._good.add(names)
        if b"\n" in values or b"\r" in values or b"\0" in values:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a header with a line break or a NUL in it")
        if (b":path", b"") in fields or (b"te" in names and (b"te", b"trailers") not in fields):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "an empty :path, or a te that is not 'trailers'")
        for _, value in fields:
            if value and (value[0] in _SPACE or value[-1] in _SPACE):
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a header with white space around its value")
        if b"content-length" in names:
            lengths = {value for name, value in fields if name == b"content-length"}
            if len(lengths) > 1 or not _LENGTH.fullmatch(min(lengths)):
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a content-length that is no number, or several")
            self.length = int(lengths.pop())

    def _state(self) -> tuple[int, int, object]:
        """What changes with the table: whatever is added to it is another object, in front.

        The object itself and not its address, which another one may take once it is gone; and not what it says, which
        another one may say as well.
        """
        table = self._decoder.header_table
        entries: deque[Any] = table.dynamic_entries  # as a tuple, compiled code would give another one each time
        return table.maxsize, len(entries), entries[0] if entries else None


def _measure(block: bytes) -> None:
    """Refuse a block that would take long to read, and with it what comes after it; hpack says what can't be read."""
    at, end, fields, updates, coded = 0, len(block), 0, 0, 0
    while at < end:
        first = block[at]
        if first & 0xE0 == 0x20:
            updates += 1
            if updates > _MOST_UPDATES:
                raise ConnectionFault(
                    ErrorCode.COMPRESSION_ERROR, "more than two updates of the table's size in a block"
                )
            at = _integer(block, at, 0x1F)[1]
            continue
        fields += 1
        if fields > _MOST_READ:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"a block of more than {_MOST_READ} headers")
        if first & 0x80:
            at = _integer(block, at, 0x7F)[1]
            continue
        index, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
        for _ in range(1 if index else 2):  # a name, where no index says it, and a value
            if at >= end:
                return
            is_coded = block[at] & 0x80
            length, at = _integer(block, at, 0x7F)
            at += length
            if is_coded:
                coded += length
        if coded > _MOST_CODED:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers of more than 16 KiB in Huffman's code")


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """An integer whose first byte has the bits of `mask` for it, and where it ends, at the latest with the block."""
    number, at = block[at] & mask, at + 1
    if number < mask:
        return number, at
    for shift in range(0, 7 * _LONGEST_INTEGER, 7):
        if at >= len(block):
            break
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    return 0, len(block)


def _check_names(names: tuple[bytes, ...]) -> None:
    first = 0
    while first < len(names) and names[first].startswith(b":"):
        first += 1
    pseudo = frozenset(names[:first])
    if len(pseudo) < first or not pseudo <= _PSEUDO:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a pseudo-header that comes twice, or that there is not")
    if first and not pseudo >= _REQUIRED:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a request without :method, :scheme or :path")
    for name in names[first:]:
        if not _NAME.fullmatch(name) or name in _OF_CONNECTIONS:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, f"a header that HTTP/2 does not have: {name[:32]!r}")
