"""A model's graph with the large weights taken out of it: in their place it names files that hold nothing else.

That is ONNX's own *external data*. Weights come out of the model's file, out of files that it names already, and out
of graphs inside its nodes (the branches of If, the body of Loop). Whatever is not a large tensor is copied as it is,
byte for byte. Runs on load threads.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from model_handlers.errors import invalid_model
from model_handlers.mapped import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_handlers.mapped import Draft


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED_LENGTH = {FIXED64: 8, FIXED32: 4}
_LONGEST_VARINT = 10


class Field(NamedTuple):
    """One field of a message: its number, its wire type, where it begins, where its value begins and ends."""

    number: int
    type: int
    start: int
    value: int
    end: int


def fields(data: Window, start: int, end: int) -> Iterator[Field]:
    """The fields of the message from `start` to `end`, in order.

    Raises:
        MmeError: INVALID_MODEL when that is no message.
    """
    at = start
    while at < end:
        tag, value = data.varint(at, end)
        number, kind = tag >> 3, tag & 7
        if kind == BYTES:
            length, value = data.varint(value, end)
            stop = value + length
        elif kind == VARINT:
            stop = data.varint(value, end)[1]
        elif kind in _FIXED_LENGTH:
            stop = value + _FIXED_LENGTH[kind]
        else:
            raise _broken(at)
        if stop > end or not number:
            raise _broken(at)
        yield Field(number, kind, at, value, stop)
        at = stop


class Window:
    """A span of a file, of which a part at a time is in memory; offsets count from the span's beginning."""

    def __init__(self, span: Span, size: int = 1 << 18) -> None:
        self._span = span
        self._size = size
        self._start = 0
        self._held = b""

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""
        if not self._start <= start <= end <= self._start + len(self._held):
            self._start = start
            length = min(max(end - start, self._size), self._span.length - start)
            self._held = self._span.file.read(self._span.offset + start, length)
        return self._held[start - self._start : end - self._start]

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """The number at `at`, and where it ends.

        Raises:
            MmeError: INVALID_MODEL when none does before `end`.
        """
        number = shift = 0
        for index, byte in enumerate(self.read(at, min(at + _LONGEST_VARINT, end))):
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, at + index + 1
            shift += 7
        raise _broken(at)


