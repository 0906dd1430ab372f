"""The second socket between the serving process and a model's process: what either says of its own accord.

Theory of operation. The control socket carries batches, strictly one question and one answer. All else crosses here,
in both directions and at any time: responses that a model sends while it executes or after it, its calls of other
models and their answers, the news that a client left, whether the model is ready, metrics. A frame is a message as
`framing` has them, and, where it names tensors, the bytes in which their places lie:

    +----------------+------------------------------+---------+
    | length, 4 B LE | {…, "payload": n}            | n bytes |      up to INLINE bytes of tensors
    +----------------+------------------------------+---------+
    | length, 4 B LE | {…, "segment": n} + one descriptor     |      more: a memfd, written once, read in place
    +----------------+----------------------------------------+

Such a memfd is used once: it belongs to whoever receives it and goes with the last view of it.

Nothing is trusted that comes out of a child. A memfd that could still change, under the eyes of a framework that has
looked at its contents, or shrink, which would kill its reader, is a `ProtocolError`, as is every frame that is none.
"""

from __future__ import annotations

import mmap
import os
import socket
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.worker import memfd
from model_handlers.worker.wire import MessageReader, Packing, ProtocolError, encode_message

if TYPE_CHECKING:
    from model_handlers.tensor import Array
    from model_handlers.worker.wire import Message

INLINE = 64 << 10
_CHUNK = 64 << 10
_MAX_FDS = 16
_NOTHING: Array = np.zeros(0, np.uint8)


class Frame:
    """One frame, ready to be sent.

    Attributes:
        data: its bytes, or those that are still to be sent.
        fd: the descriptor that goes with it, -1 for none. `close` it when the frame was sent, or never will be.
        size: bytes of the memory behind that.
    """

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
        self.data = memoryview(data)

    def send(self, end: socket.socket) -> int:
        """Send what is still to be sent of it, or some of that; returns how many bytes.

        Raises:
            OSError: as the socket does; nothing was sent.
        """
        if self.fd >= 0:
            sent = socket.send_fds(end, [self.data], [self.fd])
            self.close()
        else:
            sent = end.send(self.data)
        self.data = self.data[sent:]
        return sent

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _written(packing: Packing, size: int) -> int:
    """The descriptor of memory that holds the arrays, and never anything else."""
    fd = -1
    try:
        fd = memfd.create("mme-frame")
        os.ftruncate(fd, size)
        for offset, contents in packing.contents():
            _write(fd, offset, contents)
        memfd.freeze(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise memfd.refusal(error, f"{size} bytes of shared memory can't be had: {error}") from error
    return fd


def _write(fd: int, offset: int, contents: memoryview) -> None:
    """Faster than by a mapping, whose pages would come one by one."""
    while contents:
        written = os.pwrite(fd, contents, offset)
        offset, contents = offset + written, contents[written:]


class FrameReader:
    """Cuts what comes out of the socket into messages and the bytes in which their tensors lie.

    Attributes:
        keeps_large: whether `next` has kept back a frame that is not small.
    """

    def __init__(self) -> None:
        self.keeps_large = False
        self._messages = MessageReader()
        self._fds: list[int] = []
        self._begun: Message | None = None

    def receive(self, end: socket.socket, most: int = _CHUNK) -> bool:
        """Read what is there, so many bytes at most; False when the other side is gone.

        Raises:
            BlockingIOError: nothing is there, on a socket that does not wait.
            ProtocolError: descriptors came that belong to no frame, or could not be taken.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(end, most, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return False
        self._fds += fds
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("a descriptor that could not be taken: too many at once, or all of ours are used")
        if len(self._fds) > _MAX_FDS:
            raise ProtocolError(f"{len(self._fds)} descriptors of which no frame speaks")
        self._messages.feed(data)
        return bool(data)

    def next(self, *, small: bool = False) -> tuple[Message, Array] | None:
        """The next whole frame, None while there is none.

        Args:
            small: keep back one that is not: whose message or tensors take more than INLINE bytes.

        Raises:
            ProtocolError: what came is no frame.
        """
        self.keeps_large = small and self._begun is None and self._messages.has_over(INLINE)
        if self.keeps_large:
            return None
        message, self._begun = self._begun or self._messages.next(), None
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
        payload = self._messages.take(size)
        if payload is None:
            self._begun = message
            return None
        return message, np.frombuffer(payload, np.uint8)

    def close(self) -> None:
        """Give back descriptors that belong to no frame."""
        while self._fds:
            os.close(self._fds.pop())

    def _mapped(self, size: object) -> Array:
        try:
            fd = self._fds.pop(0)
        except IndexError:  # or `close` took it
            raise ProtocolError("a frame without the descriptor that it speaks of") from None
        try:
            if not memfd.is_frozen(fd):
                raise ProtocolError("a frame whose memory could still change")
            # Private: older kernels share what is frozen with nobody.
            mapping = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ)  # type: ignore[arg-type]  # what is none raises
            return np.frombuffer(mapping, np.uint8)
        except (OSError, ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"a frame whose memory can't be mapped: {error}") from None
        finally:
            os.close(fd)
