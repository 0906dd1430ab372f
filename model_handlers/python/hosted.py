"""Which model the running code belongs to, for the calls of `pb_utils` that do not say.

The host sets it around every call into a model. A thread that a model started itself carries no such mark: it is taken
for one of the model that ran last, which is the only one where models have processes of their own.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextvars import Token
    from pathlib import Path

    from model_handlers.outside import Outside
    from model_handlers.requests import Responder


class Hosted:
    """A model as its own code may ask about it.

    Attributes:
        name, directory: what it is called, and where its model.py lies.
        outside: what it may ask of the server; None before `initialize` begins and from `finalize` on.
        initialized: whether `initialize` has ended, so that it may also call other models.
        callers: the models that wait for what it executes, itself the last.
        waiting: see `ModelCall`.
    """

    def __init__(self, name: str, directory: Path, callers: tuple[str, ...] = ()) -> None:
        self.name = name
        self.directory = directory
        self.outside: Outside | None = None
        self.initialized = False
        self.callers = callers
        self.waiting: tuple[Responder, ...] = ()


_current: ContextVar[Hosted] = ContextVar("hosted model")
_last: list[Hosted] = []


class Running:
    """Everything inside belongs to this model."""

    def __init__(self, model: Hosted) -> None:
        self._model = model
        self._token: Token[Hosted] | None = None

    def __enter__(self) -> None:
        self._token = _current.set(self._model)
        _last[:] = [self._model]

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)


def hosted() -> Hosted | None:
    """The model whose code is running, None where no model was ever loaded."""
    return _current.get(_last[0] if _last else None)
