"""A stream whose client does not read, and long responses; everything else of streams is tested by a real client."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from container.grpc import grpc_service_pb2 as pb
from container.grpc import inference as module
from container.grpc.inference import Inference, InferStream
from container.inference.limits import RequestLimit
from container.steps.shared_memory import Regions
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BYTES, FP32
from serve.request import InferenceResponse


class Engine:
    """Takes requests for one model, which is in memory."""

    def __init__(self, *, decoupled=False, take=lambda _request: None):
        self.config = SimpleNamespace(decoupled=decoupled)
        self.registry = SimpleNamespace(canonical=lambda name: name)
        self.take, self.requests = take, []

    def submit_now(self, _name, _version, make):
        """Take one."""
        request = make(self.config)
        self.requests.append(request)
        self.take(request)
        self.requests = [each for each in self.requests if not each.answered]
        return True


class Rpc:
    """A call whose client sends some messages, and reads when it may."""

    def __init__(self, *sent, ends=True):
        self.sent, self.ends, self.taken, self.ready = list(sent), ends, [], []
        self.reads = asyncio.Event()

    async def read(self):
        """The next message."""
        if not self.sent and not self.ends:
            await asyncio.Event().wait()
        return self.sent.pop(0) if self.sent else None

    def write_now(self, part):
        """Take one that it is ready for."""
        if self.ready and self.ready.pop(0):
            self.taken.append(part)
            return True
        return False

    async def write(self, part):
        """Take one when it reads."""
        await self.reads.wait()
        self.taken.append(part)

    def free(self, _size):
        """It is answered."""

    def headers(self):
        """There are none."""
        return {}


def inference(engine=None):
    """The methods over an engine."""
    return Inference(engine or Engine(), RequestLimit(3600, asyncio.get_running_loop()), Regions())


def asked(data=4):
    """A message."""
    tensor = {"name": "X", "datatype": "FP32", "shape": [data]}
    return pb.ModelInferRequest(
        model_name="m", inputs=[tensor], raw_input_contents=[bytes(4 * data)]
    ).SerializeToString()


def floats(count):
    """A response."""
    return InferenceResponse("m", "1", [("Y", FP32, np.zeros(count, np.float32))])


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    """Once it has left too much: its request is cancelled, what it has not read is forgotten, and that is the status."""
    monkeypatch.setattr(module, "MAX_UNSENT", 10_000)
    engine, rpc = Engine(decoupled=True), Rpc(asked(), ends=False)
    serving = asyncio.create_task(inference(engine).stream_infer(rpc))
    for _ in range(3):
        await asyncio.sleep(0)
    (request,) = engine.requests
    for _ in range(20):
        request.respond(floats(1000))
        await asyncio.sleep(0)
    request.resolve(None)
    assert request.cancelled
    rpc.reads.set()
    with pytest.raises(MmeError, match="reads the responses of its stream too slowly") as raised:
        await serving
    assert raised.value.kind is Kind.TOO_LARGE
    assert len(rpc.taken) == 1


async def test_what_is_written_at_once_overtakes_nothing():
    """A client that is not ready for one response gets the next ones behind it, though it is ready for those."""
    rpc = Rpc(ends=False)
    stream = InferStream(rpc, inference())
    serving = asyncio.create_task(stream.serve())
    await asyncio.sleep(0)
    rpc.ready = [True, False, True]
    for part in (b"1", b"2", b"3", b"4"):
        stream.write(part)
    rpc.reads.set()
    for _ in range(10):
        await asyncio.sleep(0)
    stream.write(b"5")
    stream.close()
    serving.cancel()
    assert rpc.taken == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_stream_that_is_drained_as_it_opens_ends():
    """Though nothing of it was read yet: the server's end waits for no stream that has nothing to answer."""
    method = inference()
    serving = asyncio.create_task(method.stream_infer(Rpc(ends=False)))
    await asyncio.sleep(0)  # it has begun, its reader has not
    method.drain()
    with pytest.raises(MmeError, match="the server is going") as raised:
        await serving
    assert raised.value.kind is Kind.UNAVAILABLE


async def test_a_stream_that_opens_while_the_server_goes_is_refused():
    """Its client has not heard of the end yet, which would wait for that stream as long as it may."""
    method = inference()
    method.drain()
    with pytest.raises(MmeError, match="the server is going") as raised:
        await method.stream_infer(Rpc(ends=False))
    assert raised.value.kind is Kind.UNAVAILABLE


async def test_a_stream_that_its_client_has_ended_ends_well_though_the_server_goes():
    """All that was asked is answered, and nothing more will be."""
    engine, rpc = Engine(), Rpc(asked())
    rpc.reads.set()
    method = inference(engine)
    serving = asyncio.create_task(method.stream_infer(rpc))
    for _ in range(5):
        await asyncio.sleep(0)
    method.drain()
    engine.requests[0].resolve(floats(1))
    async with asyncio.timeout(10):
        await serving
    assert len(rpc.taken) == 1


class Message(bytes):
    """One that tells when it is gone."""

    gone = 0

    def __del__(self):
        Message.gone += 1


async def test_an_open_stream_keeps_nothing_of_what_is_answered(monkeypatch):
    """Neither until its next request comes, which may be long, nor until the collector of garbage does."""
    monkeypatch.setattr(Message, "gone", 0)
    tensors, gone = [], []

    def take(request):
        request.inputs = [np.zeros(1000, np.float32)]
        tensors.append(weakref.ref(request.inputs[0]))
        request.resolve(InferenceResponse("m", "1", []))

    rpc = Rpc()
    sent = [Message(asked()) for _ in range(3)]  # the first of their kind, and two like it

    async def read():
        gone.append((Message.gone, [tensor() for tensor in tensors]))
        return sent.pop() if sent else None

    rpc.read = read
    rpc.reads.set()
    gc.disable()
    try:
        await inference(Engine(take=take)).stream_infer(rpc)
    finally:
        gc.enable()
    assert gone == [(number, [None] * number) for number in range(4)]


WORDS = np.array([b"word"] * 5000, dtype=np.object_)


@pytest.mark.parametrize("decoupled", [False, True])
async def test_what_takes_long_to_write_keeps_its_place(decoupled):
    """A thread writes it; what comes behind it, of its request or of its stream, comes behind it."""
    results = [InferenceResponse("m", "1", [("Y", BYTES, part)]) for part in (WORDS[:1], WORDS, WORDS[:2])]

    def take(request):
        if not decoupled:
            request.resolve(results.pop(0))
            return
        for each in results:
            request.respond(each)
        request.resolve(None)

    rpc = Rpc(*[asked()] * (1 if decoupled else 3))
    rpc.reads.set()
    async with asyncio.timeout(60):
        await inference(Engine(decoupled=decoupled, take=take)).stream_infer(rpc)
    taken = [pb.ModelStreamInferResponse.FromString(part).infer_response for part in rpc.taken]
    assert [list(each.outputs[0].shape) for each in taken] == [[1], [5000], [2]]
    assert taken[1].raw_output_contents[0] == b"\4\0\0\0word" * 5000
