"""Gunicorn with our settings: its configuration, and what its master does around each worker.

One worker, because exactly one process owns the model cache, and no preloading, because threads and loops do not
survive a fork. Each worker has the application, and so the settings, from the master that forked it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.systemd import listen_fds

from container.observe.logs import logging_config
from container.process.resources import keep_all
from container.process.restarts import LastWords, WorkerRestarts
from container.process.sockets import PORT_SECONDS, authority, listening
from serve.sources.override import forget_overrides
from serve.state_file import life_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.settings import Settings

_DRAIN_MARGIN_SECONDS = 3  # for the worker to close what it holds; SageMaker kills 30 s after SIGTERM


class Server(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """What gunicorn's master runs; `again` starts the same server, by whatever code is installed then (SIGUSR2)."""

    def __init__(self, settings: Settings, again: Sequence[str]) -> None:
        self.settings = settings
        self._again = list(again)
        self._restarts = WorkerRestarts()
        super().__init__()

    def load_config(self) -> None:
        """Configure gunicorn, at the start and at each reload, which begins without restarts."""
        settings = self.settings
        self._restarts = WorkerRestarts()
        configuration = {
            "bind": authority(settings.host, settings.port),
            # What the log says of the address; the worker has a context of its own.
            "certfile": None if settings.tls_cert is None else str(settings.tls_cert),
            "keyfile": None if settings.tls_key is None else str(settings.tls_key),
            "backlog": 2048,  # SageMaker wants connections accepted within 250 ms, also while many clients come at once
            "proc_name": "mme",
            "workers": 1,
            "worker_class": "container.process.worker.EngineWorker",
            "preload_app": False,
            # The worker's loop tells the master that it turns; one that stands still this long answers no ping either.
            "timeout": 60,
            "graceful_timeout": int(settings.drain_seconds) + _DRAIN_MARGIN_SECONDS,
            "keepalive": int(settings.idle_timeout),
            # The heartbeat is a file. On a slow disk touching it can block, so it lies in memory where it can.
            "worker_tmp_dir": "/dev/shm" if os.access("/dev/shm", os.W_OK) else None,  # noqa: S108 - without a name
            "control_socket_disable": True,  # a socket in the home directory, which may be read-only or shared
            "accesslog": None,
            "errorlog": "-",
            "loglevel": settings.log_level,
            # gunicorn hangs handlers of its own on its loggers; this takes them off again
            "logconfig_dict": logging_config(settings.log_level, settings.log_format),
            "on_starting": self._on_starting,
            "pre_fork": self._pre_fork,
            "post_fork": _post_fork,
            "worker_exit": _worker_exit,
            "child_exit": self._child_exit,
            "when_ready": _when_ready,
            "on_exit": self._on_exit,
        }
        for name, value in configuration.items():
            self.cfg.set(name, value)

    def _on_starting(self, server: Any) -> None:
        """Refuse a taken port."""
        server.START_CTX["args"] = self._again
        if server.master_pid or listen_fds(unset_environment=False):  # a socket that listens already is handed to us
            return
        for place in server.cfg.address:
            if isinstance(place, tuple):
                (host, port), where = place, "--port/MME_PORT, 0 takes a free one"
                for each in listening(host, port, "HTTP", where, seconds=PORT_SECONDS):
                    each.close()

    def _pre_fork(self, server: Any, worker: Any) -> None:  # noqa: ARG002 - gunicorn's interface
        """All that a worker needs is imported: it and we share those pages."""
        worker.words = LastWords()
        self._restarts.begins(worker.words)
        keep_all()

    def _child_exit(self, server: Any, worker: Any) -> None:
        """Another worker follows, unless none can serve: then the server ends, with the last error."""
        reason = self._restarts.ends(worker.words) if server.LISTENERS else ""  # without: it ends anyway
        worker.words.close()
        if reason:
            raise HaltServer(reason, Arbiter.WORKER_BOOT_ERROR)

    def _on_exit(self, server: Any) -> None:  # noqa: ARG002 - gunicorn's interface
        """The files that models were loaded with are for the next worker, and none comes any more."""
        forget_overrides(self.settings.cache_dir, life_of(os.getpid()))


def _post_fork(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """A worker that follows one that ended badly does not begin at once; the master goes on, and may end it."""
    if worker.words.pause:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):  # the master's handlers do nothing here
            signal.signal(number, signal.SIG_DFL)
        time.sleep(worker.words.pause)


def _worker_exit(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """Memory of thousands of models goes with the process: Python would take them apart one by one."""
    if worker.over:
        atexit._run_exitfuncs()  # noqa: SLF001 - all that was registered, without the end of the interpreter
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _when_ready(server: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """Signals have their handlers now. End at once on a SIGTERM that was kept while we started (`mme serve`)."""
    if signal.SIGTERM in signal.sigpending():
        raise SystemExit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
