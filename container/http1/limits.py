"""What a client may send to the server, and how long it may take. Values only."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection, in bytes and seconds.

    Attributes:
        request_line: bytes of method, target and version. Beyond it: 414.
        headers: bytes of all header fields together. Beyond it: 431.
        header_count: header fields in one request. Beyond it: 431.
        body: bytes of a request's body. Beyond it: 413, before any of it is read where Content-Length tells.
        chunks: of a request's body that comes in chunks, empty ones not counted. Beyond it: 400.
        header_timeout: from a connection, or the first byte of a request, until its headers are complete. Then 408.
        body_timeout: without progress while a body arrives (then 408) or an answer leaves (then the end).
        body_grace: seconds of a body after which it has to come at `body_rate` on average; else 408.
        body_rate: bytes a second.
        idle_timeout: between two requests of one connection; it closes without a word.
        linger_timeout: after the last answer of a connection, for the client to read it and to close.
        linger: bytes thrown away meanwhile, so that a client in the middle of a body gets to read its answer.
        pipelined: requests that may wait on one connection for the one before them; then reading pauses.
        write_buffer: bytes of answers not yet sent at which the next pipelined request has to wait.
        stream_buffer: bytes not yet sent beyond which a client reads its streamed answer too slowly: when another part
            comes, the connection ends. So it holds at most as much and one part.
        sweep: how often timeouts are looked at, and so how late they may be noticed.
    """

    request_line: int = 8 * KIB
    headers: int = 64 * KIB
    header_count: int = 100
    body: int = 64 * MIB
    chunks: int = 64 * KIB
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    body_grace: float = 10.0
    body_rate: int = KIB
    idle_timeout: float = 75.0
    linger_timeout: float = 5.0
    linger: int = 64 * MIB
    pipelined: int = 16
    write_buffer: int = 256 * KIB
    stream_buffer: int = 64 * MIB
    sweep: float = 1.0
