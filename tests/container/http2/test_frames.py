"""Blocks of headers mean what a reader without memory makes of them; frames are bytes."""

import tracemalloc

import pytest
from hpack import Decoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from container.http2 import frames
from container.http2.frames import LARGEST, ConnectionFault, ErrorCode, HeaderBlocks, StreamFault, header_block
from tests.container.http2.conftest import FIELDS


def _literal(name, value, kind=0x40):
    return bytes((kind, len(name))) + name + bytes((len(value),)) + value


def _integer(number, prefix, first):
    most = (1 << prefix) - 1
    if number < most:
        return bytes((first | number,))
    found, number = bytearray((first | most,)), number - most
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


_words = st.sampled_from([b"a", b"b", b"x" * 30, b"y" * 100])
_resizes = st.sampled_from([0, 40, 80, 200, 4096]).map(lambda size: _integer(size, 5, 0x20))
_parts = st.one_of(
    st.builds(_literal, _words, _words, st.sampled_from([0x40, 0x40, 0x00, 0x10])),
    st.sampled_from([*range(15, 28), *range(29, 57), *range(58, 67)]).map(lambda index: _integer(index, 7, 0x80)),
)
_blocks = st.builds(
    lambda resizes, parts: b"".join((*resizes, *parts)), st.lists(_resizes, max_size=2), st.lists(_parts, max_size=4)
)


@given(st.lists(_blocks, max_size=5), st.lists(st.integers(0, 4), max_size=30))
def test_memory_never_changes_what_a_block_means(pool, order):
    """Blocks out of a few, in any order, with evictions and other sizes of the table."""
    blocks, plain = HeaderBlocks(), Decoder(LARGEST)
    for at in order:
        if at >= len(pool):
            continue
        try:
            meant = tuple((bytes(name), bytes(value)) for name, value in plain.decode(pool[at], raw=True))
        except HPACKError:
            with pytest.raises(ConnectionFault):
                blocks.read(pool[at])
            return
        assert blocks.read(pool[at]) == meant


def test_an_entry_that_takes_the_address_of_another():
    """A table for one entry: each block adds some, so that the last often lies where the first lay."""
    blocks = HeaderBlocks()
    blocks.read(_integer(70, 5, 0x20))
    for number in range(500):
        last = (b"n", b"%d" % number)
        blocks.read(_literal(b"n", b"-") * (number % 40) + _literal(*last))
        assert blocks.read(b"\xbe") == (last,)


def test_an_entry_that_says_what_the_first_says():
    """It drives another out of the table, which has as many entries as before."""
    blocks, plain = HeaderBlocks(), Decoder(LARGEST)
    first, second = _literal(b"n", b"1"), _literal(b"n", b"2")
    for block in (_integer(80, 5, 0x20) + first, second, b"\xbf", second, b"\xbf", second, b"\xbf"):
        meant = tuple((bytes(name), bytes(value)) for name, value in plain.decode(block, raw=True))
        assert blocks.read(block) == meant


def test_a_block_that_changes_nothing_is_read_once(monkeypatch):
    """As the headers of all calls of a client but the first."""
    blocks, read = HeaderBlocks(), []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda *args, **named: read.append(args) or decode(*args, **named))
    meant = blocks.read(_literal(b"n", b"1"))
    assert [blocks.read(b"\xbe") for _ in range(5)] == [meant] * 5
    assert len(read) == 2


def test_the_length_is_that_of_the_last_block():
    """However often it comes, and none where it says none; the same one twice is one."""
    blocks = HeaderBlocks()
    for fields, length in (([(b"content-length", b"5")] * 2, 5), ([], None)) * 3:
        blocks.read(header_block([*FIELDS, *fields]))
        assert blocks.length == length


