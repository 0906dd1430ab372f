"""What a client may send and how long it may take: limits, the rules for heads, and the words of refusals. PURE.

llhttp, strict as it comes, refuses folded lines, spaces before a colon, control characters, bare CR or LF, unsound and
repeated Content-Length, Content-Length beside Transfer-Encoding, and unsound chunks. What it lets through and a server
must not is checked here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from httptools import HttpParserInvalidMethodError, HttpParserInvalidURLError

if TYPE_CHECKING:
    from collections.abc import Mapping

KIB: Final = 1024
MIB: Final = 1024 * KIB

Fields = list[tuple[bytes, bytes]]  # names and values as sent, in their order

JSON_TYPE: Final = b"Content-Type: application/json\r\n"
_LONGEST_KNOWN: Final = 64  # bytes of a header's name
SUPPORTED_VERSIONS: Final = ("1.1", "1.0")

# Methods as text. CONNECT is missing on purpose: this is no proxy.
METHODS: Final = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection, in bytes and seconds."""

    request_line: int = 8 * KIB  # method, target and version. Beyond it: 414
    headers: int = 64 * KIB  # all header fields together. Beyond it: 431
    header_count: int = 100  # fields in one request. Beyond it: 431
    body: int = 64 * MIB  # of a request. Beyond it: 413, before any of it is read where Content-Length tells
    chunks: int = 64 * KIB  # of a body that comes in chunks, empty ones not counted. Beyond it: 400
    header_timeout: float = 10.0  # from a connection, or a request's first byte, until its headers are whole. Then 408
    body_timeout: float = 60.0  # without progress while a body arrives (then 408) or an answer leaves (then the end)
    body_grace: float = 10.0  # of a body, after which it has to come at `body_rate` on average; else 408
    body_rate: int = KIB  # bytes a second
    idle_timeout: float = 75.0  # between two requests of one connection; it closes without a word
    linger_timeout: float = 5.0  # after the last answer of a connection, for the client to read it and to close
    linger: int = 64 * MIB  # thrown away meanwhile, so that a client in the middle of a body gets to read its answer
    pipelined: int = 16  # requests that may wait on one connection for the one before them; then reading pauses
    write_buffer: int = 256 * KIB  # of answers not yet sent, at which the next pipelined request has to wait
    # Not yet sent, beyond which a client reads its streamed answer too slowly: when another part comes, the connection
    # ends. So it holds at most as much and one part.
    stream_buffer: int = 64 * MIB
    sweep: float = 1.0  # between two looks at timeouts, and so how late they may be noticed


class Headers(dict[str, str]):
    """Header fields by name, in lower case; repeated ones joined in their order.

    Attributes:
        fields: as they were sent.
    """

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.fields = fields


class Refusal(Exception):  # noqa: N818  it is what the server answers, not what went wrong in it
    """An answer of the server's own; the connection ends with it.

    Attributes:
        status: the HTTP status. The first argument is a sentence for the client.
        headers: further lines of its head.
    """

    def __init__(self, status: int, sentence: str, headers: bytes = b"") -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


def error_body(sentence: str) -> bytes:
    return json.dumps({"error": sentence}, ensure_ascii=False).encode()


def origin_form(target: bytes) -> bytes:
    """The target from its first slash, for `http://host/path` and for `*`, which stays."""
    if target == b"*":
        return target
    _, _, rest = target.partition(b"://")
    slash, question = rest.find(b"/"), rest.find(b"?")
    if slash >= 0 and not 0 <= question < slash:
        return rest[slash:]
    return b"/" + rest[question:] if question >= 0 else b"/"


def asked_host(target: bytes, headers: Mapping[str, str]) -> str | None:
    """The host and port that a request asks: of `http://host/path` those (RFC 9112, 3.2.2), else its Host, if any."""
    if target.startswith(b"/"):
        return headers.get("host")
    scheme, separator, rest = target.partition(b"://")
    if not separator or b"/" in scheme or b"?" in scheme:
        return headers.get("host")
    return re.split(rb"[/?#]", rest, maxsplit=1)[0].decode("latin-1")


def text_of(sent: bytes) -> str:
    """What a header says: UTF-8, which HTTP leaves to the server to read, or Latin-1, as HTTP once said."""
    try:
        return sent.decode()
    except UnicodeDecodeError:
        return sent.decode("latin-1")


def _lower(raw: bytes) -> str:
    return raw.decode("latin-1").lower()


# Clients send few different names, so nearly all of them are met again.
_known_lower = lru_cache(512)(_lower)


def joined(fields: Fields) -> Headers:
    """Header fields by name.

    Raises:
        Refusal: Host is repeated.
    """
    headers = Headers(fields)
    for raw, value in fields:
        name = _known_lower(raw) if len(raw) <= _LONGEST_KNOWN else _lower(raw)
        text = value.rstrip().decode("latin-1")
        if name not in headers:
            headers[name] = text
        elif name == "host":
            raise Refusal(400, "There are several Host headers: HTTP/1.1 asks for exactly one.")
        else:
            headers[name] += ", " + text
    return headers


def body_too_large(_target: bytes, size: int, limit: int) -> Refusal:
    return Refusal(413, f"The body of {size} bytes or more exceeds the maximum allowed input size of {limit} bytes.")


def malformed(error: Exception, target: bytes, version: str) -> Refusal:
    if isinstance(error, HttpParserInvalidMethodError):
        return Refusal(400, "The request does not begin with an HTTP method: send plain HTTP/1.1, not TLS.")
    if isinstance(error, HttpParserInvalidURLError):
        return Refusal(400, "The request target is malformed: percent-encode what is not plain ASCII.")
    if target and version not in (*SUPPORTED_VERSIONS, "0.0"):
        return unsupported(version)
    return Refusal(400, f"The request is malformed ({error}): send it as RFC 9112 says.")


def unsupported(version: str) -> Refusal:
    return Refusal(505, f"HTTP/{version} is not supported: speak HTTP/1.1.")


def status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


def rebuild(method: str, target: bytes, headers: dict[str, str], *, http10: bool) -> bytes:
    """The head of a request, written again from its parts."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    line = b"%b %b HTTP/1.%d\r\n" % (method.encode(), target, 0 if http10 else 1)
    return line + fields.encode("latin-1") + b"\r\n"
