"""Who waits for the responses of a model, as the handler of one sees them."""

import threading

from tests.waiting import PATIENCE


class Responses:
    """Takes the responses to one request. See `model_handlers.requests.Responder`.

    Attributes:
        got: what came: responses, errors, and None where the news of the last one came by itself.
        ends: how often the last one came.
        gone: whether `leave` was called.
    """

    def __init__(self):
        self.got = []
        self.ends = 0
        self._last = 0  # how much there was when the last one came
        self.gone = False
        self.watched = []
        self._changed = threading.Condition()

    def send(self, response, *, final):
        """Keep it."""
        with self._changed:
            self.got.append(response)
            self.ends += final
            if final and not self._last:
                self._last = len(self.got)
            self._changed.notify_all()

    def is_cancelled(self):
        """Whether `leave` was called."""
        return self.gone

    def when_cancelled(self, tell):
        """As promised."""
        self.watched.append(tell)
        if self.gone:
            tell()

    def leave(self):
        """Nobody waits any more."""
        self.gone = True
        for tell in self.watched:
            tell()

    def wait(self, count):
        """For so many responses."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= count, PATIENCE)

    def end(self):
        """What came, up to the last: what a server does not hand on that comes behind it is not there."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ends, PATIENCE), self.got
            return self.got[: self._last]
