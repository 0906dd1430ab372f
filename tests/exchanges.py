"""A request without a connection: its answer is there for the test that waits for it."""

from __future__ import annotations

from concurrent.futures import Future

from tests.waiting import PATIENCE


class WaitingExchange:
    """See `container.http1.HttpRequest`; `wait` gives status, header lines and body, once it is whole."""

    def __init__(self, method, target, headers, body):
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.on_disconnect = None
        self.unsent = 0
        self._answer = Future()
        self._begun = None
        self._parts = []

    def hold(self, _size):
        """Count nothing."""
        return True

    def respond(self, status, headers, body):
        """Take the answer."""
        self._answer.set_result((status, headers, b"".join(body)))

    def begin(self, status, headers):
        """Take the beginning of an answer."""
        self._begun = status, headers

    def write(self, data):
        """Take a part."""
        self._parts.append(bytes(data))

    def end(self):
        """Take no more."""
        self._answer.set_result((*self._begun, b"".join(self._parts)))

    def cut(self):
        """Take no more of an answer that is not whole."""
        self._answer.set_exception(EOFError("the answer was cut"))

    @property
    def answered(self):
        """Whether there is an answer, or the beginning of one."""
        return self._answer.done() or self._begun is not None

    def wait(self):
        """Status, header lines and body."""
        return self._answer.result(PATIENCE)
