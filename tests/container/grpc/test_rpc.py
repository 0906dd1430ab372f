"""One call: messages cut out of data, deadlines, compression, and clients that leave."""

import asyncio
import contextlib
import gc
import gzip
import tracemalloc

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container.grpc import rpc
from container.grpc.rpc import Calls, Method, Rpc
from container.http2 import frames
from container.http2.streams import WINDOW, Http2Stream
from container.inference.errors import Status
from container.inference.limits import RequestMemory
from model_handlers.errors import Kind, MmeError
from tests.container.http2.conftest import listening
from tests.waiting import until

LARGEST = 1 << 20


class Fake:
    """A stream that remembers what was sent and how much was credited."""

    id = 1

    def __init__(self):
        if not rpc.__file__.endswith(".py"):
            pytest.skip("a compiled call takes no stream but a real one")
        self.over, self.got_end, self.receiver, self.credits, self.blocks, self.parts = False, False, None, 0, [], []

    def headers(self, block):
        """Headers in front."""
        self.blocks.append(block)

    def data(self, payload):
        """A message."""
        self.parts.append(payload)

    def whole(self, head, payload, tail):
        """All at once."""
        self.headers(head)
        self.data(b"".join(payload))
        self.end(tail)

    def end(self, block):
        """Headers behind."""
        self.blocks.append(block)
        self.over = True

    def credit(self):
        """What came was used."""
        self.credits += 1

    async def turn(self, _heads):
        """It always is its turn."""

    async def drained(self):
        """There is always room."""


def _message(data, flag=0):
    return bytes((flag,)) + len(data).to_bytes(4, "big") + data


async def _never(context):
    await asyncio.get_running_loop().create_future()


def _calls(compression=""):
    return Calls(METHODS, LARGEST, compression, RequestMemory(1 << 30))


def _call(stream, method, fields=(), calls=None):
    return Rpc(stream, tuple(fields), method, calls or _calls())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 60), max_size=60))
async def test_messages_are_cut_wherever_frames_end(messages, cuts):
    """Several in a frame, one over several, and empty ones."""
    found = []

    async def all_of_them(context):
        while (message := await context.read()) is not None:
            found.append(message)

    stream, raw = Fake(), b"".join(map(_message, messages))
    call = _call(stream, Method(streaming=all_of_them))
    for cut in cuts:
        if raw[:cut]:
            call.received(raw[:cut])
        raw = raw[cut:]
    if raw:
        call.received(raw)
    call.ended()
    while not stream.over:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    assert found == messages


async def test_what_comes_in_tiny_frames_takes_no_more_than_it_is():
    """Whoever sends a message two bytes at a time has us keep it once, not an object for each of them."""
    size = 1 << 16
    call = _call(Fake(), Method(unary=_never))
    tracemalloc.start()
    try:
        call.received(_message(bytes(size))[:-size])
        for number in range(size // 2):
            call.received(bytes((number % 256, 1)))
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()
        call.cancelled()


_HALF = WINDOW // 2


@pytest.mark.parametrize(
    ("first", "frame"),
    [
        (b"", _message(b"") * 10_000),
        (_message(bytes(_HALF))[:-1], _message(bytes(_HALF))[-1:] + _message(bytes(_HALF))[:-1]),
    ],
)
async def test_what_nobody_reads_opens_no_window(first, frame):
    """Neither do messages without content, nor the first bytes of the next behind those that wait."""
    stream = Fake()
    call = _call(stream, Method(streaming=_never))
    call.received(first + frame)
    for _ in range(3):
        call.received(frame)
    before = stream.credits
    call.received(frame)
    assert stream.credits == before
    call.cancelled()
    await asyncio.sleep(0)


async def test_nothing_is_made_of_what_comes_behind_a_failure():
    """Be it another failure, or a message."""
    stream, calls = Fake(), _calls()
    call = _call(stream, Method(streaming=_never), calls=calls)
    call.received(_message(b"a") + _message(bytes(LARGEST + 1))[:10] + _message(b"b") * 3)
    assert len(stream.blocks) == 1
    assert stream.receiver is None
    assert not calls.memory.used
    await asyncio.sleep(0)


async def test_metadata_of_bytes():
    """With padding and without it, of several in one the last; text is text."""
    sent = {
        b"a-bin": b"w6kh",
        b"b-bin": b"AA==,AQ",
        b"c-bin": b"AQ,",
        b"d": b"AA==,AQ",
        b"te": b"trailers",
        b":path": b"/",
    }
    found = _call(Fake(), Method(unary=_echo), sent.items()).headers()
    assert found == {"a-bin": "\u00e9!", "b-bin": "\1", "c-bin": "", "d": "AA==,AQ"}


@pytest.mark.parametrize("values", [[b"99999999H"] * 3, [b"99999999H", b"1S"]])
async def test_one_deadline_of_a_call(values):
    """The timers of others would outlast it."""
    loop, made = asyncio.get_running_loop(), []
    real = loop.call_later
    loop.call_later = lambda *args: made.append(real(*args)) or made[-1]
    call = _call(Fake(), Method(unary=_never), [(b"grpc-timeout", value) for value in values])
    call.cancelled()
    assert made
    assert all(timer.cancelled() for timer in made)


# -- with a client of gRPC's -------------------------------------------------------------------------------------------


async def _echo(data, _context):
    return data


async def _echoes(context):
    while (message := await context.read()) is not None:
        await context.write(message)


async def _waits(_data, _context):
    await asyncio.get_running_loop().create_future()


async def _refuses(_data, _context):
    raise MmeError(Kind.UNKNOWN_MODEL, "no such model")


async def _floods(context):
    await context.read()
    while True:
        await context.write(bytes(1 << 18))


METHODS = {
    b"/s/Echo": Method(unary=_echo),
    b"/s/Echoes": Method(streaming=_echoes),
    b"/s/Waits": Method(unary=_waits),
    b"/s/Floods": Method(streaming=_floods),
    b"/s/Refuses": Method(unary=_refuses),
}


@contextlib.asynccontextmanager
async def _served(compression="", options=(("grpc.max_receive_message_length", -1),)):
    """A channel to a server; nothing is left of its calls afterwards."""
    calls = _calls(compression)
    async with (
        listening(calls.begin) as ((_, port), connections),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        yield channel
        await until(lambda: not calls.tasks and not any(each.streams.open for each in connections))
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) in {Rpc, Http2Stream}]


