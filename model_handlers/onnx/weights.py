"""ONNX models whose large weights are files beside the graph (ONNX's *external data*), which ONNX Runtime maps.

Weights come out of the model's file, out of files that it names already, and out of graphs inside its nodes (branches
of If, the body of Loop); all else is copied byte for byte. Mapped weights are used where they lie only if the session
does not *prepack* them, rearrange them for the processor into private memory: the price of mapping, and why a model
that turns hot is packed. A graph that is optimised at each load makes new, private weights each time: hence the refined
form, the optimised graph, which depends on ONNX Runtime's version and the processor.

A sentence encoder of 90 MB (MiniLM, one thread, 32 tokens; a plain session: load 84 ms, ten of them 970 MiB):

    form      weights   load     ten sessions   batch 1 / 8 / 32
    written   mapped    14 ms        98 MiB     7.3 / 30 / 119 ms
    refined   mapped    10 ms        97 MiB     7.2 / 30 / 119 ms
    refined   packed    38 ms       462 MiB     5.2 / 27 / 115 ms, as the plain session
"""

from __future__ import annotations

import functools
import platform
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from model_handlers.errors import invalid_model
from model_handlers.mapped import FormDraft, SourceFile, Span, Trial
from model_handlers.onnx.session import (
    create_session,
    graph_level,
    onnx_runtime,
    session_options,
    signature,
    translated,
)
from model_handlers.system import memory
from model_handlers.system.threads import processors
from model_handlers.tensor import BYTES, Array

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.config.model_config import ModelConfig


VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_FIXED_LENGTH = {FIXED64: 8, FIXED32: 4}
_LONGEST_VARINT = 10


class Field(NamedTuple):
    """One field of a message: its number, its wire type, where it begins, where its value begins and ends."""

    number: int
    type: int
    start: int
    value: int
    end: int


def fields(data: BufferedReader, start: int, end: int) -> Iterator[Field]:
    """The fields of the message from `start` to `end`, in order. Raises INVALID_MODEL when that is no message."""
    at = start
    while at < end:
        tag, value = data.varint(at, end)
        number, kind = tag >> 3, tag & 7
        if kind == LENGTH_DELIMITED:
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


class BufferedReader:
    """A span of a file, of which a part at a time is in memory; offsets count from the span's beginning."""

    def __init__(self, span: Span, size: int = 1 << 18) -> None:
        self._span = span
        self._size = size
        self._start = 0
        self._held = b""

    def read(self, start: int, end: int) -> bytes:
        if not self._start <= start <= end <= self._start + len(self._held):
            self._start = start
            length = min(max(end - start, self._size), self._span.length - start)
            self._held = self._span.file.read(self._span.offset + start, length)
        return self._held[start - self._start : end - self._start]

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """The number at `at`, and where it ends. Raises INVALID_MODEL when none does before `end`."""
        number = shift = 0
        for index, byte in enumerate(self.read(at, min(at + _LONGEST_VARINT, end))):
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, at + index + 1
            shift += 7
        raise _broken(at)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def bytes_field(number: int, *parts: bytes) -> bytes:
    """A field of bytes, which a text and a message are too."""
    value = b"".join(parts)
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(value)) + value


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


def externalise_initialisers(model_file: Path, draft: FormDraft) -> bytes:
    """The model, whose large tensors `draft` has now. Raises OSError where the draft can't be written."""
    source = _opened(model_file, draft)
    return _Externaliser(Span(source, 0, source.size), model_file.parent, draft).model()


class _Externaliser:
    def __init__(self, span: Span, folder: Path, draft: FormDraft) -> None:
        self._span = span
        self._window = BufferedReader(span)
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


def _opened(path: Path, draft: FormDraft) -> SourceFile:
    try:
        return draft.source(path)
    except OSError as error:
        raise invalid_model(f"a part of the model can't be read: {error}") from error


def _outside(name: str, length: int) -> list[bytes]:
    entries = {b"location": name, b"offset": "0", b"length": str(length)}
    named = [
        bytes_field(_TENSOR_EXTERNAL, bytes_field(_ENTRY_KEY, key), bytes_field(_ENTRY_VALUE, value.encode()))
        for key, value in entries.items()
    ]
    return [*named, varint(_TENSOR_WHERE << 3 | VARINT) + varint(_EXTERNAL)]


