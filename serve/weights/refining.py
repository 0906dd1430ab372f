"""Refining a form in a process of its own: what a framework takes to optimise a model is not the server's memory.

`Refiner` runs on the thread that wants the form, one process at a time; `main` is that process. It is the first that
the kernel ends when memory runs out, and it does not outlive the server. While there is more to refine it stays: most
of what a small model takes is the start of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_handlers.config.convert import config_fields, config_from
from model_handlers.errors import Kind, MmeError
from model_handlers.system.disk import remove_staging
from model_handlers.system.threads import advised, lower_priority_for_good
from serve.weights.store import Form, WeightStore

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.mapped import MappedHandler

_NAME = "mme-refine"
_SECONDS = 600.0
_IDLE_SECONDS = 5.0
_MOST_TASKS = 64  # of one process
_SHOWN = 500  # characters of a process's stderr
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Refiner:
    """Has forms of one store refined, on one thread; `close` may be called on another."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._process: _Process | None = None
        self._until = 0.0  # monotonic time at which it has been idle for long enough
        self._closed = False
        self._lock = threading.Lock()  # of the process, held for no longer than a start

    def refine(self, handler: type[MappedHandler], config: ModelConfig, form: Form) -> bool:
        """Refine a written form; whether its model can be mapped: it answers the same, mapped and packed.

        Raises:
            MmeError: UNAVAILABLE when the process failed, or was ended.
        """
        task = {
            "handler": f"{handler.__module__}:{handler.__qualname__}",
            "config": config_fields(config),
            "key": form.key,
        }
        self._until = math.inf
        process = self._started()
        try:
            return process.ask(task)
        except BaseException:
            self.end()
            raise
        finally:
            self._until = time.monotonic() + _IDLE_SECONDS
            if process.tasks >= _MOST_TASKS:  # what a framework keeps of each adds up
                self.end()

    @property
    def idle(self) -> bool:
        """Whether a process waits for a task that has not come for a while: `rest` ends it."""
        return self._process is not None and time.monotonic() > self._until

    def rest(self) -> None:
        """End a process that is idle; the next task starts another one. On the thread that refines."""
        if self.idle:
            self.end()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> _Process:
        with self._lock:
            if self._closed:
                raise MmeError(Kind.UNAVAILABLE, "nothing is refined any more")
            if self._process is not None and self._process.is_gone:  # while it was idle, for want of memory
                self._process.end()
                self._process = None
            if self._process is None:
                self._process = _Process(self._store)
            return self._process

    def end(self) -> None:
        """End the process, if there is one, and what it has half written. On the thread that refines, or later."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()
            remove_staging(self._store.directory)


class _Process:
    """A process that refines, and that has to be ended."""

    def __init__(self, store: WeightStore) -> None:
        self.tasks = 0
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        program = f"import sys; sys.path[:] = {sys.path!r}; from serve.weights.refining import main; main()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, _NAME, str(os.getpid()), str(store.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                start_new_session=True,  # Ctrl-C at the terminal is not for it
            )
        except OSError as error:
            self._words.close()
            raise MmeError(Kind.UNAVAILABLE, f"no process to refine weights in: {advised(error)}") from error

    def ask(self, task: dict[str, Any]) -> bool:
        """Have one form refined. Raises MmeError as `Refiner.refine`; it is good for nothing then."""
        self.tasks += 1
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101 - it has pipes
        assert stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()
        ready = select.poll()
        ready.register(stdout, select.POLLIN)
        if not ready.poll(_SECONDS * 1e3):
            self._process.kill()
        told = stdout.readline()
        if not told:
            raise MmeError(Kind.UNAVAILABLE, f"refining ended with {self._process.wait()}: {self._stderr_tail()}")
        return bool(json.loads(told))

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._words.close()

    def _stderr_tail(self) -> str:
        self._words.seek(0)
        return " ".join(self._words.read().decode("utf-8", "replace").split())[-_SHOWN:]


def main() -> None:
    """Refine what standard input names, a line each; print for each whether the model can be mapped."""
    _subordinate(int(sys.argv[2]))
    store = WeightStore(Path(sys.argv[3]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a framework prints is no answer
    for line in sys.stdin.buffer:
        answers.write(f"{json.dumps(_can_be_mapped(store, json.loads(line)))}\n")
        answers.flush()


def _can_be_mapped(store: WeightStore, task: dict[str, Any]) -> bool:
    module, _, name = task["handler"].partition(":")
    handler: type[MappedHandler] = getattr(importlib.import_module(module), name)
    config = config_from(task["config"])
    refinement = handler.refinement(config)
    form = store.form(task["key"], refinement) if store.open() else None
    return form is None or form.trial is not None or _refine(store, handler, config, form, refinement)


def _refine(store: WeightStore, handler: type[MappedHandler], config: ModelConfig, form: Form, refinement: str) -> bool:
    with store.draft() as draft:
        graph = handler.refine_form(config, form.path, draft)
        refined = store.add_refined(draft, graph, form.key, refinement)
    trial = handler.try_form(config, refined.path)
    if trial.alike:
        store.keep(replace(refined, trial=trial))
        store.drop_written(form.key)
    return trial.alike


def _subordinate(server: int) -> None:
    """Come after all other processes, and end with the server."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(_PR_SET_NAME, _NAME.encode(), 0, 0, 0)
    if os.getppid() != server:  # it died before
        os._exit(1)
    lower_priority_for_good()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
