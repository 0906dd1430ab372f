"""Which hosts a server of gRPC answers to: `:authority`, or `host` where a client sends that alone."""

from __future__ import annotations

import pytest

from container.grpc.rpc import Calls
from container.http2 import frames
from container.inference.request_memory import RequestMemory

HEAD = ((b":method", b"POST"), (b":path", b"/s/None"), (b"content-type", b"application/grpc"))


class Ended:
    """A stream that keeps the headers with which it ends."""

    over = False

    def end(self, block):
        self.block = block


@pytest.fixture
def calls():
    """Calls of no method, for who asks host a; and what was asked about."""
    asked = []

    def unknown_host(host):
        asked.append(host)
        return "" if host == "a" else f"not {host}"

    return Calls({}, 0, "", RequestMemory(0), unknown_host), asked


def answer(calls, *fields):
    """The last block of headers."""
    stream = Ended()
    calls.begin(stream, (*HEAD, *fields))
    return stream.block


@pytest.mark.parametrize(
    "fields", [((b":authority", b"b"),), ((b"host", b"b"),), ((b":authority", b"b"), (b"host", b"a"))]
)
def test_an_unknown_host_is_refused(calls, fields):
    """By a status of HTTP's and of gRPC's, with the sentence."""
    expected = [(b":status", b"403"), (b"content-type", b"application/grpc"), (b"grpc-status", b"7")]

    assert answer(calls[0], *fields) == frames.header_block([*expected, (b"grpc-message", b"not b")])


@pytest.mark.parametrize(
    "fields", [(), ((b":authority", b"a"),), ((b"host", b"a"),), ((b":authority", b"a"), (b"host", b"b"))]
)
def test_a_known_host_is_let_in(calls, fields):
    """And a client that names none, which no browser does."""
    assert b"Method not found!" in answer(calls[0], *fields)


def test_a_known_host_is_asked_about_once(calls):
    """Whatever the call; one that is refused is asked about again."""
    made, asked = calls
    for host in (b"a", b"a", b"b", b"b"):
        answer(made, (b":authority", host))

    assert asked == ["a", "b", "b"]
