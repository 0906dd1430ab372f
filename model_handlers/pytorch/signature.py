"""A configuration and a program brought together: completed, checked, and which tensor goes where. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.config.autocomplete import complete, given_to
from model_handlers.config.model_config import all_outputs
from model_handlers.config.validate import normalise
from model_handlers.errors import invalid_model
from model_handlers.pytorch.names import bound, check_given, position
from model_handlers.tensor import BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.config.autocomplete import GraphTensor
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.pytorch.names import Slot
    from model_handlers.pytorch.programs import Program
    from model_handlers.tensor import TensorSpec


def completed(config: ModelConfig, program: Program) -> ModelConfig:
    """The configuration with what the program tells of inputs and outputs.

    Raises:
        MmeError: INVALID_MODEL where the two disagree, or where the program tells nothing and neither does it.
    """
    if program.tensors is None:
        if not (config.inputs and config.outputs):
            raise _incomplete(config, program)
        return normalise(config)
    inputs, outputs = program.tensors
    return complete(
        config,
        _as_declared("input", given_to(config), program.arguments or (), inputs, config.name),
        _as_declared("output", all_outputs(config), program.results or (), outputs, config.name),
    )


def _as_declared(
    what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], tensors: list[GraphTensor], model: str
) -> list[GraphTensor]:
    """The program's tensors under the names that the configuration has for them."""
    names = {place: spec.name for place, spec in zip(bound(what, specs, slots, model), specs, strict=True)}
    return [(names.get(place, name), kind, shape) for place, (name, kind, shape) in enumerate(tensors)]


def _incomplete(config: ModelConfig, program: Program) -> Exception:
    inputs = program.arguments if program.arguments is not None else ()
    outputs = program.results if program.results is not None else ()
    takes = ", ".join(slot.name for slot in inputs) or "a dictionary"
    gives = ", ".join(slot.name for slot in outputs) or "what only an execution tells"
    lacks = " and ".join(field for field, specs in (("input", config.inputs), ("output", config.outputs)) if not specs)
    return invalid_model(
        f"model '{config.name}' keeps names alone, neither types nor shapes (it takes {takes} and returns {gives}), "
        f"and its configuration has no {lacks}: write into config.pbtxt, for each of them, "
        f'input [ {{ name: "{inputs[0].name if inputs else "INPUT__0"}" data_type: TYPE_FP32 dims: [ -1 ] }} ] and '
        f'output [ {{ name: "{outputs[0].name if outputs else "OUTPUT__0"}" data_type: TYPE_FP32 dims: [ -1 ] }} ]'
    )


def arguments(config: ModelConfig, program: Program) -> list[tuple[TensorSpec, str]]:
    """For each input the argument that it is.

    Raises:
        MmeError: INVALID_MODEL where they can't be matched.
    """
    slots, specs = program.arguments, given_to(config)
    if slots is None:
        return [(spec, spec.name) for spec in specs]
    found = bound("input", specs, slots, config.name)
    check_given(specs, found, slots, config.name)
    chosen = [slots[place] for place in found]
    _check_strings("input", specs, chosen, config.name)
    return [(spec, slot.name) for spec, slot in zip(specs, chosen, strict=True)]


def places(config: ModelConfig, program: Program) -> dict[str, int]:
    """For each output its place among the results, where those have an order.

    Raises:
        MmeError: INVALID_MODEL where they can't be matched.
    """
    slots, specs = program.results, all_outputs(config)
    if slots is None:
        return {spec.name: position(spec.name, index) for index, spec in enumerate(specs)}
    found = bound("output", specs, slots, config.name)
    _check_strings("output", specs, [slots[place] for place in found], config.name)
    return {spec.name: place for spec, place in zip(specs, found, strict=True)}


def _check_strings(what: str, specs: Sequence[TensorSpec], slots: Sequence[Slot], model: str) -> None:
    for spec, slot in zip(specs, slots, strict=True):
        if slot.strings is not None and slot.strings != (spec.data_type is BYTES):
            kind = "a list of strings, TYPE_STRING" if slot.strings else "a tensor, which TYPE_STRING can't be"
            raise invalid_model(
                f"unable to load model '{model}', configuration expects datatype {spec.data_type.config_name} for "
                f"{what} '{spec.name}', model provides {kind}"
            )
