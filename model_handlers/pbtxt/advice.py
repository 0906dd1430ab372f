"""What was likely meant where a config.pbtxt can't be read, by the parser's words and what stands there. PURE."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from model_handlers.pbtxt.fields import every_field
from model_handlers.proto import model_config_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf import text_format

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
