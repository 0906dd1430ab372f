"""The fork server of models' processes, for as long as several tests need it."""

import contextlib
import socket

from model_handlers.isolation.fork_client import FORKS
from model_handlers.isolation.listener import Channel
from model_handlers.isolation.questions import WRITER


@contextlib.contextmanager
def fork_server():
    """It and the threads of all channels live as long as the process that serves: they are no leak of a test."""
    FORKS.ensure_running()
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours, lambda *_: None, lambda _: None)
        channel.start()
        channel.close()
    WRITER.do(lambda: None)
    yield FORKS
    FORKS.stop()
