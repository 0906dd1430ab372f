"""Compressed bodies."""

import gzip
import resource
import zlib

import pytest

from container.codec.bodies import compress, inflate, wanted_encoding
from model_handlers.errors import Kind

BODY = b'{"inputs": []}' * 100


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", " gzip "])
def test_gzip_is_inflated(encoding):
    """Gzip by each of its names."""
    assert inflate(gzip.compress(BODY), encoding) == BODY


def test_deflate_is_a_zlib_stream():
    """What HTTP calls deflate is inflated."""
    assert inflate(zlib.compress(BODY), "deflate") == BODY


@pytest.mark.parametrize("encoding", ["identity", "", "Identity"])
def test_identity_is_the_body_itself(encoding):
    """A body that is not compressed is not copied."""
    assert inflate(BODY, encoding) is BODY


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress"])
def test_an_unknown_encoding_is_refused(encoding, refusal):
    """Other encodings are not supported; the sentence names those that are."""
    sentence = refusal(inflate, BODY, encoding, kind=Kind.UNSUPPORTED)
    assert sentence == f"Unsupported compression type '{encoding}': send gzip, deflate or identity"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("body", [b"", b"no such thing", b"\x1f\x8b\x08"])
def test_garbage_is_refused(encoding, body, refusal):
    """Bytes that are no such stream, or none at all."""
    assert encoding in refusal(inflate, body, encoding)


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_stream_that_ends_early_is_refused(encoding, compress, refusal):
    """Wherever the stream is cut."""
    whole = compress(BODY)
    for cut in range(1, len(whole)):
        refusal(inflate, whole[:cut], encoding)


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("tail", [b"x", gzip.compress(BODY, mtime=0)], ids=["junk", "stream"])
def test_what_follows_the_stream_is_not_left_out_in_silence(encoding, compress, tail, refusal):
    """Trailing bytes, a second gzip member among them, are refused."""
    assert f"{len(tail)} bytes follow the end" in refusal(inflate, compress(BODY) + tail, encoding)


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_the_limit_counts_inflated_bytes(encoding, compress, refusal):
    """A body of exactly the limit passes, one byte more does not."""
    assert inflate(compress(BODY), encoding, len(BODY)) == BODY
    sentence = refusal(inflate, compress(BODY), encoding, len(BODY) - 1, kind=Kind.TOO_LARGE)
    assert sentence == f"the body is larger than {len(BODY) - 1} bytes once decompressed"


def test_a_bomb_is_never_inflated(refusal):
    """A bomb of 256 MiB costs the limit and not more."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    first, other = (compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = first + 255 * other + compressor.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(inflate, bomb, "gzip", 1 << 20, kind=Kind.TOO_LARGE)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # kilobytes


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip, br", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("gzip; q=0.5, deflate; q=0.2", "gzip"),
        ("GZIP", "gzip"),
        ("identity, gzip;q=0.5", ""),
        ("identity;q=0.1, gzip;q=0.5", "gzip"),
        ("gzip;q=0", ""),
        ("gzip;q=much", ""),
        ("br, zstd", ""),
        ("*", ""),
        ("identity", ""),
        ("", ""),
    ],
)
def test_the_encoding_that_a_client_likes_best(accept, encoding):
    """By its weights, of those that there are; what makes no sense is left out."""
    assert wanted_encoding(accept) == encoding


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_answer_is_compressed_as_a_whole(encoding):
    """Its parts are one body again once it is inflated."""
    parts = [BODY, memoryview(BODY), b""]
    compressed = compress(parts, encoding)
    assert len(compressed) < len(BODY)
    assert inflate(compressed, encoding) == BODY * 2
