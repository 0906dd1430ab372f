"""One call between its request and its last response: order, threads, errors, clients that leave, what is kept."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from container.codec.encode import encode
from container.codec.request import OutputOptions
from container.control.routes import Flavor, HotTarget, InferenceType
from container.inference import http
from container.inference.call import Call
from container.inference.http import GenerateBody, HttpReply, InferRoutes, TensorBody
from container.inference.limits import RequestMemory
from container.observe.trace_settings import TraceSettings
from container.observe.tracing import Tracing, follow
from container.settings import Settings
from container.steps import CallStep
from container.steps.shared_memory import Regions
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BYTES, FP32, UINT8
from serve.request import InferenceResponse, LoadReport

LARGE = np.arange(1 << 17, dtype=np.float32)
SMALL = np.arange(2, dtype=np.float32)
CONFIG = ModelConfig("m", backend="onnx")
SCRIPT = ModelConfig("m", backend="sagemaker")


class Exchange:
    """A request over HTTP, and what was answered."""

    def __init__(self, body):
        self.method, self.target, self.headers, self.body = "POST", b"/invocations", {}, body
        self.on_disconnect = None
        self.status = None
        self.head, self.said = b"", b""
        self.whole = asyncio.Event()

    def hold(self, _size):
        """All of it fits."""
        return True

    def respond(self, status, headers, body):
        """Take the answer."""
        self.begin(status, headers)
        self.said = b"".join(body)
        self.whole.set()

    def begin(self, status, headers):
        """Take the beginning of one."""
        assert self.status is None
        self.status, self.head = status, headers

    def write(self, data):
        """Take a part."""
        assert not self.whole.is_set()
        self.said += bytes(data)

    def end(self):
        """It is whole."""
        self.whole.set()

    cut = end

    async def answer(self):
        """Status and body, once they are whole."""
        async with asyncio.timeout(60):
            await self.whole.wait()
        return self.status, self.said


class Engine:
    """Takes requests for one model, which is in memory or is loaded first."""

    def __init__(self, config=CONFIG, *, resident=True):
        self.config, self.resident, self.request = config, resident, None
        self.index = SimpleNamespace(is_resident=lambda _name: self.resident, config=lambda *_: None)
        self.registry = SimpleNamespace(canonical=lambda name: name)
        self.cache = SimpleNamespace(events=SimpleNamespace(listen=lambda _heard: None))

    def submit_now(self, _name, _version, make):
        """Take it, if the model is there."""
        if self.resident:
            self.request = make(self.config)
        return self.resident

    async def submit_made(self, _name, _version, make):
        """Take it behind a load."""
        await asyncio.sleep(0)
        report = LoadReport() if self.resident else LoadReport(load=2_000_000)
        self.request = make(self.config)
        return report


class Remembering(Tracing):
    """Traces everything, and keeps what it is told."""

    def __init__(self):
        super().__init__(TraceSettings(on=True, rate=1))
        self.ended = []

    def end(self, trace, error):
        """Keep how many responses there were, whether there was a request, and what went wrong."""
        self.ended.append((trace.responses, trace.request is not None, error and error.message))

    def close(self):
        """Nothing is open."""


@pytest.fixture(params=["plain", "traced"])
def tracer(request):
    """What traces requests, if anything does."""
    return None if request.param == "plain" else Remembering()


def begun(tracer, kind=InferenceType.INFER, *, engine=None, event_stream=False, body=b"{}"):
    """A call, its reply and its exchange."""
    engine = engine or Engine()
    exchange, routes = Exchange(body), InferRoutes(engine, Settings(), RequestMemory(1 << 28), Regions())
    route = HotTarget(Flavor.SAGEMAKER, event_stream=event_stream)
    reply = HttpReply(routes, exchange, route, kind)
    sent = TensorBody if kind is InferenceType.INFER else GenerateBody
    call = Call(engine, None, sent(routes, exchange, route, reply), reply)
    call.name = "m"
    if tracer is not None:
        call.steps = (follow(tracer, exchange),)
    exchange.on_disconnect = call.abandon
    return call, reply, exchange


def asked(tracer):
    """A call that wants JSON, its request as submitted, and its exchange."""
    document = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}
    call, reply, exchange = begun(tracer, body=json.dumps(document).encode())
    assert call.start() is None
    assert isinstance(reply.wanted, OutputOptions)
    return call, call.engine.request, exchange


def response(array, data_type=FP32):
    """Of a model with one output."""
    return InferenceResponse("m", "1", [("Y", data_type, array)])


@pytest.mark.parametrize("kind", list(InferenceType))
@pytest.mark.parametrize("event_stream", [False, True])
async def test_a_model_that_takes_bodies_answers_with_one_whatever_the_route_says(tracer, kind, event_stream):
    """The body as it came, behind a load whose cost the answer tells."""
    call, _, exchange = begun(tracer, kind, engine=Engine(SCRIPT, resident=False), event_stream=event_stream, body=b"x")
    await call.start()
    request = call.engine.request
    assert bytes(request.inputs[0]) == b"x"
    request.resolve(InferenceResponse("m", "1", [("BODY", UINT8, np.frombuffer(b"said", np.uint8))]))
    status, body = await exchange.answer()
    assert (status, b"said" in body, event_stream or body == b"said") == (200, True, True)
    assert b"Server-Timing: cache;desc=miss" in exchange.head


@pytest.mark.parametrize("early", [False, True])
async def test_a_client_that_leaves_cancels_its_request(tracer, early):
    """Before and after that is made."""
    call, _, exchange = begun(tracer, engine=Engine(SCRIPT, resident=False), body=b"x")
    rest = call.start()
    if early:
        exchange.on_disconnect()
    await rest
    if not early:
        assert not call.engine.request.cancelled
        exchange.on_disconnect()
    assert call.over
    assert call.engine.request is None or call.engine.request.cancelled


async def test_what_takes_long_to_read_is_read_by_a_thread_and_then_submitted():
    """Though its model is in memory."""
    document = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1 << 17], "data": [1.5] * (1 << 17)}]}
    call, _, _ = begun(None, body=json.dumps(document).encode())
    rest = call.start()
    assert call.engine.request is None
    await rest
    assert call.engine.request.inputs[0].sum() == 1.5 * (1 << 17)


class Refusals(CallStep):
    """Counts how often its call was refused."""

    count = 0

    def refused(self, _call):
        """Once more."""
        self.count += 1


@pytest.mark.parametrize("kind", [InferenceType.INFER, InferenceType.GENERATE])
async def test_a_large_request_whose_client_left_during_the_load_is_refused_once(kind):
    """It is neither read again nor tried again for ever."""

    class Loading(Engine):
        tries = 0

        async def submit_made(self, name, version, make):
            self.tries += 1
            assert self.tries <= 2  # else it would go on
            exchange.on_disconnect()
            return await super().submit_made(name, version, make)

    document = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1 << 17], "data": [1.5] * (1 << 17)}]}
    engine, refusals = Loading(resident=False), Refusals()
    call, _, exchange = begun(None, kind, engine=engine, body=json.dumps(document).encode())
    call.steps = (refusals,)
    await call.start()
    assert (call.over, engine.tries, engine.request, refusals.count) == (True, 1, None, 1)


# -- answers that take long to write ---------------------------------------------------------------------------------


@pytest.fixture
def threads(monkeypatch):
    """On which threads answers were written: whether each was that of the loop."""
    found = []

    def encoded(*arguments, **how):
        found.append(threading.current_thread() is threading.main_thread())
        return encode(*arguments, **how)

    monkeypatch.setattr(http, "encode", encoded)
    return found


@pytest.mark.parametrize(("array", "on_loop"), [(SMALL, True), (LARGE, False)])
async def test_a_long_answer_is_written_by_a_thread(array, on_loop, tracer, threads):
    """The client sees no difference."""
    _, request, exchange = asked(tracer)
    request.resolve(response(array))
    assert threads == ([True] if on_loop else [])
    status, body = await exchange.answer()
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, array.tolist())
    assert threads == [on_loop]


async def test_several_responses_keep_their_order(tracer):
    """Also errors behind a long one, another long one, and the end."""
    _, request, exchange = asked(tracer)
    error = MmeError(Kind.EXECUTION_FAILED, "not this one")
    for each in (response(SMALL), response(LARGE), error, response(LARGE[1:]), response(SMALL)):
        request.respond(each)
    request.resolve(None)
    status, body = await exchange.answer()
    lines = [json.loads(line) for line in body.splitlines()]
    sizes = [line["outputs"][0]["shape"] if "outputs" in line else line["error"] for line in lines]
    assert (status, sizes) == (200, [[2], [1 << 17], "not this one", [(1 << 17) - 1], [2]])


@pytest.mark.parametrize("several", [False, True])
async def test_a_long_answer_that_can_not_be_written_is_an_error(several, tracer):
    """The client is told, once, and the model is told to send no more."""
    _, request, exchange = asked(tracer)
    wrong = response(np.full(1 << 12, b"\xff", np.object_), BYTES)
    if several:
        request.respond(wrong)
        request.respond(response(SMALL))
    request.resolve(None if several else wrong)
    status, body = await exchange.answer()
    assert "not UTF-8 text" in json.loads(body)["error"]
    assert (status >= 400, request.cancelled) == (True, several)


@pytest.mark.parametrize("several", [False, True])
async def test_what_is_no_array_is_an_error(several, tracer):
    """As foreign code may return it: how long writing takes is unknown, and the client is told at once."""
    _, request, exchange = asked(tracer)
    if several:
        request.respond(response([1.0]))
    request.resolve(None if several else response([1.0]))
    assert exchange.whole.is_set()
    assert "AttributeError" in json.loads(exchange.said)["error"]
    assert (exchange.status, request.cancelled) == (500, several)


async def test_a_client_that_leaves_while_its_answer_is_written_gets_none(tracer, threads):
    """It is not missed."""
    call, request, exchange = asked(tracer)
    request.respond(response(LARGE))
    request.respond(response(SMALL))
    exchange.on_disconnect()
    request.resolve(None)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others)
    assert call.over
    assert exchange.status is None
    assert len(threads) <= 1


@pytest.mark.parametrize("several", [False, True])
async def test_a_trace_ends_when_a_thread_has_written_the_answer(several):
    """Not when the model gave it."""
    tracer = Remembering()
    _, request, exchange = asked(tracer)
    if several:
        request.respond(response(LARGE))
        request.resolve(None)
    else:
        request.resolve(response(LARGE))
    assert tracer.ended == []
    status, _ = await exchange.answer()
    assert (status, tracer.ended) == (200, [(1, True, None)])


async def test_a_trace_ends_once():
    """With what befell the request first."""
    tracer = Remembering()
    call, request, exchange = asked(tracer)
    exchange.on_disconnect()
    call.fail(MmeError(Kind.INTERNAL, "later"))
    request.resolve(response(SMALL))
    assert tracer.ended == [(0, True, "the client left")]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_what_is_over_is_gone(traced, leaves):
    """Call, request and whatever followed it do not wait for the collector of garbage, large tensors with them."""
    tracer = Remembering() if traced else None

    async def main():
        call, request, exchange = asked(tracer)
        if leaves:
            exchange.on_disconnect()
        request.resolve(response(SMALL))
        request.inputs = [SMALL.copy()]
        call.engine.request = None
        return weakref.ref(request.inputs[0])

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()
