"""The threads that compute a batch of rows together, a part of it each.

The libraries have OpenMP for that. It has a team of threads for each thread that executes, LightGBM keeps how many for
all models at once, and where a thread can't be started OpenMP ends the process. So the libraries compute with one
thread, and a model's own threads, which are started when it is loaded, call them side by side.
"""

from __future__ import annotations

import itertools
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.system.priority import usual_priority
from model_handlers.system.system_limits import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.system.threads import Threads
    from model_handlers.tensor import Array

    Compute = Callable[[Array], Array]

_LEAST_ROWS = 128  # of a part: a call takes as long as some dozens of them


class _Job:
    """A batch under way."""

    def __init__(self, compute: Compute, parts: list[Array]) -> None:
        self._compute = compute
        self._parts = parts
        self._next = itertools.count()
        self._done = threading.Semaphore(0)
        self._found: list[Array] = [*parts]
        self._errors: list[Exception] = []

    def work(self) -> None:
        """Compute parts until each is taken."""
        while (index := next(self._next)) < len(self._parts):
            try:
                self._found[index] = self._compute(self._parts[index])
            except Exception as error:  # noqa: BLE001 - raised by `result`
                self._errors.append(error)
            finally:
                self._done.release()

    def result(self) -> Array:
        """That of all parts, once they are computed."""
        for _ in self._parts:
            self._done.acquire()
        if self._errors:
            raise self._errors[0]
        return np.concatenate(self._found)


class Crew:
    """Threads of one model, beside those that execute it; several may do so at a time.

    Args:
        threads: how many a batch is computed on, the one that executes it among them.
        model: its name.

    Raises:
        MmeError: UNAVAILABLE where the system has no room for them.
    """

    def __init__(self, threads: Threads, model: str) -> None:
        self._threads = threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._members: list[threading.Thread] = []
        try:
            for number in range(1, threads.count):
                name = f"rows of '{model}' {number}"
                member = threading.Thread(target=self._serve, name=name, daemon=True)
                start_thread(member)
                self._members.append(member)
        except BaseException:
            self.close()
            raise

    def compute(self, compute: Compute, rows: Array) -> Array:
        """What `compute` returns for the rows, a row for each."""
        count = min(len(rows) // _LEAST_ROWS, 1 + len(self._members))
        if count < 2:
            return compute(rows)
        job = _Job(compute, np.array_split(rows, count))
        for _ in range(count - 1):
            self._jobs.put(job)
        job.work()
        return job.result()

    def close(self) -> None:
        """End the threads, and give them back. Once more does nothing."""
        for _ in self._members:
            self._jobs.put(None)
        for member in self._members:
            member.join()
        self._members = []
        self._threads.give_back()

    def _serve(self) -> None:
        usual_priority()  # it was started by a load
        while (job := self._jobs.get()) is not None:
            job.work()
