"""What lies around bodies: compression of requests and answers, server-sent events, AWS event streams. PURE.

A compressed body is never larger than the limit once it is inflated. Answers are compressed quickly rather than well: a
client that is far away asks for it, and its neighbours wait for us.

A frame of `application/vnd.amazon.eventstream`, as InvokeEndpointWithResponseStream answers:

    u32 length of the frame | u32 length of the headers | u32 CRC-32 of these 8 bytes
    headers | payload | u32 CRC-32 of everything before

Numbers are big-endian. A header is `u8 length, name, u8 7 (a string), u16 length, value`.
"""

from __future__ import annotations

import functools
import re
import struct
import zlib
from typing import TYPE_CHECKING
from zlib import crc32

import orjson
from isal import isal_zlib

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


# zlib's window sizes: 31 reads gzip, 15 a zlib stream (what HTTP calls deflate).
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
ENCODINGS = ("gzip", "deflate")  # of answers
_LEVEL = 1
_STEP = 1 << 20  # bytes that are inflated at once
_QUICK = 1 << 18  # which take less than a millisecond
_WEIGHT = re.compile(r"q=([01](?:\.[0-9]{0,3})?)")


def inflate_quickly(body: bytes, encoding: str, limit: int) -> bytes | None:
    """What `inflate` returns, None where that would take long: a few bytes may become a thousand times as many."""
    try:
        return inflate(body, encoding, min(limit, _QUICK))
    except MmeError as error:
        if error.kind is not Kind.TOO_LARGE or limit <= _QUICK:
            raise
        return None


def inflate(
    body: bytes, encoding: str, limit: int = 64 << 20, take: Callable[[int], None] = lambda _size: None
) -> bytes:
    """The body as it was before `Content-Encoding`; `take` is told of each further size, and may raise.

    Raises:
        MmeError: UNSUPPORTED for an unknown encoding, TOO_LARGE beyond `limit` bytes, INVALID_ARGUMENT for garbage.
    """
    coding = encoding.strip().lower()
    if coding in {"", "identity"}:
        return body
    window = _WINDOWS.get(coding)
    if window is None:
        raise MmeError(Kind.UNSUPPORTED, f"Unsupported compression type '{encoding}': send gzip, deflate or identity")
    decompressor = zlib.decompressobj(window)
    parts, size, rest = [], 0, body
    while not decompressor.eof and size <= limit:
        most = min(_STEP, limit + 1 - size)
        try:
            part = decompressor.decompress(rest, most)
        except zlib.error as error:
            raise invalid_argument(f"the body is not valid {coding} data: {error}") from None
        take(len(part))
        parts.append(part)
        size, rest = size + len(part), decompressor.unconsumed_tail
        if len(part) < most:
            break
    if size > limit:
        raise MmeError(Kind.TOO_LARGE, f"the body is larger than {limit} bytes once decompressed")
    if not decompressor.eof:
        raise invalid_argument(f"the body's {coding} data end too early")
    if decompressor.unused_data:  # another gzip member, perhaps; better refused than left out in silence
        raise invalid_argument(
            f"{len(decompressor.unused_data)} bytes follow the end of the body's {coding} data; send one stream"
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


@functools.lru_cache(maxsize=256)
def wanted_encoding(accept: str) -> str:
    """The encoding of ours that an `Accept-Encoding` likes best, "" for none; of two equals the first."""
    weights: dict[str, float] = {}
    for part in accept.lower().split(","):
        coding, _, parameters = part.partition(";")
        weight = _WEIGHT.fullmatch(parameters.replace(" ", "")) if parameters.strip() else None
        if weight is not None or not parameters.strip():
            weights.setdefault(coding.strip(), float(weight[1]) if weight else 1.0)
    known = {coding: weight for coding, weight in weights.items() if coding in (*ENCODINGS, "identity")}
    best = max(known, key=lambda coding: known[coding], default="identity")
    return best if best in ENCODINGS and known[best] else ""


def compress(parts: Sequence[bytes | memoryview], encoding: str) -> bytes:
    compressor = isal_zlib.compressobj(_LEVEL, wbits=_WINDOWS[encoding])
    return b"".join((*[compressor.compress(part) for part in parts], compressor.flush()))


_LINE_END = re.compile(rb"\r\n|\r|\n")


def event(data: bytes) -> bytes:
    """An event with these data, UTF-8. Each line has a field of its own, which clients join with a line feed."""
    return b"".join(b"data: %b\n" % line for line in _LINE_END.split(data)) + b"\n"


_LENGTHS = struct.Struct(">II")
_CRC = struct.Struct(">I")
_STRING = 7
_OVERHEAD = _LENGTHS.size + 2 * _CRC.size
_MAX_FRAME = 16 << 20  # bytes, which is as much as AWS's clients take


def _header_lines(headers: Mapping[str, str]) -> bytes:
    lines = []
    for name, value in headers.items():
        key, text = name.encode(), value.encode()
        lines.append(struct.pack(f">B{len(key)}sBH{len(text)}s", len(key), key, _STRING, len(text), text))
    return b"".join(lines)


_PAYLOAD_PART = _header_lines(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
)
_MAX_PAYLOAD = _MAX_FRAME - _OVERHEAD - len(_PAYLOAD_PART)


def payload_part(data: bytes | memoryview) -> bytes:
    """The frame of a part of the answer; several frames where it is larger than clients take."""
    if len(data) <= _MAX_PAYLOAD:
        return _frame(_PAYLOAD_PART, data)
    starts = range(0, len(data), _MAX_PAYLOAD)
    return b"".join([_frame(_PAYLOAD_PART, data[start : start + _MAX_PAYLOAD]) for start in starts])


def exception(message: str) -> bytes:
    """The frame that ends an answer which failed after it had begun.

    boto3 raises an EventStreamError of the code ModelStreamError with that message.
    """
    headers = {":message-type": "exception", ":exception-type": "ModelStreamError", ":content-type": "application/json"}
    return _frame(_header_lines(headers), orjson.dumps({"Message": message, "ErrorCode": "StreamBroken"}))


def _frame(headers: bytes, payload: bytes | memoryview) -> bytes:
    lengths = _LENGTHS.pack(_OVERHEAD + len(headers) + len(payload), len(headers))
    frame = b"".join((lengths, _CRC.pack(crc32(lengths)), headers, payload))
    return frame + _CRC.pack(crc32(frame))
