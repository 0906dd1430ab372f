"""`pb_utils.ModelConfig`: what a model's `auto_complete_config` is given and completes. PURE.

It holds the configuration as the JSON that clients are shown, and refuses with Triton's words what contradicts it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_INPUT_PROPERTIES = ("name", "data_type", "dims", "optional")
_OUTPUT_PROPERTIES = ("name", "data_type", "dims")
_UNKNOWN = "TYPE_INVALID"


class ModelConfig:
    """A configuration under completion. All `set_` and `add_` methods raise ValueError for contradictions.

    Args:
        model_config: the configuration as JSON text.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)
        self._name: str = self._model_config["name"]

    def as_dict(self) -> dict[str, Any]:
        """The configuration as it is now, to be read."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch, which may not be smaller than the configured one."""
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Have requests batched, with default settings unless the configuration has others."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Say whether the model is decoupled: `{"decoupled": bool}`."""
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
        """Add an input: `name`, `data_type` ("TYPE_FP32"), `dims` and maybe `optional`."""
        self._add("input", input, _INPUT_PROPERTIES)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: `name`, `data_type` ("TYPE_FP32") and `dims`."""
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
        """What the configuration says stands; the model may say the same."""
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
