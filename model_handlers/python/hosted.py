"""Which model the running code belongs to, for the calls of `pb_utils` that do not say.

The host sets it around every call into a model. A thread that a model started itself carries no such mark: it is taken
for one of the model that ran last, which is the only one where models have processes of their own.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_handlers.base import Responder
    from model_handlers.outside import Outside


@dataclass(slots=True, eq=False)
class Hosted:
    """A model as its own code may ask about it.

    Attributes:
        name, directory: what it is called, and where its model.py lies.
        outside: what it may ask of the server; None before `initialize` begins and from `finalize` on.
        initialized: whether `initialize` has ended, so that it may also call other models.
        callers: the models that wait for what it executes, itself the last.
        waiting: see `ModelCall`.
    """

    name: str
    directory: Path
    outside: Outside | None = None
    initialized: bool = False
    callers: tuple[str, ...] = ()
    waiting: tuple[Responder, ...] = ()


_current: ContextVar[Hosted] = ContextVar("hosted model")
_last: list[Hosted] = []


@contextmanager
def running(model: Hosted) -> Iterator[None]:
    """Everything inside belongs to this model."""
    token = _current.set(model)
    _last[:] = [model]
    try:
        yield
    finally:
        _current.reset(token)


def hosted() -> Hosted | None:
    """The model whose code is running, None where no model was ever loaded."""
    return _current.get(_last[0] if _last else None)
