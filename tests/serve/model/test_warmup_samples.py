"""The samples of a model's configuration are executed as its author wrote them, or say what is wrong with them."""

import logging
import subprocess
import sys
from types import MappingProxyType

import numpy as np
import pytest

from model_handlers.config.model_config import (
    ControlInput,
    ControlKind,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    WarmupInput,
    WarmupSample,
)
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import ModelResponse
from model_handlers.tensor import BYTES, DATA_TYPES, FP32, INT64, TensorSpec, encode_bytes_elements
from serve.model.warmup import Warmup
from tests.cgroups import small_group


def sample(given=None, *, name="s", batch_size=1, count=1, **inputs):
    """A sample of the input x, or of those named."""
    inputs = inputs or {"x": given or WarmupInput(FP32, (2,), zero_data=True)}
    return WarmupSample(name, batch_size, MappingProxyType(inputs), count)


def warm(toys, folder, *samples, script=None, **config):
    """A handler that was warmed up by these samples."""
    handler = toys.Scripted(toys.config(model_warmup=samples, **config), script)
    Warmup(handler.config, folder).run(handler, "m_0")
    return handler


def executed(toys, folder, given, spec, max_batch_size=0):
    """The array that a handler is given for an input."""
    seen = []

    class Echo(toys.Scripted):
        def execute(self, inputs, outputs):  # noqa: ARG002 - there is one
            seen.append(inputs["x"])
            return [np.zeros((1, 2))]

    config = toys.config(max_batch_size=max_batch_size, inputs=(spec,), model_warmup=(sample(given),))
    Warmup(config, folder).run(Echo(config), "m_0")
    return seen[0]


def refused(toys, folder, *samples, **config):
    """Why a model is not warmed up."""
    with pytest.raises(MmeError) as caught:
        warm(toys, folder, *samples, **config)
    assert caught.value.kind is Kind.INVALID_MODEL
    return caught.value.message


def recorded(folder, data, name="data"):
    """The path of a file with these bytes, in the folder of a model."""
    (folder / "warmup").mkdir(exist_ok=True)
    (folder / "warmup" / name).write_bytes(data)
    return name


def test_samples_are_executed_in_order_each_as_often_as_it_says(toys, tmp_path):
    """A batch of several requests is one execution."""
    handler = warm(toys, tmp_path, sample(batch_size=3, count=2), sample(name="none", batch_size=0), sample())

    assert handler.batches == [[0, 0, 0], [0, 0, 0], [0]]


def test_a_model_that_does_not_batch_executes_the_requests_of_a_sample_one_by_one(toys, tmp_path):
    """There is nothing along which they could be joined."""
    spec = TensorSpec("x", FP32, (1, 2))
    given = WarmupInput(FP32, (1, 2), zero_data=True)
    handler = warm(toys, tmp_path, sample(given, batch_size=2), max_batch_size=0, inputs=(spec,))

    assert handler.batches == [[0], [0]]


@pytest.mark.parametrize("data", ["zero_data", "random_data"])
@pytest.mark.parametrize("data_type", DATA_TYPES, ids=str)
def test_made_up_data_has_the_inputs_type_and_shape(data_type, data, toys, tmp_path):
    """Of every type; texts are empty, numbers zero, or so small that they may be an index."""
    array = executed(
        toys, tmp_path, WarmupInput(data_type, (3, 50), **{data: True}), TensorSpec("x", data_type, (3, -1)), 4
    )

    assert (array.shape, array.dtype) == ((1, 3, 50), data_type.dtype)
    if data_type is BYTES:
        assert set(array.flat) == {b""}
    elif data == "zero_data":
        assert not array.any()
    else:
        numbers = array.astype(np.float64)
        assert 0 <= numbers.min() < numbers.max() <= 1


def test_recorded_data_is_what_is_in_the_file(toys, tmp_path):
    """The elements that the shape has, from the file's beginning; it may hold more."""
    file = recorded(tmp_path, np.arange(5).astype("<i8").tobytes())
    given = WarmupInput(INT64, (2, 2), input_data_file=file)

    assert executed(toys, tmp_path, given, TensorSpec("x", INT64, (2, 2))).tolist() == [[0, 1], [2, 3]]


