"""Warm-up samples out of a ModelConfig message and back into one. Translates alone; see `pbtxt`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from model_handlers.config import WarmupData, WarmupInput, WarmupSample
from model_handlers.errors import invalid_model
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.tensor import BY_NUMBER

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


def warmup_messages(samples: tuple[WarmupSample, ...]) -> list[pb.ModelWarmup]:
    """The messages that say the same."""
    return [
        pb.ModelWarmup(
            name=sample.name,
            batch_size=sample.batch_size,
            count=sample.count,
            inputs={name: _input_message(given) for name, given in sample.inputs.items()},
        )
        for sample in samples
    ]


def _input(name: str, given: pb.ModelWarmup.Input, model: str) -> WarmupInput:
    chosen = given.WhichOneof("input_data_type")
    if chosen is None:
        raise invalid_model(f"warmup setting expects input '{name}' to have input_data_type set for {model}")
    if given.data_type not in BY_NUMBER:
        raise invalid_model(f"warmup setting expects input '{name}' to have data_type set for {model}")
    return WarmupInput(BY_NUMBER[given.data_type], tuple(given.dims), _DATA[chosen], given.input_data_file)


def _input_message(given: WarmupInput) -> pb.ModelWarmup.Input:
    fields: dict[str, Any] = {"data_type": given.data_type.number, "dims": given.dims}
    message = pb.ModelWarmup.Input(**fields)
    if given.data is WarmupData.FILE:
        message.input_data_file = given.file
    elif given.data is WarmupData.RANDOM:
        message.random_data = True
    else:
        message.zero_data = True
    return message
