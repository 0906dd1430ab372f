"""What becomes of each field of config.pbtxt: a row for each that is not honoured, and the walk that looks rows up.

A field that is set is honoured, harmless (logged once, then forgotten) or refused; none is dropped in silence, and
docs/configuration.md has those that are not honoured. A message field that is honoured sends the walk inside; a row
speaks for everything below its field. Fields that are spelled out with their default value (`decoupled: false`) count
as not set, as protobuf itself has it.
Knows fields, not their values: `config_checks.py` judges those. Runs on a load thread; holds no state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

_log = logging.getLogger("mme.config")


class Fate(Enum):
    """What becomes of a field that is set."""

    HONOURED = "honoured"
    HARMLESS = "harmless"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: the fate, and what the reader of the log line or of the error should know about it."""

    fate: Fate
    reason: str = ""


def _harmless(reason: str) -> Rule:
    return Rule(Fate.HARMLESS, reason)


def _refused(reason: str) -> Rule:
    return Rule(Fate.REFUSED, reason)


_HONOURED = Rule(Fate.HONOURED)
_SPEED = _harmless("it changes speed, never results")
_SHAPES = _refused(
    "shape tensors are only supported for TensorRT platform, and an engine is told a request's own shapes here"
)
_LAYOUTS = _refused("Non-linear IO format is only supported for the TensorRT platform, and tensors lie as numpy's here")

# By message and field of the published message; all others are honoured.
_NOT_HONOURED: Mapping[str, Rule] = {
    "ModelInput.is_shape_tensor": _SHAPES,
    "ModelInput.is_non_linear_format_io": _LAYOUTS,
    "ModelOutput.is_shape_tensor": _SHAPES,
    "ModelOutput.is_non_linear_format_io": _LAYOUTS,
    "ModelOptimizationPolicy.priority": _SPEED,
    "ModelOptimizationPolicy.input_pinned_memory": _SPEED,
    "ModelOptimizationPolicy.output_pinned_memory": _SPEED,
    "ModelOptimizationPolicy.gather_kernel_buffer_threshold": _SPEED,
    "ModelOptimizationPolicy.eager_batching": _SPEED,
    "ModelOptimizationPolicy.Cuda.graphs": _SPEED,
    "ModelOptimizationPolicy.Cuda.busy_wait_events": _SPEED,
    "ModelOptimizationPolicy.Cuda.graph_spec": _SPEED,
    "ModelOptimizationPolicy.Cuda.output_copy_stream": _SPEED,
    "ModelInstanceGroup.secondary_devices": _refused("instances run on CPUs and GPUs alone"),
    "ModelInstanceGroup.passive": _refused("every instance takes requests"),
    "ModelInstanceGroup.host_policy": _harmless("threads and memory are the operating system's to place"),
}


def rule_of(field: FieldDescriptor) -> Rule:
    """The row of a field."""
    return _NOT_HONOURED.get(field.full_name.removeprefix("mme."), _HONOURED)


def every_field(message: Descriptor, prefix: str = "") -> Iterator[tuple[str, Rule]]:
    """Path and row of each field that a message can have; what lies below one that is not honoured shares its fate."""
    for field in message.fields:
        inside, rule = _message_of(field), rule_of(field)
        path = f"{prefix}{field.name}{'[]' if field.is_repeated else ''}"
        if rule.fate is Fate.HONOURED and inside is not None and inside.fields:
            yield from every_field(inside, f"{path}.")
        else:
            yield path, rule


def check_fields(message: Message, model: str) -> None:
    """Refuse or log every field of a ModelConfig message that is set and not honoured.

    Raises:
        MmeError: UNSUPPORTED for a refused field, INVALID_MODEL for a number that its enum does not name; the
            sentence holds the field's full path.
    """
    logged = set()
    for path, field, value, rule in set_fields(message):
        error = field_error(path, field, value, rule, model)
        if error is not None:
            raise error
        if rule.fate is Fate.HARMLESS and field.full_name not in logged:
            logged.add(field.full_name)
            _log.warning("model '%s': config.pbtxt field '%s' is ignored: %s", model, path, rule.reason)


def field_error(path: str, field: FieldDescriptor, value: Any, rule: Rule, model: str) -> MmeError | None:
    """What is wrong with a field that is set, whatever the rest of the configuration says."""
    if rule.fate is Fate.REFUSED:
        return refusal(path, rule.reason, model)
    # A number in the text need not be one that the enum names.
    if field.enum_type is not None and value not in field.enum_type.values_by_number:
        names = ", ".join(field.enum_type.values_by_name)
        return invalid_model(f"model '{model}': config.pbtxt field '{path}' is {value}, must be one of {names}")
    return None


def refusal(path: str, reason: str, model: str) -> MmeError:
    """The error that refuses a field or its value."""
    return MmeError(
        Kind.UNSUPPORTED,
        f"model '{model}': config.pbtxt field '{path}' is not honoured ({reason}); "
        "remove it or serve the model elsewhere",
    )


def set_fields(message: Message, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor, Any, Rule]]:
    """Path, descriptor, value and row of each set field, depth first, as far as the rows lead inside."""
    for field, value in message.ListFields():
        path, rule = prefix + field.name, rule_of(field)
        yield path, field, value, rule
        if rule.fate is Fate.HONOURED:
            for member_path, member in _members(field, value, path):
                yield from set_fields(member, f"{member_path}.")


def _message_of(field: FieldDescriptor) -> Descriptor | None:
    """What is inside of a field; of a map, inside of its values."""
    message: Descriptor | None = field.message_type
    if message is not None and message.GetOptions().map_entry:
        message = message.fields_by_name["value"].message_type
    return message


def _members(field: FieldDescriptor, value: Any, path: str) -> Iterable[tuple[str, Message]]:
    """The messages inside a field: none in a scalar, one, those of a list, or the values of a map."""
    if field.message_type is None or _message_of(field) is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        return [(f"{path}['{key}']", value[key]) for key in sorted(value)]
    if field.is_repeated:
        return [(f"{path}[{index}]", member) for index, member in enumerate(value)]
    return [(path, value)]
