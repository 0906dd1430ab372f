"""How a model's process waits for its next message."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from model_handlers.worker.main import _Side
from model_handlers.worker.policies import BusyPoll
from model_handlers.worker.wire import encode_message
from tests.model_handlers.worker.asleep import times_asleep

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket of either side."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("longest", [0, 1_000_000, 60_000_000_000])
def test_messages_arrive_however_long_it_waits_awake(
    ends: tuple[socket.socket, socket.socket], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are there, those that come while it waits, and the end."""
    monkeypatch.setattr(BusyPoll, "longest", longest)
    ours, theirs = ends
    side = _Side(theirs)
    ours.sendall(encode_message({"batch": 1}))
    assert side.receive() == {"batch": 1}
    received: list[object] = []
    waiting = threading.Thread(target=lambda: received.extend([side.receive(), side.receive()]))
    waiting.start()
    ours.sendall(encode_message({"batch": 2}))
    ours.close()
    waiting.join(60)
    assert received == [{"batch": 2}, None]


def test_a_wait_that_brings_nothing_ends_asleep(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next ones are not spent awake."""
    monkeypatch.setattr(BusyPoll, "longest", 1000)
    _, theirs = ends
    side = _Side(theirs)
    side._wait_awake(1000)
    assert side._poll.begin() == 0


def test_a_processor_that_others_keep_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave it away once sleeps the next times, and finds what came meanwhile."""
    monkeypatch.setattr(BusyPoll, "longest", 20_000_000)
    monkeypatch.setattr("os.sched_yield", lambda: time.sleep(0.05))
    ours, theirs = ends
    side = _Side(theirs)
    assert not side._wait_awake(BusyPoll.longest)
    assert [side._poll.begin() for _ in range(7)] == [0] * 7
    ours.sendall(encode_message({"batch": 1}))
    assert side.receive() == {"batch": 1}


def test_it_sleeps_on_while_its_last_answer_is_read(ends: tuple[socket.socket, socket.socket]) -> None:
    """Room on the socket is nothing that it waits for."""
    ours, theirs = ends
    side = _Side(theirs)
    waiting = threading.Thread(target=side.receive)
    waiting.start()
    sleeps = times_asleep(waiting)
    for _ in range(50):
        theirs.sendall(b"an answer")
        assert ours.recv(100) == b"an answer"
        time.sleep(0.001)  # for who was woken to go to sleep again
    assert times_asleep(waiting) == sleeps
    ours.close()
    waiting.join(60)
