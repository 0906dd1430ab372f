"""An ensemble whose steps answer what no other model can take: every request of it has its one answer all the same."""

import asyncio

import numpy as np
import pytest

from model_handlers.config.model_config import EnsembleStep
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32, TensorSpec
from serve.model.ensemble import EnsembleModel
from serve.model.model import Model
from serve.model.response_cache import ResponseCache
from serve.statistics import ModelStats

SPECS = {"inputs": (TensorSpec("x", FP32, (1, 2)),), "outputs": (TensorSpec("y", FP32, (1, 2)),), "max_batch_size": 0}
BEHIND = {"max_batch_size": 8, "inputs": (TensorSpec("x", FP32, (2,)),), "outputs": (TensorSpec("y", FP32, (2,)),)}


def no_array(_rows):
    """What is no array, as code of others may return it."""
    return [[[1.0, 2.0]]]


async def answered(toys, script, second, *, decoupled=False, cached=False, client=lambda _: None):
    """What a client of an ensemble is told, whose first step does that, and whether anybody is still owed an answer."""
    loop = asyncio.get_running_loop()
    first = toys.config("first", **SPECS)
    second = toys.config("second", response_cache=cached, **second)
    steps = (EnsembleStep("first", -1, {"x": "x"}, {"y": "a"}), EnsembleStep("second", -1, {"x": "a"}, {"y": "y"}))
    models = [
        Model("first", 1, [("first_0", toys.Scripted(first, script))], ModelStats(), loop),
        Model("second", 1, [("second_0", toys.Scripted(second))], ModelStats(), loop, responses=ResponseCache(1 << 20)),
    ]
    ensemble = EnsembleModel(
        "whole", 1, toys.config("whole", ensemble=steps, decoupled=decoupled, **SPECS), models, ModelStats(), loop
    )
    try:
        call = toys.Call(1)
        call.request.on_response = lambda *_: None
        ensemble.submit(call.request)
        client(call.request)
        async with asyncio.timeout(60):
            answer = await call.answer()
        assert [model.outstanding for model in (*models, ensemble)] == [0, 0, 0]
        assert len(call.answers) == 1
        return answer
    finally:
        for model in models:
            await asyncio.to_thread(model.close)
        await asyncio.sleep(0)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("second", [SPECS, BEHIND], ids=["as it is", "with a batch dimension"])
async def test_a_step_that_cannot_be_asked_with_what_another_answered(toys, second, decoupled):
    """The client is told which step, and what was wrong."""
    answer = await answered(toys, no_array, second, decoupled=decoupled)

    assert isinstance(answer, MmeError)
    assert answer.kind is Kind.INTERNAL
    assert answer.message.startswith("in ensemble 'whole', model 'second' failed: ")


async def test_elements_that_can_not_be_compared_with_those_of_requests_before(toys):
    """A step whose responses are cached looks at every element, also at text that is none."""

    def no_text(_rows):
        return [np.array([["\udc80", "a"]], object)]

    answer = await answered(toys, no_text, SPECS, cached=True)

    assert answer.kind is Kind.INTERNAL
    assert "UnicodeEncodeError" in answer.message


async def test_no_step_is_executed_for_a_client_that_left(toys):
    """It left while the first one was executing, which goes on: the second one is not asked."""
    requests = []

    def leaves(rows):
        requests[0].cancel()
        return [rows]

    answer = await answered(toys, leaves, SPECS, client=requests.append)

    assert isinstance(answer, MmeError)
    assert answer.kind is Kind.CANCELLED