def test_recorded_texts_are_in_the_wire_form(toys, tmp_path):
    """Each behind its length."""
    texts = np.array([b"a", b"", b"longer"], np.object_)
    file = recorded(tmp_path, encode_bytes_elements(texts))
    given = WarmupInput(BYTES, (3,), input_data_file=file)

    assert executed(toys, tmp_path, given, TensorSpec("x", BYTES, (3,))).tolist() == texts.tolist()


def test_a_reshape_holds_for_samples_as_well(toys, tmp_path):
    """They are given as clients give them."""
    spec = TensorSpec("x", FP32, (4,), reshape=(2, 2))

    assert executed(toys, tmp_path, WarmupInput(FP32, (4,), zero_data=True), spec, 4).shape == (1, 2, 2)


def test_bad_data_is_told_by_file_and_bytes(toys, tmp_path):
    """A file that is not there, or too short, or no texts."""

    def given(file, data_type=FP32):
        return sample(WarmupInput(data_type, (2,), input_data_file=file))

    short = recorded(tmp_path, b"12345", "short")
    text = {"inputs": (TensorSpec("x", BYTES, (2,)),)}

    failed = "model 'm': failed to run warmup sample 's': "
    assert refused(toys, tmp_path, given("gone")) == (
        f"{failed}there is no file warmup/gone, which its input 'x' is to be read from"
    )
    assert refused(toys, tmp_path, given(short)) == (
        f"{failed}warmup setting expects 8 bytes, but the data provided from warmup/short only has 5 bytes"
    )
    assert "incomplete string" in refused(toys, tmp_path, given(short, BYTES), **text)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"x": WarmupInput(FP32, (3,), zero_data=True)}, "unexpected shape for input 'x' for model 'm'"),
        ({"x": WarmupInput(INT64, (2,), zero_data=True)}, "inference input 'x' data-type is 'INT64'"),
        ({"z": WarmupInput(FP32, (2,), zero_data=True)}, "unexpected inference input 'z'"),
    ],
)
def test_a_sample_that_does_not_fit_the_model_is_refused(wrong, words, toys, tmp_path):
    """In the words in which a request would be, behind the sample's name."""
    message = refused(toys, tmp_path, sample(name="first"), sample(name="bad", **wrong))

    assert message.startswith("model 'm': failed to run warmup sample 'bad': ")
    assert words in message


def test_a_failure_names_the_sample_and_the_instance(toys, tmp_path):
    """Whatever the model raises."""

    def fail(rows):
        raise MmeError(Kind.EXECUTION_FAILED, "no zeros, please")

    assert refused(toys, tmp_path, sample(name="z"), script=fail) == (
        "model 'm' instance m_0: failed to run warmup sample 'z': no zeros, please"
    )


def test_no_memory_for_a_sample_is_no_fault_of_the_model(toys, tmp_path):
    """Others may go for it, which an invalid model would not be worth."""

    def fail(rows):
        raise MmeError(Kind.OUT_OF_MEMORY, "none left")

    with pytest.raises(MmeError, match="warmup sample 's'") as caught:
        warm(toys, tmp_path, sample(), script=fail)
    assert caught.value.kind is Kind.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("given", "batch_size"),
    [((2**50,), 1), ((2**62, 8), 1), ((1,), 2**32 - 1)],
    ids=["data", "more than 64 bits", "requests"],
)
@pytest.mark.parametrize("data", ["zero_data", "random_data"])
def test_a_sample_that_no_memory_holds_is_not_even_made(given, batch_size, data, toys, tmp_path):
    """The system would end the server, and with it all other models, for what one asks for."""
    spec = TensorSpec("x", FP32, (-1,) * len(given))
    too_large = sample(WarmupInput(FP32, given, **{data: True}), batch_size=batch_size)

    message = refused(toys, tmp_path, too_large, max_batch_size=2**32, inputs=(spec,))

    assert "failed to run warmup sample 's': its requests take " in message


