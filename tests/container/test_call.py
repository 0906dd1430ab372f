"""Calls that turn out to be of another type than their route says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from container.call import CALLS
from container.on_loop import WaitingExchange
from container.targets import Flavor, InferenceType
from model_handlers.tensor import UINT8
from serve.request import InferenceRequest, InferenceResponse, Layout, LoadReport


@pytest.fixture(scope="module", params=["plain", "traced"])
def calls(request):
    """The classes of calls, and those of a server that traces."""
    if request.param == "plain":
        yield CALLS
        return
    tracing = pytest.importorskip("container.tracing")
    tracer = tracing.Tracer("http://127.0.0.1:9/v1/traces", 1, "test")
    tracer.control.change("", {"trace_level": ["OFF"]})  # nobody is there to take spans
    yield tracer.calls(CALLS)
    tracer.close()


def made(calls, kind):
    """A call that became one of type `infer`, its request taken, and its exchange."""
    exchange = WaitingExchange("POST", b"/invocations", {}, b"x")
    call = calls[kind](exchange, Flavor.SAGEMAKER)
    exchange.on_disconnect = call.abandon
    call.become(calls[InferenceType.INFER, kind[1]])
    request = InferenceRequest(Layout((("BODY", UINT8, (1,)),), ()), [np.zeros(1, np.uint8)], call.complete)
    return call, request, exchange


KINDS = tuple(itertools.product((InferenceType.GENERATE, InferenceType.GENERATE_STREAM), (False, True)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind[1]])
def test_a_call_that_becomes_another_answers_as_that_one_does(calls, kind):
    """A body as it is, and what its load has cost."""
    call, request, exchange = made(calls, kind)
    call.take(request)
    call.report = LoadReport(load=2_000_000)

    body = np.frombuffer(b"said", np.uint8)
    request.resolve(InferenceResponse("m", "1", [("BODY", UINT8, body)]))

    status, headers, answer = exchange.wait()
    assert (status, answer) == (200, b"said")
    assert b"Server-Timing: cache;desc=miss" in headers


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_becomes_another_knows_that_its_client_left(calls, kind):
    """Before and after."""
    for early in (True, False):
        call, request, exchange = made(calls, kind)
        if early:
            exchange.on_disconnect()
        call.take(request)
        if not early:
            exchange.on_disconnect()
        assert (call.over, request.cancelled) == (True, True)
