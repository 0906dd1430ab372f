"""Triton's example backends: identity, repeat and square."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.registry import find_backend, handler_for
from model_handlers.requests import ModelRequest
from model_handlers.tensor import BY_NAME, TensorSpec
from tests.responders import Responses


def specs(tensors):
    """Specs of (name, type, dims)."""
    return tuple(TensorSpec(name, BY_NAME[kind], tuple(dims)) for name, kind, dims in tensors)


@pytest.fixture
def load():
    """Loads a model of a backend, by its configuration alone."""
    loaded = []

    def load(backend, inputs, outputs, *, decoupled=False, lane="m_0_0", **parameters):
        config = ModelConfig(
            "m",
            backend=backend,
            inputs=specs(inputs),
            outputs=specs(outputs),
            parameters=parameters,
            decoupled=decoupled,
        )
        loaded.append(handler_for(find_backend(backend, "", "m")).load(config, Path(), CPU, lane))
        return loaded[-1]

    yield load
    for handler in loaded:
        handler.close()


REPEAT = (
    (("IN", "INT32", [-1]), ("DELAY", "UINT32", [-1]), ("WAIT", "UINT32", [1])),
    (("OUT", "INT32", [1]), ("IDX", "UINT32", [1])),
)
SQUARE = ((("IN", "INT32", [1]),), (("OUT", "INT32", [1]),))


def streamed(handler, outputs, **inputs):
    """What a decoupled model sends for one request."""
    responses = Responses()
    assert handler.execute_requests([ModelRequest(inputs, outputs, responder=responses)]) == [None]
    return responses.end()


def test_identity_hands_inputs_back_by_their_numbers(load):
    """OUTPUT1 is INPUT1 in whatever order they are declared; the size is counted, strings by their bytes."""
    handler = load(
        "identity",
        [("INPUT1", "BYTES", [1]), ("INPUT0", "FP32", [2])],
        [("OUTPUT1", "BYTES", [1]), ("OUTPUT0", "FP32", [2])],
    )
    family = METRICS.family("input_byte_size_counter", "Bytes of inputs so far.", MetricKind.COUNTER)
    counter = METRICS.metric(family, {"model": "m"})
    before = counter.value
    inputs = {"INPUT0": np.array([1, 2], "f4"), "INPUT1": np.array([b"abc"], object)}
    (answer,) = handler.execute_requests([ModelRequest(inputs, ("OUTPUT0", "OUTPUT1"))])

    assert answer.outputs["OUTPUT0"].tolist() == [1, 2]
    assert answer.outputs["OUTPUT1"].tolist() == [b"abc"]
    assert answer.parameters == {"param0": "an example string param", "param1": 42, "param2": False}
    assert counter.value - before == 8 + 3


@pytest.mark.parametrize(
    ("lane", "parameters", "seconds"),
    [
        ("m_0_0", {}, 0),
        ("m_0_0", {"execute_delay_ms": "20"}, 0.02),
        ("m_0_3", {"execute_delay_ms": "20", "instance_wise_delay_multiplier": "2"}, 0.12),
        ("m_0_0", {"execute_delay_ms": "20", "instance_wise_delay_multiplier": "2"}, 0.02),
    ],
)
def test_identity_takes_its_time(lane, parameters, seconds, load, monkeypatch):
    """The delay is that of its parameters, times the instance's number where they say so."""
    handler = load("identity", [("INPUT0", "FP32", [1])], [("OUTPUT0", "FP32", [1])], lane=lane, **parameters)

    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    handler.execute_requests([ModelRequest({"INPUT0": np.ones(1, "f4")}, ("OUTPUT0",))])
    assert sum(slept) == pytest.approx(seconds)


