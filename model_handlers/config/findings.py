"""Everything that is wrong with a config.pbtxt, and not only the first of it. PURE.

A load stops at the first rule that is broken; the author of a configuration wants all of them at once. So values that
no enum names and the first field that does not exist are named, and the rest is judged without them. What follows from
another problem alone may be missing until that one is fixed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format

from model_handlers.config.bounds import excesses
from model_handlers.config.pbtxt import (
    Support,
    check_escapes,
    field_error,
    gaps,
    hint_for,
    is_named_only,
    place_of,
    read_text,
    set_fields,
    syntax_error,
    translated,
)
from model_handlers.config.validate import broken_rules, normalise
from model_handlers.errors import MmeError
from model_handlers.tensor import BY_NUMBER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.proto import model_config_pb2 as pb

_MOST_VALUES = 50
_NAME = re.compile(r"[A-Za-z_]\w*")
# What stands before the value of an enum: the field, and maybe other values.
_ENUM_VALUE = re.compile(r"(\w+)\s*:\s*\[?(?:[^\[\]{}<>:]*,)?\s*$")
_FP32 = 11


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth a word: the path of the field ("" for none), what is said of it, what to do."""

    field: str
    sentence: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Understood:
    """What a text says."""

    # the configuration, defaults filled in where nothing is wrong; None where the text can't be read at all
    config: ModelConfig | None
    problems: tuple[Finding, ...] = ()  # what keeps the model from being loaded
    notes: tuple[Finding, ...] = ()  # fields that change nothing here


def understand(text: str, *, model: str, strict_name: bool = False) -> Understood:
    """Read a config.pbtxt as far as it can be read. Arguments are those of `pbtxt.parse_config`."""
    problems: list[Finding] = []
    message = _parsed(text, model, problems)
    if message is None:
        return Understood(None, tuple(problems))
    _take_out_excesses(message, problems)
    notes = _judge_fields(message, model, problems)
    if strict_name and message.name and message.name != model:
        sentence = (
            f"unexpected directory name '{model}' for model '{message.name}', directory name must equal model name"
        )
        problems.append(Finding("name", sentence, f'write name: "{model}", or leave the field out'))
    _complete_tensors(message, model, problems)
    config = _translated(message, model, problems)
    problems += config_findings(config)
    return Understood(config if problems else normalise(config), tuple(problems), notes)


def config_findings(config: ModelConfig) -> Iterator[Finding]:
    for field, error in broken_rules(config):
        yield Finding(field, error.message)


# -- the text ----------------------------------------------------------------------------------------------------------


def _parsed(text: str, model: str, problems: list[Finding]) -> pb.ModelConfig | None:
    try:
        check_escapes(text, model)
    except MmeError as error:
        problems.append(Finding("", _bare(error, model)))
        return None
    skips_fields, place = False, -1
    for _ in range(_MOST_VALUES):
        try:
            return read_text(text, allow_unknown_field=skips_fields)
        except text_format.ParseError as error:
            last, place = place, place_of(text, error)
            if place == last:  # nothing that can be skipped or replaced
                return None
            problems.append(_unreadable(text, place, _bare(syntax_error(error, model), model), hint_for(text, error)))
            repaired = _with_other_value(text, place)
            skips_fields |= repaired is None
            text = repaired or text
    return None


def _with_other_value(text: str, place: int) -> str | None:
    before, value = _ENUM_VALUE.search(text, 0, place), _NAME.match(text, place)
    if before is None or value is None:
        return None
    stand_in = str(_FP32) if before[1] == "data_type" else "0"
    return text[:place] + stand_in.ljust(len(value[0])) + text[value.end() :]  # as long: later errors keep their place


def _bare(error: MmeError, model: str) -> str:
    # Without the model and the file: where it is shown, those stand beside it.
    return error.message.removeprefix(f"model '{model}': config.pbtxt ")


def _unreadable(text: str, place: int, sentence: str, mend: str) -> Finding:
    found = _NAME.match(text, place)
    if found is None:
        return Finding("", sentence, mend)
    before = _ENUM_VALUE.search(text, 0, place)
    return Finding(before[1] if before is not None else found[0], sentence, mend)


# -- the message -------------------------------------------------------------------------------------------------------


def _take_out_excesses(message: pb.ModelConfig, problems: list[Finding]) -> None:
    # What is beyond its bound; the rest is judged without the field of the message that holds it.
    for excess in tuple(excesses(message)):
        problems.append(Finding(excess.path, excess.sentence, "mme config bounds lists what each field may hold"))
        _clear(message, _top(excess.path))


def _top(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def _judge_fields(message: pb.ModelConfig, model: str, problems: list[Finding]) -> tuple[Finding, ...]:
    """Take out the fields that are not known, and return what to note of others."""
    unknown, notes = [], []
    for path, field, value, rule in set_fields(message):
        error = field_error(path, field, value, rule, model)
        if error is not None:
            problems.append(Finding(path, _bare(error, model), "remove it" if rule.support is Support.REFUSED else ""))
            if rule.support is not Support.REFUSED:
                unknown.append(path)
        elif rule.support is Support.HARMLESS:
            notes.append(Finding(path, f"is ignored: {rule.reason}"))
    for path in unknown:
        _clear(message, _top(path))
    return tuple(notes)


def _complete_tensors(message: pb.ModelConfig, model: str, problems: list[Finding]) -> None:
    # Tensors without a name or a type get one, so that what else is wrong with them is told as well.
    both: list[tuple[str, Any]] = [("input", message.input), ("output", message.output)]
    for what, tensors in both:
        for index, tensor in enumerate(tensors):
            if not tensor.name:
                problems.append(Finding(f"{what}[{index}].name", f"model {what} must specify 'name' for {model}"))
                tensor.name = f"{what}[{index}]"
            if tensor.data_type not in BY_NUMBER and not is_named_only(tensor, message):
                sentence = f"model {what} '{tensor.name}' must specify 'data_type' for {model}"
                problems.append(Finding(f"{what}[{index}].data_type", sentence))
                tensor.data_type = _FP32


def _translated(message: pb.ModelConfig, model: str, problems: list[Finding]) -> ModelConfig:
    for field, error in tuple(gaps(message, model)):
        problems.append(Finding(field, error.message))
        _clear(message, field)
    return translated(message, model)


def _clear(message: Message, field: str) -> None:
    message.ClearField(field)
