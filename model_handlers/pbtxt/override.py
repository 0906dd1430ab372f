"""A configuration that a client sends as JSON, in place of a model's config.pbtxt.

The JSON is that of the published message, as `GET /v2/models/M/config` answers it; names of enums may be written in
any letter case. Translates only, see `pbtxt`; holds no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from google.protobuf import json_format

from model_handlers.bounds import MAX_CONFIG_SIZE
from model_handlers.errors import invalid_argument
from model_handlers.pbtxt.text import config_of
from model_handlers.proto import model_config_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

    from model_handlers.config import ModelConfig
    from model_handlers.errors import MmeError

_SHOWN = 300  # characters of the parser's sentence, which may quote the document


def parse_config_json(text: str, *, model: str, strict_name: bool = False) -> ModelConfig:
    """Read a configuration. Arguments and result are those of `pbtxt.parse_config`.

    Raises:
        MmeError: INVALID_ARGUMENT for text that is no ModelConfig; else as `parse_config`.
    """
    if len(text) > MAX_CONFIG_SIZE:
        raise _no_config(model, f"it has {len(text)} characters, at most {MAX_CONFIG_SIZE}")
    try:
        document = orjson.loads(text)
        if not isinstance(document, dict):
            raise _no_config(model, "it must be a JSON object")
        fields = pb.DESCRIPTOR.message_types_by_name["ModelConfig"]
        message = json_format.ParseDict(_known_enums(document, fields), pb.ModelConfig())
    except RecursionError:
        raise _no_config(model, "it is nested too deeply") from None
    except (orjson.JSONDecodeError, json_format.ParseError) as error:
        raise _no_config(model, str(error).partition("\n")[0].replace("mme.", "")[:_SHOWN]) from None
    return config_of(message, model=model, strict_name=strict_name)


def _no_config(model: str, what: str) -> MmeError:
    """An error that begins as Triton's, which its clients look for."""
    return invalid_argument(
        f"failed to load '{model}', failed to poll from model repository: Invalid config override: {what}"
    )


def _known_enums(document: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    """The document with names of enums as the message has them."""
    fields = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    return {name: _known(value, fields[name]) if name in fields else value for name, value in document.items()}


def _known(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        return [_known(item, field) for item in value]
    if field.enum_type is not None and isinstance(value, str):
        return value.upper()
    if field.message_type is None or not isinstance(value, dict):
        return value
    if not field.message_type.GetOptions().map_entry:
        return _known_enums(value, field.message_type)
    inside = field.message_type.fields_by_name["value"]
    return {key: _known(item, inside) for key, item in value.items()}
