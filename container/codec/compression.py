"""Bodies that a client compressed, never larger than the limit once inflated, and answers compressed for it. PURE.

Answers are compressed quickly rather than well: a client that is far away asks for it, and its neighbours wait for us.
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import TYPE_CHECKING

from isal import isal_zlib

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """The body as it was before `Content-Encoding`.

    Args:
        body: as it was sent.
        encoding: of it.
        limit: of its size.
        take: told of each further size; may raise.

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
    """A body in one of `ENCODINGS`."""
    compressor = isal_zlib.compressobj(_LEVEL, wbits=_WINDOWS[encoding])
    return b"".join((*[compressor.compress(part) for part in parts], compressor.flush()))
