"""Requests that are not let in by their head: they are refused before their body, and heads are asked of once."""

from __future__ import annotations

import pytest

from container.http1 import Refusal

HEAD = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n"


@pytest.fixture
def gated(serve):
    """A server that lets in who asks host a, and what it has asked of."""
    asked = []

    def gate(method, target, headers, host):
        asked.append((method, target, host))
        return None if host in {"a", None} else Refusal(403, f"not {host}")

    running = serve()
    running.server.gate = gate
    return running, asked


def test_a_head_that_comes_again_is_asked_of_twice(gated):
    """Whatever its body; from then on it is known, so that being let in costs a client nothing that repeats itself."""
    running, asked = gated
    client = running.connect()
    for number in range(20):
        assert client.ask(HEAD + b"%03d" % number).status == 200

    assert asked == [("POST", b"/a", "a")] * 2


@pytest.mark.parametrize("header", [b"Origin: http://a", b"Sec-Fetch-Site: same-origin"])
def test_a_browser_is_asked_of_each_time(gated, header):
    """Since what its page may do depends on the route, which may be another one with the same headers."""
    running, asked = gated
    client = running.connect()
    for path in (b"/a", b"/a", b"/b"):
        assert client.ask(HEAD.replace(b"/a", path).replace(b"Host", header + b"\r\nHost") + b"abc").status == 200

    assert [target for _, target, _ in asked] == [b"/a", b"/a", b"/b"]


def test_a_refused_request_ends_its_connection_without_its_body(gated):
    """Which nobody waits for; what was asked before it is answered first."""
    running, _ = gated
    client = running.connect()
    client.send(HEAD + b"abc" + HEAD.replace(b"Host: a", b"Host: b").replace(b"h: 3", b"h: 1000"))

    assert client.answer().status == 200
    answer = client.answer()
    assert (answer.status, answer.body) == (403, b'{"error": "not b"}')
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("line", "fields", "host"),
    [
        (b"GET / HTTP/1.1", b"Host: b\r\n", "b"),
        (b"GET http://b:1/ HTTP/1.1", b"Host: a\r\n", "b:1"),
        (b"GET http://b HTTP/1.1", b"Host: a\r\n", "b"),
        (b"GET http://b?/ HTTP/1.1", b"Host: a\r\n", "b"),
        (b"GET http://a@b/ HTTP/1.1", b"Host: a\r\n", "a@b"),
        (b"GET / HTTP/1.0", b"Host: b\r\n", "b"),
        (b"GET /?to=http://a HTTP/1.1", b"Host: b\r\n", "b"),
        (b"GET / HTTP/1.1", b"Host:\r\n", ""),
    ],
)
def test_which_host_a_request_asks(gated, line, fields, host):
    """That of its target if there is one, as RFC 9112 has it, else its Host."""
    running, asked = gated

    assert running.connect().ask(line + b"\r\n" + fields + b"\r\n").status == 403
    assert asked[0][2] == host


def test_a_target_with_a_host_is_asked_of_behind_known_heads(gated):
    """Who knows a head with these fields does not know whom the next target names."""
    running, asked = gated
    client = running.connect()
    for _ in range(3):
        assert client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").status == 200

    assert client.ask(b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n").status == 403
    assert len(asked) == 3


def test_http_10_names_no_host(gated):
    """It may; None is for the gate to judge."""
    running, asked = gated

    assert running.connect().ask(b"GET / HTTP/1.0\r\n\r\n").status == 200
    assert asked == [("GET", b"/", None)]