def test_repeat_sends_one_element_after_the_other(load):
    """Each with its position; what is not asked for is not sent."""
    handler = load("repeat", *REPEAT, decoupled=True)
    inputs = {"IN": np.array([7, 8], np.int32), "DELAY": np.zeros(2, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    both = streamed(handler, ("OUT", "IDX"), **inputs)
    out = streamed(handler, ("OUT",), **inputs)

    assert [(r.outputs["OUT"].tolist(), r.outputs["IDX"].tolist()) for r in both[:-1]] == [([7], [0]), ([8], [1])]
    assert both[-1] is None
    assert [list(response.outputs) for response in out[:-1]] == [["OUT"], ["OUT"]]


def test_repeat_of_nothing_is_an_end(load):
    """No element, no response but the news that it was the last."""
    empty = {"IN": np.empty(0, np.int32), "DELAY": np.empty(0, np.uint32), "WAIT": np.zeros(1, np.uint32)}

    assert streamed(load("repeat", *REPEAT, decoupled=True), ("OUT",), **empty) == [None]


def test_repeat_wants_a_delay_for_each(load):
    """Two elements and one delay are the client's error."""
    (error,) = streamed(
        load("repeat", *REPEAT, decoupled=True),
        ("OUT",),
        IN=np.array([7, 8], np.int32),
        DELAY=np.zeros(1, np.uint32),
        WAIT=np.zeros(1, np.uint32),
    )

    assert error.kind is Kind.INVALID_ARGUMENT
    assert "got 1 for 2" in error.message


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [3, 3, 3, None]),
        ({"CUSTOM_OUTPUT_DELAY_NS": "1000", "CUSTOM_INFER_DELAY_NS": "1000"}, [3, 3, 3, None]),
        ({"CUSTOM_EMPTY_COUNT": "2"}, [{}, {}, 3, None]),
        ({"CUSTOM_FAIL_COUNT": "2"}, [3, "fails"]),
    ],
)
def test_square_answers_n_with_n_times_n(parameters, expected, load):
    """As often as the number says; some of them empty, or failing, as parameters ask."""
    handler = load("square", *SQUARE, decoupled=True, **parameters)
    answers = streamed(handler, ("OUT",), IN=np.array([3], np.int32))
    shown = [
        "fails" if isinstance(answer, MmeError) else answer and (answer.outputs and int(answer.outputs["OUT"][0]))
        for answer in answers
    ]

    assert shown == expected


def test_an_unloaded_model_ends_its_streams(load):
    """Whoever waits for the next element when the model is unloaded is told, at once."""
    handler = load("repeat", *REPEAT, decoupled=True)
    responses = Responses()
    hour = np.full(2, 3_600_000, np.uint32)
    request = ModelRequest(
        {"IN": hour.astype(np.int32), "DELAY": hour, "WAIT": np.zeros(1, np.uint32)}, ("OUT",), responder=responses
    )
    handler.execute_requests([request])
    handler.close()

    (error,) = responses.end()
    assert error.kind is Kind.UNAVAILABLE


REFUSED = {
    "a stream that may not be one": ("square", *SQUARE, False, "set model_transaction_policy { decoupled: true }"),
    "tensors of other names": ("square", *REPEAT, True, "needs the inputs IN, and config.pbtxt has IN, DELAY, WAIT"),
    "no tensors": ("identity", (), (), False, "needs the inputs declared, and config.pbtxt has none"),
    "more inputs than outputs": (
        "identity",
        (("INPUT0", "FP32", [1]), ("INPUT1", "FP32", [1])),
        (("OUTPUT0", "FP32", [1]),),
        False,
        "needs as many outputs as inputs, and config.pbtxt has 2 inputs and 1 outputs",
    ),
    "another type": (
        "identity",
        (("INPUT0", "FP32", [1]),),
        (("OUTPUT0", "FP64", [1]),),
        False,
        "needs 'OUTPUT0' to have the data_type and dims of 'INPUT0'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_does_not_fit_is_refused(case, load):
    """The sentence says what the backend needs."""
    backend, inputs, outputs, decoupled, sentence = REFUSED[case]
    with pytest.raises(MmeError, match=sentence) as caught:
        load(backend, inputs, outputs, decoupled=decoupled)

    assert caught.value.kind is Kind.INVALID_MODEL
