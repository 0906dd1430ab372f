"""How long a model waits for its environment: until a deadline, or until nobody wants the model any more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.isolation.parameters import LOAD_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable


class Patience:
    """One wait.

    Args:
        model: whose wait it is.
        seconds: how long it may take.
        cancelled: whether nobody wants the model any more; called about twenty times a second.
    """

    def __init__(self, model: str, seconds: float, cancelled: Callable[[], bool]) -> None:
        self.model = model
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._cancelled = cancelled

    def check(self) -> None:
        """Go on, or not.

        Raises:
            MmeError: INVALID_MODEL at the deadline, CANCELLED.
        """
        if self._cancelled():
            raise MmeError(Kind.CANCELLED, f"the load of model '{self.model}' was cancelled")
        if time.monotonic() > self._deadline:
            raise invalid_model(
                f"model '{self.model}': its environment was not there within {self._seconds:g} s; "
                f"give it more by the parameter '{LOAD_TIMEOUT}'"
            )
