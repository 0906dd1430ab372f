"""A configuration of sequences completed from a graph: what clients send is apart from signals and states."""

import pytest

from model_handlers.config.autocomplete import complete
from model_handlers.config.model_config import (
    ControlInput,
    ControlKind,
    ModelConfig,
    OldestStrategy,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    all_inputs,
    all_outputs,
)
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BOOL, FP32, INT32, INT64, TensorSpec

BATCHING = SequenceBatching(
    OldestStrategy(),
    control_input=(
        ControlInput("START", (SequenceControl(ControlKind.CONTROL_SEQUENCE_START, int32_false_true=(0, 1)),)),
    ),
    state=(SequenceState("IN", "OUT", FP32, (-1, 2)),),
)
INPUTS = [("X", FP32, (-1, 4)), ("START", INT32, (-1, 1)), ("IN", FP32, (-1, -1, 2))]
OUTPUTS = [("Y", FP32, (-1, 1)), ("OUT", FP32, (-1, -1, 2))]


def completed(inputs=INPUTS, outputs=OUTPUTS, declared=(), **changes):
    """The configuration that comes of a graph."""
    config = ModelConfig("m", sequence_batching=BATCHING, outputs=declared, **changes)
    return complete(normalise(config), inputs, outputs)


def refused(**changes):
    """Why it does not fit the graph."""
    with pytest.raises(MmeError) as caught:
        completed(**changes)
    assert caught.value.kind is Kind.INVALID_MODEL
    return caught.value.message


def test_clients_send_what_is_neither_signal_nor_state():
    """The graph's other tensors become inputs and outputs; sequences have no dynamic batcher beside them."""
    config = completed()

    assert (config.inputs, config.outputs) == ((TensorSpec("X", FP32, (4,)),), (TensorSpec("Y", FP32, (1,)),))
    assert (config.max_batch_size, config.dynamic_batching) == (4, None)
    assert config.sequence_batching.strategy == OldestStrategy(0, (4,))
    assert [spec.name for spec in all_inputs(config)] == ["X", "START", "IN"]
    assert [spec.name for spec in all_outputs(config)] == ["Y", "OUT"]


def test_a_state_that_is_declared_is_an_output():
    """As the configuration has it, once."""
    outputs = (TensorSpec("OUT", FP32, (-1, 2)), TensorSpec("Y", FP32, (1,)))
    config = completed(max_batch_size=8, declared=outputs)

    assert config.outputs == outputs
    assert [spec.name for spec in all_outputs(config)] == ["OUT", "Y"]


def test_a_graph_without_a_batch_dimension_has_signals_without_one():
    """Of shape [1]."""
    inputs = [("X", FP32, (4,)), ("START", INT32, (1,)), ("IN", FP32, (-1, 2))]
    config = completed(inputs=inputs, outputs=[("Y", FP32, (1,)), ("OUT", FP32, (-1, 2))])

    assert (config.max_batch_size, [spec.name for spec in config.inputs]) == (0, ["X"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"inputs": [INPUTS[0], INPUTS[2]]},
            (
                "unable to load model 'm', configuration specified sequence control or state input 'START', but the model "
                "does not provide it, it has: X, IN"
            ),
        ),
        (
            {"outputs": [OUTPUTS[0]]},
            (
                "unable to load model 'm', configuration specified sequence state output 'OUT', but the model does not "
                "provide it, it has: Y"
            ),
        ),
        (
            {"inputs": [INPUTS[0], ("START", BOOL, (-1, 1)), INPUTS[2]]},
            (
                "unable to load model 'm', configuration expects datatype TYPE_INT32 for sequence control or state input "
                "'START', model provides TYPE_BOOL"
            ),
        ),
        (
            {"inputs": [INPUTS[0], ("START", INT32, (-1, 2)), INPUTS[2]]},
            (
                "model 'm', tensor 'START': the model expects 2 dimensions (shape [-1,2]) but the model configuration "
                "specifies 2 dimensions"
            ),
        ),
        (
            {"outputs": [OUTPUTS[0], ("OUT", INT64, (-1, -1, 2))]},
            (
                "unable to load model 'm', configuration expects datatype TYPE_FP32 for sequence state output 'OUT', model "
                "provides TYPE_INT64"
            ),
        ),
    ],
)
def test_a_graph_that_has_them_otherwise_is_refused(changes, sentence):
    """By the name of the tensor."""
    assert refused(max_batch_size=4, **changes).startswith(sentence)
