"""config.pbtxt into a `ModelConfig`, and a `ModelConfig` back into text.

The text is read by protobuf's own parser against the published message, so that whatever Triton accepts is accepted
here letter by letter. Which fields count is the business of `fields`, what they mean that of `message`,
which values are right that of `config_checks`. Runs on load threads and in `mme pack`; holds no state.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from google.protobuf import json_format, text_format

from model_handlers.bounds import excesses
from model_handlers.config_checks import normalise
from model_handlers.config_json import config_json, with_named
from model_handlers.errors import MmeError, invalid_model
from model_handlers.pbtxt.advice import advice
from model_handlers.pbtxt.fields import check_fields
from model_handlers.pbtxt.message import translated
from model_handlers.proto import model_config_pb2 as pb

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig

_COMMENT_OR_STRING = re.compile(r"""#.*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
_ESCAPE = re.compile(r"\\([4-7][0-7]{2}|.)")  # the first alternative is no byte
_ESCAPES = frozenset("abfnrtv\\'\"01234567xuU")


def parse_config(text: str, *, model: str, strict_name: bool = False) -> ModelConfig:
    """Read a config.pbtxt.

    Args:
        text: the file's contents.
        model: the name that the model is served under; errors name it, and the result carries it.
        strict_name: refuse a `name` in the text that differs from `model`, as a repository on disk does. Otherwise
            `name` is only what the author called the model.

    Returns:
        the configuration with defaults filled in; inputs, outputs, backend and batch size may still be missing.

    Raises:
        MmeError: INVALID_MODEL for text that is no ModelConfig (with line and field) or breaks a rule; UNSUPPORTED for
            a field that is not honoured here, by its full path.
    """
    return config_of(_parse_text(text, model), model=model, strict_name=strict_name)


def config_of(message: pb.ModelConfig, *, model: str, strict_name: bool = False) -> ModelConfig:
    """What the message says. Arguments, result and errors are those of `parse_config`."""
    for excess in excesses(message):
        raise excess.error(model)
    check_fields(message, model)
    if strict_name and message.name and message.name != model:
        raise invalid_model(
            f"unexpected directory name '{model}' for model '{message.name}', directory name must equal model name: "
            f'write name: "{model}", or leave the field out'
        )
    return normalise(translated(message, model))


def config_message(config: ModelConfig) -> pb.ModelConfig:
    """The published message that says what `config` says."""
    return json_format.ParseDict(with_named(config_json(config, filled_in=False), config), pb.ModelConfig())


def config_text(config: ModelConfig) -> str:
    """The configuration as the text of a config.pbtxt; `parse_config` reads it back into an equal one."""
    return text_format.MessageToString(config_message(config), as_utf8=True)


def _parse_text(text: str, model: str) -> pb.ModelConfig:
    check_escapes(text, model)
    try:
        return read_text(text)
    except text_format.ParseError as error:
        refused, hint = syntax_error(error, model), advice(text, error)
        raise (invalid_model(f"{refused.message.removesuffix('.')}; {hint}") if hint else refused) from None


def read_text(text: str, *, allow_unknown_field: bool = False) -> pb.ModelConfig:
    """Return the message that the text is, maybe without fields that the message does not have.

    Raises:
        text_format.ParseError: it is none. The parser lets any number pass for an enum, and the message refuses one of
            more than 32 bits without a word of where it stands.
    """
    try:
        return text_format.Parse(text, pb.ModelConfig(), allow_unknown_field=allow_unknown_field)
    except ValueError as error:
        at = max(text.find(str(error).rpartition(" ")[2]), 0)
        column = at - text.rfind("\n", 0, at)
        raise text_format.ParseError(str(error), text.count("\n", 0, at) + 1, column) from None


def syntax_error(error: text_format.ParseError, model: str) -> MmeError:
    """What the parser says, with line and column; `advice` knows what to do about it."""
    line, column = error.GetLine(), error.GetColumn()
    # The parser quotes the line, which may be the whole file and may hold what no response can carry.
    what = str(error).removeprefix(f"{line}:{column} : ").replace('"mme.', '"')[:300]
    what = what.encode(errors="replace").decode()
    return invalid_model(f"model '{model}': config.pbtxt line {line}, column {column}: {what}")


def check_escapes(text: str, model: str) -> None:
    r"""Refuse `\m` and its like in strings: the parser keeps them as they are, with one of Python's own warnings."""
    for token in _COMMENT_OR_STRING.finditer(text):
        for escape in () if token[0].startswith("#") else _ESCAPE.finditer(token[0]):
            if escape[1] not in _ESCAPES:
                line = text.count("\n", 0, token.start()) + 1
                raise invalid_model(
                    f"model '{model}': config.pbtxt line {line}: {escape[0]!a} in a string is no escape sequence; "
                    "write a backslash twice"
                )
