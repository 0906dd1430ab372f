"""Handlers whose models can be mapped: a model, taken apart into a graph and files of weights that others map too.

A *form* is a file, the graph, in a directory with *blobs*: files that hold one large tensor and nothing else, aligned
to pages by nature, which the handler's framework maps instead of reading. A form is written once and never changed, in
two steps: *written* is the model as its author made it, which costs little more than copying; *refined* has behind it
what the framework would work out at every load.

Where forms are kept, for how long, and which models are worth it: the engine knows, handlers do not.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from model_handlers.base import Handler

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.config import ModelConfig
    from model_handlers.file_span import SourceFile, Span


class Draft(Protocol):
    """A form that is being written.

    Attributes:
        folder: a directory for what is needed meanwhile; it goes with the draft.
    """

    folder: Path

    def source(self, path: Path) -> SourceFile:
        """Open a file that the form is made from; it is made anew when one of them changes. Closed with the draft."""

    def put(self, span: Span) -> str:
        """Have a blob of just these bytes beside the graph; returns its name. The same bytes get one name."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a refined form was seen to take and to do, in a process of its own.

    Attributes:
        mapped_bytes, packed_bytes: private memory of a loaded model that has executed once.
        mapped_ns, packed_ns: the shortest of a few executions.
        mapped_when_packed: the blobs that a packed model goes on mapping.
        alike: whether mapped and packed it answers the same, but for rounding.
    """

    mapped_bytes: int
    packed_bytes: int
    mapped_ns: int
    packed_ns: int
    mapped_when_packed: tuple[str, ...]
    alike: bool

    @property
    def gain(self) -> float:
        """How many times quicker the packed model is."""
        return self.mapped_ns / self.packed_ns


class MappedHandler(Handler):
    """A handler that can load its models from forms, on the CPU.

    Attributes:
        mappings: how many files it maps; none any more once it is closed.
    """

    mappings: int = 0

    @classmethod
    @abstractmethod
    def refinement(cls, config: ModelConfig) -> str:
        """What a refined form depends on beside the model: the framework's version, the processor, options."""

    @classmethod
    @abstractmethod
    def write_form(cls, config: ModelConfig, model_file: Path, draft: Draft) -> bytes:
        """Take a model apart. On the way of the first load: no dearer than to read the file and write the weights.

        Returns:
            the graph.

        Raises:
            MmeError: INVALID_MODEL when the file is none that this can be done with.
            OSError: the disk has something against it.
        """

    @classmethod
    @abstractmethod
    def refine_form(cls, config: ModelConfig, form: Path, draft: Draft) -> bytes:
        """The graph of the refined form of a written one. In a process of its own.

        Raises:
            MmeError: the framework has something against it.
            OSError: as `write_form`.
        """

    @classmethod
    @abstractmethod
    def try_form(cls, config: ModelConfig, form: Path) -> Trial:
        """Load a refined form, mapped and packed, and execute it. In a process of its own.

        Raises:
            MmeError: the framework has something against it.
        """

    @classmethod
    @abstractmethod
    def load_form(cls, config: ModelConfig, form: Path, *, refined: bool, packed: bool) -> MappedHandler:
        """Load the model of a form. See `Handler.load`.

        Args:
            config: the model's configuration.
            form: the graph.
            refined: whether the form is.
            packed: whether weights are rearranged for the processor, which takes time and private memory, and makes
                executions quicker; or stay where they are mapped.
        """