@pytest.fixture
def channel():
    """One to a server without anything special."""
    return _served()


async def _code(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code()


@pytest.mark.parametrize("compression", ["", "gzip", "deflate"])
async def test_messages_of_all_sizes(compression):
    """Come back as they went, many at once too."""
    async with _served(compression) as channel:
        sizes = [0, 1, 16_379, 16_380, 65_531, 100_000, LARGEST]
        echo = channel.unary_unary("/s/Echo")
        assert [len(each) for each in await asyncio.gather(*[echo(bytes(size)) for size in sizes * 3])] == sizes * 3
        for how in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            assert await echo(bytes(50_000), compression=how) == bytes(50_000)
        stream = channel.stream_stream("/s/Echoes")(iter([bytes(size) for size in sizes]))
        assert [len(each) async for each in stream] == sizes


async def test_messages_that_are_too_large(channel):
    """Also once they are inflated, and whatever can't be."""
    echo, echoes = channel.unary_unary("/s/Echo"), channel.stream_stream("/s/Echoes")
    assert await _code(echo(bytes(LARGEST + 1))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    bomb = bytes(20 * LARGEST)
    assert await _code(echo(bomb, compression=grpc.Compression.Gzip)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    call = echoes(iter([b"a", bomb]), compression=grpc.Compression.Gzip)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        [_ async for _ in call]
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("raw", "encoding", "status"),
    [
        (_message(b"no gzip", 1), b"gzip", Status.INVALID_ARGUMENT),
        (_message(gzip.compress(b"x", mtime=0)[:-3], 1), b"gzip", Status.INVALID_ARGUMENT),
        (_message(b"x", 1), b"x" * 60_000, Status.UNIMPLEMENTED),
        (_message(b"x", 1), b"identity", Status.UNIMPLEMENTED),
        (_message(b"x", 7), b"gzip", Status.INTERNAL),
        (_message(b"x") * 2, b"gzip", Status.INTERNAL),
        (_message(b"x")[:-1], b"gzip", Status.INTERNAL),
        (b"", b"gzip", Status.INTERNAL),
    ],
)
async def test_messages_that_are_none(raw, encoding, status):
    """Each has its status, in few words."""
    stream = Fake()
    call = _call(stream, Method(unary=_echo), [(b"grpc-encoding", encoding)])
    if raw:
        call.received(raw)
    if not stream.over:
        call.ended()
    while not stream.over:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    (block,) = stream.blocks
    assert frames.header_block([(b"grpc-status", b"%d" % status)]) in block
    assert frames.header_block([(b"grpc-accept-encoding", b"identity,deflate,gzip")]) in block
    assert len(block) < 1000
    await asyncio.sleep(0)


async def test_deadlines(channel):
    """End a call whose handler takes longer."""
    for seconds in (0.001, 0.01):
        code = await _code(channel.unary_unary("/s/Waits")(b"", timeout=seconds))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("value", [b"0n", b"0H", b"1u"])
async def test_deadlines_that_are_past(value):
    """The server itself ends the call."""
    stream, calls = Fake(), _calls()
    call = _call(stream, Method(unary=_waits), [(b"grpc-timeout", value)], calls)
    call.received(_message(b""))
    call.ended()
    async with asyncio.timeout(30):
        await until(lambda: stream.over and not calls.tasks)
    assert frames.header_block([(b"grpc-status", b"4")]) in stream.blocks[0]


@pytest.mark.parametrize("value", [b"", b"1", b"-1S", b"123456789S", b"1 S", b"xS", b"1s"])
@pytest.mark.parametrize("method", [Method(unary=_echo), Method(streaming=_echoes)], ids=["unary", "stream"])
async def test_deadlines_that_are_none(method, value):
    """Are refused, since a client that set one does not wait for ever; nothing is executed."""
    stream, calls = Fake(), _calls()
    call = _call(stream, method, [(b"grpc-timeout", value), (b"grpc-timeout", b"1S")], calls)
    call.received(_message(b""))
    call.ended()
    assert (calls.tasks, len(stream.blocks), stream.parts) == (set(), 1, [])
    assert frames.header_block([(b"grpc-status", b"13")]) in stream.blocks[0]


async def test_clients_that_leave(channel):
    """While they wait, while they send, and while they don't read what is sent without end."""
    waits = [channel.unary_unary("/s/Waits")(bytes(100_000)) for _ in range(20)]
    echoes = [channel.stream_stream("/s/Echoes")() for _ in range(5)]
    floods = [channel.stream_stream("/s/Floods")() for _ in range(5)]
    for call in (*echoes, *floods):
        await call.write(b"x")
    for call in (*echoes, *floods):
        await call.read()
    for call in (*waits, *echoes, *floods):
        call.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def test_what_is_refused_is_gone_at_once():
    """Nothing of a call waits for the collector of garbage, its message least of all."""
    async with _served() as channel:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert await _code(channel.unary_unary("/s/Refuses")(b"")) is grpc.StatusCode.NOT_FOUND
            assert not [each for each in gc.get_objects() if type(each) is Rpc]
        finally:
            gc.enable()


# -- hosts -------------------------------------------------------------------------------------------------------------

HEAD = ((b":method", b"POST"), (b":path", b"/s/None"), (b"content-type", b"application/grpc"))


class Ended:
    """A stream that keeps the headers with which it ends."""

    over = False

    def end(self, block):
        self.block = block


@pytest.fixture
def calls():
    """Calls of no method, for who asks host a; and what was asked about."""
    asked = []

    def unknown_host(host):
        asked.append(host)
        return "" if host == "a" else f"not {host}"

    return Calls({}, 0, "", RequestMemory(0), unknown_host), asked


def answer(calls, *fields):
    """The last block of headers."""
    stream = Ended()
    calls.begin(stream, (*HEAD, *fields))
    return stream.block


@pytest.mark.parametrize(
    "fields", [((b":authority", b"b"),), ((b"host", b"b"),), ((b":authority", b"b"), (b"host", b"a"))]
)
def test_an_unknown_host_is_refused(calls, fields):
    """By a status of HTTP's and of gRPC's, with the sentence."""
    expected = [(b":status", b"403"), (b"content-type", b"application/grpc"), (b"grpc-status", b"7")]

    assert answer(calls[0], *fields) == frames.header_block([*expected, (b"grpc-message", b"not b")])


@pytest.mark.parametrize(
    "fields", [(), ((b":authority", b"a"),), ((b"host", b"a"),), ((b":authority", b"a"), (b"host", b"b"))]
)
def test_a_known_host_is_let_in(calls, fields):
    """And a client that names none, which no browser does."""
    assert b"Method not found!" in answer(calls[0], *fields)


def test_a_known_host_is_asked_about_once(calls):
    """Whatever the call; one that is refused is asked about again."""
    made, asked = calls
    for host in (b"a", b"a", b"b", b"b"):
        answer(made, (b":authority", host))

    assert asked == ["a", "b", "b"]
