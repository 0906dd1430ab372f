"""What is a request and what is not: raw bytes, the answer, and whether the connection lives on."""

from __future__ import annotations

import pytest

H = b"Host: a\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
AGAIN = b"GET /again HTTP/1.1\r\nHost: a\r\n\r\n"

VALID = {
    "get": (b"GET /x?y=1 HTTP/1.1\r\n" + H + b"\r\n", b"GET /x?y=1 "),
    "post": (b"POST / HTTP/1.1\r\n" + H + b"Content-Length: 3\r\n\r\nabc", b"POST / abc"),
    "empty body": (b"POST / HTTP/1.1\r\n" + H + b"Content-Length: 0\r\n\r\n", b"POST / "),
    "no length is no body": (b"POST / HTTP/1.1\r\n" + H + b"\r\n", b"POST / "),
    "white space around a length": (b"POST / HTTP/1.1\r\n" + H + b"Content-Length: \t3 \t\r\n\r\nabc", b"POST / abc"),
    "unusual method": (b"PROPFIND / HTTP/1.1\r\n" + H + b"\r\n", b"PROPFIND / "),
    "empty lines before": (b"\r\n\r\nGET / HTTP/1.1\r\n" + H + b"\r\n", b"GET / "),
    "empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", b"GET / "),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\n" + H + b"\r\n", b"OPTIONS * "),
    "absolute target": (b"GET http://h:80/p?q HTTP/1.1\r\n" + H + b"\r\n", b"GET /p?q "),
    "absolute target, no path": (b"GET http://h HTTP/1.1\r\n" + H + b"\r\n", b"GET / "),
    "absolute target, query alone": (b"GET http://h?q=/ HTTP/1.1\r\n" + H + b"\r\n", b"GET /?q=/ "),
    "chunked": (CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"POST / abc"),
    "chunked in capitals": (CHUNKED.replace(b"chunked", b"CHUNKED ") + b"1\r\na\r\n0\r\n\r\n", b"POST / a"),
    "chunked, empty": (CHUNKED + b"0\r\n\r\n", b"POST / "),
    "chunk extension": (CHUNKED + b'2;a=1;b="x"\r\nab\r\n0\r\n\r\n', b"POST / ab"),
    "trailers": (CHUNKED + b"2\r\nab\r\n0\r\nX-T: 1\r\nHost: evil\r\n\r\n", b"POST / ab"),
    "upgrade": (b"GET /u HTTP/1.1\r\n" + H + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"GET /u "),
    "upgrade with body": (
        b"POST /u HTTP/1.1\r\n" + H + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab",
        b"POST /u ab",
    ),
    "upgrade with chunks": (
        CHUNKED[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        b"POST / ab",
    ),
    "http/1.0 that keeps alive": (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"GET / "),
    "connection: something else": (b"GET / HTTP/1.1\r\n" + H + b"Connection: x, keep-alive\r\n\r\n", b"GET / "),
}

LAST = {
    "close": b"GET / HTTP/1.1\r\n" + H + b"Connection: close\r\n\r\n",
    "close in a list": b"GET / HTTP/1.1\r\n" + H + b"Connection: x, Close\r\n\r\n",
    "close with an upgrade": b"GET / HTTP/1.1\r\n" + H + b"Connection: upgrade, close\r\nUpgrade: x\r\n\r\n",
    "http/1.0": b"GET / HTTP/1.0\r\n\r\n",
    "http/1.0 with a host": b"GET / HTTP/1.0\r\nHost: a\r\n\r\n",
}


def post(*lines: bytes) -> bytes:
    """A request with these header lines and two bytes behind."""
    return b"POST / HTTP/1.1\r\n" + H + b"".join(line + b"\r\n" for line in lines) + b"\r\nab"


def get(lines: bytes) -> bytes:
    """A request with these header lines alone."""
    return b"GET / HTTP/1.1\r\n" + lines + b"\r\n"


