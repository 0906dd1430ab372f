"""The serving process's ends of the channels: one place reads what the processes of all models say unasked.

The event loop is that place, once it has lent itself (`Listener.lend`): what is small goes no further before it is with
the client, and nothing is read before the loop has done with what came before, so that a model that sends faster than
we can answer waits. A frame that is large, or wrong, and the end of a channel are for a thread. While it has one,
nothing else of that channel is read, until the loop has done with it; nor is it while responses of that model take much
memory, which are still to be written for their clients, though for a second at most, since others may keep some for
long. Without a loop the thread reads everything.

`Channel.post` may be called on any thread and never waits: what the socket does not take at once is sent later. What
came is handed to the channel's owner on the thread that reads, which must not be kept.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from model_handlers.system.priority import usual_priority
from model_handlers.worker.memory import FrameReader

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterator

    from model_handlers.tensor import Array
    from model_handlers.worker.memory import Frame
    from model_handlers.worker.wire import Message

_log = logging.getLogger("mme.isolation")
_MAX_UNSENT = 256 << 20  # bytes of frames that wait for a child to read; what lies in descriptors does not count
_PIECE = 8 << 10  # bytes of a channel that are read in one go: sixty responses, or a millisecond
_IN_A_TURN = 4  # channels of which the loop reads one
_MOST_ALIVE = 64 << 20  # bytes of large responses of a model in memory
_HELD_SECONDS = 1.0


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
        self._alive = 0  # bytes of what was kept, those included that were let go of since they were counted last
        self._let_go: deque[int] = deque()
        self._waits = False  # until memory is free
        self._unsent: deque[Frame] = deque()
        self._unsent_size = 0
        self._lock = threading.Lock()  # of what is sent, and of the end
        self._reading = threading.Lock()
        self._open = True
        self._listened = False
        self._wants_room = False
        self._wrong: Exception | None = None  # with what came, for the thread to tell

    def __repr__(self) -> str:
        return f"<Channel: {'open' if self._open else 'closed'}, {self.unsent} bytes unsent>"

    @property
    def closed(self) -> bool:
        """Whether nothing is sent or read any more."""
        return not self._open

    @property
    def unsent(self) -> int:
        """Bytes of frames that the other side has not read yet."""
        return self._unsent_size

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

    def has_room(self) -> None:
        """The socket takes something again. Where channels are read."""
        with self._lock:
            error = self._send() if self._open else None
        if error is not None:
            self._gone(error)

    def read(self) -> None:
        """The socket has something, or is at its end. On the listening thread."""
        with self._reading:
            self._read()

    def read_small(self) -> bool:
        """The same on an event loop; False leaves the rest of what came to `read`."""
        if not self._reading.acquire(blocking=False):
            return True  # `drain` takes everything
        try:
            with self._lock:
                more = self._open and self._reader.receive(self._end, _PIECE)
            self._take_frames(small=True)
        except BlockingIOError:
            return True
        except Exception as error:  # noqa: BLE001 - as below
            self._wrong = error
            return False
        else:
            return more and not self._reader.keeps_large
        finally:
            self._reading.release()

    def keep(self, owner: object, size: int) -> None:
        """Count so many bytes of memory as long as their owner lives. Where channels are read."""
        self._alive += size
        weakref.finalize(owner, self._freed, size).atexit = False

    def is_full(self) -> bool:
        """Whether more is kept than may be; if so, the thread is woken whenever that becomes less."""
        self._waits = True  # first: what is let go of from now on is told
        while self._let_go:
            self._alive -= self._let_go.popleft()
        self._waits = self._alive > _MOST_ALIVE
        return self._waits

    def _freed(self, size: int) -> None:
        """On any thread, in the middle of anything."""
        self._let_go.append(size)
        if self._waits:
            LISTENER.wake()

    def drain(self) -> None:
        """Take what has come, to the end of it, and close: for a child that is gone."""
        with self._reading:
            while self._read():
                pass
        self.close()

    def _read(self) -> bool:
        """Whether there may be more."""
        if self._wrong is not None:
            self._gone(self._wrong)
            return False
        try:
            if self._reader.keeps_large:
                self._take_frames()
                return True
            with self._lock:
                more = self._open and self._reader.receive(self._end, _PIECE)
            self._take_frames()
        except BlockingIOError:
            return False
        except Exception as error:  # noqa: BLE001 - a child may send anything; whoever reads serves all the others too
            self._gone(error)
            return False
        if not more:
            self._gone(None)
        return more

    def _take_frames(self, *, small: bool = False) -> None:
        while (frame := self._reader.next(small=small)) is not None:
            self._take(*frame)

    def _gone(self, error: Exception | None) -> None:
        if self.close():
            self._lost(error)

    def _send(self) -> DeafError | None:
        """As much as the socket takes; what is wrong with it, if anything is. Under the lock."""
        while self._unsent:
            frame = self._unsent[0]
            try:
                self._unsent_size -= frame.send(self._end)
            except BlockingIOError:
                self._want_room(wants=True)
                return None
            except ConnectionError:  # the other side is gone, which its end of the stream tells
                self._drop_unsent()
                break
            except OSError as error:  # too many descriptors under way, or no memory
                return DeafError(f"nothing can be sent to it: {error}")
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
    """Who reads the channels: a thread, started with the first of them, and the event loops that lend themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._bell = -1  # which wakes the thread
        self._channels: dict[int, Channel] = {}
        self._masks: dict[int, int] = {}
        self._away: set[int] = set()  # channels that nobody reads but the thread
        self._aside: deque[tuple[int, Channel]] = deque()  # those whose turn there has not come
        self._full: list[tuple[int, Channel, float]] = []  # those that are full, and until when nobody reads them
        self._lent: list[asyncio.AbstractEventLoop] = []
        self._loops: list[asyncio.AbstractEventLoop] = []  # those of them that have begun to read

    def lend(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have channels read on a loop, until it is taken back."""
        with self._lock:
            self._lent.append(loop)
            if self._epoll is not None:
                self._ask(loop, self._epoll)

    def take_back(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have them read without the loop. On the loop."""
        with self._lock:
            if loop in self._lent:
                self._lent.remove(loop)
            if self._epoll is not None and loop in self._loops and loop not in self._lent:
                self._loops.remove(loop)
                loop.remove_reader(self._epoll.fileno())
                os.eventfd_write(self._bell, 1)

    def add(self, fd: int, channel: Channel) -> None:
        """Read a channel from now on."""
        with self._lock:
            epoll = self._epoll or self._begin()
            if any(loop.is_closed() for loop in self._loops):  # and its engine never was
                self._loops = [loop for loop in self._loops if not loop.is_closed()]
                os.eventfd_write(self._bell, 1)
            epoll.register(fd, select.EPOLLIN)
            self._channels[fd], self._masks[fd] = channel, select.EPOLLIN

    def remove(self, fd: int) -> None:
        """Read it no more."""
        with self._lock:
            del self._channels[fd], self._masks[fd]
            if fd in self._away:
                self._away.remove(fd)
            elif self._epoll is not None:
                self._epoll.unregister(fd)

    def wants_room(self, fd: int, *, wants: bool) -> None:
        """Whether the channel is to be told when its socket has room."""
        with self._lock:
            self._masks[fd] = select.EPOLLIN | (select.EPOLLOUT if wants else 0)
            if self._epoll is not None and fd not in self._away:
                self._epoll.modify(fd, self._masks[fd])

    def _begin(self) -> select.epoll:
        self._epoll, self._bell = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC)
        threading.Thread(target=self._main, args=(self._epoll, self._bell), name="model events", daemon=True).start()
        for loop in self._lent:
            self._ask(loop, self._epoll)
        return self._epoll

    def wake(self) -> None:
        """Have the thread look again. Takes no lock, and may be called in the middle of anything."""
        os.eventfd_write(self._bell, 1)

    # -- on a loop -----------------------------------------------------------------------------------------------

    def _ask(self, loop: asyncio.AbstractEventLoop, epoll: select.epoll) -> None:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(self._hear, loop, epoll)

    def _hear(self, loop: asyncio.AbstractEventLoop, epoll: select.epoll) -> None:
        with self._lock:
            if loop in self._lent and loop not in self._loops:
                self._loops.append(loop)
                loop.add_reader(epoll.fileno(), self._read_small, epoll)
                os.eventfd_write(self._bell, 1)

    def _read_small(self, epoll: select.epoll) -> None:
        for fd, channel in self._ready(epoll, _IN_A_TURN):
            if not channel.read_small():
                self._set_aside(fd, channel)

    def _set_aside(self, fd: int, channel: Channel) -> None:
        with self._lock:
            if self._epoll is None or self._channels.get(fd) is not channel or fd in self._away:
                return
            self._epoll.unregister(fd)
            self._away.add(fd)
        self._aside.append((fd, channel))
        os.eventfd_write(self._bell, 1)

    def _take_again(self, fd: int, channel: Channel) -> None:
        """Behind what the thread has handed on of it."""
        with self._lock:
            if self._epoll is not None and self._channels.get(fd) is channel and fd in self._away:
                self._away.remove(fd)
                self._epoll.register(fd, self._masks[fd])

    # -- on the thread -------------------------------------------------------------------------------------------

    def _main(self, epoll: select.epoll, bell: int) -> None:
        usual_priority()  # not that of the load that was the first to need it
        lent, alone = select.poll(), select.poll()
        for waits in (lent, alone):
            waits.register(bell, select.POLLIN)
        alone.register(epoll.fileno(), select.POLLIN)
        while True:
            if bell in dict((lent if self._loops else alone).poll(self._patience())):
                os.eventfd_read(bell)
            full, self._full = self._full, []
            for each in full:
                self._give_back(*each)
            while self._aside:
                fd, channel = self._aside.popleft()
                self._read(channel)
                self._give_back(fd, channel, time.monotonic() + _HELD_SECONDS)
            if not self._loops:
                for _, channel in self._ready(epoll):
                    self._read(channel)

    def _patience(self) -> int | None:
        """Milliseconds until the first of the full ones is read again in any case."""
        if not self._full:
            return None
        return max(math.ceil((min(until for _, _, until in self._full) - time.monotonic()) * 1e3), 0)

    def _give_back(self, fd: int, channel: Channel, until: float) -> None:
        """Have the loop read it again, behind what was handed on of it; not while it is full."""
        if channel.is_full() and time.monotonic() < until:
            self._full.append((fd, channel, until))
            return
        for loop in self._loops[:1]:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._take_again, fd, channel)
                return
        self._take_again(fd, channel)

    def _read(self, channel: Channel) -> None:
        with _logged():
            channel.read()

    def _ready(self, epoll: select.epoll, most: int = -1) -> Iterator[tuple[int, Channel]]:
        """Channels that have something, with their descriptors; those that have room are told."""
        for fd, events in epoll.poll(0, most):
            channel = self._channels.get(fd)
            if channel is None:
                continue
            if events & select.EPOLLOUT:
                with _logged():
                    channel.has_room()
            if events & ~select.EPOLLOUT:
                yield fd, channel


@contextmanager
def _logged() -> Iterator[None]:
    """One channel's trouble is not that of the others."""
    try:
        yield
    except Exception:  # noqa: BLE001 - as it says
        _log.exception("a model's channel could not be served")


LISTENER = _Listener()
