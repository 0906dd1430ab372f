"""Handlers whose models can be mapped: a model, taken apart into a graph and files of weights that others map too.

A *form* is a file, the graph, beside *blobs*: files of one large tensor each, page-aligned, which the framework maps.
It never changes once written, in two steps: *written* is the model as made, *refined* has behind it what the framework
would work out at every load. Where forms are kept, and which models are worth it, the engine knows, not handlers.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from model_handlers.base import Handler
from model_handlers.errors import invalid_model
from model_handlers.system.disk import identity_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_handlers.config.model_config import ModelConfig


# Bytes read at a time. Below it system calls count; from a megabyte on, the C library asks the system for every buffer
# again (see `memory.return_large_blocks`), which then costs more than what is read into it.
PIECE = 1 << 19


class SourceFile:
    """A file that is open for reading, and what it was when it was opened. To be closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.fd)
        self.size = status.st_size
        self.identity = identity_of(status)

    def __repr__(self) -> str:
        return f"<SourceFile {self.path}, {self.size} bytes>"

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = os.preadv(self.fd, [buffer], offset)
            if not count:
                raise invalid_model(f"{self.path} ends at byte {offset}, before what it announces")
            buffer, offset = buffer[count:], offset + count

    def is_unchanged(self) -> bool:
        return identity_of(os.fstat(self.fd)) == self.identity

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Span:
    """`length` bytes of a file from `offset` on."""

    file: SourceFile
    offset: int
    length: int

    def pieces(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(PIECE, self.length)))
        for start in range(0, self.length, PIECE):
            piece = buffer[: self.length - start]
            self.file.read_into(piece, self.offset + start)
            yield piece

    def equals(self, other: Span) -> bool:
        if self.length != other.length:
            return False
        # Arrays of bytes are compared at once, views one element after the other.
        ours, theirs = bytearray(PIECE), bytearray(PIECE)
        for start in range(0, self.length, PIECE):
            if self.length - start < PIECE:
                ours, theirs = bytearray(self.length - start), bytearray(self.length - start)
            self.file.read_into(memoryview(ours), self.offset + start)
            other.file.read_into(memoryview(theirs), other.offset + start)
            if ours != theirs:
                return False
        return True


class FormDraft(Protocol):
    """A form that is being written; `folder` is a directory for what is needed meanwhile, and goes with it."""

    folder: Path

    def source(self, path: Path) -> SourceFile:
        """Open a file that the form is made from; it is made again when one of them changes. Closed with the draft."""

    def put(self, span: Span) -> str:
        """Have a blob of just these bytes beside the graph; returns its name. The same bytes get one name."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a refined form was seen to take and to do, in a process of its own."""

    # mapped_bytes, packed_bytes: private memory of a loaded model that has executed once
    mapped_bytes: int
    packed_bytes: int
    # mapped_ns, packed_ns: the shortest of a few executions
    mapped_ns: int
    packed_ns: int
    mapped_when_packed: tuple[str, ...]  # the blobs that a packed model goes on mapping
    alike: bool  # whether mapped and packed it answers the same, but for rounding

    @property
    def gain(self) -> float:
        return self.mapped_ns / self.packed_ns


class MappedHandler(Handler):
    """A handler that can load its models from forms, on the CPU. It maps `mappings` files until it is closed."""

    mappings: int = 0

    @classmethod
    @abstractmethod
    def refinement(cls, config: ModelConfig) -> str:
        """What a refined form depends on beside the model: the framework's version, the processor, options."""

    @classmethod
    @abstractmethod
    def write_form(cls, config: ModelConfig, model_file: Path, draft: FormDraft) -> bytes:
        """Take a model apart; return the graph, as quickly as copying it. INVALID_MODEL: it can't be done."""

    @classmethod
    @abstractmethod
    def refine_form(cls, config: ModelConfig, form: Path, draft: FormDraft) -> bytes:
        """The graph of the refined form of a written one. In a process of its own."""

    @classmethod
    @abstractmethod
    def try_form(cls, config: ModelConfig, form: Path) -> Trial:
        """Load a refined form, mapped and packed, and execute it. In a process of its own."""

    @classmethod
    @abstractmethod
    def load_form(cls, config: ModelConfig, form: Path, *, refined: bool, packed: bool) -> MappedHandler:
        """Load the model of a form, whose graph is `form`. See `Handler.load`.

        `packed` rearranges weights for the processor, which takes time and private memory, and makes executions
        quicker; else they stay where they are mapped.
        """
