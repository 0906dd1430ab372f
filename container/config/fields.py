"""Every field of config.pbtxt and what becomes of it, in the order of the published message. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.pbtxt.fields import RULES, Fate
from model_handlers.proto import model_config_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_WORDS = {Fate.HONOURED: "honoured", Fate.HARMLESS: "ignored", Fate.REFUSED: "refused"}


def field_rows() -> Iterator[tuple[str, str, str]]:
    """(path, fate, reason) of each field; what lies below one that is not honoured shares its fate."""
    yield from _rows(pb.DESCRIPTOR.message_types_by_name["ModelConfig"], "")


def exceptions() -> Mapping[tuple[str, str], list[str]]:
    """The paths of the fields that are not honoured, by fate and reason."""
    paths: dict[tuple[str, str], list[str]] = {}
    for path, fate, reason in field_rows():
        if fate != _WORDS[Fate.HONOURED]:
            paths.setdefault((fate, reason), []).append(path)
    return paths


def _rows(message: Descriptor, prefix: str) -> Iterator[tuple[str, str, str]]:
    rules = RULES[message.full_name.removeprefix("mme.")]
    for field in message.fields:
        inside, rule = _message_of(field), rules[field.name]
        path = f"{prefix}{field.name}{'[]' if field.is_repeated else ''}"
        if rule.fate is Fate.HONOURED and inside is not None and inside.fields:
            yield from _rows(inside, f"{path}.")
        else:
            yield path, _WORDS[rule.fate], rule.reason


def _message_of(field: FieldDescriptor) -> Descriptor | None:
    """What is inside of a field; of a map, inside of its values."""
    message: Descriptor | None = field.message_type
    if message is not None and message.GetOptions().map_entry:
        message = message.fields_by_name["value"].message_type
    return message
