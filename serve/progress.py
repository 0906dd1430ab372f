"""What a thread that works for a load and the event loop tell each other: whether to go on, and whether it gets on."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import WriteableBuffer


class Progress:
    """Asked by a thread, as `cancelled`, whether its work is not wanted any more; told by it whenever bytes came.

    Args:
        cancelled: whether it is so.
        clock: seconds.
    """

    def __init__(self, cancelled: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._cancelled = cancelled
        self._clock = clock
        self._moved = clock()
        self._stopped = False

    def __repr__(self) -> str:
        return f"<Progress, {self.idle:.0f} s ago>"

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._stopped or self._cancelled()

    def stop(self) -> None:
        """Nothing waits for it any more."""
        self._stopped = True

    def moved(self) -> None:
        """Bytes came."""
        self._moved = self._clock()

    @property
    def idle(self) -> float:
        """Seconds since bytes came, or since the beginning."""
        return self._clock() - self._moved


class _Watched(io.RawIOBase):
    def __init__(self, stream: BinaryIO, progress: Progress) -> None:
        super().__init__()
        self._stream = stream
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        size: int = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        self._progress.moved()
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()


def watched(stream: BinaryIO, cancelled: Callable[[], bool]) -> BinaryIO:
    """The stream, whose bytes are told to a `Progress`; as it is where nothing watches."""
    return cast("BinaryIO", _Watched(stream, cancelled)) if isinstance(cancelled, Progress) else stream