def varint(number: int) -> bytes:
    """A number as the format writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def bytes_field(number: int, *parts: bytes) -> bytes:
    """A field of bytes, which a text and a message are too."""
    value = b"".join(parts)
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def _broken(at: int) -> Exception:
    return invalid_model(f"byte {at} begins no field of a model")


SMALLEST = 1 << 16  # bytes of a tensor that is worth a file: below it pages and descriptors cost more than is shared

# Field numbers of onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_ATTRIBUTE = 5
_ATTRIBUTE_GRAPHS = (6, 11)
_TENSOR_RAW, _TENSOR_EXTERNAL, _TENSOR_WHERE = 9, 13, 14
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_EXTERNAL = 1  # the value of _TENSOR_WHERE
_LOCATION = b"location"  # the entry that every external tensor has


def take_weights_out(model_file: Path, draft: Draft) -> bytes:
    """The model, whose large tensors `draft` has now.

    Raises:
        MmeError: INVALID_MODEL when it is none, or names files that are not there, or not in its folder.
        OSError: the draft can't be written.
    """
    source = _opened(model_file, draft)
    return _Surgeon(Span(source, 0, source.size), model_file.parent, draft).model()


class _Surgeon:
    def __init__(self, span: Span, folder: Path, draft: Draft) -> None:
        self._span = span
        self._window = Window(span)
        self._folder = folder
        self._draft = draft

    def model(self) -> bytes:
        parts = []
        for field in fields(self._window, 0, self._span.length):
            is_graph = field.number == _MODEL_GRAPH
            parts.append(bytes_field(field.number, self._graph(field)) if is_graph else self._as_it_is(field))
        return b"".join(parts)

    def _graph(self, graph: Field) -> bytes:
        parts = []
        for field in fields(self._window, graph.value, graph.end):
            if field.number == _GRAPH_INITIALIZER:
                parts.append(bytes_field(field.number, self._tensor(field)))
            elif field.number == _GRAPH_NODE and self._may_hold_weights(field):
                parts.append(bytes_field(field.number, self._node(field)))
            else:
                parts.append(self._as_it_is(field))
        return b"".join(parts)

    def _may_hold_weights(self, node: Field) -> bool:
        return node.end - node.value >= SMALLEST or _LOCATION in self._window.read(node.value, node.end)

    def _node(self, node: Field) -> bytes:
        parts = []
        for field in fields(self._window, node.value, node.end):
            is_attribute = field.number == _NODE_ATTRIBUTE
            parts.append(bytes_field(field.number, self._attribute(field)) if is_attribute else self._as_it_is(field))
        return b"".join(parts)

    def _attribute(self, attribute: Field) -> bytes:
        parts = []
        for field in fields(self._window, attribute.value, attribute.end):
            is_graph = field.number in _ATTRIBUTE_GRAPHS
            parts.append(bytes_field(field.number, self._graph(field)) if is_graph else self._as_it_is(field))
        return b"".join(parts)

    def _tensor(self, tensor: Field) -> bytes:
        """The tensor, without its elements if they are many."""
        kept: list[bytes] = []
        elements: Span | None = None
        entries: dict[str, str] = {}
        for field in fields(self._window, tensor.value, tensor.end):
            if field.number == _TENSOR_RAW:
                elements = Span(self._span.file, self._span.offset + field.value, field.end - field.value)
            elif field.number == _TENSOR_EXTERNAL:
                key, value = self._entry(field)
                entries[key] = value
            elif field.number != _TENSOR_WHERE:
                kept.append(self._as_it_is(field))
        if entries:
            elements = self._elsewhere(entries)
        if elements is None or (elements.length < SMALLEST and not entries):
            return self._window.read(tensor.value, tensor.end)
        if elements.length < SMALLEST:
            return b"".join([*kept, bytes_field(_TENSOR_RAW, elements.file.read(elements.offset, elements.length))])
        return b"".join([*kept, *_outside(self._draft.put(elements), elements.length)])

    def _entry(self, entry: Field) -> tuple[str, str]:
        texts = {
            field.number: self._window.read(field.value, field.end).decode("utf-8", "replace")
            for field in fields(self._window, entry.value, entry.end)
        }
        return texts.get(_ENTRY_KEY, ""), texts.get(_ENTRY_VALUE, "")

    def _elsewhere(self, entries: dict[str, str]) -> Span:
        """The elements of a tensor that lies in a file of its own already."""
        location = PurePosixPath(entries.get("location", ""))
        path = (self._folder / location).resolve()
        if location.is_absolute() or ".." in location.parts or not path.is_relative_to(self._folder.resolve()):
            raise invalid_model(f"a tensor lies in '{location}', outside of the model's folder")
        source = _opened(path, self._draft)
        try:
            offset = int(entries.get("offset", "0"))
            length = int(entries.get("length", source.size - offset))
        except ValueError:
            raise invalid_model(f"a tensor lies at no number of bytes into '{location}'") from None
        if not 0 <= offset <= offset + length <= source.size:
            raise invalid_model(f"a tensor lies beyond the end of '{location}'")
        return Span(source, offset, length)

    def _as_it_is(self, field: Field) -> bytes:
        return self._window.read(field.start, field.end)


def _opened(path: Path, draft: Draft) -> SourceFile:
    try:
        return draft.source(path)
    except OSError as error:
        raise invalid_model(f"a part of the model can't be read: {error}") from error


def _outside(name: str, length: int) -> list[bytes]:
    """The fields of a tensor whose elements are all there is in the file `name`."""
    entries = {b"location": name, b"offset": "0", b"length": str(length)}
    named = [
        bytes_field(_TENSOR_EXTERNAL, bytes_field(_ENTRY_KEY, key), bytes_field(_ENTRY_VALUE, value.encode()))
        for key, value in entries.items()
    ]
    return [*named, varint(_TENSOR_WHERE << 3 | VARINT) + varint(_EXTERNAL)]
