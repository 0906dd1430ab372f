"""Warm-up samples out of a ModelConfig message. Translates alone; see `pbtxt`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.config import WarmupData, WarmupInput, WarmupSample
from model_handlers.errors import invalid_model
from model_handlers.tensor import BY_NUMBER

if TYPE_CHECKING:
    from model_handlers.proto import model_config_pb2 as pb

_DATA = {
    "zero_data": WarmupData.ZERO,
    "random_data": WarmupData.RANDOM,
    "input_data_file": WarmupData.FILE,
}


def warmup_samples(message: pb.ModelConfig, model: str) -> tuple[WarmupSample, ...]:
    """The samples, in the order of the text.

    Raises:
        MmeError: INVALID_MODEL for an input that names no data or no type.
    """
    return tuple(
        WarmupSample(
            sample.name,
            sample.batch_size,
            sample.count or 1,  # 0 is how the message says that none is given
            MappingProxyType({name: _input(name, sample.inputs[name], model) for name in sorted(sample.inputs)}),
        )
        for sample in message.model_warmup
    )


def _input(name: str, given: pb.ModelWarmup.Input, model: str) -> WarmupInput:
    chosen = given.WhichOneof("input_data_type")
    if chosen is None:
        raise invalid_model(f"warmup setting expects input '{name}' to have input_data_type set for {model}")
    if given.data_type not in BY_NUMBER:
        raise invalid_model(f"warmup setting expects input '{name}' to have data_type set for {model}")
    return WarmupInput(BY_NUMBER[given.data_type], tuple(given.dims), _DATA[chosen], given.input_data_file)
