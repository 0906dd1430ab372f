"""config.pbtxt into a `ModelConfig`, and a `ModelConfig` back into text; what becomes of each of its fields.

The text is read by protobuf's own parser against the published message, so that whatever Triton accepts is accepted
here letter by letter. A field that is set is honoured, harmless (logged once) or refused; none is dropped in silence.
A message field that is honoured sends the walk inside; a row speaks for everything below its field. Fields that are
spelled out with their default value (`decoupled: false`) count as not set, as protobuf itself has it.
"""

from __future__ import annotations

import difflib
import logging
import re
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from google.protobuf import json_format, text_format

from model_handlers.config.bounds import MAX_CONFIG_SIZE, excesses
from model_handlers.config.convert import OPTIMIZATION, config_from, config_json, said_by, with_named
from model_handlers.config.validate import normalise
from model_handlers.errors import MmeError, invalid_argument, invalid_model, unsupported
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.tensor import BY_NUMBER, FP32, INT32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

    from model_handlers.config.model_config import ModelConfig


_log = logging.getLogger("mme.config")


class Support(Enum):
    """What becomes of a field that is set."""

    HONOURED = "honoured"
    HARMLESS = "harmless"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: the support, and what the reader of the log line or of the error should know about it."""

    support: Support
    reason: str = ""


_harmless, _refused = partial(Rule, Support.HARMLESS), partial(Rule, Support.REFUSED)

_HONOURED = Rule(Support.HONOURED)
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
    return _NOT_HONOURED.get(field.full_name.removeprefix("mme."), _HONOURED)


def every_field(message: Descriptor, prefix: str = "") -> Iterator[tuple[str, Rule]]:
    """Path and row of each field that a message can have; what lies below one that is not honoured shares its fate."""
    for field in message.fields:
        inside, rule = _message_of(field), rule_of(field)
        path = f"{prefix}{field.name}{'[]' if field.is_repeated else ''}"
        if rule.support is Support.HONOURED and inside is not None and inside.fields:
            yield from every_field(inside, f"{path}.")
        else:
            yield path, rule


def check_fields(message: Message, model: str) -> None:
    """Refuse or log every field of a ModelConfig message that is set and not honoured.

    Raises UNSUPPORTED for a refused field, INVALID_MODEL for a number that its enum does not name, with the full path.
    """
    logged = set()
    for path, field, value, rule in set_fields(message):
        error = field_error(path, field, value, rule, model)
        if error is not None:
            raise error
        if rule.support is Support.HARMLESS and field.full_name not in logged:
            logged.add(field.full_name)
            _log.warning("model '%s': config.pbtxt field '%s' is ignored: %s", model, path, rule.reason)


def field_error(path: str, field: FieldDescriptor, value: Any, rule: Rule, model: str) -> MmeError | None:
    """What is wrong with a field that is set, whatever the rest of the configuration says."""
    if rule.support is Support.REFUSED:
        return refusal(path, rule.reason, model)
    # A number in the text need not be one that the enum names.
    if field.enum_type is not None and value not in field.enum_type.values_by_number:
        names = ", ".join(field.enum_type.values_by_name)
        return invalid_model(f"model '{model}': config.pbtxt field '{path}' is {value}, must be one of {names}")
    return None


def refusal(path: str, reason: str, model: str) -> MmeError:
    return unsupported(
        f"model '{model}': config.pbtxt field '{path}' is not honoured ({reason}); "
        "remove it or serve the model elsewhere"
    )


def set_fields(message: Message, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor, Any, Rule]]:
    """Path, descriptor, value and row of each set field, depth first, as far as the rows lead inside."""
    for field, value in message.ListFields():
        path, rule = prefix + field.name, rule_of(field)
        yield path, field, value, rule
        if rule.support is Support.HONOURED:
            for member_path, member in _members(field, value, path):
                yield from set_fields(member, f"{member_path}.")


def _message_of(field: FieldDescriptor) -> Descriptor | None:
    message: Descriptor | None = field.message_type
    if message is not None and message.GetOptions().map_entry:
        message = message.fields_by_name["value"].message_type
    return message


def _members(field: FieldDescriptor, value: Any, path: str) -> Iterable[tuple[str, Message]]:
    if field.message_type is None or _message_of(field) is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        return [(f"{path}['{key}']", value[key]) for key in sorted(value)]
    if field.is_repeated:
        return [(f"{path}[{index}]", member) for index, member in enumerate(value)]
    return [(path, value)]


_COMMENT_OR_STRING = re.compile(r"""#.*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
_ESCAPE = re.compile(r"\\([4-7][0-7]{2}|.)")  # the first alternative is no byte
_ESCAPES = frozenset("abfnrtv\\'\"01234567xuU")


