"""A configuration completed by the model's own `auto_complete_config`, and `pb_utils.ModelConfig`, which that is given.

It holds the configuration as the JSON that clients are shown, and refuses with Triton's words what contradicts it. What
config.pbtxt says stands: the author's code may add tensors, a larger batch and dynamic batching. Where the server
completes no configurations it is not asked.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model_handlers.config.convert import config_json, with_named
from model_handlers.config.model_config import DynamicBatching, NamedTensor
from model_handlers.config.model_config import ModelConfig as Config
from model_handlers.config.validate import normalise
from model_handlers.errors import invalid_model
from model_handlers.python.author_code import failed_load
from model_handlers.tensor import BY_CONFIG_NAME, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_INPUT_PROPERTIES = ("name", "data_type", "dims", "optional")
_OUTPUT_PROPERTIES = ("name", "data_type", "dims")
_UNKNOWN = "TYPE_INVALID"


class ModelConfig:
    """A configuration under completion, of JSON. All `set_` and `add_` methods raise ValueError for contradictions."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)
        self._name: str = self._model_config["name"]

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        if any(name != "decoupled" for name in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                "property other than 'decoupled'."
            )
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = bool(transaction_policy_dict["decoupled"])
        configured = self._model_config.get("model_transaction_policy")
        if configured is not None and configured["decoupled"] != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{configured['decoupled']}'."
            )
        self._model_config["model_transaction_policy"] = {"decoupled": wanted}

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - its interface
        self._add("input", input, _INPUT_PROPERTIES)

    def add_output(self, output: Mapping[str, Any]) -> None:
        self._add("output", output, _OUTPUT_PROPERTIES)

    def _add(self, what: str, tensor: Mapping[str, Any], properties: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{what} {where} is missing 'name' property.")
        name = tensor["name"]
        if any(given not in properties for given in tensor):
            *most, last = (f"'{given}'" for given in properties)
            raise ValueError(f"{what} '{name}' {where} contains property other than {', '.join(most)} and {last}.")
        for needed in ("data_type", "dims"):
            if needed not in tensor:
                raise ValueError(f"{what} '{name}' {where} is missing '{needed}' property.")
        configured = next((other for other in self._model_config[what] if other["name"] == name), None)
        if configured is None:
            self._model_config[what].append({**tensor, "dims": list(tensor["dims"])})
        else:
            self._agree(what, configured, tensor)

    def _agree(self, what: str, configured: dict[str, Any], tensor: Mapping[str, Any]) -> None:
        # What the configuration says stands; the model may say the same.
        name, data_type, dims = tensor["name"], tensor["data_type"], list(tensor["dims"])
        if is_incomplete(configured):  # what is missing is the model's to say
            optional = {"optional": tensor["optional"]} if "optional" in tensor else {}
            configured |= {"dims": configured["dims"] or dims, **optional}
            if configured["data_type"] == _UNKNOWN:
                configured["data_type"] = data_type
        if configured["data_type"] != data_type:
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {configured['data_type']} for "
                f"{what} '{name}', model provides {data_type}"
            )
        if configured["dims"] != dims:
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects dims {dims} but the model configuration "
                f"specifies dims {configured['dims']}"
            )
        optional = tensor.get("optional", configured.get("optional"))
        if configured.setdefault("optional", optional) != optional:
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects optional {optional} but the model "
                f"configuration specifies optional {configured['optional']}"
            )


def is_incomplete(tensor: Mapping[str, Any]) -> bool:
    """Whether a tensor of the configuration still lacks its type or its dims."""
    return tensor.get("data_type") == _UNKNOWN or not tensor.get("dims", True)


def complete(config: Config, author_class: type[Any]) -> Config:
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
    names = {spec.name for spec in completed}
    for tensor in named:
        if tensor.name not in names:
            raise invalid_model(
                f"model {what} '{tensor.name}' must specify 'data_type' and 'dims' for {model}: in config.pbtxt, or in "
                f"auto_complete_config with add_{what}"
            )


def _asked(config: Config, author_class: type[Any]) -> dict[str, Any]:
    shown = config.author_view()
    try:
        document = json.dumps(with_named(config_json(shown), shown))
        completed = author_class.auto_complete_config(ModelConfig(document))
    except BaseException as error:
        raise failed_load("auto_complete_config ran", error, config.name) from error
    if not isinstance(completed, ModelConfig):
        raise invalid_model(
            f"auto_complete_config function in model '{config.name}' must return a valid pb.ModelConfig object."
        )
    return completed.as_dict()


def _merged(config: Config, asked: Mapping[str, Any]) -> Config:
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
    missing = {spec.name: spec for spec in declared}
    incomplete = {each.name for each in named}
    specs = []
    for tensor in asked:
        name = tensor["name"]
        if name in missing:
            specs.append(missing.pop(name))
        elif name not in incomplete or not is_incomplete(tensor):
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
