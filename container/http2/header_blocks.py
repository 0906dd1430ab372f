"""Header blocks that clients send, read by hpack, and remembered: most are the same bytes again and again.

A block means what the table of headers makes of it that both sides keep. A block that leaves this table as it is means
the same next time, unless another one changes the table in between.

A block is measured before it is read, since hpack reads all of a block at once: how many fields it has, how often it
resizes the table, and how much of it is Huffman-coded, which takes the longest to read.

What breaks the rules of RFC 9113, sections 8.2 and 8.3, or says too much, ends the stream that it came on, since the
table is what it should be. What can't be read, or is too large to be, ends the connection.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hpack import Decoder, HPACKError, OversizedHeaderListError

from container.http2.frames import ConnectionFault, ErrorCode, OversizedFault, StreamFault

if TYPE_CHECKING:
    from collections import deque

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
    """Those of one connection, in their order.

    Attributes:
        length: what the content-length of the last block says, None where it has none.
    """

    def __init__(self) -> None:
        self.length: int | None = None
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
        """Refuse what no request and no trailers may say.

        Raises:
            StreamFault: they do.
        """
        names = tuple([name for name, _ in fields])
        values = b" ".join([value for _, value in fields])
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
            self.length = _length({value for name, value in fields if name == b"content-length"})

    def _state(self) -> tuple[int, int, object]:
        """What changes with the table: whatever is added to it is another object, in front.

        The object itself and not its address, which another one may take once it is gone; and not what it says, which
        another one may say as well.
        """
        table = self._decoder.header_table
        entries: deque[Any] = table.dynamic_entries  # as a tuple, compiled code would give another one each time
        return table.maxsize, len(entries), entries[0] if entries else None


def _length(values: set[bytes]) -> int:
    """What content-length says.

    Raises:
        StreamFault: it is no length, or there are several.
    """
    value = values.pop()
    if values or not _LENGTH.fullmatch(value):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a content-length that is no number, or several")
    return int(value)


def _measure(block: bytes) -> None:
    """Refuse a block that would take long to read. One that can't be read is left to hpack.

    Raises:
        ConnectionFault: it is refused; what comes after it can't be read without it.
    """
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
    """Refuse names that no request and no trailers have, or not in this order.

    Raises:
        StreamFault: they do.
    """
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
