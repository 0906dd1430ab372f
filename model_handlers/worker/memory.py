"""Memory that two processes share: anonymous files (memfds), segments for batches, frames of the channel.

A memfd leaves nothing behind, and is sealed against shrinking, which could kill the other side by SIGBUS. A segment
grows by both sides mapping it again; it is busy exactly as long as an array that `lend` gave out lives. Pages of a
large batch stay until it is retired. Used by one thread at a time in each process; views may go on any thread. Nothing
out of a worker is trusted: a memfd that could still change or shrink is a `ProtocolError`, as is a frame that is none.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import weakref
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.errors import Kind, MmeError, out_of_memory
from model_handlers.worker.wire import MessageSplitter, ProtocolError, encode_message

if TYPE_CHECKING:
    from model_handlers.tensor import Array
    from model_handlers.worker.wire import Message, Packing


_CLOEXEC, _ALLOW_SEALING = 1, 2
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _WRITE = 1, 2, 4, 8


def new_memfd(name: str) -> int:
    """Return a new anonymous file, which children do not inherit. Raises OSError: the system has none for us."""
    if hasattr(os, "memfd_create"):  # Conda builds its interpreters against a C library that lacks it
        return os.memfd_create(name, _CLOEXEC | _ALLOW_SEALING)
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, "the C library has no memfd_create")
    fd: int = library.memfd_create(name.encode(), _CLOEXEC | _ALLOW_SEALING)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


def memory_refusal(error: OSError, sentence: str) -> MmeError:
    """What to raise where the system refuses us memory: it has none, or no descriptors."""
    if error.errno in {errno.ENOMEM, errno.ENOSPC}:
        return out_of_memory(sentence)
    return MmeError(Kind.UNAVAILABLE, sentence)


def seal(fd: int) -> None:
    fcntl.fcntl(fd, _ADD_SEALS, _SHRINK | _SEAL)


def freeze(fd: int) -> None:
    """Have the file never change again, in any process. Raises OSError: it is mapped somewhere, to be written."""
    fcntl.fcntl(fd, _ADD_SEALS, _SHRINK | _GROW | _WRITE | _SEAL)


def is_frozen(fd: int) -> bool:
    """Return whether the file can neither shrink nor be written. Raises OSError: it is no such file."""
    return fcntl.fcntl(fd, _GET_SEALS) & (_SHRINK | _WRITE) == _SHRINK | _WRITE


_SPARE = 2  # free segments kept beside the one that is taken
_WINDOW = 64  # batches over which a need counts as recent
_KEPT = 1 << 20  # a segment of this size is no burden
_RESTING = 64 << 10  # bytes of a segment that is kept while the worker is idle
_BLOCK = 512  # what fstat counts in
_EXCESS = 4  # times the recent need: growth doubles, so twice is usual


@dataclass(slots=True)
class Sizes:
    """How large segments are made. One for the process, set before the first of them is made."""

    smallest: int = 64 << 10  # bytes of a new segment; pages that no tensor touches cost nothing
    growth: int = 0  # bytes by which one grows at least; it doubles where that is more


SIZES = Sizes()


class Segment:
    """One piece of shared memory, mapped here."""

    __deletable__ = ("_mapping",)  # which compiled classes have to say

    def __init__(self, id: int, fd: int, size: int) -> None:  # noqa: A002 - the word for it
        self.id = id
        self.fd = fd
        self.size = size
        self.batch = 0
        self.out = False  # whether a batch, the number `batch`, is on its way in it
        self._mapping = mmap.mmap(fd, size)
        self._lent: weakref.ref[Array] | None = None

    def __repr__(self) -> str:
        return f"<Segment {self.id}: {self.size} bytes{', busy' if self.busy else ''}>"

    @classmethod
    def create(cls, id: int, size: int) -> Segment:  # noqa: A002
        """Make new shared memory of at least `size` bytes. Pages cost memory once they are touched."""
        size = _page_rounded(max(size, SIZES.smallest))
        fd = new_memfd("mme-segment")
        try:
            os.ftruncate(fd, size)
            seal(fd)
            return cls(id, fd, size)
        except BaseException:
            os.close(fd)
            raise

    def ensure(self, size: int) -> None:
        if size > self.size:
            size = _page_rounded(max(size, 2 * self.size, self.size + SIZES.growth))
            os.ftruncate(self.fd, size)
            self.follow(size)

    def follow(self, size: int) -> None:
        """Map what the other side has grown. Raises ValueError: it has not."""
        if size > self.size:
            self._mapping = mmap.mmap(self.fd, size)  # refuses more than the file has
            self.size = size

    def memory(self) -> memoryview:
        """The bytes, to write into. To be released before the segment is closed."""
        return memoryview(self._mapping)

    def lend(self, *, writable: bool = False) -> Array:
        """The bytes as an array, read-only as a rule; the segment is busy until it and its views are gone."""
        memory = memoryview(self._mapping)
        array: Array = np.frombuffer(memory if writable else memory.toreadonly(), np.uint8)
        self._lent = weakref.ref(array)
        return array

    @property
    def taken(self) -> int:
        """Bytes of memory that it takes, whichever side touched them."""
        return os.fstat(self.fd).st_blocks * _BLOCK

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way in it, or views of what was lent live."""
        return self.out or (self._lent is not None and self._lent() is not None)

    def close(self) -> None:
        """Give it up; views that still live keep their mapping until they go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self._mapping


class SegmentPool:
    """The segments that the serving process shares with one worker."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._last_id = 0
        self._need = self._recent_need = self._batches = 0
        self.retired: list[int] = []  # ids of those that the worker is still to be told of

    def __len__(self) -> int:
        return len(self._segments)

    def take(self, size: int) -> tuple[Segment, bool]:
        """A free segment of at least `size` bytes, and whether it is new to the worker. OSError: nothing left."""
        free = sorted((segment for segment in self._segments if not segment.busy), key=lambda segment: segment.size)
        while len(free) > 1 + _SPARE:
            self.retire(free.pop(0))
        for segment in free:
            if segment.size >= size:
                return segment, False
        if free:
            free[-1].ensure(size)
            return free[-1], False
        self._last_id += 1
        segment = Segment.create(self._last_id, size)
        self._segments.append(segment)
        return segment, True

    def used(self, size: int) -> None:
        """Count the bytes of a batch. Now and then, segments far larger than any recent batch are given back."""
        self._need = max(self._need, size)
        self._batches += 1
        if self._batches == _WINDOW:
            enough = max(_KEPT, _EXCESS * max(self._need, self._recent_need))
            for segment in [each for each in self._segments if each.size > enough and not each.out]:
                self.retire(segment)
            self._recent_need, self._need, self._batches = self._need, 0, 0

    @property
    def busy(self) -> bool:
        return any(segment.busy for segment in self._segments)

    @property
    def under_way(self) -> bool:
        """Whether a batch was sent, and is not answered yet."""
        return any(segment.out for segment in self._segments)

    def rest(self) -> None:
        """Retire free segments that take more than a small batch needs."""
        for segment in [segment for segment in self._segments if not segment.busy and segment.taken > _RESTING]:
            self.retire(segment)

    def take_retired(self) -> list[int]:
        """Ids that the worker is told of now."""
        retired, self.retired = self.retired, []
        return retired

    @property
    def taken(self) -> int:
        return sum([segment.taken for segment in self._segments])

    def retire(self, segment: Segment) -> None:
        """Use it no more; `retired` tells the worker with the next message."""
        self._segments.remove(segment)
        self.retired.append(segment.id)
        segment.close()

    def give_up(self, segment: Segment) -> None:
        """Leave it to the worker."""
        self._segments.remove(segment)
        segment.close()

    def close(self) -> None:
        while self._segments:
            self._segments.pop().close()