IN_A_GROUP = """
import sys
from pathlib import Path
from model_handlers.config.model_config import ModelConfig, WarmupInput, WarmupSample
from model_handlers.errors import MmeError
from model_handlers.tensor import FP32, TensorSpec
from serve.model.warmup import Warmup

Path(sys.argv[1], "cgroup.procs").write_text("0")
held = bytearray(b"x") * (128 << 20)
given = {"x": WarmupInput(FP32, (16 << 20,), zero_data=True)}
config = ModelConfig("m", inputs=(TensorSpec("x", FP32, (-1,)),), model_warmup=(WarmupSample("s", 1, given),))
try:
    Warmup(config, Path())
except MmeError as error:
    print(error.kind.name, error.message)
"""


def test_a_sample_finds_the_memory_that_its_control_group_has():
    """Whatever the machine has beside that: the kernel would kill who takes it."""
    with small_group(200 << 20) as folder:
        told = subprocess.check_output([sys.executable, "-c", IN_A_GROUP, str(folder)], text=True, timeout=100)

    assert told.startswith("OUT_OF_MEMORY model 'm': failed to run warmup sample 's': its requests take 134218")


def test_each_sample_is_logged(toys, tmp_path, caplog):
    """By name and instance, once; its iterations for those who want to know all."""
    with caplog.at_level(logging.DEBUG, "mme.load"):
        warm(toys, tmp_path, sample(count=2))

    assert [record.getMessage() for record in caplog.records] == [
        "model 'm' instance m_0 is running warmup sample 's'",
        "warmup sample 's' for iteration 0",
        "warmup sample 's' for iteration 1",
    ]


SEQUENCES = SequenceBatching(
    control_input=(
        ControlInput("start", (SequenceControl(ControlKind.CONTROL_SEQUENCE_START, int32_false_true=(0, 1)),)),
        ControlInput("end", (SequenceControl(ControlKind.CONTROL_SEQUENCE_END, fp32_false_true=(0.0, 1.0)),)),
        ControlInput("id", (SequenceControl(ControlKind.CONTROL_SEQUENCE_CORRID, data_type=BYTES),)),
    ),
    state=(SequenceState("sum", "next", FP32, (-1,)),),
)


def test_a_model_of_sequences_is_warmed_up_by_first_requests(toys, tmp_path):
    """It is told that a sequence begins, and given its first state, unless the sample says otherwise."""
    seen = []

    class Keeping(toys.Scripted):
        def execute(self, inputs, outputs):  # noqa: ARG002 - there is one
            seen.append({name: array.ravel().tolist() for name, array in inputs.items()})
            return [inputs["x"]]

    ends = {"end": WarmupInput(FP32, (1,), random_data=True), "x": WarmupInput(FP32, (2,), zero_data=True)}
    config = toys.config(sequence_batching=SEQUENCES, model_warmup=(sample(batch_size=2), sample(**ends)))
    Warmup(config, tmp_path).run(Keeping(config), "m_0")

    assert seen[0] == {"x": [0] * 4, "start": [1, 1], "end": [0, 0], "id": [b"1", b"1"], "sum": [0, 0]}
    assert seen[1].keys() == seen[0].keys()
    assert seen[1]["end"] != [0]


class Answering:
    """What `execute_requests` of a model of its own mind does with one request after the other."""

    sees_requests = True

    def __init__(self, *ways):
        self.ways = list(ways)

    def warm(self, *, begins):
        """It has no limit of time."""

    def execute_requests(self, requests):
        """Each request in its own way."""
        return [way(request.responder) for way, request in zip(self.ways, requests, strict=True)]


def later(responder):
    """Two responses, in another thread's time."""
    responder.send(ModelResponse({}), final=False)
    responder.send(None, final=True)


def at_once(responder):
    """One response."""
    return ModelResponse({})


def broken(responder):
    """A response, and then an error."""
    responder.send(ModelResponse({}), final=False)
    responder.send(MmeError(Kind.EXECUTION_FAILED, "out of words"), final=True)


def test_responses_that_come_unasked_are_waited_for(toys, tmp_path):
    """The end of each request is waited for, and an error on the way is the sample's."""
    config = toys.config(model_warmup=(sample(batch_size=2),))

    Warmup(config, tmp_path).run(Answering(later, at_once), "m_0")
    with pytest.raises(MmeError, match="failed to run warmup sample 's': out of words"):
        Warmup(config, tmp_path).run(Answering(later, broken), "m_0")