@pytest.mark.parametrize("size", [900, 2000])
@pytest.mark.parametrize("name", [b"n", b""], ids=["values", "names"])
def test_what_is_remembered_takes_little(name, size):
    """However many blocks a client makes up, of long values or of long names."""
    blocks = HeaderBlocks()
    texts = [b"n%0*d" % (size, number) for number in range(1000)]
    made = [header_block([(name or text, text if name else b"v")]) for text in texts]
    tracemalloc.start()
    try:
        for block in made:
            blocks.read(block)
        assert tracemalloc.get_traced_memory()[0] < 600_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\xff" + b"\xff" * 100_000, ErrorCode.COMPRESSION_ERROR),
        (b"\xbe", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x05ab", ErrorCode.COMPRESSION_ERROR),
        (b"\x80", ErrorCode.COMPRESSION_ERROR),
        (header_block([(b"n", b"v" * 60_000)] * 5), ErrorCode.ENHANCE_YOUR_CALM),
        (b"\x40\x01n\x7f\xd1\x0e" + b"v" * 2000 + b"\xbe" * 150, ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_what_cannot_be_read_ends_the_connection(block, code):
    """Also a short block that says the same long thing many times."""
    with pytest.raises(ConnectionFault) as fault:
        HeaderBlocks().read(block)
    assert fault.value.code is code


_METHOD, _SCHEME, _PATH = FIELDS


@pytest.mark.parametrize(
    "fields",
    [
        [*FIELDS, (b"X-Capital", b"v")],
        [*FIELDS, (b"x y", b"v")],
        [*FIELDS, (b"x:y", b"v")],
        [*FIELDS, ("grö".encode(), b"v")],
        [*FIELDS, (b"", b"v")],
        [*FIELDS, (b"n", b"a\0b")],
        [*FIELDS, (b"n", b"a\r\nforged: b")],
        [(b"n", b"a\nb")],
        [*FIELDS, (b"n", b" v")],
        [*FIELDS, (b"n", b"v\t")],
        [*FIELDS, (b"n", b" ")],
        [*FIELDS, (b"content-length", b"-1")],
        [*FIELDS, (b"content-length", b"1_0")],
        [*FIELDS, (b"content-length", b"")],
        [*FIELDS, (b"content-length", b"1"), (b"content-length", b"2")],
        [*FIELDS, (b"connection", b"keep-alive")],
        [*FIELDS, (b"transfer-encoding", b"chunked")],
        [*FIELDS, (b"te", b"trailers, deflate")],
        [*FIELDS, (b":unknown", b"v")],
        [(b":status", b"200")],
        [_METHOD, _SCHEME, (b"n", b"v"), _PATH],
        [_METHOD, *FIELDS],
        [_SCHEME, _PATH],
        [_METHOD, _PATH],
        [_METHOD, _SCHEME],
        [_METHOD, _SCHEME, (b":path", b"")],
        [(b":method", b"CONNECT"), (b":authority", b"a:1")],
    ],
)
def test_what_no_client_may_say_ends_its_stream_alone(fields):
    """Each time that it is said; and what it adds to the table stays there."""
    blocks = HeaderBlocks()
    for _ in range(2):
        with pytest.raises(StreamFault) as fault:
            blocks.read(header_block(fields))
        assert fault.value.code is ErrorCode.PROTOCOL_ERROR
    with pytest.raises(StreamFault):
        blocks.read(header_block(fields) + _literal(b"n", b"1") + _literal(b"Big", b"2"))
    assert blocks.read(b"\xbf") == ((b"n", b"1"),)


@pytest.mark.parametrize(
    "fields",
    [
        FIELDS,
        [_PATH, _SCHEME, (b":authority", b"a"), _METHOD, (b"te", b"trailers"), (b"n", "grün".encode()), (b"n", b"")],
        [(b"grpc-status", b"0")],
        [],
    ],
)
def test_what_clients_may_say(fields):
    """In any order of the pseudo-headers; trailers have none."""
    assert HeaderBlocks().read(header_block(fields)) == tuple(fields)


def test_who_says_too_much_loses_its_stream_alone():
    """The table is what it would be."""
    blocks = HeaderBlocks()
    with pytest.raises(StreamFault) as fault:
        blocks.read(header_block([*FIELDS, (b"n", b"v" * LARGEST)]) + _literal(b"n", b"1"))
    assert fault.value.code is ErrorCode.ENHANCE_YOUR_CALM
    assert blocks.read(b"\xbe") == ((b"n", b"1"),)


def test_what_a_block_says_is_counted_as_the_setting_promises():
    """32 bytes beside each field's name and value, and nothing between them: as much as that is taken, one byte more is not."""
    left = LARGEST - sum(len(name) + len(value) + 32 for name, value in [*FIELDS, (b"n", b"")])
    most = (*FIELDS, (b"n", b"v" * left))
    assert HeaderBlocks().read(header_block(most)) == most
    with pytest.raises(StreamFault, match="64 KiB"):
        HeaderBlocks().read(header_block([*most[:-1], (b"n", b"v" * (left + 1))]))


# -- frames ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**24 - 1), st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1))
def test_a_head_says_what_follows(length, kind, flags, stream):
    """Nine bytes."""
    head = frames.frame_head(length, kind, flags, stream)
    assert head == length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=20_000)), max_size=4))
def test_every_reader_reads_our_headers(fields):
    """Of any length, and nothing of them is to be remembered."""
    decoder = Decoder(1 << 20)
    found = decoder.decode(frames.header_block(fields), raw=True)
    assert [(bytes(name), bytes(value)) for name, value in found] == fields
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("size", [0, 126, 127, 128, 254, 255, 16_510, 16_511, 3_000_000])
def test_lengths_at_their_edges(size):
    """Where a length takes one more byte."""
    fields = [(b"n", b"v" * size)]
    assert [tuple(each) for each in Decoder(1 << 23).decode(frames.header_block(fields), raw=True)] == fields


def test_settings():
    """What one side writes the other reads; of one that is told twice the last."""
    wanted = {frames.INITIAL_WINDOW_SIZE: 5, frames.MAX_FRAME_SIZE: 1 << 14, 99: 2**32 - 1}
    payload = frames.settings(wanted)[frames.HEAD :]
    assert frames.settings_of(payload) == wanted
    assert frames.settings_of(payload + frames.settings({99: 1})[frames.HEAD :])[99] == 1
