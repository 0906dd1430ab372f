"""The token of a load, which its threads also tell whenever bytes come."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, BinaryIO, cast

from model_handlers.cancel_token import CancelToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import WriteableBuffer


class Progress(CancelToken):
    """A token that can be cancelled by itself, and knows when bytes came last.

    Args:
        subject: see `CancelToken`.
        cancelled: see `CancelToken`.
        clock: seconds.
    """

    def __init__(
        self, subject: str, cancelled: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(subject, lambda: self._stopped or cancelled())
        self._clock = clock
        self._moved = clock()
        self._stopped = False

    def cancel(self) -> None:
        """Have the threads stop."""
        self._stopped = True

    def moved(self) -> None:
        """Note that bytes came."""
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


def watched(stream: BinaryIO, token: CancelToken) -> BinaryIO:
    """The stream, whose bytes are told to a `Progress`; as it is where nothing watches."""
    return cast("BinaryIO", _Watched(stream, token)) if isinstance(token, Progress) else stream
