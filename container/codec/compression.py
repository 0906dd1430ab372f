"""Request bodies that a client compressed, never larger than the limit once inflated."""

from __future__ import annotations

import zlib

from model_handlers.errors import Kind, MmeError, invalid_argument

# zlib's window sizes: 31 reads gzip, 15 a zlib stream (what HTTP calls deflate).
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def inflate(body: bytes, encoding: str, limit: int = 64 << 20) -> bytes:
    """The body as it was before `Content-Encoding`.

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
    try:
        inflated = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid_argument(f"the body is not valid {coding} data: {error}") from None
    if len(inflated) > limit:
        raise MmeError(Kind.TOO_LARGE, f"the body is larger than {limit} bytes once decompressed")
    if not decompressor.eof:
        raise invalid_argument(f"the body's {coding} data end too early")
    if decompressor.unused_data:  # another gzip member, perhaps; better refused than left out in silence
        raise invalid_argument(
            f"{len(decompressor.unused_data)} bytes follow the end of the body's {coding} data; send one stream"
        )
    return inflated
