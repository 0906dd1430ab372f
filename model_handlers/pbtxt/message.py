"""The published message ModelConfig → a `ModelConfig`. Translates alone: see `pbtxt` for its text.

PURE, but for a line in the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from google.protobuf import json_format

from model_handlers.config_json import OPTIMIZATION, config_from, said_by
from model_handlers.errors import invalid_model
from model_handlers.tensor import BY_NUMBER, FP32, INT32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.config import ModelConfig
    from model_handlers.errors import MmeError
    from model_handlers.proto import model_config_pb2 as pb

_log = logging.getLogger("mme.config")


def translated(message: pb.ModelConfig, model: str) -> ModelConfig:
    """The message as a configuration, whose rules nobody has looked at yet.

    Raises:
        MmeError: INVALID_MODEL for what a configuration has no place for.
    """
    for _, error in gaps(message, model):
        raise error
    said = {**said_by(message), "name": model}
    for what in ("input", "output"):
        tensors = getattr(message, what)
        named = [place for place, tensor in enumerate(tensors) if is_named_only(tensor, message)]
        if named:
            said[what] = [tensor for place, tensor in enumerate(tensors) if place not in named]
            said[f"named_{what}s"] = [{**said_by(tensors[place]), "place": place} for place in named]
    if "optimization" in said:
        said["optimization"] = _optimization(message.optimization)
    batching = message.dynamic_batching
    if not batching.priority_levels and (batching.priority_queue_policy or batching.default_priority_level):
        _log.warning("model '%s': priorities change nothing, since dynamic_batching.priority_levels is 0", model)
    return config_from(said)


def _optimization(message: pb.ModelOptimizationPolicy) -> dict[str, object]:
    """As JSON, without what is the default."""
    document = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {name: value for name, value in document.items() if value != OPTIMIZATION.get(name)}


def is_named_only(tensor: pb.ModelInput | pb.ModelOutput, message: pb.ModelConfig) -> bool:
    """Whether a tensor lacks its type or its dims, which a Python model may give it in `auto_complete_config`.

    Where the text names no backend the model's file tells later whether it is one.
    """
    whole = tensor.data_type in BY_NUMBER and tensor.dims
    may_be_python = message.backend == "python" or not (message.backend or message.platform)
    return may_be_python and bool(tensor.name) and not whole


def gaps(message: pb.ModelConfig, model: str) -> Iterator[tuple[str, MmeError]]:
    """What a message lacks that a configuration has to have: the field of ModelConfig, and the error."""
    for what in ("input", "output"):
        for tensor in getattr(message, what):
            if not tensor.name:
                yield what, invalid_model(f"model {what} must specify 'name' for {model}")
            elif tensor.data_type not in BY_NUMBER and not is_named_only(tensor, message):
                yield what, invalid_model(f"model {what} '{tensor.name}' must specify 'data_type' for {model}")
    policy = message.version_policy
    if policy.HasField("specific") and not policy.specific.versions:
        yield (
            "version_policy",
            invalid_model(
                f"at least one version must be available under the version policy of model '{model}': "
                "name one in 'version_policy.specific.versions'"
            ),
        )
    if any(given.data_type not in (INT32.number, FP32.number) for given in message.batch_input):
        yield "batch_input", invalid_model("batch input data type must be TYPE_INT32 or TYPE_FP32")
    for sample in message.model_warmup:
        for name, given in sorted(sample.inputs.items()):
            lacking = "" if given.WhichOneof("input_data_type") else "input_data_type"
            lacking = lacking or ("" if given.data_type in BY_NUMBER else "data_type")
            if lacking:
                sentence = f"warmup setting expects input '{name}' to have {lacking} set for {model}"
                yield "model_warmup", invalid_model(sentence)
    for control in message.model_metrics.metric_control:
        for field in ("metric_identifier", "histogram_options"):
            if not control.HasField(field):
                yield "model_metrics", invalid_model(f"metric control must specify '{field}'")
    for state in message.sequence_batching.state:
        if state.data_type not in BY_NUMBER:
            sentence = f"state input '{state.input_name}' must specify 'data_type' for {model}"
            yield "sequence_batching", invalid_model(sentence)
