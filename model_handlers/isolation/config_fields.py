"""A model configuration as plain JSON values, to cross between processes, and back.

PURE. Unlike config.pbtxt this says everything that a `ModelConfig` says and checks nothing: it was checked before.

A list stands for a tuple, and an object of one key for what JSON has no form for: `{"map": [[key, value], …]}`,
`{"type": "FP32"}`, `{"InstanceKind": "GPU"}`, `{"VersionPolicy": {field: value, …}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from model_handlers import config as _config
from model_handlers import sequence_config
from model_handlers.config import ModelConfig
from model_handlers.tensor import BY_NAME, DataType, TensorSpec

_CLASSES: dict[str, Any] = {
    name: value
    for name, value in {**vars(_config), **vars(sequence_config), "TensorSpec": TensorSpec}.items()
    if isinstance(value, type) and (is_dataclass(value) or issubclass(value, Enum))
}


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of the configuration as objects, lists, strings and numbers."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def config_from(plain: dict[str, Any]) -> ModelConfig:
    """The configuration that `config_fields` took apart.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it did not.
    """
    return ModelConfig(**{name: _made(value) for name, value in plain.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {"map": [[key, _plain(item)] for key, item in value.items()]}
    if isinstance(value, DataType):
        return {"type": value.name}
    if isinstance(value, Enum):
        return {type(value).__name__: value.name}
    if is_dataclass(value):
        return {type(value).__name__: {field.name: _plain(getattr(value, field.name)) for field in fields(value)}}
    return value


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_made(item) for item in value)
    if not isinstance(value, dict):
        return value
    ((what, inner),) = value.items()
    if what == "map":
        return MappingProxyType({key: _made(item) for key, item in inner})
    if what == "type":
        return BY_NAME[inner]
    made = _CLASSES[what]
    return made[inner] if issubclass(made, Enum) else made(**{name: _made(item) for name, item in inner.items()})
