"""How long a model's process may take, by the model's own `parameters`, and how much of the host while it loads.

Until a model is measured an estimate stands for it, which says little of code never loaded before. So what its process
takes beyond what is promised is asked for. Many loads take for a moment twice what they keep, for which no model is
evicted: up to that is allowed while memory is free, some always left to others. A look reads one small file of /proc,
kept open; what the process takes alone is measured at the start, and rarely again, since that takes long.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from model_handlers.base import Ambient
from model_handlers.config.model_config import number
from model_handlers.errors import Kind, MmeError
from model_handlers.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.worker.process import Child


EXECUTION_TIMEOUT = "MME_EXECUTION_TIMEOUT"
LOAD_TIMEOUT = "MME_LOAD_TIMEOUT"
_LOAD_SECONDS = 300.0
EXECUTION_SECONDS = 60.0  # as long as SageMaker itself waits for an answer of an endpoint


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after which a process that does not answer is ended."""

    # `execution` where a configuration does not say: the limit of a request. One for the process.
    usual_execution: ClassVar[float] = EXECUTION_SECONDS

    # from its start to the loaded model; and as long before that for the environment that a model brings
    load: float = _LOAD_SECONDS
    execution: float = EXECUTION_SECONDS  # one batch, from its start; of a decoupled model, from its last response
    close: float = 5.0  # the model's own clean-up when it is unloaded

    @classmethod
    def of(cls, config: ModelConfig) -> Deadlines:
        """The deadlines that a configuration asks for. MmeError: INVALID_MODEL for one that is no positive number."""
        return cls(
            _seconds(config, LOAD_TIMEOUT, _LOAD_SECONDS), _seconds(config, EXECUTION_TIMEOUT, cls.usual_execution)
        )


def _seconds(config: ModelConfig, key: str, default: float) -> float:
    return number(
        config, key, default, allowed=lambda value: 0 < value < math.inf, expected="a positive number of seconds"
    )


_FOR_A_MOMENT = 2  # times what is promised
_OTHERS = 20  # a part of the machine's memory that loads leave alone beyond what is promised to them
_OTHERS_LEAST = 128 << 20  # bytes of it: as much as a process takes between two looks
_STEP = 4  # a part of what is free beyond that, which one load may take before it is looked at again


class ReservationExceededError(MmeError):
    """A load was stopped, since it took more than it could be given. Kind OUT_OF_MEMORY."""

    def __init__(self, message: str, need: int, taken: int = 0, *, final: bool) -> None:
        super().__init__(Kind.OUT_OF_MEMORY, message)
        self.need = need  # bytes that have to be promised to it, at least
        self.taken = taken  # bytes that it took when it was stopped
        self.final = final  # whether so much can't be promised whatever leaves


class LoadQuota:
    """What one load may take. Used on the thread that loads.

    `more` has so many bytes promised in all and returns how many are; it may wait for others to leave, calling what it
    is given, and raises ReservationExceededError. `must_go_on` raises once the model is not waited for any more.
    """

    def __init__(self, more: Callable[[int, Callable[[], None]], int], must_go_on: Callable[[], None]) -> None:
        self.must_go_on = must_go_on
        self.settled = 0  # bytes that those of the load's processes take that have loaded
        self._more = more
        self._promised = 0

    def settle(self, taken: int) -> None:
        """A part of the load is over, and takes so many bytes."""
        self.settled += taken

    def may_take(self, taken: int, growth: Callable[[], int] = lambda: 0) -> int:
        """Bytes that a process may take which takes `taken`, and `growth()` more by now; never less than those.

        Raises ReservationExceededError: it has to be stopped. MmeError: `more` can't tell.
        """
        total = self.settled + taken
        others, left = max(memory.host_memory() // _OTHERS, _OTHERS_LEAST), memory.free_memory()
        free = max(left - others, 0) // _STEP
        if total > self._most(total, free):
            floor = min(others, left // 2)

            def need(taken: int) -> int:
                return -(-taken // _FOR_A_MOMENT) if free else taken

            def look() -> None:
                grown = growth()
                if grown > 0 and memory.free_memory() < floor:
                    sentence = "the load took memory faster than other models left"
                    raise ReservationExceededError(sentence, need(total + grown), total + grown, final=False)

            try:
                self._promised = self._more(need(total), look)
            except ReservationExceededError as error:
                most = max(total, error.taken)
                stopped = f"{error.message}; it took {most / 1e6:.1f} MB when it was stopped, and was still loading"
                raise ReservationExceededError(stopped, error.need, most, final=error.final) from None
        return self._most(total, free) - self.settled

    def _most(self, total: int, free: int) -> int:
        if not free:
            return self._promised
        return max(self._promised, min(_FOR_A_MOMENT * self._promised, total + free))


_allowed: Ambient[LoadQuota] = Ambient("what the load under way may take")
allowing = _allowed.given  # models that are loaded inside may take this together
allowed = _allowed.get  # what the load under way here may take; None for all that it likes


_RARELY = 4  # times as long as a measurement took, until the next


class LoadWatch:
    """Looks at one process while its block lasts: called again and again by the thread that waits for it."""

    def __init__(self, child: Child, quota: LoadQuota) -> None:
        self._child = child
        self._quota = quota
        self._may_take = 0
        self._harmless = 0  # bytes touched, up to which it can't have taken too much
        self._measured: tuple[int, int] | None = None  # what it took, and what of no file it had touched then
        self._again_at = 0.0
        self._statm = -1  # opened by the first look; it stays that of this process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._statm >= 0:
            os.close(self._statm)

    def __call__(self) -> None:
        """Look. Raises MmeError: the load is to be stopped."""
        self._quota.must_go_on()
        touched = self._touched()
        if touched is None or touched[0] <= self._harmless:
            return
        mapped, of_no_file = touched
        taken = self._taken(of_no_file)
        if taken is None:
            return
        if taken > self._may_take:
            self._may_take = self._quota.may_take(taken, lambda: self._grown(of_no_file))
        self._harmless = mapped + self._may_take - taken

    def _touched(self) -> tuple[int, int] | None:
        """Bytes that the process has touched, and those of no file, shared or not; None when it is not there."""
        try:
            if self._statm < 0:
                if not (self._child.alive and self._child.pid):
                    return None
                self._statm = os.open(f"/proc/{self._child.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            return memory.touched_memory(os.pread(self._statm, 128, 0))
        except OSError:
            return None

    def _grown(self, before: int) -> int:
        touched = self._touched()
        return touched[1] - before if touched is not None else 0

    def _taken(self, of_no_file: int) -> int | None:
        """Bytes that the process takes for itself alone; None where it is not time to find out."""
        if self._measured is not None:
            taken, before = self._measured
            taken += of_no_file - before
            if taken > self._may_take:
                return taken
        began = time.monotonic()
        if began < self._again_at:
            return None
        measured = self._child.private_memory()
        if measured is None:
            return None
        self._measured = measured, of_no_file
        done = time.monotonic()
        self._again_at = done + _RARELY * (done - began)
        return measured
