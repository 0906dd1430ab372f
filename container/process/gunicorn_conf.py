"""Gunicorn's configuration, as the module it reads with `-c python:container.process.gunicorn_conf`.

Every upper-level name here that gunicorn knows is one of its settings; the values come from `Settings`. One worker,
because exactly one process owns the model cache, and no preloading, because threads and loops do not survive a fork.
Runs in gunicorn's master, and again on a reload.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.systemd import listen_fds

from container.observe.logs import configure, logging_config
from container.process.authority import authority
from container.process.garbage import keep_all
from container.process.last_words import LastWords
from container.process.restarts import Restarts
from container.settings import Settings
from container.settings.address import listening_address
from serve.sources.override import forget_overrides
from serve.state_file import life_of

if TYPE_CHECKING:
    from typing import Any

# `mme serve` has said where; the worker reads it again, in a process of another number.
os.environ["MME_HOST"] = listening_address(os.environ, os.path.exists, os.getpid()).host
_settings = Settings.from_environ(os.environ)
configure(_settings.log_level, _settings.log_format)
_restarts = Restarts()  # the master's; a reload begins with none
_DRAIN_MARGIN_SECONDS = 3  # for the worker to close what it holds; SageMaker kills 30 s after SIGTERM

bind = authority(_settings.host, _settings.port)
# What the log says of the address; the worker has a context of its own.
certfile = None if _settings.tls_cert is None else str(_settings.tls_cert)
keyfile = None if _settings.tls_key is None else str(_settings.tls_key)
backlog = 2048  # SageMaker wants connections accepted within 250 ms, also while many clients come at once
proc_name = "mme"

workers = 1
worker_class = "container.process.worker.EngineWorker"
preload_app = False
# The worker's loop tells the master that it turns; a loop that has stood still for this long answers no ping either.
timeout = 60
graceful_timeout = int(_settings.drain_seconds) + _DRAIN_MARGIN_SECONDS
keepalive = int(_settings.idle_timeout)

# The heartbeat is a file. On a slow disk touching it can block, so it lies in memory where that is possible.
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a file without a name
control_socket_disable = True  # a socket in the home directory, which may be read-only or shared

accesslog = None
errorlog = "-"
loglevel = _settings.log_level
# gunicorn hangs handlers of its own on its loggers; this takes them off again
logconfig_dict = logging_config(_settings.log_level, _settings.log_format)


def on_starting(server: Any) -> None:
    """Refuse a number of workers that came another way (GUNICORN_CMD_ARGS, gunicorn's own flags), and a taken port."""
    if server.cfg.workers != 1:
        raise RuntimeError(
            f"workers={server.cfg.workers}: one process owns the model cache, so that only 1 worker can be used"
        )
    # On SIGUSR2 it executes itself again, by the path of its own file: Python would take the modules beside that for
    # the top of the import path, and gunicorn's `http` for its own.
    server.START_CTX["args"] = [sys.executable, "-m", "gunicorn", *sys.argv[1:]]
    if server.master_pid or listen_fds(unset_environment=False):  # somebody hands us a socket that listens already
        return
    for place in server.cfg.address:
        if isinstance(place, tuple):
            _wait_for_port(*place)


def _wait_for_port(host: str, port: int) -> None:
    """Return when it can be listened to: a server that had it may be about to end.

    Raises:
        RuntimeError: gunicorn ends with its sentence.
    """
    for last in (False, False, False, False, True):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as place:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                place.bind((host, port))
            except OSError as error:
                if last or error.errno != errno.EADDRINUSE:
                    raise RuntimeError(
                        f"the server cannot listen to HTTP requests at {host}:{port}: {error.strerror}; "
                        "choose another --port/MME_PORT, 0 takes a free one"
                    ) from error
            else:
                return
        time.sleep(1)


def pre_fork(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """All that a worker needs is imported: it and we share those pages."""
    worker.words = LastWords()
    _restarts.begins(worker.words)
    keep_all()


def post_fork(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """A worker that follows one that ended badly does not begin at once; the master goes on, and may end it."""
    if worker.words.pause:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):  # the master's handlers do nothing here
            signal.signal(number, signal.SIG_DFL)
        time.sleep(worker.words.pause)


def worker_exit(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """Memory of thousands of models goes with the process: Python would take them apart one by one."""
    if worker.over:
        atexit._run_exitfuncs()  # noqa: SLF001 - all that was registered, without the end of the interpreter
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def child_exit(server: Any, worker: Any) -> None:
    """Another worker follows, unless none can serve: then the server ends, with the last error.

    Raises:
        HaltServer: gunicorn ends.
    """
    reason = _restarts.ends(worker.words) if server.LISTENERS else ""  # without: it ends anyway
    worker.words.close()
    if reason:
        raise HaltServer(reason, Arbiter.WORKER_BOOT_ERROR)


def when_ready(server: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """Signals have their handlers now. End at once on a SIGTERM that was kept while we started (`mme serve`)."""
    if signal.SIGTERM in signal.sigpending():
        raise SystemExit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def on_exit(server: Any) -> None:  # noqa: ARG001 - gunicorn's interface
    """The files that models were loaded with are for the next worker, and none comes any more."""
    forget_overrides(_settings.cache_dir, life_of(os.getpid()))
