"""The serving process's ends of the channels: one thread reads what the processes of all models say unasked.

`Channel.post` may be called on any thread and never waits: what the socket does not take at once, the thread sends
later. What came is handed to the channel's owner on that thread, which must not keep it.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from model_handlers.isolation.channel import FrameReader
from model_handlers.priority import usual_priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.isolation.channel import Frame
    from model_handlers.isolation.framing import Message
    from model_handlers.tensor import Array

_log = logging.getLogger("mme.isolation")
_MAX_UNSENT = 256 << 20  # bytes of frames that wait for a child to read; what lies in descriptors does not count


class DeafError(Exception):
    """The other side does not take what it is told, and this is why."""


class Channel:
    """One child's channel, from `start` to `close`.

    Args:
        end: our end of the socket; closed with the channel.
        take: takes each frame that came; what it raises ends the channel.
        lost: told once that nothing more will come, unless `close` was called: None at an end, a `DeafError`, else
            what was wrong with what came. On any thread, which must not wait.
    """

    def __init__(
        self,
        end: socket.socket,
        take: Callable[[Message, Array], None],
        lost: Callable[[Exception | None], None],
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._take = take
        self._lost = lost
        self._reader = FrameReader()
        self._unsent: deque[Frame] = deque()
        self._unsent_size = 0
        self._lock = threading.Lock()  # of what is sent, and of the end
        self._reading = threading.Lock()
        self._open = True
        self._listened = False
        self._wants_room = False

    def start(self) -> None:
        """Have frames taken from now on.

        Raises:
            OSError: the system has no descriptor left; the channel is closed.
        """
        try:
            with self._lock:  # the first frame may come before this is done
                LISTENER.add(self._end.fileno(), self)
                self._listened = True
        except BaseException:
            self.close()
            raise

    def post(self, frame: Frame) -> None:
        """Send a frame, now or as soon as the other side reads; it is lost if that has gone."""
        error = None
        with self._lock:
            if not self._open:
                frame.close()
                return
            self._unsent.append(frame)
            self._unsent_size += len(frame.data)
            if len(self._unsent) == 1:
                error = self._send()
            elif self._unsent_size > _MAX_UNSENT:
                error = DeafError(f"it does not read what it is told, of which {self._unsent_size >> 20} MiB wait")
        if error is not None:
            self._gone(error)

    def close(self) -> bool:
        """Neither send nor read any more. False if that was so already."""
        with self._lock:
            if not self._open:
                return False
            self._open = False
            if self._listened:
                LISTENER.remove(self._end.fileno())
            self._end.close()
            self._reader.close()
            self._drop_unsent()
            return True

    def ready(self, *, readable: bool) -> None:
        """On the listening thread: the socket has something, or room."""
        if readable:
            with self._reading:
                self._read()
            return
        with self._lock:
            error = self._send() if self._open else None
        if error is not None:
            self._gone(error)

    def drain(self) -> None:
        """Take what has come, to the end of it, and close: for a child that is gone."""
        with self._reading:
            while self._read():
                pass
        self.close()

    def _read(self) -> bool:
        """Whether there may be more."""
        try:
            with self._lock:
                more = self._open and self._reader.receive(self._end)
            while (frame := self._reader.next()) is not None:
                self._take(*frame)
        except BlockingIOError:
            return False
        except Exception as error:  # noqa: BLE001 - a child may send anything; the thread serves all the others too
            self._gone(error)
            return False
        if not more:
            self._gone(None)
        return more

    def _gone(self, error: Exception | None) -> None:
        if self.close():
            self._lost(error)

    def _send(self) -> DeafError | None:
        """As much as the socket takes; what is wrong with it, if anything is. Under the lock."""
        while self._unsent:
            frame = self._unsent[0]
            try:
                fds = [frame.fd] if frame.fd >= 0 else []
                sent = socket.send_fds(self._end, [frame.data], fds, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._want_room(wants=True)
                return None
            except ConnectionError:  # the other side is gone, which its end of the stream tells
                self._drop_unsent()
                break
            except OSError as error:  # too many descriptors under way, or no memory
                return DeafError(f"nothing can be sent to it: {error}")
            frame.close()
            self._unsent_size -= sent
            frame.data = frame.data[sent:]
            if not frame.data:
                self._unsent.popleft()
        self._want_room(wants=False)
        return None

    def _drop_unsent(self) -> None:
        while self._unsent:
            self._unsent.popleft().close()
        self._unsent_size = 0

    def _want_room(self, *, wants: bool) -> None:
        if wants != self._wants_room:
            self._wants_room = wants
            LISTENER.wants_room(self._end.fileno(), wants=wants)


class _Listener:
    """The thread, started with the first channel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._channels: dict[int, Channel] = {}

    def add(self, fd: int, channel: Channel) -> None:
        """Read a channel from now on."""
        with self._lock:
            if self._epoll is None:
                self._epoll = select.epoll()
                threading.Thread(target=self._main, args=(self._epoll,), name="model events", daemon=True).start()
            self._epoll.register(fd, select.EPOLLIN)
            self._channels[fd] = channel

    def remove(self, fd: int) -> None:
        """Read it no more."""
        with self._lock:
            del self._channels[fd]
            assert self._epoll is not None  # noqa: S101 - it was added
            self._epoll.unregister(fd)

    def wants_room(self, fd: int, *, wants: bool) -> None:
        """Whether the channel is to be told when its socket has room."""
        with self._lock:
            if self._epoll is not None:
                self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wants else 0))

    def _main(self, epoll: select.epoll) -> None:
        usual_priority()  # not that of the load that was the first to need it
        while True:
            for fd, events in epoll.poll():
                channel = self._channels.get(fd)
                if channel is None:
                    continue
                try:
                    if events & select.EPOLLOUT:
                        channel.ready(readable=False)
                    if events & ~select.EPOLLOUT:
                        channel.ready(readable=True)
                except Exception:  # noqa: BLE001 - one channel's trouble is not that of the others
                    _log.exception("a model's channel could not be served")


LISTENER = _Listener()
