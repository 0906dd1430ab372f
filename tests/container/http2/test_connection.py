"""What clients may do, and what they may not."""

import asyncio
import gc
import weakref

import pytest
import uvloop
from hpack import Decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from container.http2 import frames, streams
from container.http2.connection import LAST_PING, drain
from container.http2.frames import ErrorCode
from container.http2.streams import WINDOW
from tests.container.http2.conftest import FIELDS, OPENING, REQUEST, Life, listening, live
from tests.waiting import PATIENCE, until

BOTH = frames.END_HEADERS | frames.END_STREAM
TRAILERS = frames.header_block([(b"grpc-status", b"0")])


def _window(number, more):
    return frames.window_update(number, more)


def _data_of(sent, number):
    return b"".join(payload for kind, _, stream, payload in sent if kind == frames.DATA and stream == number)


@pytest.mark.parametrize("step", [1, 2, 7, 10, 23, 10_000])
async def test_frames_come_in_any_pieces(life, step):
    """Also one byte at a time: padding, priorities and continuations included."""
    head = b"\x03" + b"\0\0\0\0\x05" + REQUEST[:4] + b"pad"
    flags = frames.PADDED | frames.WITH_PRIORITY
    raw = OPENING + frames.frame(frames.HEADERS, flags, 1, head)
    raw += frames.frame(frames.CONTINUATION, 0, 1, REQUEST[4:9])
    raw += frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, REQUEST[9:])
    raw += frames.frame(frames.DATA, frames.PADDED, 1, b"\x02hello--") + frames.frame(77, 0, 1, b"?")
    raw += frames.frame(frames.DATA, frames.END_STREAM, 1, b" world")
    for at in range(0, len(raw), step):
        life.send(raw[at : at + step])
    assert (life.told[1].data, life.told[1].over) == (b"hello world", True)
    assert await life.fault() is None


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (frames.frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.DATA, 0, 5, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.DATA, frames.PADDED, 1, b"\x05abcd"), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.DATA, frames.PADDED, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, BOTH, 2, REQUEST), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, BOTH, 0, REQUEST), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, frames.END_HEADERS, 1, TRAILERS), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, BOTH, 1, REQUEST), ErrorCode.PROTOCOL_ERROR),
        (
            frames.frame(frames.HEADERS, BOTH, 5, REQUEST) + frames.frame(frames.HEADERS, BOTH, 3, REQUEST),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (
            frames.frame(frames.HEADERS, 0, 3, REQUEST) + frames.frame(frames.PING, 0, 0, bytes(8)),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (frames.frame(frames.HEADERS, 0, 3) + frames.frame(frames.CONTINUATION, 0, 5), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, REQUEST), ErrorCode.PROTOCOL_ERROR),
        (
            frames.frame(frames.HEADERS, 0, 3) + frames.frame(frames.CONTINUATION, 0, 3) * 5000,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (
            frames.frame(frames.HEADERS, 0, 3) + frames.frame(frames.CONTINUATION, 0, 3, bytes(1000)) * 300,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (frames.frame(frames.HEADERS, BOTH, 3, b"\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frames.frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.PUSH_PROMISE, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.RST_STREAM, 0, 9, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.settings({frames.MAX_FRAME_SIZE: 16_383}), ErrorCode.PROTOCOL_ERROR),
        (frames.settings({frames.MAX_FRAME_SIZE: 1 << 24}), ErrorCode.PROTOCOL_ERROR),
        (frames.settings({frames.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
        (_window(1, 10) + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31 - 1}), ErrorCode.FLOW_CONTROL_ERROR),
        (_window(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (_window(0, 0), ErrorCode.PROTOCOL_ERROR),
        (_window(7, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.frame_head(1 << 20, frames.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frames.settings({}) * 5000, ErrorCode.ENHANCE_YOUR_CALM),
        (frames.frame(frames.PRIORITY, 0, 1, bytes(5)) * 5000, ErrorCode.ENHANCE_YOUR_CALM),
        (frames.frame(99, 0, 1) * 5000, ErrorCode.ENHANCE_YOUR_CALM),
        (frames.frame(frames.PING, frames.ACK, 0, bytes(8)) * 5000, ErrorCode.ENHANCE_YOUR_CALM),
        (frames.frame(frames.DATA, 0, 1) * 5000, ErrorCode.ENHANCE_YOUR_CALM),
        (frames.frame(frames.DATA, 0, 1, bytes(1 << 16)) * 17, ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
async def test_what_ends_a_connection(life, raw, code):
    """With a word of why, once; and its streams hear of it."""
    life.send(OPENING)
    life.open(1)
    await life.sent()
    life.send(raw)
    assert await life.fault() is code
    assert life.told[1].gone
    life.send(raw)
    assert not await life.sent()


_OF_FIVE = frames.header_block([*FIELDS, (b"content-length", b"5")])


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (frames.frame(frames.HEADERS, BOTH, 1, _OF_FIVE), False),
        (frames.frame(frames.DATA, frames.END_STREAM, 1, b"four"), False),
        (frames.frame(frames.DATA, 0, 1, b"sixsix"), False),
        (frames.frame(frames.DATA, 0, 1, b"four") + frames.frame(frames.HEADERS, BOTH, 1, TRAILERS), False),
        (frames.frame(frames.DATA, 0, 1, b"four") + frames.frame(frames.DATA, frames.END_STREAM, 1, b"5"), True),
        (frames.frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x02five5--"), True),
        (frames.frame(frames.DATA, 0, 1, b"five5") + frames.frame(frames.HEADERS, BOTH, 1, TRAILERS), True),
    ],
)
async def test_a_content_length_is_that_of_the_data(life, sent, taken):
    """A stream with more or less is reset, and its receiver is not told of an end (RFC 9113, section 8.1.1)."""
    head = b"" if sent[3] == frames.HEADERS else frames.frame(frames.HEADERS, frames.END_HEADERS, 1, _OF_FIVE)
    life.send(OPENING + head + sent)
    resets = [
        ErrorCode(int.from_bytes(payload, "big"))
        for kind, *_, payload in await life.sent()
        if kind == frames.RST_STREAM
    ]
    assert resets == ([] if taken else [ErrorCode.PROTOCOL_ERROR])
    assert [each.over for each in life.told.values()] == ([taken] if head else [])
    life.send(frames.frame(frames.PING, 0, 0, bytes(8)))
    assert await life.fault() is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
    steps=st.lists(
        st.tuples(st.sampled_from(["stream", "all", "initial", "frame"]), st.integers(0, 4), st.integers(1, 30_000)),
        max_size=40,
    ),
)
async def test_no_more_is_sent_than_windows_allow_and_all_of_it_in_the_end(sizes, steps):
    """Windows that open, shut and go below nothing, over several answers."""
    async with live() as life:
        life.send(OPENING + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
        numbers = [1 + 2 * at for at in range(len(sizes))]
        windows, got, initial, total = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, b""), 0, frames.DEFAULT_WINDOW
        ended, largest = set(), frames.SMALLEST_FRAME_SIZE
        life.open(*numbers, flags=BOTH)

        async def look():
            nonlocal total
            for kind, flags, number, payload in await life.sent():
                if kind == frames.DATA:
                    windows[number] -= len(payload)
                    total -= len(payload)
                    got[number] += payload
                    assert number not in ended
                    assert windows[number] >= 0
                    assert total >= 0
                    assert 0 < len(payload) <= largest
                elif kind == frames.HEADERS and flags & frames.END_STREAM:
                    ended.add(number)
                assert kind not in {frames.GOAWAY, frames.RST_STREAM}

        for number, size in zip(numbers, sizes, strict=True):
            life.told[number].stream.headers(TRAILERS)
            life.told[number].stream.data(bytes((number,)) * size)
            life.told[number].stream.end(TRAILERS)
        await look()
        for kind, at, more in steps:
            number = numbers[at % len(numbers)]
            if kind == "stream":
                windows[number] += more
                life.send(_window(number, more))
            elif kind == "all":
                total += more
                life.send(_window(0, more))
            elif kind == "initial":
                windows = {number: window + more - initial for number, window in windows.items()}
                initial = more
                life.send(frames.settings({frames.INITIAL_WINDOW_SIZE: more}))
            else:
                largest = frames.SMALLEST_FRAME_SIZE + more
                life.send(frames.settings({frames.MAX_FRAME_SIZE: largest}))
            await look()
        for number in numbers:
            windows[number] += 1 << 20
            life.send(_window(number, 1 << 20))
        total += 1 << 20
        life.send(_window(0, 1 << 20))
        await look()
        assert got == {number: bytes((number,)) * size for number, size in zip(numbers, sizes, strict=True)}
        assert ended == set(numbers)


async def test_answers_take_turns_at_the_connections_window(life):
    """A long one keeps no others from theirs."""
    life.send(OPENING + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 28}))
    life.open(1, 3, 5, flags=BOTH)
    life.told[1].stream.data(bytes(1 << 20))
    life.told[3].stream.data(bytes(1000))
    life.told[5].stream.data(bytes(1000))
    life.told[3].stream.end(TRAILERS)
    await life.sent()
    life.send(_window(0, 10_000))
    assert {len(_data_of(await life.sent(), 1))} == {10_000}
    life.send(_window(0, 1500))
    sent = await life.sent()
    assert [len(_data_of(sent, number)) for number in (1, 3, 5)] == [0, 1000, 500]
    assert life.told[3].stream.over


async def test_streams_that_wait_are_forgotten_when_they_are_given_up(life):
    """And nothing is sent on them any more, whatever is said."""
    life.send(OPENING + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 28}))
    for number in range(1, 3001, 2):
        life.open(number, flags=BOTH)
        stream = life.told[number].stream
        stream.data(bytes(100_000))
        life.send(frames.reset(number, ErrorCode.CANCEL))
        stream.headers(TRAILERS)
        stream.data(b"x")
        stream.end(TRAILERS)
        assert stream.over
        assert life.told[number].gone
    assert not life.connection.streams.window.waiting
    life.send(_window(0, 1 << 20))
    assert sum(kind in {frames.HEADERS, frames.DATA} for kind, *_ in await life.sent()) <= 4


async def test_a_client_that_does_not_read_is_not_listened_to(life):
    """As long as it does not."""
    life.send(OPENING)
    life.open(1, flags=BOTH)
    life.connection.pause_writing()
    life.wire.unread = 2 << 20
    life.told[1].stream.data(b"x")
    await life.sent()
    assert not life.wire.reads
    life.connection.resume_writing()
    assert life.wire.reads


async def test_pings_between_answers_of_a_stream_are_no_flood(life):
    """A client may measure its way as long as something is sent to it."""
    life.send(OPENING)
    life.open(1, flags=BOTH)
    for _ in range(3000):
        life.told[1].stream.data(b"x")
        await life.sent()
        life.send(frames.frame(frames.PING, 0, 0, bytes(8)))
    assert await life.fault() is None


async def test_frames_that_bring_nothing_may_come_now_and_then(life, monkeypatch):
    """Only many of them within a short time are a flood."""
    monkeypatch.setattr(streams, "EMPTY_SECONDS", -1.0)
    life.send(OPENING)
    life.open(1)
    life.send(frames.frame(frames.PRIORITY, 0, 1, bytes(5)) * 5000)
    assert await life.fault() is None


async def test_data_of_a_stream_that_was_given_up_is_no_flood(life):
    """However many frames of it were under way."""
    life.send(OPENING)
    life.open(1)
    life.told[1].stream.end(TRAILERS)
    life.send(frames.frame(frames.DATA, 0, 1, b"x") * 5000)
    assert await life.fault() is None


@pytest.mark.parametrize("kind", [frames.DATA, frames.HEADERS])
async def test_what_comes_behind_the_end_ends_the_stream(life, kind):
    """And no other."""
    life.send(OPENING)
    life.open(1, 3, flags=BOTH)
    await life.sent()
    life.send(frames.frame(kind, BOTH, 1, TRAILERS))
    assert await life.sent() == [(frames.RST_STREAM, 0, 1, ErrorCode.STREAM_CLOSED.to_bytes(4, "big"))]
    assert life.told[1].gone
    assert not life.told[3].gone


@pytest.mark.parametrize("block", [REQUEST + frames.header_block([(b"Name", b"v")]), REQUEST + REQUEST])
async def test_headers_against_the_rules_end_their_stream(life, block):
    """Before anybody is told of it, or behind data; and no other."""
    life.send(OPENING)
    life.open(1, 3)
    await life.sent()
    life.send(frames.frame(frames.HEADERS, BOTH, 5, block) + frames.frame(frames.HEADERS, BOTH, 1, block))
    refused = ErrorCode.PROTOCOL_ERROR.to_bytes(4, "big")
    assert await life.sent() == [(frames.RST_STREAM, 0, 5, refused), (frames.RST_STREAM, 0, 1, refused)]
    assert list(life.told) == [1, 3]
    assert life.told[1].gone
    life.send(frames.frame(frames.HEADERS, BOTH, 5, block) + frames.frame(frames.DATA, frames.END_STREAM, 5, b"x"))
    assert not await life.sent()
    life.open(7)
    assert await life.fault() is None
    assert life.told[7]


@pytest.mark.parametrize(("more", "code"), [(0, ErrorCode.PROTOCOL_ERROR), (2**31 - 1, ErrorCode.FLOW_CONTROL_ERROR)])
async def test_windows_that_there_are_not_end_their_stream(life, more, code):
    """And no other."""
    life.send(OPENING)
    life.open(1, 3)
    await life.sent()
    life.send(_window(1, more) + _window(1, more))
    assert await life.sent() == [(frames.RST_STREAM, 0, 1, code.to_bytes(4, "big"))]
    assert life.told[1].gone
    assert not life.told[3].gone


async def test_a_client_gives_up_all_streams_that_end_at_once(life):
    """And says so of each, and opens its window, as it does not know yet that it is over."""
    life.send(OPENING)
    numbers = range(1, 2 * streams.MAX_STREAMS, 2)
    life.open(*numbers)
    for number in numbers:
        life.told[number].stream.end(TRAILERS)
    await life.sent()
    for number in numbers:
        life.send(_window(number, 1) + frames.frame(frames.HEADERS, BOTH, number, TRAILERS))
        life.send(frames.reset(number, ErrorCode.CANCEL))
    assert await life.fault() is None


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [0, 100, 4095, 4096, 1 << 16])
async def test_a_client_whose_table_of_headers_is_small(life, size, whole):
    """Is told once that no more of it is used, without which it takes no headers; also where these end the stream."""
    decoder = Decoder()
    decoder.max_allowed_table_size = size
    life.send(OPENING + frames.settings({frames.HEADER_TABLE_SIZE: size}))
    life.open(1, 3, 5, flags=BOTH)
    await life.sent()
    if whole:
        life.told[1].stream.whole(TRAILERS, (b"x",), TRAILERS)
    else:
        life.told[1].stream.end(TRAILERS)
    life.told[3].stream.headers(TRAILERS)
    first, *others = [payload for kind, *_, payload in await life.sent() if kind == frames.HEADERS]
    assert (len(first) > len(TRAILERS)) == (size < 4096)
    assert others == [TRAILERS] * (1 + whole)
    assert [decoder.decode(block) for block in (first, *others)] == [[("grpc-status", "0")]] * (2 + whole)
    life.send(frames.settings({frames.HEADER_TABLE_SIZE: size}))
    life.told[5].stream.headers(TRAILERS)
    assert decoder.decode((await life.sent())[-1][3]) == [("grpc-status", "0")]


async def test_as_many_streams_as_were_agreed(life):
    """Those beyond are refused; all may be given up at once, and not again and again."""
    life.send(OPENING)
    numbers = range(1, 2 * streams.MAX_STREAMS, 2)
    life.open(*numbers)
    await life.sent()
    life.open(5001)
    assert await life.sent() == [(frames.RST_STREAM, 0, 5001, ErrorCode.REFUSED_STREAM.to_bytes(4, "big"))]
    for number in numbers:
        life.send(frames.reset(number, ErrorCode.CANCEL))
    assert await life.fault() is None
    for number in range(6001, 6001 + 2 * streams.MAX_RESETS, 2):
        life.open(number)
        life.send(frames.reset(number, ErrorCode.CANCEL))
    assert await life.fault() is ErrorCode.ENHANCE_YOUR_CALM


async def test_what_was_used_may_be_sent_again(life):
    """The windows of a stream and of the connection open by what came."""
    life.send(OPENING)
    life.open(1)
    await life.sent()
    more = {0: 0, 1: 0}
    for _ in range(40):
        life.send(frames.frame(frames.DATA, 0, 1, bytes(WINDOW // 4)))
        life.told[1].stream.credit()
        for kind, _, number, payload in await life.sent():
            assert kind == frames.WINDOW_UPDATE
            more[number] += int.from_bytes(payload, "big")
    assert more == {0: 1 << 23, 1: 10 * WINDOW}


@pytest.mark.parametrize("said", [OPENING, OPENING[:5]])
async def test_a_client_that_says_nothing_is_given_up(said):
    """One that has said its first words is not."""
    async with live(greeting=0.0) as life:
        life.send(said)
        await life.sent()
        assert not life.wire.closed if said == OPENING else life.wire.aborted


async def test_no_http2(life):
    """The first bytes may tell."""
    life.send(b"\x16\x03\x01\x02\x00\x01")
    assert await life.sent() == []
    assert life.wire.closed


@pytest.mark.parametrize("pieces", [[b"GET / HTTP/1.1\r\n\r\n"], [b"P", b"OST / HTTP/1.0\r\n\r\n"]])
async def test_http1_is_told_where_it_is(life, pieces):
    """In its own words, and nothing else."""
    for piece in pieces:
        life.send(piece)
    await asyncio.sleep(0)
    assert life.wire.written.startswith(b"HTTP/1.1 505 ")
    assert b"HTTP/2" in life.wire.written.partition(b"\r\n\r\n")[2]
    assert life.wire.closed


@pytest.mark.parametrize("first", [frames.frame(frames.PING, 0, 0, bytes(8)), frames.frame(frames.SETTINGS, 1, 0)])
async def test_settings_come_first(life, first):
    """Whatever else does is no HTTP/2; and ours come in front of the word of that."""
    life.send(frames.PREFACE + first)
    sent = await life.sent()
    assert [sent[0][0], sent[-1][0]] == [frames.SETTINGS, frames.GOAWAY]
    assert life.wire.closed


_ENDS = frames.frame(frames.PING, frames.ACK, 0, LAST_PING)


async def _until_closed(life):
    await until(lambda: life.wire.closed)


def _lasts(sent):
    """The last streams that were told to be served, and the code."""
    found = [payload for kind, _, _, payload in sent if kind == frames.GOAWAY]
    return [(int.from_bytes(each[:4], "big"), int.from_bytes(each[4:8], "big")) for each in found]


async def test_draining(life):
    """Streams come to their end that there are, or that were opened before the client had heard of it."""
    life.send(OPENING)
    life.open(1, flags=BOTH)
    await life.sent()
    life.connection.drain()
    life.connection.drain()
    sent = await life.sent()
    assert [kind for kind, *_ in sent] == [frames.GOAWAY, frames.PING]
    assert _lasts(sent) == [(2**31 - 1, 0)]
    life.told[1].stream.end(TRAILERS)
    life.open(3, flags=BOTH)
    assert not life.wire.closed
    life.send(_ENDS)
    assert _lasts(await life.sent()) == [(3, 0)]
    life.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 5, REQUEST) + frames.frame(frames.DATA, 1, 5, b"x"))
    assert await life.sent() == [(frames.RST_STREAM, 0, 5, ErrorCode.REFUSED_STREAM.to_bytes(4, "big"))]
    life.told[3].stream.end(TRAILERS)
    life.open(7)
    sent = await life.sent()
    assert sent[-1] == (frames.RST_STREAM, 0, 7, ErrorCode.REFUSED_STREAM.to_bytes(4, "big"))
    await _until_closed(life)
    assert _lasts(sent + await life.sent()) == []


async def test_draining_without_streams(life):
    """The connection ends as soon as the client has heard of it."""
    life.send(OPENING)
    life.connection.drain()
    await life.sent()
    assert not life.wire.closed
    life.send(_ENDS)
    assert _lasts(await life.sent()) == [(0, 0)]
    await _until_closed(life)


async def test_draining_before_the_first_words(life):
    """Nobody is waited for who has not said what he speaks."""
    life.send(OPENING[:5])
    life.connection.drain()
    assert life.wire.aborted


async def test_draining_a_client_that_breaks_the_rules(life):
    """Its connection ends with that; the last stream is one that it opened before it had heard of the end."""
    life.send(OPENING)
    life.open(1)
    life.connection.drain()
    life.send(_ENDS)
    life.open(3)
    await life.sent()
    life.send(_window(0, 0))
    assert _lasts(await life.sent()) == [(1, ErrorCode.PROTOCOL_ERROR)]


async def test_a_client_that_does_not_say_that_it_has_heard():
    """Has its time to."""
    async with live(notice=0.0) as life:
        life.send(OPENING)
        life.connection.drain()
        await _until_closed(life)


async def test_pings_of_a_client_end_nothing(life):
    """Nor does an answer to a ping that was not sent."""
    life.send(OPENING + _ENDS)
    life.open(1)
    assert await life.fault() is None


@pytest.mark.parametrize("signs", ["words", "reading", "none"])
async def test_what_was_said_last_may_be_read(signs):
    """As long as the client says or reads anything; nothing is made of what it says."""
    async with live(goodbye=0.0) as life:
        life.send(OPENING)
        life.open(1)
        life.wire.unread = 1000 * (signs == "reading")
        life.connection.end(ErrorCode.NO_ERROR)
        assert life.wire.closed
        assert life.told[1].gone
        for _ in range(100 * (signs != "none")):
            if signs == "words":
                life.open(3)
            else:
                life.wire.unread -= 1
            await asyncio.sleep(0)
            assert not life.wire.aborted
        async with asyncio.timeout(PATIENCE):
            await until(lambda: life.wire.aborted)
        assert list(life.told) == [1]


async def test_by_tls_the_end_waits_for_a_client_that_speaks():
    """TLS has a goodbye of its own, which would wait only so long for what the client has yet to read."""
    async with live(goodbye=0.0) as life:
        life.wire.secure = True
        life.send(OPENING)
        life.connection.end(ErrorCode.NO_ERROR)
        for _ in range(100):
            life.send(_window(0, 1))
            await asyncio.sleep(0)
            assert not life.wire.closed
        await until(lambda: life.wire.said_goodbye)
        assert not life.wire.aborted


async def test_nothing_is_left_of_a_connection():
    """No timer keeps it, nor does who waited for room."""
    life = Life(asyncio.get_running_loop())
    life.send(OPENING)
    life.open(1, flags=BOTH)
    life.connection.pause_writing()
    waits = asyncio.ensure_future(life.told[1].stream.drained())
    await asyncio.sleep(0)
    life.connection.end(ErrorCode.NO_ERROR)
    life.connection.connection_lost(None)
    await waits
    weak = weakref.ref(life.connection)
    del life, waits
    await asyncio.sleep(0)
    gc.collect()
    assert weak() is None


class _Answers:
    """A receiver that has answered as soon as it was made."""

    def __init__(self, stream, size):
        stream.headers(TRAILERS)
        stream.data(bytes(size))
        stream.end(TRAILERS)

    def cancelled(self):
        """It is over by then."""


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
async def test_an_end_takes_back_nothing_that_was_said(loop_factory):
    """A client that still speaks when the connection ends reads the answer before it, and the goodbye."""
    size = 8 << 20
    async with listening(lambda stream, _: _Answers(stream, size)) as (address, connections):
        reader, writer = await asyncio.open_connection(*address, limit=1 << 14)
        wide = frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 28, frames.MAX_FRAME_SIZE: 1 << 23})
        writer.write(OPENING + wide + _window(0, 1 << 28) + frames.frame(frames.HEADERS, BOTH, 1, REQUEST))
        got = await reader.readexactly(1 << 20)
        (connection,) = connections
        connection.end(ErrorCode.NO_ERROR)
        while piece := await reader.read(1 << 14):
            got += piece
            writer.write(_window(0, 1))
            await writer.drain()
        assert len(got) > size
        assert frames.go_away(1, ErrorCode.NO_ERROR) in got[size:]
        writer.close()


async def test_a_drain_meets_connections_that_were_being_made():
    """They end, and it does."""
    loop = asyncio.get_running_loop()
    early, late = Life(loop, notice=0.0), Life(loop, notice=0.0)
    draining = asyncio.ensure_future(drain(early.all, 60))
    await early.sent()
    late.send(OPENING)
    early.all.add(late.connection)
    early.connection.connection_lost(None)
    await until(lambda: late.wire.closed)
    late.connection.connection_lost(None)
    early.all.discard(late.connection)
    await draining
    assert not late.wire.aborted


# -- pings of both sides, and connections that grow old ----------------------------------------------------------------

PING = frames.frame(frames.PING, 0, 0, b"whatever")
ANSWER = frames.frame(frames.PING, frames.ACK, 0, b"mme-ping")


async def _until(life, kind):
    while True:
        sent = await life.sent()
        if any(each[0] == kind for each in sent):
            return sent
        await asyncio.sleep(0.001)


async def _until_aborted(life):
    await until(lambda: life.wire.aborted)


async def test_a_client_that_does_not_answer_is_left():
    """One that does is asked again."""
    async with live(time=0.001, timeout=0.001, permit_without_calls=True) as life:
        life.send(OPENING)
        await _until(life, frames.PING)
        await _until_aborted(life)
    async with live(time=0.001, timeout=30, permit_without_calls=True, max_pings_without_data=0) as life:
        life.send(OPENING)
        for _ in range(3):
            await _until(life, frames.PING)
            life.send(ANSWER)
        assert not life.wire.closed


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_answers_late_but_lives(reads):
    """It sends something else, or reads what lies before the ping."""
    async with live(timeout=0.0, permit_without_calls=True) as life:
        life.send(OPENING)
        life.wire.unread = 1000 * reads
        life.connection.watch.ping()
        for _ in range(100):
            if reads:
                life.wire.unread -= 1
            else:
                life.send(frames.frame(frames.PRIORITY, 0, 1, bytes(5)))
            await asyncio.sleep(0)
            assert not life.wire.aborted
        await _until_aborted(life)


async def test_nobody_is_asked_without_calls_or_too_often():
    """Unless that is permitted."""
    async with live(time=0.001, timeout=30, max_pings_without_data=1) as life:
        life.send(OPENING)
        await life.sent()
        await asyncio.sleep(0.02)
        assert not await life.sent()
        life.open(1)
        await _until(life, frames.PING)
        life.send(ANSWER)
        await asyncio.sleep(0.02)
        assert not await life.sent()
        life.told[1].stream.data(b"x")
        await _until(life, frames.PING)


@pytest.mark.parametrize("strikes", [0, 2])
async def test_a_client_that_asks_too_often_is_told_off(strikes):
    """After its strikes; 0 is any number."""
    async with live(max_ping_strikes=strikes) as life:
        life.send(OPENING)
        life.open(1)
        await life.sent()
        life.send(PING * 3)
        assert [each[0] for each in await life.sent()] == [frames.PING] * 3
        life.send(PING)
        assert await life.fault() is (ErrorCode.ENHANCE_YOUR_CALM if strikes else None)


async def test_an_answer_forgives():
    """What is sent of a call lets a client ask anew."""
    async with live(max_ping_strikes=2) as life:
        life.send(OPENING)
        life.open(1)
        for _ in range(20):
            life.send(PING * 2)
            life.told[1].stream.data(b"x")
            assert await life.fault() is None


async def test_old_connections_end():
    """As soon as they are idle, else after their grace."""
    async with live(max_age=0.001) as life:
        life.send(OPENING)
        (*_, (*_, payload)) = await _until(life, frames.PING)
        life.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        await until(lambda: life.wire.closed)
        assert not life.wire.aborted
    for grace in ({"grace": 0.001}, {}):
        async with live(max_age=0.001, **grace) as life:
            life.send(OPENING)
            life.open(1, flags=BOTH)
            await _until(life, frames.GOAWAY)
            if grace:
                await _until_aborted(life)
            else:
                await asyncio.sleep(0.02)
                assert not life.wire.closed
