"""How many threads models compute on: where a configuration does not say, and all of them together.

Models have pools of threads. On many processors that is thousands of them with a few dozen models, which share the same
processors. So the models of the serving process take theirs from one `ThreadBudget`: the first get one a processor,
later ones half of what is left, and then none but the one that executes them.
"""

from __future__ import annotations

import math
import os
import threading
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from model_handlers.system import memory
from model_handlers.system.ambient import Ambient

if TYPE_CHECKING:
    from pathlib import Path

_SMALL_MODEL = 1 << 20  # bytes of the model file


def default_threads(model_file: Path) -> int:
    """One thread for a small model: splitting its operators costs more than it gains, and a pool costs threads."""
    small = model_file.is_file() and model_file.stat().st_size < _SMALL_MODEL
    return 1 if small else processors()


def processors() -> int:
    """How many of them this process may use: those it is bound to, no more than its control groups grant time of.

    More threads would use up the time of a period together, and then all of them stand still until the next one.
    """
    granted = memory.granted_processors()
    bound = len(os.sched_getaffinity(0))
    return bound if granted is None else max(min(bound, math.ceil(granted)), 1)


class Threads:
    """Threads that a model may compute on.

    Attributes:
        count: how many, the one that executes it among them.
    """

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
    """Threads of frameworks in one process, beside those that execute models. On any thread.

    Attributes:
        limit: how many there may be.
        taken: how many there are.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ThreadBudget: {self.taken} of {self.limit} threads>"

    def take(self, wanted: int, model: str, parameter: str) -> Threads:
        """See `take_threads`."""
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
        """So many have ended."""
        with self._lock:
            self.taken -= count


_budget: Ambient[ThreadBudget] = Ambient("whose threads models take that are loaded here")
within = _budget.given  # models that are loaded inside take their threads from this; from none, as many as they want


def take_threads(wanted: int, model: str, parameter: str = "") -> Threads:
    """Threads for a model that is loaded here; to be given back when it is closed.

    Args:
        wanted: how many it computes on; fewer where they are not free, unless its configuration asks for them.
        model: its name.
        parameter: that of its configuration which asks; "" where none does.

    Raises:
        MmeError: UNAVAILABLE where those that its configuration asks for are not free.
    """
    budget = _budget.get()
    return Threads(wanted) if budget is None else budget.take(wanted, model, parameter)
