"""config.pbtxt into a `ModelConfig`, and a `ModelConfig` back into text.

The text is read by protobuf's own parser against the published message, so that whatever Triton accepts is accepted
here letter by letter. Which fields count is the business of `fields`, which values are
right that of `config_checks`. Runs on load threads and in `mme pack`; holds no state.
"""

from __future__ import annotations

import difflib
import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from google.protobuf import json_format, text_format

from model_handlers.config.convert import OPTIMIZATION, config_from, config_json, said_by, with_named
from model_handlers.config.fields import check_fields, every_field
from model_handlers.config.validate import normalise
from model_handlers.errors import MmeError, invalid_argument, invalid_model
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.system.bounds import MAX_CONFIG_SIZE, excesses
from model_handlers.tensor import BY_NUMBER, FP32, INT32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf.descriptor import Descriptor, FieldDescriptor

    from model_handlers.config.model_config import ModelConfig


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


# -- the message -------------------------------------------------------------------------------------------------------

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


# -- what was likely meant where a text can't be read ------------------------------------------------------------------

_PATHS = [path for path, _ in every_field(pb.DESCRIPTOR.message_types_by_name["ModelConfig"])]
_FIELDS = sorted({name.removesuffix("[]") for path in _PATHS for name in path.split(".")})
_FIELD_AT_END = re.compile(r"(\w+)\s*:?\s*$")
_SCALAR = re.compile(r"""["']?([^\s"'\]},;]*)""")


class _Stop(NamedTuple):
    """Where the parser stopped: the text before it and from there on, and the groups of what it said."""

    before: str
    rest: str
    said: tuple[str, ...]


def place_of(text: str, error: text_format.ParseError) -> int:
    """Where in the text the parser stopped."""
    lines = text.split("\n")[: (error.GetLine() or 1) - 1]
    return sum(len(line) + 1 for line in lines) + (error.GetColumn() or 1) - 1


def advice(text: str, error: text_format.ParseError) -> str:
    """What to write instead, a clause; "" where nobody knows."""
    place = place_of(text, error)
    for pattern, clause in _CLAUSES:
        found = re.search(pattern, str(error))
        if found:
            return clause(_Stop(text[:place], text[place:], found.groups()))
    return ""


def _unknown_field(stop: _Stop) -> str:
    message, name = stop.said
    if message.endswith("ParametersEntry"):
        return f'write parameters {{ key: "{name}" value: {{ string_value: "…" }} }}'
    return _meant(name, _FIELDS)


def _unknown_value(stop: _Stop) -> str:
    name = stop.said[0].strip("\"'")
    known = [value.name for enum in _enums() for value in enum.values]
    if name in known:
        return f"write {name} without quotes"
    ends = [each for each in known if each.endswith(f"_{name.upper()}")]
    return f"did you mean {ends[0]}?" if len(ends) == 1 else _meant(name, known)


def _meant(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {nearest[0]}?" if nearest else ""


def _enums() -> Iterator[Any]:
    yield pb.DESCRIPTOR.enum_types_by_name["DataType"]
    waiting = list(pb.DESCRIPTOR.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        yield from message.enum_types
        waiting += message.nested_types


def _no_group(stop: _Stop) -> str:
    """A value where fields in braces should be."""
    field, value = _FIELD_AT_END.search(stop.before), _SCALAR.match(stop.rest)
    if field is None or value is None:
        return ""
    if field[1] == "value":
        return f'write value: {{ string_value: "{value[1]}" }}'
    return f"{field[1]} holds fields: write {field[1]} {{ … }}"


def _no_colon(stop: _Stop) -> str:
    return "between a field and its value stands a colon" if stop.rest.startswith("=") else ""


def _no_string(stop: _Stop) -> str:
    return f'write "{stop.said[0]}", in quotes' if re.fullmatch(r"[\w./-]+", stop.said[0]) else ""


def _no_number(stop: _Stop) -> str:
    return f"write {stop.said[0]} without quotes"


def _no_name(stop: _Stop) -> str:
    if stop.rest.startswith(("/", "*")):
        return "comments begin with #"
    if stop.rest.startswith("{") and not stop.before.strip():
        return 'this is no JSON: write backend: "onnxruntime" and so on, without braces around it'
    return "a bracket before it is not closed" if stop.rest.startswith(("]", "}", ")", ">")) else ""


_CLAUSES: tuple[tuple[str, Callable[[_Stop], str]], ...] = (
    (r'Message type "([\w.]+)" has no field named "(\w+)"', _unknown_field),
    (r"has no value named (\S+?)\.?$", _unknown_value),
    (r'Expected "\{"', _no_group),
    (r'Expected ":"', _no_colon),
    (r"Expected string but found: '(.*)'", _no_string),
    (r"""Couldn't parse (?:integer|number|float|double): ["']([\d.]+)["']""", _no_number),
    (r"Expected identifier or number, got", _no_name),
)


# -- a client's JSON in place of a text --------------------------------------------------------------------------------

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
