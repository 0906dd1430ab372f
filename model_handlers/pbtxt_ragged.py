"""The helpers of ragged batches out of a ModelConfig message. Translates alone; see `pbtxt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.config import BatchInput, BatchInputKind, BatchOutput
from model_handlers.errors import invalid_model
from model_handlers.tensor import BY_NUMBER, FP32, INT32

if TYPE_CHECKING:
    from model_handlers.proto import model_config_pb2 as pb


def batch_inputs(message: pb.ModelConfig) -> tuple[BatchInput, ...]:
    """What is worked out of each batch for the model.

    Raises:
        MmeError: INVALID_MODEL for a type that it can't have.
    """
    return tuple(_batch_input(given) for given in message.batch_input)


def _batch_input(given: pb.BatchInput) -> BatchInput:
    data_type = BY_NUMBER.get(given.data_type)
    if data_type not in (INT32, FP32):
        raise invalid_model("batch input data type must be TYPE_INT32 or TYPE_FP32")
    return BatchInput(BatchInputKind(given.kind), tuple(given.target_name), data_type, tuple(given.source_input))


def batch_outputs(message: pb.ModelConfig) -> tuple[BatchOutput, ...]:
    """What outputs are split by the shape of an input."""
    return tuple(BatchOutput(tuple(given.target_name), tuple(given.source_input)) for given in message.batch_output)
