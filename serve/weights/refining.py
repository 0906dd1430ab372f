"""Refining a form in a process of its own.

What a framework takes to optimise a model is then neither the server's memory nor measured as some other model's, and
if it crashes, it crashes alone.

`Refiner` runs on the thread that wants the form, one process at a time; `main` is that process. It is the first that
the kernel ends when memory runs out, and it does not outlive the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from model_handlers.isolation.config_fields import config_fields, config_from
from serve.weights.store import Form, WeightStore

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig
    from model_handlers.mapped import MappedHandler

_log = logging.getLogger("mme.weights")
_NICENESS = 10
_SECONDS = 600.0
_SHOWN = 500  # characters of a process's last words
_PR_SET_PDEATHSIG = 1


class Refiner:
    """Has forms of one store refined."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()  # of the two above, held for no longer than a start

    def refine(self, handler: type[MappedHandler], config: ModelConfig, form: Form) -> bool:
        """Refine a written form; whether its model can be mapped: it answers the same, mapped and packed.

        Raises:
            MmeError: UNAVAILABLE when the process failed, or was ended.
        """
        task = {
            "server": os.getpid(),
            "store": str(self._store.directory),
            "handler": f"{handler.__module__}:{handler.__qualname__}",
            "config": config_fields(config),
            "key": form.key,
        }
        program = f"import sys; sys.path[:] = {sys.path!r}; from serve.weights.refining import main; main()"
        with self._lock:
            if self._closed:
                raise MmeError(Kind.UNAVAILABLE, "nothing is refined any more")
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", program, "mme-refine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at the terminal is not for it
            )
        try:
            told, words = process.communicate(json.dumps(task).encode(), _SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            told, words = process.communicate()
        if process.returncode:
            shown = " ".join(words.decode("utf-8", "replace").split())[-_SHOWN:]
            raise MmeError(Kind.UNAVAILABLE, f"refining ended with {process.returncode}: {shown}")
        return bool(json.loads(told))

    def close(self) -> None:
        """End what is under way; whoever waits for it is told."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()


def main() -> None:
    """Refine what standard input names; print whether the model can be mapped."""
    task = json.loads(sys.stdin.buffer.read())
    _subordinate(task["server"])
    module, _, name = task["handler"].partition(":")
    handler: type[MappedHandler] = getattr(importlib.import_module(module), name)
    config = config_from(task["config"])
    store = WeightStore(Path(task["store"]))
    refinement = handler.refinement(config)
    form = store.form(task["key"], refinement) if store.open() else None
    can_be_mapped = form is None or form.trial is not None or _refine(store, handler, config, form, refinement)
    sys.stdout.write(json.dumps(can_be_mapped))


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
    """Come after everybody else, and end with the server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it died before
        os._exit(1)
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
