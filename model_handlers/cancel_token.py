"""Whether a thread's work is still wanted: one token a load, asked wherever its threads wait or work for long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_CHECK_SECONDS = 0.05


class CancelToken:
    """Never changes by itself: `cancelled` says where the answer is.

    Args:
        subject: what is loaded, for the error: "model 'm'".
        cancelled: whether nothing waits for it any more.
    """

    def __init__(self, subject: str = "a model", cancelled: Callable[[], bool] = lambda: False) -> None:
        self.subject = subject
        self._cancelled = cancelled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.subject}>"

    @property
    def cancelled(self) -> bool:
        """Whether to stop."""
        return self._cancelled()

    def check(self) -> None:
        """Go on, or raise.

        Raises:
            MmeError: CANCELLED.
        """
        if self.cancelled:
            raise MmeError(Kind.CANCELLED, f"the load of {self.subject} was cancelled")

    def wait(self, ready: Callable[[float], T | None]) -> T:
        """Call `ready`, which waits for at most so many seconds, until it returns something; `check` in between."""
        while (result := ready(_CHECK_SECONDS)) is None:
            self.check()
        return result

    def sleep(self, seconds: float) -> bool:
        """Wait; return whether the time went by without a cancellation."""
        ends = time.monotonic() + seconds
        while not self.cancelled:
            left = ends - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, _CHECK_SECONDS))
        return False


NEVER = CancelToken()
