"""Calling a WSGI application for one complete request."""

import sys
from wsgiref.validate import validator

import pytest

from container.control.on_loop import WaitingExchange
from container.control.wsgi import call_application, make_environ


def exchange(method="GET", target=b"/", headers=None, body=b""):
    """A complete request."""
    return WaitingExchange(method, target, headers or {}, body)


def test_the_environment_says_what_was_asked():
    """Path decoded as PEP 3333 wants it but for slashes in names, query and target as sent, headers by their CGI names, length of the body."""
    environ = make_environ(
        exchange(
            "POST",
            b"/v2/models/mod%C3%A8le%2Fx/load?a=%20b&c",
            {
                "content-type": "application/json",
                "x-a-b": "1, 2",
                "content-length": "999",
                "transfer-encoding": "chunked",
            },
            b"{}",
        )
    )
    assert environ["REQUEST_METHOD"] == "POST"
    assert environ["PATH_INFO"].encode("latin-1").decode() == "/v2/models/modèle%2Fx/load"
    assert environ["QUERY_STRING"] == "a=%20b&c"
    assert environ["RAW_URI"] == "/v2/models/mod%C3%A8le%2Fx/load?a=%20b&c"
    assert environ["CONTENT_TYPE"] == "application/json"
    assert environ["HTTP_X_A_B"] == "1, 2"
    assert environ["CONTENT_LENGTH"] == "2"
    assert environ["wsgi.input"].read() == b"{}"
    assert not {"HTTP_CONTENT_LENGTH", "HTTP_CONTENT_TYPE", "HTTP_TRANSFER_ENCODING"} & set(environ)
    assert sys.stderr is environ["wsgi.errors"]


def test_the_caller_keeps_to_pep_3333():
    """The standard library's validator has nothing to complain about."""

    def application(environ, start_response):
        assert environ["wsgi.input"].read(2) == b"ab"
        start_response("201 Created", [("Content-Type", "text/plain"), ("Content-Length", "3")])
        return [b"abc"]

    answer = call_application(validator(application), exchange("POST", b"/x?q=1", {"host": "h"}, b"ab"))
    assert answer == (201, b"Content-Type: text/plain\r\n", b"abc")


def test_headers_that_the_http_server_writes_are_left_to_it():
    """Length, date and connection are not sent twice; others keep their order, repeated ones too."""

    def application(_environ, start_response):
        names = ("Set-Cookie", "date", "Connection", "Set-Cookie", "TRANSFER-ENCODING", "X-\xe9")
        start_response("200 OK", [(name, f"{number}\xe9") for number, name in enumerate(names)])
        return []

    assert (
        call_application(application, exchange())[1] == b"Set-Cookie: 0\xe9\r\nSet-Cookie: 3\xe9\r\nX-\xe9: 5\xe9\r\n"
    )


def test_written_and_iterated_data_are_joined_and_the_iterable_closed():
    """`write` comes before what is iterated; `close` is called."""
    closed = []

    class Body:
        def __iter__(self):
            yield b"2"
            yield b"3"

        def close(self):
            closed.append(True)

    def application(_environ, start_response):
        start_response("200 OK", [])(b"1")
        return Body()

    assert call_application(application, exchange()) == (200, b"", b"123")
    assert closed == [True]


def test_a_body_is_gone_whoever_keeps_the_request():
    """Flask's errors of routing and its requests refer to each other until the collector of garbage comes."""
    kept = []

    def application(environ, start_response):
        kept.append(environ)
        start_response("404 Not Found", [])
        return [environ["wsgi.input"].read()]

    asked = exchange("POST", body=b"long")
    assert call_application(application, asked)[2] == b"long"
    assert asked.body == b""
    assert kept[0]["wsgi.input"].closed


@pytest.mark.parametrize("when", ["before", "in"])
def test_an_application_that_fails_is_answered_for(when, caplog):
    """Its client gets a JSON 500, its traceback the log."""

    def application(_environ, start_response):
        if when == "before":
            raise ZeroDivisionError
        start_response("200 OK", [])
        return (1 // 0 for _ in range(1))

    status, headers, body = call_application(application, exchange(target=b"/broken"))
    assert (status, headers) == (500, b"Content-Type: application/json\r\n")
    assert body == b'{"error":"the server failed to answer this request; its log says why"}'
    assert "GET /broken failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
