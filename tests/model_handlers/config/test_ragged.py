"""What ragged batches ask of a model is checked against the model."""

from dataclasses import replace

import pytest

from model_handlers.config.autocomplete import complete
from model_handlers.config.model_config import BatchInput, BatchInputKind, BatchOutput, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32, INT32, INT64, TensorSpec

GRAPH = [("x", FP32, (-1,)), ("count", INT32, (-1,))], [("y", FP32, (-1,))]
COUNT = BatchInput(BatchInputKind.ELEMENT_COUNT, ("count",), INT32, ("x",))
CONFIG = ModelConfig(
    "bert",
    max_batch_size=8,
    inputs=(TensorSpec("x", FP32, (-1, 3), allow_ragged_batch=True),),
    outputs=(TensorSpec("y", FP32, (-1, 3)),),
    batch_input=(COUNT,),
    batch_output=(BatchOutput(("y",), ("x",)),),
)
UNABLE = "unable to load model 'bert', configuration expects datatype"


def test_what_is_worked_out_is_no_input_of_clients():
    """Nor do split outputs need the graph's shape; what is not declared is found in the graph as ever."""
    assert complete(CONFIG, *GRAPH) == CONFIG
    inputs = [*GRAPH[0], ("z", INT64, (-1, 2))]
    completed = complete(replace(CONFIG, outputs=()), inputs, GRAPH[1])
    assert completed.inputs == (*CONFIG.inputs, TensorSpec("z", INT64, (2,)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"batch_input": (replace(COUNT, source_input=("nobody",)),)},
            "unknown source input name 'nobody' for bert",
        ),
        (
            {"batch_output": (BatchOutput(("y",), ("count",)),)},
            "unknown source input name 'count' for bert",
        ),
        (
            {"outputs": (), "batch_output": (BatchOutput(("nothing",), ("x",)),)},
            "unknown target output name 'nothing' for bert",
        ),
        (
            {"batch_input": (replace(COUNT, data_type=FP32),)},
            f"{UNABLE} TYPE_FP32 for batch input 'count', model provides TYPE_INT32",
        ),
        (
            {"outputs": (), "batch_input": (COUNT, replace(COUNT, target_name=("other",)))},
            f"{UNABLE} TYPE_INT32 for batch input 'other', model provides no such input",
        ),
    ],
)
def test_what_is_named_must_be_there(changes, sentence):
    """Sources are inputs of clients, targets are tensors of the model."""
    with pytest.raises(MmeError) as caught:
        complete(replace(CONFIG, **changes), *GRAPH)

    assert (caught.value.kind, caught.value.message) == (Kind.INVALID_MODEL, sentence)


def test_a_model_of_a_ragged_input_takes_a_row():
    """It gets the elements of all requests, which have no shape together."""
    with pytest.raises(MmeError) as caught:
        complete(CONFIG, [("x", FP32, (-1, -1, 3)), GRAPH[0][1]], GRAPH[1])

    assert caught.value.message == (
        "unable to load model 'bert', configuration expects model provides input with shape [-1]  for ragged input 'x'"
    )
