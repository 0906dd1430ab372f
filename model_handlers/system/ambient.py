"""What is given to a load on its thread, and to everything that it calls, without being handed down."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


class Ambient(Generic[T]):
    """One such value, None where nothing is given. `name` is for who debugs it."""

    def __init__(self, name: str) -> None:
        self._value: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """The value here and now."""
        return self._value.get()

    @contextmanager
    def given(self, value: T | None) -> Iterator[None]:
        """What runs inside has this one."""
        token = self._value.set(value)
        try:
            yield
        finally:
            self._value.reset(token)
