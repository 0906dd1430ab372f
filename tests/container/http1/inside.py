"""What a test waits for inside an HTTP/1.1 connection, where nothing on the wire tells: its private names are here alone."""

from __future__ import annotations

from contextlib import contextmanager


class Inside:
    """A connection, or the reader of one; to be looked at on its loop."""

    def __init__(self, connection) -> None:
        self.connection = connection

    @property
    def half_closed(self) -> bool:
        """Whether the client has sent its last byte."""
        return self.connection._half_closed

    @property
    def full(self) -> bool:
        """Whether reading is paused, since enough requests wait."""
        return self.connection._full

    @property
    def write_paused(self) -> bool:
        """Whether the client's socket takes no more for now."""
        return self.connection._write_paused

    @property
    def behind(self) -> bool:
        """Whether an exchange waits for the answer before it."""
        return self.connection._behind

    @property
    def between(self) -> bool:
        """Whether what was read so far ends with a request."""
        return self.connection._boundary

    @property
    def wants_continue(self) -> bool:
        """Whether the client waits for a 100 (Continue)."""
        return self.connection._wants_continue

    @property
    def refused(self) -> bool:
        """Whether a refusal waits for the answers before it."""
        return self.connection._pending_refusal is not None

    @property
    def begun(self) -> bool:
        """Whether the head of a request is there, and its body is not."""
        return self.connection._arriving is not None

    @property
    def repeats(self) -> bool:
        """Whether the connection knows the last request again."""
        return self.connection._repeat is not None

    @property
    def discarded(self) -> int:
        """Bytes that came behind the last request."""
        return self.connection._discarded

    @property
    def head_bytes(self) -> int:
        """Of a head that is not complete; at least as many as there are."""
        return self.connection._head_bound

    @property
    def body_bytes(self) -> int:
        """Of a body that is not complete."""
        buffer = self.connection._buffer
        return len(self.connection._arriving.body) if buffer is None else buffer.tell()

    @contextmanager
    def unparsed(self, server):
        """While it lasts, what llhttp is given closes the connection without an answer."""
        feed = self.connection._feed
        server.call(setattr, self.connection, "_feed", None)
        yield
        server.call(setattr, self.connection, "_feed", feed)


def stop_sweeping(server) -> None:
    """Let time pass by `Running.elapse` alone."""
    server._stop_sweeping()
