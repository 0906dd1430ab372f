"""Memory of requests on the way: their bytes, from the first one until the answer is handed over.

Bodies and messages count as they arrive, and what they are once inflated counts as well. What does not fit is refused,
and gives back what it held: requests that have arrived in part never wait for one another. Responses do not count, nor
does memory that clients share.

On the event loop, but for `Inflating.take`.
"""

from __future__ import annotations

import threading
from typing import Self

from model_handlers.errors import Kind, MmeError


class RequestMemory:
    """The budget of all connections together.

    Args:
        limit: bytes.

    Attributes:
        used: bytes, of requests as they arrived.
    """

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._most = limit  # less what threads inflate at the moment
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<RequestMemory: {self.used} of {self._most} bytes>"

    def fits(self, size: int) -> bool:
        """Whether so many further bytes would."""
        return self.used + size <= self._most

    def take(self, size: int) -> bool:
        """Count further bytes, if they fit."""
        self.used += size
        if self.used <= self._most:
            return True
        self.used -= size
        return False

    def free(self, size: int) -> None:
        """Count them no more."""
        self.used -= size

    @property
    def full(self) -> str:
        """What is answered to a request that does not fit."""
        return (
            f"the server holds as many bytes of requests as it may ({self._limit}): send this one again in a moment, "
            "or raise MME_REQUEST_MEMORY"
        )

    def lower(self, size: int) -> bool:
        """Take bytes by another thread, if they fit; below zero gives them back."""
        with self._lock:
            if size > 0 and self.used + size > self._most:
                return False
            self._most -= size
            return True


class Inflating:
    """What a thread inflates of one request. A context: in the end it counts no more, or is the request's own."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._taken = 0

    def take(self, size: int) -> None:
        """Count further bytes.

        Raises:
            MmeError: UNAVAILABLE when they do not fit.
        """
        if not self._memory.lower(size):
            raise out_of_request_memory(self._memory)
        self._taken += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.lower(-self._taken)


def out_of_request_memory(memory: RequestMemory) -> MmeError:
    """What is answered to a request that does not fit."""
    return MmeError(Kind.UNAVAILABLE, memory.full)
