"""What a model may ask of the server that it is in. Interfaces and values.

A handler whose models are code of their authors is given an `Outside` by what serves it; without one, its models can
call no other. It has it from the beginning of its load on: the load says so around it, on its thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from model_handlers.errors import MmeError
    from model_handlers.requests import Responder
    from model_handlers.tensor import Array, DataType

    Done = Callable[["bool | MmeError"], None]


@dataclass(slots=True)
class ModelCall:
    """A request that a model makes of another one."""

    model: str
    version: int | None  # which of its versions, None for the one that the server chooses
    inputs: tuple[tuple[str, DataType, Array], ...]  # (name, data type, array of the full shape) of each tensor
    outputs: tuple[str, ...] = ()  # names of the wanted outputs, () for all
    decoupled: bool = False  # whether any number of responses is welcome
    callers: tuple[str, ...] = ()  # the models that wait for the answer, the caller last
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout_us: int = 0
    correlation_id: int | str = 0
    flags: int = 0
    # the responders of the requests that the caller has open, on whose behalf it calls
    waiting: tuple[Responder, ...] = ()
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Override:
    """What a model is to be loaded with this once, instead of what its directory holds."""

    config: str  # its configuration, as JSON of the published message; "" for its own
    # `file:` and a path inside its directory → contents. They stand for all of its files; none leave them.
    files: Mapping[str, bytes] = field(default_factory=dict)


class Outside(Protocol):
    """The server around a model. Every method may be called on any thread, and returns at once."""

    def infer(self, call: ModelCall, responder: Responder) -> None:
        """Have a model called. The responder gets what it answers, errors too; the last comes with `final`."""

    def load(self, model: str, override: Override | None, callers: tuple[str, ...], done: Done) -> None:
        """Load a model; `done` is told True or why not, on any thread. `callers` are as in `ModelCall`."""

    def unload(self, model: str, dependents: bool, callers: tuple[str, ...], done: Done) -> None:  # noqa: FBT001
        """Unload a model, and those that it depends on if `dependents`; `done` is told True or why not."""

    def is_ready(self, model: str, version: int | None, done: Done) -> None:
        """Ask whether a model would answer."""


class Caller:
    """Half of a `Responder` of the caller of a model: it may stop waiting, which the called one may learn."""

    def __init__(self) -> None:
        self._cancelled = False
        self._tell: list[Callable[[], None]] = []

    def is_cancelled(self) -> bool:
        return self._cancelled

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when nothing waits any more; at once if that is so."""
        self._tell.append(tell)
        if self._cancelled:
            tell()

    def cancel(self) -> None:
        """Wait for nothing more. In a collection of garbage, maybe, in the middle of anything."""
        self._cancelled = True
        told, self._tell = self._tell, []
        for tell in told:
            tell()

    def _ended(self) -> None:
        """The last response came: what it would be told to is not held any longer."""
        self._tell = []
