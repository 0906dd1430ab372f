"""Looks at a process while it loads a model, so that it takes no more than it may: see `allowance`.

A look costs one small file of /proc, which is kept open: Python's lock is held for microseconds, by a thread that
has to stand back behind those that serve. As long as all that the process has touched could be within what it may take,
that is all. What it takes for itself alone is measured at the start; from there on it is what was of no file that grew,
and measured again where files grew too, though rarely, since that takes long. While more is asked for the process is
stopped: it could take gigabytes in the time that others need to leave.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Self

from model_handlers.system import devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.allowance import Allowance
    from model_handlers.worker.process import Child

_RARELY = 4  # times as long as a measurement took, until the next


class LoadWatch:
    """Of one process, while its block lasts. Called again and again by whoever waits for it.

    Args:
        child: the process.
        allowance: what the load may take that it is for.
    """

    def __init__(self, child: Child, allowance: Allowance) -> None:
        self._child = child
        self._allowance = allowance
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
        """Look.

        Raises:
            MmeError: the load is to be stopped.
        """
        self._allowance.must_go_on()
        touched = self._touched()
        if touched is None or touched[0] <= self._harmless:
            return
        mapped, of_no_file = touched
        taken = self._taken(of_no_file)
        if taken is None:
            return
        if taken > self._may_take:
            with self._paused():
                self._may_take = self._allowance.may_take(taken)
        self._harmless = mapped + self._may_take - taken

    def _touched(self) -> tuple[int, int] | None:
        """Bytes that the process has touched, and those of them that are of no file, whoever shares them.

        None when it is not there.
        """
        try:
            if self._statm < 0:
                if not (self._child.alive and self._child.pid):
                    return None
                self._statm = os.open(f"/proc/{self._child.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            return devices.touched_memory(os.pread(self._statm, 128, 0))
        except OSError:
            return None

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

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if not self._child.has_died():
            with contextlib.suppress(ProcessLookupError):  # it does just now
                os.kill(self._child.pid, number)