_CPU_LINES = ("model name", "flags", "CPU part", "Features")  # of /proc/cpuinfo, on x86-64 and on Arm
_RUNS = 5
_ENOUGH_NS = 500_000_000  # of runs of one model
# elements of a variable dimension in a trial, as tokens of a text: one is a case of its own for kernels
_USUAL = 16
_CLOSE = 1e-2  # relative: kernels for packed weights may add up in another order, or in another precision


def refinement(config: ModelConfig) -> str:
    tried = f"with {_USUAL} in variable dimensions"  # an earlier trial says nothing of this one's
    return "\n".join([onnx_runtime().__version__, platform.machine(), _processor(), graph_level(config), tried])


@functools.cache
def _processor() -> str:
    first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    return "\n".join(line for line in first.splitlines() if line.startswith(_CPU_LINES))


def refine(config: ModelConfig, form: Path, draft: FormDraft) -> bytes:
    options = session_options(config, processors())
    options.add_session_config_entry("session.disable_prepacking", "1")
    optimised = draft.folder / "optimised"
    options.optimized_model_filepath = str(optimised)
    for key, value in {"file_name": "weights", "min_size_in_bytes": str(SMALLEST)}.items():
        options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", value)
    create_session(form, options, config.name)
    return externalise_initialisers(optimised, draft)


def load(config: ModelConfig, form: Path, threads: int, *, refined: bool, packed: bool) -> Any:
    options = session_options(config, threads)
    if refined:
        options.graph_optimization_level = onnx_runtime().GraphOptimizationLevel.ORT_DISABLE_ALL
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
        # Planning which tensors share a buffer is two thirds of the load; the arena reuses memory anyhow.
        options.enable_mem_reuse = False
    return create_session(form, options, config.name)


def try_out(config: ModelConfig, form: Path) -> Trial:
    mapped_answers, mapped_bytes, mapped_ns, _ = _try(config, form, packed=False)
    packed_answers, packed_bytes, packed_ns, names = _try(config, form, packed=True)
    alike = all(map(same_numbers, mapped_answers, packed_answers))
    return Trial(mapped_bytes, packed_bytes, mapped_ns, packed_ns, names, alike)


def _try(config: ModelConfig, form: Path, *, packed: bool) -> tuple[list[Array], int, int, tuple[str, ...]]:
    # The answers to zeros, private bytes, the processor time of the shortest execution in ns, which other processes do
    # not change, and the names of what is mapped.
    memory.trim()
    before = memory.private_memory()
    session = load(config, form, processors(), refined=True, packed=packed)
    zeros = _zeros(session, config.name, _USUAL)
    try:
        session.run(None, zeros)
    except Exception:  # noqa: BLE001 - of any of a dozen classes; its inputs may have to be of other sizes
        zeros = _zeros(session, config.name, 1)
    took: list[int] = []
    while len(took) <= _RUNS and sum(took) < _ENOUGH_NS:
        began = time.process_time_ns()
        try:
            answers: list[Array] = session.run(None, zeros)
        except Exception as error:  # as above
            raise translated(error, config.name, loading=True) from error
        took.append(time.process_time_ns() - began)
    memory.trim()
    names = tuple(sorted({path.name for path in _mapped_files() if path.parent == form.parent}))
    return answers, max(memory.private_memory() - before, 0), min(took), names


def _mapped_files() -> list[Path]:
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [Path(row[5]) for row in rows if len(row) == 6]


def _zeros(session: Any, model: str, variable: int) -> dict[str, Array]:
    zeros = {}
    for name, data_type, shape in signature(session, model)[0]:
        dims = [max(dim, 1) for dim in shape[:1]] + [variable if dim < 0 else dim for dim in shape[1:]]
        zeros[name] = np.zeros(dims, dtype=data_type.dtype)
        if data_type is BYTES:
            zeros[name].fill("")
    return zeros


def same_numbers(one: Array, other: Array) -> bool:
    """Whether one answer is the other but for rounding: a hundredth of the largest number, of floats alone."""
    if one.dtype.kind != "f":
        return one.shape == other.shape and bool(np.all(one == other))
    scale = float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one)))
    return one.shape == other.shape and np.allclose(one, other, rtol=_CLOSE, atol=_CLOSE * scale, equal_nan=True)
