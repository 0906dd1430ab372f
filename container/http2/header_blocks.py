"""Header blocks that clients send, read by hpack, and remembered: most are the same bytes again and again.

A block means what the table of headers makes of it that both sides keep. A block that leaves this table as it is means
the same next time, unless another one changes the table in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpack import Decoder, HPACKError, OversizedHeaderListError

from container.http2.frames import Code, ConnectionFault

if TYPE_CHECKING:
    from collections import deque

Fields = tuple[tuple[bytes, bytes], ...]

LARGEST = 64 << 10  # bytes of a block, and of all that it says
_MOST = 128  # blocks that are remembered
_LONGEST = 1 << 10  # bytes of one


class HeaderBlocks:
    """Those of one connection, in their order."""

    def __init__(self) -> None:
        self._decoder = Decoder(LARGEST)
        self._known: dict[bytes, Fields] = {}

    def read(self, block: bytes) -> Fields:
        """Its names and values.

        Raises:
            ConnectionFault: it is none, or says too much; what comes after it can't be read.
        """
        fields = self._known.get(block)
        if fields is not None:
            return fields
        size, count, first = self._state()
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "headers of more than 64 KiB") from error
        except (HPACKError, ValueError, IndexError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"headers that can't be read: {error}") from error
        size_now, count_now, first_now = self._state()
        if size_now != size or count_now != count or first_now is not first or len(self._known) >= _MOST:
            self._known.clear()
        elif len(block) <= _LONGEST:
            self._known[block] = fields
        return fields

    def _state(self) -> tuple[int, int, object]:
        """What changes with the table: whatever is added to it is another object, in front.

        The object itself and not its address, which another one may take once it is gone; and not what it says, which
        another one may say as well.
        """
        table = self._decoder.header_table
        entries: deque[Any] = table.dynamic_entries  # as a tuple, compiled code would give another one each time
        return table.maxsize, len(entries), entries[0] if entries else None
