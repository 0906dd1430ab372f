"""What a worker process leaves behind for the master, however it ends: memory that both have, and no file.

Made by the master before it forks, written by the worker, read by the master after its end. A worker that is killed, or
that native code takes along, has left what it wrote until then.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SERVED, _ASKED, _ERROR, _NAMES = 0, 1, 8, 4096  # where each begins
_SIZE = 64 << 10  # names that find no room are not left
_LENGTH = struct.Struct("=I")
_LONGEST = 1000  # characters of an error


class LastWords:
    """Of one worker.

    Attributes:
        pause: seconds that it waits before it begins.
        left_out: models that it does not bring back, since two workers before it ended while they loaded them.
    """

    def __init__(self) -> None:
        self.pause = 0.0
        self.left_out: frozenset[str] = frozenset()
        self._memory = mmap.mmap(-1, _SIZE)

    def __repr__(self) -> str:
        return f"<LastWords, served: {self.has_served}, asked to end: {self.was_asked}>"

    def serves(self) -> None:
        """A /ping is answered 200."""
        self._memory[_SERVED] = 1

    @property
    def has_served(self) -> bool:
        """Whether a /ping was answered 200."""
        return bool(self._memory[_SERVED])

    def asked(self) -> None:
        """It ends because it is to: a signal says so, or a GPU that was lost."""
        self._memory[_ASKED] = 1

    @property
    def was_asked(self) -> bool:
        """Whether it was to end."""
        return bool(self._memory[_ASKED])

    def fails(self, error: BaseException) -> None:
        """It ends of this."""
        self._put(_ERROR, f"{type(error).__name__}: {error}"[:_LONGEST].encode(errors="replace"), _NAMES)

    @property
    def error(self) -> str:
        """What it ended of, "" where it could not tell."""
        return self._text(_ERROR)

    def loads(self, names: Iterable[str]) -> None:
        """The models that are being loaded now."""
        self._put(_NAMES, "\0".join(names).encode(), _SIZE)

    @property
    def loading(self) -> frozenset[str]:
        """Those that were being loaded when it ended."""
        return frozenset(filter(None, self._text(_NAMES).split("\0")))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def _put(self, start: int, text: bytes, end: int) -> None:
        body = start + _LENGTH.size
        text = text[: end - body] if start == _ERROR else text if body + len(text) <= end else b""
        # At one stroke: a thread that is killed between two statements would leave neither what was there nor this.
        self._memory[start : body + len(text)] = _LENGTH.pack(len(text)) + text

    def _text(self, start: int) -> str:
        body = start + _LENGTH.size
        (length,) = _LENGTH.unpack(self._memory[start:body])
        return self._memory[body : body + length].decode(errors="replace")
