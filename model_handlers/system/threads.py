"""How many threads models compute on, what the system refuses them, and whether a load's threads are still wanted.

With pools of their own, models would have thousands of threads on many processors. So those of the serving process take
theirs from one `ThreadBudget`: the first get one a processor, later ones half of what is left, then only the one that
executes them. Errors say which limit of the operator's was met. Any thread may ask.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from model_handlers.base import Ambient
from model_handlers.errors import Kind, MmeError
from model_handlers.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable


_NO_TASKS = "raise the limit of processes and threads (ulimit -u, or the container's pids limit)"
_NO_FILES = "raise the limit of open files (ulimit -n)"
_MORE = 4  # threads that may be begun by others, between the proof and what it is for
_GONE_SECONDS = 1.0
_POLL_SECONDS = 0.0005
_ADVICE = {errno.EAGAIN: _NO_TASKS, errno.EMFILE: _NO_FILES, errno.ENFILE: "raise the system's limit fs.file-max"}


def advised(error: OSError) -> str:
    """What an error says, and what to do where it means one of these limits."""
    advice = _ADVICE.get(error.errno or 0)
    return f"{error}; {advice}" if advice else str(error)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises MmeError: UNAVAILABLE, as many threads and processes are there as may be."""
    try:
        thread.start()
    except RuntimeError as error:
        raise no_room_for(thread.name) from error


def no_room_for(thread: str) -> MmeError:
    return MmeError(Kind.UNAVAILABLE, f"thread '{thread}' can't be started: {_NO_TASKS}")


def prove_room(count: int, name: str) -> None:
    """Start so many threads and some more, ended at once: a library may hang or die without. MmeError: UNAVAILABLE."""
    begun: list[threading.Thread] = []
    over = threading.Event()
    try:
        while count > 0 and len(begun) < count + _MORE:
            thread = threading.Thread(target=over.wait, name=name, daemon=True)
            start_thread(thread)
            begun.append(thread)
    finally:
        over.set()
        for thread in begun:
            thread.join()
    until = time.monotonic() + _GONE_SECONDS  # Python joins them before the system has let them go
    while any(Path(f"/proc/self/task/{each.native_id}").exists() for each in begun) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


_SMALL_MODEL = 1 << 20  # bytes of the model file


def default_threads(model_file: Path) -> int:
    """One thread for a small model: splitting its operators costs more than it gains, and a pool costs threads."""
    small = model_file.is_file() and model_file.stat().st_size < _SMALL_MODEL
    return 1 if small else processors()


def processors() -> int:
    """Processors bound to or granted time of: more threads use up a period's time, and then all stand still."""
    granted = memory.granted_processors()
    bound = len(os.sched_getaffinity(0))
    return bound if granted is None else max(min(bound, math.ceil(granted)), 1)


class Threads:
    """Threads that a model may compute on: `count`, the one that executes it among them."""

    def __init__(self, count: int, budget: ThreadBudget | None = None, taken: int = 0) -> None:
        self.count = count
        self._budget = budget
        self._taken = taken

    def give_back(self) -> None:
        """The model has ended its own. Once more does nothing."""
        taken, self._taken = self._taken, 0
        if self._budget is not None:
            self._budget.give_back(taken)


class ThreadBudget:
    """Threads of frameworks in one process, beside those that execute models: `taken` of `limit`. On any thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ThreadBudget: {self.taken} of {self.limit} threads>"

    def take(self, wanted: int, model: str, parameter: str) -> Threads:
        with self._lock:
            free = max(self.limit - self.taken, 0)
            count = wanted if parameter else min(wanted, 1 + free // 2)
            more = count - 1
            if more > free:
                raise MmeError(
                    Kind.UNAVAILABLE,
                    f"model '{model}': parameter '{parameter}' asks for {more} threads, but {self.taken} of the "
                    f"{self.limit} that frameworks may have in the server's process are taken: ask for fewer, unload a "
                    "model, or raise MME_FRAMEWORK_THREADS",
                )
            self.taken += more
        return Threads(count, self, more)

    def give_back(self, count: int) -> None:
        with self._lock:
            self.taken -= count


_budget: Ambient[ThreadBudget] = Ambient("whose threads models take that are loaded here")
within = _budget.given  # models that are loaded inside take their threads from this; from none, as many as they want


def take_threads(wanted: int, model: str, parameter: str = "") -> Threads:
    """Threads for a model that is loaded here, `wanted` or fewer. UNAVAILABLE: `parameter` asks for too many."""
    budget = _budget.get()
    return Threads(wanted) if budget is None else budget.take(wanted, model, parameter)


T = TypeVar("T")

_CHECK_SECONDS = 0.05


class CancelToken:
    """Whether nothing waits for a load any more, which `cancelled` says; `subject` is what is loaded."""

    def __init__(self, subject: str = "a model", cancelled: Callable[[], bool] = lambda: False) -> None:
        self.subject = subject
        self._cancelled = cancelled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.subject}>"

    @property
    def cancelled(self) -> bool:
        return self._cancelled()

    def check(self) -> None:
        """Go on, or raise. Raises MmeError: CANCELLED."""
        if self.cancelled:
            raise MmeError(Kind.CANCELLED, f"the load of {self.subject} was cancelled")

    def wait(self, ready: Callable[[float], T | None]) -> T:
        """Call `ready`, which waits for so many seconds at most, until it returns something; `check` in between."""
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
