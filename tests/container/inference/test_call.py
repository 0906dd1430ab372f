"""Calls that turn out to be of another type than their route says, and calls whose answers take long to write."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
import time
import weakref

import numpy as np
import pytest

from container.codec.encode import Reply, encode
from container.control.on_loop import WaitingExchange
from container.control.targets import Flavor, InferenceType
from container.inference import call as module
from container.inference import in_turn
from container.inference.call import Call
from container.traces.settings import TraceSettings
from container.traces.traced import Tracing, follow
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BYTES, FP32, UINT8
from serve.request import InferenceRequest, InferenceResponse, Layout, LoadReport


@pytest.fixture(scope="module", params=["plain", "traced"])
def tracer(request):
    """Nobody, and whoever traces."""
    if request.param == "plain":
        yield None
        return
    tracing = pytest.importorskip("container.traces.spans")
    tracer = tracing.Tracer("http://127.0.0.1:9/v1/traces", TraceSettings(on=True, rate=1), "test")
    tracer.control.change("", {"trace_level": ["OFF"]})  # nobody is there to take spans
    yield tracer
    tracer.close()


def begun(tracer, kind=InferenceType.INFER, *, event_stream=False):
    """A call, and its exchange."""
    exchange = WaitingExchange("POST", b"/invocations", {}, b"x")
    following = None if tracer is None else follow(tracer, exchange)
    call = Call(exchange, Flavor.SAGEMAKER, kind, event_stream=event_stream, following=following)
    exchange.on_disconnect = call.abandon
    return call, exchange


def made(tracer, kind, *, event_stream=False):
    """A call that became one of type `infer`, its request taken, and its exchange."""
    call, exchange = begun(tracer, kind, event_stream=event_stream)
    call.kind = InferenceType.INFER
    request = InferenceRequest(Layout((("BODY", UINT8, (1,)),), ()), [np.zeros(1, np.uint8)], call.complete)
    return call, request, exchange


KINDS = (InferenceType.GENERATE, InferenceType.GENERATE_STREAM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_becomes_another_answers_as_that_one_does(tracer, kind):
    """A body as it is, and what its load has cost."""
    call, request, exchange = made(tracer, kind)
    call.take(request)
    call.report = LoadReport(load=2_000_000)

    body = np.frombuffer(b"said", np.uint8)
    request.resolve(InferenceResponse("m", "1", [("BODY", UINT8, body)]))

    status, headers, answer = exchange.wait()
    assert (status, answer) == (200, b"said")
    assert b"Server-Timing: cache;desc=miss" in headers


@pytest.mark.parametrize(("kind", "event_stream"), list(itertools.product(KINDS, (False, True))))
def test_a_call_that_becomes_another_knows_that_its_client_left(tracer, kind, event_stream):
    """Before and after."""
    for early in (True, False):
        call, request, exchange = made(tracer, kind, event_stream=event_stream)
        if early:
            exchange.on_disconnect()
        call.take(request)
        if not early:
            exchange.on_disconnect()
        assert (call.over, request.cancelled) == (True, True)


# -- answers that take long to write ---------------------------------------------------------------------------------

LARGE = np.arange(1 << 17, dtype=np.float32)
SMALL = np.arange(2, dtype=np.float32)


def asked(tracer):
    """A call of type `infer` that wants JSON, its request, and its exchange."""
    call, exchange = begun(tracer)
    call.reply = Reply({}, binary=False, remember=True)
    request = InferenceRequest(Layout((("X", FP32, (1,)),), ()), [SMALL[:1]], call.complete)
    request.on_response, request.on_error = call.respond, call.respond_error
    return call, call.take(request), exchange


def response(array, data_type=FP32):
    """Of a model with one output."""
    return InferenceResponse("m", "1", [("Y", data_type, array)])


def body_of(exchange):
    """Status and body, once they are whole."""
    status, _, body = exchange.wait()
    return status, body if isinstance(body, bytes) else b"".join(body)


@pytest.fixture
def threads(monkeypatch):
    """On which threads answers were written: whether each was that of the loop."""
    found = []

    def encoded(*arguments, **how):
        found.append(threading.current_thread() is threading.main_thread())
        return encode(*arguments, **how)

    monkeypatch.setattr(module, "encode", encoded)
    return found


def writers_rest():
    """Wait until no thread writes any more."""
    while in_turn._WRITERS.works():
        time.sleep(0.001)


@pytest.mark.parametrize(("array", "on_loop"), [(SMALL, True), (LARGE, False)])
async def test_a_long_answer_is_written_by_a_thread(array, on_loop, tracer, threads):
    """The client sees no difference."""
    _, request, exchange = asked(tracer)
    request.resolve(response(array))
    assert threads == ([True] if on_loop else [])
    status, body = await asyncio.to_thread(body_of, exchange)
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, array.tolist())
    assert threads == [on_loop]


async def test_several_responses_keep_their_order(tracer):
    """Also errors behind a long one, and the end."""
    _, request, exchange = asked(tracer)
    for each in (
        response(SMALL),
        response(LARGE),
        MmeError(Kind.EXECUTION_FAILED, "not this one"),
        response(SMALL),
    ):
        request.respond(each)
    request.resolve(None)
    status, body = await asyncio.to_thread(body_of, exchange)
    lines = [json.loads(line) for line in body.splitlines()]
    sizes = [line["outputs"][0]["shape"] if "outputs" in line else line["error"] for line in lines]
    assert (status, sizes) == (200, [[2], [1 << 17], "not this one", [2]])


@pytest.mark.parametrize("several", [False, True])
async def test_a_long_answer_that_can_not_be_written_is_an_error(several, tracer):
    """The client hears of it, once, and the model that nobody wants more of it."""
    _, request, exchange = asked(tracer)
    wrong = response(np.full(1 << 12, b"\xff", np.object_), BYTES)
    if several:
        request.respond(wrong)
        request.respond(response(SMALL))
    request.resolve(None if several else wrong)
    (status, body), cancelled = await asyncio.to_thread(body_of, exchange), request.cancelled
    assert "not UTF-8 text" in json.loads(body)["error"]
    assert (status >= 400, cancelled) == (True, several)


@pytest.mark.parametrize("several", [False, True])
async def test_what_is_no_array_is_an_error(several, tracer):
    """As code of others may return it: nobody can say how long it takes to write, and the client is told at once."""
    _, request, exchange = asked(tracer)
    if several:
        request.respond(response([1.0]))
    request.resolve(None if several else response([1.0]))
    assert exchange.answered
    (status, body), cancelled = body_of(exchange), request.cancelled
    assert "AttributeError" in json.loads(body)["error"]
    assert (status, cancelled) == (500, several)


async def test_a_client_that_leaves_while_its_answer_is_written_gets_none(tracer):
    """Nobody misses it."""
    call, request, exchange = asked(tracer)
    request.respond(response(LARGE))
    request.respond(response(SMALL))
    exchange.on_disconnect()
    request.resolve(None)
    await asyncio.to_thread(writers_rest)
    await asyncio.sleep(0.001)  # the turn of the loop that hears of it
    assert call.over
    assert not exchange.answered


class Remembering(Tracing):
    """Traces everything, and keeps what it is told."""

    def __init__(self):
        super().__init__(TraceSettings(on=True, rate=1))
        self.ended = []

    def end(self, trace, came, request, error):  # noqa: ARG002 - how it came is not of interest
        """Keep how many responses there were, whether there was a request, and what went wrong."""
        self.ended.append((trace.responses, request is not None, error and error.message))

    def close(self):
        """Nothing is open."""


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
    status, _ = await asyncio.to_thread(body_of, exchange)
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
    """Call, request and whoever followed it do not wait for the collector of garbage, large tensors with them."""
    tracer = Remembering() if traced else None

    async def main():
        _, request, exchange = asked(tracer)
        if leaves:
            exchange.on_disconnect()
        request.resolve(response(SMALL))
        request.inputs = [SMALL.copy()]
        return weakref.ref(request.inputs[0])

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()