INVALID = {
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "unknown method": (b"FETCH / HTTP/1.1\r\n" + H + b"\r\n", 400),
    "method in small letters": (b"get / HTTP/1.1\r\n" + H + b"\r\n", 400),
    "space in target": (b"GET /a b HTTP/1.1\r\n" + H + b"\r\n", 400),
    "control character in target": (b"GET /\x01 HTTP/1.1\r\n" + H + b"\r\n", 400),
    "bytes over 127 in target": (b"GET /\xe4 HTTP/1.1\r\n" + H + b"\r\n", 400),
    "relative target": (b"GET x HTTP/1.1\r\n" + H + b"\r\n", 400),
    "not http in the version": (b"GET / FTP/1.1\r\n" + H + b"\r\n", 400),
    "space after version": (b"GET / HTTP/1.1 \r\n" + H + b"\r\n", 400),
    "bare LF": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "bare LF after a header": (get(b"Host: a\n"), 400),
    "no host": (get(b""), 400),
    "two hosts": (get(H + H), 400),
    "two hosts, other case": (get(H + b"HOST: b\r\n"), 400),
    "folded line": (get(H + b"X: a\r\n b\r\n"), 400),
    "space before the first header": (get(b" " + H), 400),
    "space before colon": (get(b"Host : a\r\n"), 400),
    "no colon": (get(H + b"X\r\n"), 400),
    "no name": (get(H + b": x\r\n"), 400),
    "bad name": (get(H + b"a(b): x\r\n"), 400),
    "NUL in value": (get(b"Host: a\0\r\n"), 400),
    "bare CR in value": (get(H + b"X: a\rb\r\n"), 400),
    "control character in value": (get(H + b"X: \x01\r\n"), 400),
    "two lengths that agree": (post(b"Content-Length: 2", b"Content-Length: 2"), 400),
    "two lengths that differ": (post(b"Content-Length: 2", b"Content-Length: 3"), 400),
    "two lengths in one": (post(b"Content-Length: 2, 2"), 400),
    "negative length": (post(b"Content-Length: -1"), 400),
    "length with a sign": (post(b"Content-Length: +2"), 400),
    "length in hex": (post(b"Content-Length: 0x2"), 400),
    "length with a space": (post(b"Content-Length: 1 2"), 400),
    "empty length": (post(b"Content-Length:"), 400),
    "length beyond 64 bits": (post(b"Content-Length: 99999999999999999999999"), 400),
    "length beyond the limit": (post(b"Content-Length: 18446744073709551615"), 413),
    "length, then coding": (post(b"Content-Length: 2", b"Transfer-Encoding: chunked"), 400),
    "coding, then length": (post(b"Transfer-Encoding: chunked", b"Content-Length: 2"), 400),
    "unknown coding": (post(b"Transfer-Encoding: gzip"), 501),
    "unknown coding before chunked": (post(b"Transfer-Encoding: gzip, chunked"), 501),
    "unknown coding on a line before": (post(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"), 501),
    "coding identity": (post(b"Transfer-Encoding: identity"), 501),
    "coding after chunked": (post(b"Transfer-Encoding: chunked, gzip"), 400),
    "chunked twice": (post(b"Transfer-Encoding: chunked, chunked"), 400),
    "coding with parameter": (post(b"Transfer-Encoding: chunked;q=1"), 501),
    "coding after vertical tab": (post(b"Transfer-Encoding: \x0bchunked"), 400),
    "empty coding": (post(b"Transfer-Encoding:"), 400),
    "coding in http/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunk size not hex": (CHUNKED + b"zz\r\n", 400),
    "chunk size negative": (CHUNKED + b"-1\r\n", 400),
    "chunk size with 0x": (CHUNKED + b"0x2\r\nab\r\n", 400),
    "chunk size beyond 64 bits": (CHUNKED + b"fffffffffffffffff\r\n", 400),
    "chunk longer than its size": (CHUNKED + b"2\r\nabc\r\n", 400),
    "chunk without end": (CHUNKED + b"2\r\nab0\r\n\r\n", 400),
    "chunk lines with bare LF": (CHUNKED + b"2\nab\n0\n\n", 400),
    "LF inside a chunk extension": (CHUNKED + b"2;\nab\r\n0\r\n\r\n", 400),
    "folded trailer": (CHUNKED + b"0\r\nX: 1\r\n 2\r\n\r\n", 400),
    "connect": (b"CONNECT a:443 HTTP/1.1\r\n" + H + b"\r\n", 501),
    "http/0.9": (b"GET /\r\n\r\n", 505),
    "http/0.9 by name": (b"GET / HTTP/0.9\r\n" + H + b"\r\n", 505),
    "http/1.2": (b"GET / HTTP/1.2\r\n" + H + b"\r\n", 505),
    "http/2": (b"GET / HTTP/2.0\r\n" + H + b"\r\n", 505),
    "http/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 505),
    "http/3": (b"GET / HTTP/3.0\r\n" + H + b"\r\n", 505),
    "other expectation": (post(b"Expect: the-moon", b"Content-Length: 2"), 417),
}


@pytest.mark.parametrize("case", VALID)
def test_valid(serve, case):
    """A valid request is handed over as sent, and the connection takes another one."""
    raw, expected = VALID[case]
    client = serve().connect()

    answer = client.ask(raw)

    assert (answer.status, answer.body) == (200, expected)
    assert "close" not in answer.headers.get("connection", "")
    assert client.ask(AGAIN).body == b"GET /again "


@pytest.mark.parametrize("case", VALID)
def test_valid_in_one_go(serve, case):
    """A valid request followed by another in the same packet leaves nothing of itself in the other."""
    raw, expected = VALID[case]
    client = serve().connect().send(raw + AGAIN + raw)

    assert [client.answer().body for _ in range(3)] == [expected, b"GET /again ", expected]


@pytest.mark.parametrize("case", LAST)
def test_last(serve, case):
    """A client that wants its connection closed gets its answer and the end, whatever it sends behind."""
    for behind in (b"", b"\r\n", AGAIN):
        client = serve().connect()

        answer = client.ask(LAST[case] + behind)

        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.at_end()


@pytest.mark.parametrize("case", INVALID)
def test_invalid(serve, later, case):
    """What is no request is refused with its status and a sentence, never handed over, and ends the connection."""
    raw, status = INVALID[case]
    server = serve(later)
    client = server.connect()

    answer = client.ask(raw)

    assert answer.status == status
    assert answer.error.endswith(".")
    assert answer.headers["connection"] == "close"
    assert client.at_end()
    assert len(later) == 0


@pytest.mark.parametrize("case", ["unknown method", "no host", "two hosts", "unknown coding", "http/2"])
def test_invalid_behind_valid(serve, case):
    """An unsound request behind a sound one is refused after the sound one was answered."""
    raw, status = INVALID[case]
    client = serve().connect().send(AGAIN + raw)

    assert client.answer().body == b"GET /again "
    assert client.answer().status == status
    assert client.at_end()


@pytest.mark.parametrize("case", ["unknown method", "two hosts", "unknown coding"])
def test_invalid_behind_upgrade(serve, case):
    """So is one behind a request whose Upgrade was ignored."""
    raw, status = INVALID[case]
    client = serve().connect().send(VALID["upgrade with body"][0] * 2 + raw)

    assert [client.answer().status for _ in range(3)] == [200, 200, status]
    assert client.at_end()


def test_headers(serve, later):
    """Names come in lower case, values trimmed and as latin-1; repeated fields are joined; trailers do not count."""
    server = serve(later)
    lines = b"X-One:  a b \t\r\nx-two: 1\r\nX-TWO:2\r\nX-Empty:\r\nX-Umlaut: \xe4\r\n"
    server.connect().send(
        b"POST / HTTP/1.1\r\nHost: a:1\r\nTransfer-Encoding: chunked\r\n"
        + lines
        + b"\r\n0\r\nX-One: evil\r\n\r\n"
        + AGAIN
    )
    server.until(lambda: server.server.in_flight == 2)
    server.call(lambda: later.exchanges[0].respond(200, b"", ()))

    assert [each.headers for each in later.exchanges] == [
        {
            "host": "a:1",
            "transfer-encoding": "chunked",
            "x-one": "a b",
            "x-two": "1, 2",
            "x-empty": "",
            "x-umlaut": "ä",
        },
        {"host": "a"},
    ]


def test_upgrade_is_invisible(serve, later):
    """A handler does not see the Upgrade that is ignored, and sees all the rest."""
    server = serve(later)
    server.connect().send(VALID["upgrade with body"][0] * 3)
    server.until(lambda: server.server.in_flight == 3)

    assert later.exchanges[0].headers == {"host": "a", "connection": "upgrade", "content-length": "2"}


def test_headers_that_repeat(serve, later):
    """The same headers again mean the same again; other ones in between mean what they say."""
    server = serve(later)
    one, other = b"Host: a\r\nX: 1\r\n", b"Host: a\r\nX: 2\r\n"
    for number, lines in enumerate((one, one, other, one, other, other)):
        client = server.clients[0] if number else server.connect()
        client.send(get(lines))
        server.until(lambda: len(later) == number + 1)  # noqa: B023
        server.call(later.exchanges[-1].respond, 200, b"", ())

    assert [each.headers["x"] for each in later.exchanges] == ["1", "1", "2", "1", "2", "2"]


def test_same_headers_in_another_version(serve):
    """What the same headers mean still depends on the version they come with."""
    lines = H + b"Connection: keep-alive\r\n\r\n"
    client = serve().connect()

    assert "connection" not in client.ask(b"GET / HTTP/1.1\r\n" + lines).headers
    assert client.ask(b"GET / HTTP/1.0\r\n" + lines).headers["connection"] == "keep-alive"
    assert client.ask(b"GET / HTTP/2.0\r\n" + lines).status == 505

    client = serve().connect()
    assert client.ask(get(H)).status == 200
    assert client.ask(get(H).replace(b"1.1", b"1.0")).headers["connection"] == "close"
    assert client.at_end()
