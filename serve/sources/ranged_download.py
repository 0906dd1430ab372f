"""A large object as one stream of bytes, fetched in parts by a few threads at once and delivered in order.

One connection to an object store is slower than the network; several fill it. A part's bytes are delivered while the
rest of it is still coming, a part whose connection breaks goes on where it broke, and at most `ahead` parts are in
memory. Refuses to know S3: it is given a function that opens a range. Read by one thread; closed by any.
"""

from __future__ import annotations

import io
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Protocol

from model_handlers.errors import DamagedError, Kind, MmeError
from model_handlers.system.threads import start_thread
from serve.sources.retries import pause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

_CHUNK_SIZE = 256 << 10
_ATTEMPTS = 4  # openings of one part, before its error is everybody's
_CLOSE_SECONDS = 0.5  # that the threads of a download that is closed are waited for
_PATIENCE_SECONDS = 20.0  # without a byte of a part, over several openings, each of which waits for some seconds


class RangeBody(Protocol):
    """The bytes of one range while they arrive."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill the start of `buffer`; 0 at the end. An `MmeError` says that the connection broke.

        Raises:
            DamagedError: at the end, of bytes that are not what was sent.
        """

    def interrupt(self) -> None:
        """Wake the thread that reads; called by any other."""

    def close(self) -> None:
        """Give the connection back."""


class _Part:
    """One part: the first `filled` bytes of `data` have arrived and never change again."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.data = memoryview(bytearray(size))
        self.filled = 0


class RangedDownload(io.RawIOBase):
    """The object's bytes in order.

    Every field below the condition is guarded by it; part numbers run from `_reading` to `_claimed`.
    """

    def __init__(
        self,
        open_range: Callable[[int, int], RangeBody],
        size: int,
        *,
        part_size: int,
        ahead: int,
        name: str,
        closed: threading.Event | None = None,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        """Start to download.

        Args:
            open_range: opens the bytes from its first argument up to, not including, its second. Called by several
                threads; what it raises ends the download.
            size: bytes of the object.
            part_size: bytes of a part; an object that is not larger is asked for whole.
            ahead: parts in memory, and threads, at most.
            name: of the object, for errors and threads.
            closed: set when nothing reads any more.
            patience: seconds without a byte of a part, after which it is not opened again.

        Raises:
            MmeError: UNAVAILABLE, not one thread can be started.
        """
        super().__init__()
        self._open_range = open_range
        self._size = size
        self._part_size = part_size
        self._ahead = ahead
        self._count = -(-size // part_size)
        self._name = name
        self._closed = closed or threading.Event()
        self._patience = patience
        self._changed = threading.Condition()
        self._parts: dict[int, _Part] = {}
        self._claimed = 0  # parts that a thread has taken on
        self._reading = 0  # the part that the reader is in
        self._offset = 0  # of the reader in that part
        self._error: BaseException | None = None
        self._stopped = False
        self._bodies: set[RangeBody] = set()  # being read
        self._threads: list[threading.Thread] = []
        for lane in range(min(ahead, self._count)):
            thread = threading.Thread(target=self._work, name=f"download {name} {lane}", daemon=True)
            try:
                start_thread(thread)
            except MmeError:
                if not self._threads:
                    raise
                break  # those that run do it alone
            self._threads.append(thread)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Bytes that have arrived, at least one; 0 at the end.

        Raises:
            MmeError: what `open_range` raised, or UNAVAILABLE when the connection broke too often.
            ValueError: the stream was closed while this waited.
        """
        target = memoryview(buffer).cast("B")
        if self._reading == self._count:
            return 0
        part = self._arrived()
        size = min(len(target), part.filled - self._offset)
        target[:size] = part.data[self._offset : self._offset + size]
        self._advance(part, size)
        return size

    def close(self) -> None:
        """Stop the threads. One that waits for the head of an answer is left behind until that comes, or times out."""
        with self._changed:
            self._stopped = True
            self._closed.set()
            self._changed.notify_all()
            for body in self._bodies:
                body.interrupt()
        ends = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # a stream that was dropped unclosed may end in one of them
                thread.join(max(ends - time.monotonic(), 0.0))
        self._parts.clear()
        super().close()

    def _arrived(self) -> _Part:
        """The part being read, once it has bytes that were not read yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._error or self._has_bytes())
            if self._stopped:
                raise ValueError(f"the download of {self._name} is closed")
            if self._error:
                raise self._error
            return self._parts[self._reading]

    def _has_bytes(self) -> bool:
        part = self._parts.get(self._reading)
        return part is not None and part.filled > self._offset

    def _advance(self, part: _Part, size: int) -> None:
        self._offset += size
        if self._offset == len(part.data):
            with self._changed:
                self._parts.pop(self._reading, None)
                self._reading += 1
                self._offset = 0
                self._changed.notify_all()

    def _work(self) -> None:
        """A thread: take on one part after the other."""
        try:
            while (part := self._claim()) is not None:
                self._download(part)
        except BaseException as error:  # noqa: BLE001 - it is raised again, where the stream is read
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _claim(self) -> _Part | None:
        """The next part, as soon as there is room for it; None when there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle() or self._claimed < self._reading + self._ahead)
            if self._idle():
                return None
            start = self._claimed * self._part_size
            part = self._parts[self._claimed] = _Part(start, min(self._part_size, self._size - start))
            self._claimed += 1
            return part

    def _idle(self) -> bool:
        return self._stopped or self._error is not None or self._claimed == self._count

    def _download(self, part: _Part) -> None:
        """Fill the part, opening what is missing of it again when the connection breaks."""
        since = time.monotonic()
        for attempt in range(1, _ATTEMPTS + 1):
            before = part.filled
            with self._opened(part.start + before, part.start + len(part.data)) as body:
                try:
                    self._receive(part, body)
                except DamagedError:  # and the bytes before were handed on
                    raise
                except MmeError as error:
                    if self._stopped:
                        return
                    if part.filled > before:
                        since = time.monotonic()
                    elif attempt == _ATTEMPTS or time.monotonic() - since > self._patience:
                        raise self._ended_early(part) from error
                    if attempt == _ATTEMPTS:
                        raise
                else:
                    return
            self._closed.wait(pause(attempt))

    @contextmanager
    def _opened(self, start: int, stop: int) -> Iterator[RangeBody]:
        """The bytes of a range, which `close` interrupts."""
        with closing(self._open_range(start, stop)) as body:
            with self._changed:
                self._bodies.add(body)
            try:
                yield body
            finally:
                with self._changed:
                    self._bodies.discard(body)

    def _ended_early(self, part: _Part) -> MmeError:
        return MmeError(
            Kind.UNAVAILABLE,
            f"the store announced {self._size} bytes of '{self._name}' and sent none behind byte "
            f"{part.start + part.filled}: the download ended early, try again",
        )

    def _receive(self, part: _Part, body: RangeBody) -> None:
        while part.filled < len(part.data) and not self._stopped:
            received = body.readinto(part.data[part.filled : part.filled + _CHUNK_SIZE])
            if not received:
                raise self._ended_early(part)
            if part.filled + received == len(part.data):
                body.readinto(memoryview(bytearray(1)))  # the end, where the store's checksum is compared
            with self._changed:
                part.filled += received
                self._changed.notify_all()