def _page_rounded(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


# The control socket carries batches, strictly one question and one answer; all else crosses on the channel at any time.
# A frame there is a message as `wire` has them and, where it names tensors, the bytes in which their places lie:
#
# +----------------+------------------------------+---------+
# | length, 4 B LE | {…, "payload": n}            | n bytes |      up to INLINE bytes of tensors
# +----------------+------------------------------+---------+
# | length, 4 B LE | {…, "segment": n} + one descriptor     |      more: a memfd, written once, read in place
# +----------------+----------------------------------------+
INLINE = 64 << 10
_CHUNK = 16 << 10  # most messages are shorter by far; larger blocks cost the allocator more than a second read
_MAX_FDS = 16
_RIGHTS = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)  # room for descriptors
_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_NOTHING: Array = np.zeros(0, np.uint8)


class Frame:
    """One frame, ready to be sent; `fd` goes with it, -1 for none: `close` it in any case. `size` counts its memory."""

    def __init__(self, message: Message, packing: Packing | None = None) -> None:
        """Raises MmeError: as `encode_message`; OUT_OF_MEMORY, or UNAVAILABLE for want of descriptors."""
        size = packing.end if packing is not None else 0
        self.fd, self.size = -1, 0
        if packing is None or size == 0:
            data = encode_message(message)
        elif size <= INLINE:
            payload = bytearray(size)
            packing.write(memoryview(payload))
            data = encode_message(message | {"payload": size}) + payload
        else:
            data = encode_message(message | {"segment": size})
            self.fd, self.size = _written(packing, size), size
        self.data = memoryview(data)  # its bytes, or those that are still to be sent

    def send(self, end: socket.socket) -> int:
        """Send some of what is left of it; return how many bytes. OSError: as the socket; nothing was sent."""
        if self.fd >= 0:
            sent = socket.send_fds(end, [self.data], [self.fd])
            self.close()
        else:
            sent = end.send(self.data)
        self.data = self.data[sent:]
        return sent

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _written(packing: Packing, size: int) -> int:
    fd = -1
    try:
        fd = new_memfd("mme-frame")
        os.ftruncate(fd, size)
        for offset, contents in packing.contents():
            _write(fd, offset, contents)
        freeze(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise memory_refusal(error, f"{size} bytes of shared memory can't be had: {error}") from error
    return fd


def _write(fd: int, offset: int, contents: memoryview) -> None:
    while contents:
        written = os.pwrite(fd, contents, offset)
        offset, contents = offset + written, contents[written:]


class FrameReader:
    """Cuts what comes out of the socket into messages and the bytes in which their tensors lie."""

    def __init__(self) -> None:
        self.keeps_large = False  # whether `next` has kept back a frame that is not small
        self.messages = MessageSplitter()
        self.fds: list[int] = []  # that came, and belong to nothing that was taken
        self._begun: Message | None = None

    def receive(self, end: socket.socket, most: int = _CHUNK) -> bool:
        """Read at most so many bytes of what is there; False when the other side is gone.

        Raises BlockingIOError: nothing is there. ProtocolError: descriptors belong to no frame, or could not be taken.
        """
        try:
            data, rights, flags, _ = end.recvmsg(most, _RIGHTS, _FLAGS)
        except ConnectionError:
            return False
        for _, _, fds in rights:  # which few messages bring
            self.fds += array("i", fds)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("a descriptor that could not be taken: too many at once, or all of ours are used")
        if len(self.fds) > _MAX_FDS:
            raise ProtocolError(f"{len(self.fds)} descriptors of which no frame speaks")
        self.messages.feed(data)
        return bool(data)

    def next(self, *, small: bool = False) -> tuple[Message, Array] | None:
        """Next frame, None for none; `small` keeps back those beyond INLINE bytes. ProtocolError: it is no frame."""
        self.keeps_large = small and self._begun is None and self.messages.has_over(INLINE)
        if self.keeps_large:
            return None
        message, self._begun = self._begun or self.messages.next(), None
        if message is None:
            return None
        if "segment" in message:
            if small:
                self.keeps_large, self._begun = True, message
                return None
            return message, self._mapped(message["segment"])
        size = message.get("payload", 0)
        if not isinstance(size, int) or not 0 <= size <= INLINE:
            raise ProtocolError(f"a frame with a payload of {str(size)[:50]} bytes")
        if size == 0:
            return message, _NOTHING
        payload = self.messages.take(size)
        if payload is None:
            self._begun = message
            return None
        return message, np.frombuffer(payload, np.uint8)

    def close(self) -> None:
        """Give back descriptors that belong to no frame."""
        while self.fds:
            os.close(self.fds.pop())

    def _mapped(self, size: object) -> Array:
        try:
            fd = self.fds.pop(0)
        except IndexError:  # or `close` took it
            raise ProtocolError("a frame without the descriptor that it speaks of") from None
        try:
            if not is_frozen(fd):
                raise ProtocolError("a frame whose memory could still change")
            # Private: older kernels do not share what is frozen.
            mapping = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ)  # type: ignore[arg-type]  # what is none raises
            return np.frombuffer(mapping, np.uint8)
        except (OSError, ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"a frame whose memory can't be mapped: {error}") from None
        finally:
            os.close(fd)