def parse_config(text: str, *, model: str, strict_name: bool = False) -> ModelConfig:
    """Read a config.pbtxt; inputs, outputs, backend and batch size may still be missing.

    The result has the name `model`, under which it is served. With `strict_name` a `name` in the text has to be the
    same, as in a repository on disk; otherwise it is only what the author called the model. Raises INVALID_MODEL for
    text that is no ModelConfig (with line and field) or breaks a rule, UNSUPPORTED for a field that is not honoured.
    """
    return config_of(_parse_text(text, model), model=model, strict_name=strict_name)


def config_of(message: pb.ModelConfig, *, model: str, strict_name: bool = False) -> ModelConfig:
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
    return json_format.ParseDict(with_named(config_json(config, filled_in=False), config), pb.ModelConfig())


def config_text(config: ModelConfig) -> str:
    """The configuration as the text of a config.pbtxt; `parse_config` reads it back into an equal one."""
    return text_format.MessageToString(config_message(config), as_utf8=True)


def _parse_text(text: str, model: str) -> pb.ModelConfig:
    check_escapes(text, model)
    try:
        return read_text(text)
    except text_format.ParseError as error:
        refused, hint = syntax_error(error, model), hint_for(text, error)
        raise (invalid_model(f"{refused.message.removesuffix('.')}; {hint}") if hint else refused) from None


def read_text(text: str, *, allow_unknown_field: bool = False) -> pb.ModelConfig:
    """The message that the text is, maybe without fields that the message does not have.

    Raises ParseError, also of numbers beyond 32 bits in an enum, which the message refuses without saying where.
    """
    try:
        return text_format.Parse(text, pb.ModelConfig(), allow_unknown_field=allow_unknown_field)
    except ValueError as error:
        at = max(text.find(str(error).rpartition(" ")[2]), 0)
        column = at - text.rfind("\n", 0, at)
        raise text_format.ParseError(str(error), text.count("\n", 0, at) + 1, column) from None


def syntax_error(error: text_format.ParseError, model: str) -> MmeError:
    """What the parser says, with line and column; `hint_for` knows what to do about it."""
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


def translated(message: pb.ModelConfig, model: str) -> ModelConfig:
    """The message as a configuration, whose rules are not checked yet."""
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

_FIELD_AT_END = re.compile(r"(\w+)\s*:?\s*$")
_SCALAR = re.compile(r"""["']?([^\s"'\]},;]*)""")


class _Stop(NamedTuple):
    before: str
    rest: str
    said: tuple[str, ...]


def place_of(text: str, error: text_format.ParseError) -> int:
    lines = text.split("\n")[: (error.GetLine() or 1) - 1]
    return sum(len(line) + 1 for line in lines) + (error.GetColumn() or 1) - 1


def hint_for(text: str, error: text_format.ParseError) -> str:
    """What to write instead, a clause; "" where that is unknown."""
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
    paths = (path for path, _ in every_field(pb.DESCRIPTOR.message_types_by_name["ModelConfig"]))
    return _meant(name, sorted({field for path in paths for field in path.replace("[]", "").split(".")}))


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
    field, value = _FIELD_AT_END.search(stop.before), _SCALAR.match(stop.rest)
    if field is None or value is None:
        return ""
    if field[1] == "value":
        return f'write value: {{ string_value: "{value[1]}" }}'
    return f"{field[1]} holds fields: write {field[1]} {{ … }}"


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
    (r'Expected ":"', lambda stop: "between a field and its value stands a colon" if stop.rest[:1] == "=" else ""),
    (r"Expected string but found: '([\w./-]+)'", lambda stop: f'write "{stop.said[0]}", in quotes'),
    (
        r"""Couldn't parse (?:integer|number|float|double): ["']([\d.]+)["']""",
        lambda stop: f"write {stop.said[0]} without quotes",
    ),
    (r"Expected identifier or number, got", _no_name),
)


# -- a client's JSON in place of a text --------------------------------------------------------------------------------

_SHOWN = 300  # characters of the parser's sentence, which may quote the document


def parse_config_json(text: str, *, model: str, strict_name: bool = False) -> ModelConfig:
    """As `parse_config`, of JSON; raises INVALID_ARGUMENT for text that is no ModelConfig."""
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
    # It begins as Triton's does, which its clients look for.
    return invalid_argument(
        f"failed to load '{model}', failed to poll from model repository: Invalid config override: {what}"
    )


def _known_enums(document: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
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
