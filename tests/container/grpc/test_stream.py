"""A stream whose client does not read, and long responses; everything else of streams is tested by a real client."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from container.grpc import grpc_service_pb2 as pb
from container.grpc import stream as module
from container.grpc.decode import Remembered, Wanted
from container.grpc.encode import Encoder
from container.grpc.infer import Codec
from container.grpc.stream import Call, Stream, Streams
from container.inference.request_limit import RequestLimit
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BYTES, FP32
from serve.request import InferenceRequest, InferenceResponse, Layout


def no_limit():
    """Of time, for a test."""
    return RequestLimit(3600, asyncio.get_running_loop())


async def no_requests():
    """What a client sends that waits."""
    await asyncio.Event().wait()


async def nothing_more():
    """What a client sends that has asked for all it wants."""


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    """Once it has left too much: its request is cancelled, what it has not read is forgotten, and that is the status."""
    monkeypatch.setattr(module, "_LIMIT", 10_000)
    taken = []
    codec = SimpleNamespace(encode=lambda response, _wanted, final: Encoder().encode(response, final))
    stream, reading = Stream(None, codec, None, no_limit(), {}), asyncio.Event()

    async def write(part):
        taken.append(part)
        await reading.wait()

    serving = asyncio.create_task(stream.serve(no_requests, write))
    call = Call(stream, None, 0)
    request = call.request = InferenceRequest(Layout((), ()), [], call.complete)
    stream._calls.add(call)
    for _ in range(20):
        call.respond(request, InferenceResponse("m", "1", [("Y", FP32, np.zeros(1000, np.float32))]))
        await asyncio.sleep(0)
    call.complete(request, None)
    assert stream.closed
    assert request.cancelled
    reading.set()
    with pytest.raises(MmeError, match="reads the responses of its stream too slowly") as raised:
        await serving
    assert raised.value.kind is Kind.TOO_LARGE
    assert len(taken) == 1


async def test_what_is_written_at_once_overtakes_nothing():
    """A client that is not ready for one response gets the next ones behind it, though it is ready for those."""
    taken, ready = [], [True, False, True]
    stream, reading, over = Stream(None, None, None, no_limit(), {}), asyncio.Event(), asyncio.Event()

    async def write(part):
        await reading.wait()
        taken.append(part)
        if len(taken) == 4:
            over.set()

    def write_now(part):
        if ready.pop(0):
            taken.append(part)
            return True
        return False

    serving = asyncio.create_task(stream.serve(no_requests, write, write_now))
    await asyncio.sleep(0)
    for part in (b"1", b"2", b"3", b"4"):
        stream.write(part)
    reading.set()
    async with asyncio.timeout(60):
        await over.wait()
    stream.write(b"5")
    stream.close()
    serving.cancel()
    assert taken == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_stream_that_is_drained_as_it_opens_ends():
    """Though nothing of it was read yet: the server's end waits for no stream that has nothing to answer."""
    stream = Stream(None, None, None, no_limit(), {})
    serving = asyncio.create_task(stream.serve(no_requests, None))
    await asyncio.sleep(0)  # it has begun, its reader has not
    stream.drain()
    with pytest.raises(MmeError, match="the server is going") as raised:
        await serving
    assert raised.value.kind is Kind.UNAVAILABLE


async def test_a_stream_that_opens_while_the_server_goes_is_refused():
    """Its client has not heard of the end yet, which would wait for that stream as long as it may."""
    streams = Streams(None, None, None, no_limit())
    streams.drain()
    with pytest.raises(MmeError, match="the server is going") as raised:
        await streams.serve(SimpleNamespace(metadata=list, read=no_requests, write=None, write_now=None, free=None))
    assert raised.value.kind is Kind.UNAVAILABLE


async def test_a_stream_that_its_client_has_ended_ends_well_though_the_server_goes():
    """All that was asked is answered, and nothing more will be."""
    stream = Stream(None, None, None, no_limit(), {})
    call = Call(stream, None, 0)
    stream._calls.add(call)
    serving = asyncio.create_task(stream.serve(nothing_more, None))
    for _ in range(3):
        await asyncio.sleep(0)
    stream.drain()
    stream.over(call)
    async with asyncio.timeout(10):
        await serving


class Message(bytes):
    """One that tells when it is gone."""

    gone = 0

    def __del__(self):
        Message.gone += 1


@pytest.mark.parametrize("known", [False, True], ids=["the first of its kind", "remembered"])
async def test_an_open_stream_keeps_nothing_of_what_is_answered(monkeypatch, known):
    """Neither until its next request comes, which may be long, nor until the collector of garbage does."""
    monkeypatch.setattr(Message, "gone", 0)
    sent = [Message(pb.ModelInferRequest(model_name="m").SerializeToString()) for _ in range(3)]
    tensors, gone = [], []

    def decode(_data, _message, complete, _headers):
        tensor = np.zeros(1000, np.float32)
        tensors.append(weakref.ref(tensor))
        return InferenceRequest(Layout((), ()), [tensor], complete), Wanted({}, empty_final=False)

    def remembered(data, complete, headers):
        if not known:
            return None
        request, wanted = decode(data, None, complete, headers)
        return Remembered("m", "", request.layout, wanted), request

    async def submit_made(_name, _version, make):
        make(SimpleNamespace(decoupled=False)).resolve(InferenceResponse("m", "1", []))

    async def read():
        gone.append((Message.gone, [tensor() for tensor in tensors]))
        return sent.pop() if sent else None

    gc.disable()
    try:
        codec = SimpleNamespace(
            target=lambda *_: ("m", None),
            decode=decode,
            remembered=remembered,
            encode=lambda response, *_, **__: response.id.encode(),
        )
        stream = Stream(SimpleNamespace(submit_made=submit_made), codec, None, no_limit(), {})
        await stream.serve(read, lambda _: asyncio.sleep(0))
    finally:
        gc.enable()
    assert gone == [(number, [None] * number) for number in range(4)]


WORDS = np.array([b"word"] * 5000, dtype=np.object_)


@pytest.mark.parametrize("decoupled", [False, True])
async def test_what_takes_long_to_write_keeps_its_place(decoupled):
    """A thread writes it; what comes behind it, of its request or of its stream, comes behind it."""
    taken = []
    stream, over = Stream(None, Codec(None), None, no_limit(), {}), asyncio.Event()

    async def write(part):
        taken.append(pb.ModelStreamInferResponse.FromString(part))
        if len(taken) == 3:
            over.set()

    serving = asyncio.create_task(stream.serve(nothing_more, write))
    calls = [Call(stream, None, 0) for _ in range(1 if decoupled else 3)]
    for call in calls:
        call.request = InferenceRequest(Layout((), ()), [], call.complete)
        call.wanted = Wanted({}, empty_final=False)
        call.ordered = not decoupled
        stream._calls.add(call)
        stream._order.append(call)
    if decoupled:
        stream._order.clear()
    words = [WORDS[:1], WORDS, WORDS[:2]]
    for number, part in enumerate(words):
        call, result = calls[-1 if decoupled else number], InferenceResponse("m", "1", [("Y", BYTES, part)])
        if decoupled:
            call.respond(call.request, result)
        else:
            call.complete(call.request, result)
    if decoupled:
        call.complete(call.request, None)
    async with asyncio.timeout(60):
        await over.wait()
    await serving
    assert [list(each.infer_response.outputs[0].shape) for each in taken] == [[1], [5000], [2]]
    assert taken[1].infer_response.raw_output_contents[0] == b"\4\0\0\0word" * 5000
