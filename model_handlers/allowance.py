"""How much a load in processes of its own may take of the host while it goes on: whoever loads says so.

What a model takes is measured when it is loaded. Until then an estimate stands for it, which says little of code that
was never loaded before. So its process is looked at while it loads (`worker/load_watch.py`); what it takes beyond
what is promised to it is asked for. Many loads take for a moment twice what they keep, for which nobody is to leave: a
load may go on up to that while the machine has the memory free, some always being left to others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices
from model_handlers.system.ambient import Ambient

if TYPE_CHECKING:
    from collections.abc import Callable

_FOR_A_MOMENT = 2  # times what is promised
_OTHERS = 20  # a part of the machine's memory that loads leave alone beyond what is promised to them
_OTHERS_LEAST = 128 << 20  # bytes of it: as much as a process takes between two looks
_STEP = 4  # a part of what is free beyond that, which one load may take before it is looked at again


class OutgrownError(MmeError):
    """A load was stopped, since it took more than it could be given. Kind OUT_OF_MEMORY.

    Attributes:
        need: bytes that have to be promised to it, at least.
        taken: bytes that it took when it was stopped.
        final: whether so much can't be promised whoever leaves.
    """

    def __init__(self, message: str, need: int, taken: int = 0, *, final: bool) -> None:
        super().__init__(Kind.OUT_OF_MEMORY, message)
        self.need = need
        self.taken = taken
        self.final = final


class Allowance:
    """What one load may take. Used on the thread that loads.

    Args:
        more: has so many bytes promised to the load in all; returns how many are, which may be more. It may wait while
            others leave, and raises OutgrownError where they are not to be had.
        must_go_on: raises once nobody waits for the model any more.

    Attributes:
        settled: bytes that those of the load's processes take that have loaded.
    """

    def __init__(self, more: Callable[[int], int], must_go_on: Callable[[], None]) -> None:
        self.must_go_on = must_go_on
        self.settled = 0
        self._more = more
        self._promised = 0

    def settle(self, taken: int) -> None:
        """A part of the load is over, and takes so many bytes."""
        self.settled += taken

    def may_take(self, taken: int) -> int:
        """Bytes that a process may take which takes so many now; not less than those.

        Raises:
            OutgrownError: it has to be stopped.
            MmeError: whoever was asked for more can't tell.
        """
        total = self.settled + taken
        others = max(devices.host_memory() // _OTHERS, _OTHERS_LEAST)
        free = max(devices.free_memory() - others, 0) // _STEP
        if total > self._most(total, free):
            need = -(-total // _FOR_A_MOMENT) if free else total
            try:
                self._promised = self._more(need)
            except OutgrownError as error:
                stopped = f"{error.message}; it took {total / 1e6:.1f} MB when it was stopped, and was still loading"
                raise OutgrownError(stopped, error.need, total, final=error.final) from None
        return self._most(total, free) - self.settled

    def _most(self, total: int, free: int) -> int:
        if not free:
            return self._promised
        return max(self._promised, min(_FOR_A_MOMENT * self._promised, total + free))


_allowed: Ambient[Allowance] = Ambient("what the load under way may take")
allowing = _allowed.given  # models that are loaded inside may take this together
allowed = _allowed.get  # what the load under way here may take; None for all that it likes
