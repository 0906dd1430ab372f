"""A configuration completed by the model's own `auto_complete_config`. Runs on the thread that loads.

What config.pbtxt says stands: the author's code may add tensors, a larger batch and dynamic batching. Where the server
completes no configurations it is not asked.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model_handlers.config.convert import config_json, with_named
from model_handlers.config.model_config import DynamicBatching
from model_handlers.config.validate import normalise
from model_handlers.errors import invalid_model
from model_handlers.python import pb_config
from model_handlers.python.failures import failed_load
from model_handlers.tensor import BY_CONFIG_NAME, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from model_handlers.config.model_config import ModelConfig, NamedTensor


def complete(config: ModelConfig, author_class: type[Any]) -> ModelConfig:
    """The configuration with what the author's class adds, checked.

    Raises:
        MmeError: INVALID_MODEL when it contradicts config.pbtxt or nobody names any input or output.
    """
    if hasattr(author_class, "auto_complete_config") and not config.strict:
        config = _merged(config, _asked(config, author_class))
    _check_named("input", config.named_inputs, config.inputs, config.name)
    _check_named("output", config.named_outputs, config.outputs, config.name)
    config = normalise(replace(config, named_inputs=(), named_outputs=()))
    if not (config.inputs or config.outputs):
        raise invalid_model(
            f"model configuration must contain at least one input or output, none were specified for '{config.name}': "
            "name them in config.pbtxt, or add them in auto_complete_config with add_input and add_output"
        )
    return config


def _check_named(what: str, named: Sequence[NamedTensor], completed: Sequence[TensorSpec], model: str) -> None:
    """Whether every tensor that config.pbtxt only names has been completed."""
    names = {spec.name for spec in completed}
    for tensor in named:
        if tensor.name not in names:
            raise invalid_model(
                f"model {what} '{tensor.name}' must specify 'data_type' and 'dims' for {model}: in config.pbtxt, or in "
                f"auto_complete_config with add_{what}"
            )


def _asked(config: ModelConfig, author_class: type[Any]) -> dict[str, Any]:
    """What the author's code makes of the configuration."""
    try:
        completed = author_class.auto_complete_config(pb_config.ModelConfig(json.dumps(_document(config.authors()))))
    except BaseException as error:
        raise failed_load("auto_complete_config ran", error, config.name) from error
    if not isinstance(completed, pb_config.ModelConfig):
        raise invalid_model(
            f"auto_complete_config function in model '{config.name}' must return a valid pb.ModelConfig object."
        )
    return completed.as_dict()


def _document(config: ModelConfig) -> dict[str, Any]:
    """What the author's code is shown: as clients see it, and the tensors that are to be completed in their places."""
    return with_named(config_json(config), config)


def _merged(config: ModelConfig, asked: Mapping[str, Any]) -> ModelConfig:
    batching = config.dynamic_batching
    if batching is None and "dynamic_batching" in asked:
        batching = DynamicBatching(preferred_batch_size=())
    return replace(
        config,
        max_batch_size=_integer(asked["max_batch_size"], "max_batch_size", config.name),
        dynamic_batching=batching,
        inputs=_with_added("input", config.inputs, config.named_inputs, asked["input"], config.name),
        outputs=_with_added("output", config.outputs, config.named_outputs, asked["output"], config.name),
        decoupled=bool(asked.get("model_transaction_policy", {}).get("decoupled")) or config.decoupled,
    )


def _with_added(
    what: str,
    declared: tuple[TensorSpec, ...],
    named: tuple[NamedTensor, ...],
    asked: Sequence[Mapping[str, Any]],
    model: str,
) -> tuple[TensorSpec, ...]:
    """The declared specs, and those that the author's code added or completed, in the order in which it has them."""
    missing = {spec.name: spec for spec in declared}
    incomplete = {each.name for each in named}
    specs = []
    for tensor in asked:
        name = tensor["name"]
        if name in missing:
            specs.append(missing.pop(name))
        elif name not in incomplete or not pb_config.is_incomplete(tensor):
            specs.append(_spec(what, tensor, model))
    return (*missing.values(), *specs)


def _spec(what: str, tensor: Mapping[str, Any], model: str) -> TensorSpec:
    name = tensor["name"]
    subject = f"{what} '{name}' that auto_complete_config of model '{model}' adds"
    if not isinstance(name, str) or not name:
        raise invalid_model(f"{subject} has no text for a name")
    data_type = BY_CONFIG_NAME.get(tensor["data_type"])
    if data_type is None:
        raise invalid_model(f"{subject} has data_type {tensor['data_type']!r}; data types look like 'TYPE_FP32'")
    dims = tuple(_integer(dim, f"a dimension of {subject}", model) for dim in tensor["dims"])
    return TensorSpec(name, data_type, dims, optional=bool(tensor.get("optional", False)))


def _integer(value: Any, what: str, model: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise invalid_model(f"{what} must be an integer, auto_complete_config of model '{model}' says {value!r}")
    return int(value)
