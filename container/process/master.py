"""Gunicorn with our settings: its configuration, what its master does around each worker, and when it gives up.

One worker, because exactly one process owns the model cache, and no preloading, because threads and loops do not
survive a fork. Each worker has the application, and so the settings, from the master that forked it.

A worker that ends unasked is followed by another after a pause, which doubles. Five in a row of which none came to
answer a /ping with 200 are a start that can't succeed: the server ends, with the last error. A worker that has served
is always followed, as is one that lived for a minute and loads nothing: not every platform asks for /ping. A model
whose load was under way at two ends of the first kind is not brought back.

A worker that has lost a GPU ends, and another one loads its models again. A GPU that is lost again and again, or that
the next process does not see, is broken: then /ping fails, so that the platform replaces the instance.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import signal
import struct
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.systemd import listen_fds

from container.observe.logs import logging_config
from container.process.resources import keep_all
from container.process.sockets import PORT_SECONDS, authority, listening
from model_handlers.system.devices import first_reason, gpu_uuids
from serve.sources.override import forget_overrides
from serve.state_file import StateFile, life_of, remove_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

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


_FIRST_SECONDS = 0.5
_MOST_SECONDS = 30.0  # shorter than gunicorn's patience with a worker that gives no sign of life
_STEADY_SECONDS = 60.0  # a worker that lived for so long begins the pauses again
_MOST_UNSERVED = 5
_MOST_LOADS = 2


class WorkerRestarts:
    """The ends of workers, one after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._ended = 0  # in a row, none of which lived for long
        self._unserved = 0  # in a row
        self._loading: Counter[str] = Counter()  # ends of that kind, by the models that were being loaded

    def __repr__(self) -> str:
        return f"<WorkerRestarts: {self._ended} in a row, {self._unserved} of them before they served>"

    def begins(self, words: LastWords) -> None:
        words.pause = min(_FIRST_SECONDS * 2.0 ** (self._ended - 1), _MOST_SECONDS) if self._ended else 0.0
        words.left_out = frozenset(name for name, count in self._loading.items() if count >= _MOST_LOADS)
        self._began = self._clock() + words.pause

    def ends(self, words: LastWords) -> str:
        """A worker has ended: why no other is to be started, "" if one is."""
        if words.was_asked:
            return ""
        steady = self._clock() - self._began > _STEADY_SECONDS
        has_served = words.has_served or (steady and not words.loading)
        self._ended = 1 if has_served and steady else min(self._ended + 1, 32)
        if has_served:
            self._unserved = 0
            return ""
        self._unserved += 1
        self._loading.update(words.loading)
        if self._unserved < _MOST_UNSERVED:
            return ""
        loading = ", ".join(f"'{name}'" for name in sorted(words.loading))
        while_loading = f", the last one while it loaded {loading}" if loading else ""
        error = words.error or "none was told; the lines above say how it ended"
        return (
            f"{self._unserved} worker processes in a row ended before /ping was answered 200{while_loading}: "
            f"this server can't start; the last error: {error}"
        )


_SERVED, _ASKED, _ERROR, _NAMES = 0, 1, 8, 4096  # where each begins
_SIZE = 64 << 10  # names that find no room are not left
_LENGTH = struct.Struct("=I")
_LONGEST = 1000  # characters of an error


class LastWords:
    """What one worker is told by the master, and tells it."""

    def __init__(self) -> None:
        self.pause = 0.0  # seconds that it waits before it begins
        self.left_out: frozenset[str] = frozenset()  # models that two workers before it ended in the load of
        self._memory = mmap.mmap(-1, _SIZE)

    def __repr__(self) -> str:
        return f"<LastWords, served: {self.has_served}, asked to end: {self.was_asked}>"

    def serves(self) -> None:
        """A /ping is answered 200."""
        self._memory[_SERVED] = 1

    @property
    def has_served(self) -> bool:
        return bool(self._memory[_SERVED])

    def asked(self) -> None:
        """It ends because it is to: a signal says so, or a GPU that was lost."""
        self._memory[_ASKED] = 1

    @property
    def was_asked(self) -> bool:
        return bool(self._memory[_ASKED])

    def fails(self, error: BaseException) -> None:
        self._put(_ERROR, f"{type(error).__name__}: {error}"[:_LONGEST].encode(errors="replace"), _NAMES)

    @property
    def error(self) -> str:
        """What it ended of, "" where it could not tell."""
        return self._text(_ERROR)

    def loads(self, names: Iterable[str]) -> None:
        self._put(_NAMES, "\0".join(names).encode(), _SIZE)

    @property
    def loading(self) -> frozenset[str]:
        return frozenset(filter(None, self._text(_NAMES).split("\0")))

    def close(self) -> None:
        self._memory.close()

    def _put(self, start: int, text: bytes, end: int) -> None:
        body = start + _LENGTH.size
        text = text[: end - body] if start == _ERROR else text if body + len(text) <= end else b""
        # At one stroke: a thread that is killed between two statements would leave neither what was there nor this.
        self._memory[start : body + len(text)] = _LENGTH.pack(len(text)) + text

    def _text(self, start: int) -> str:
        body = start + _LENGTH.size
        (length,) = _LENGTH.unpack(self._memory[start:body])
        return self._memory[body : body + length].decode(errors="replace")


_log = logging.getLogger("mme.worker")
_FORM = "mme lost GPUs 1"
_PREFIX = "lost-gpus-"
_LIMIT = 3  # processes that end within so many seconds
_SECONDS = 600.0


class LostGpus:
    """Looks whether a GPU was lost. The workers of a master, which `life` names, share a file that outlives them.

    `are_broken` tells whether a new process is no help.
    """

    def __init__(self, directory: Path, life: str) -> None:
        self._file = StateFile(directory / f"{_PREFIX}{life}", _FORM)
        self._ended: list[float] = []
        self.are_broken = False
        remove_ended(directory, _PREFIX)
        self._read()

    def _read(self) -> None:
        document = self._file.read()
        self._ended = [at for at in document.get("ended", ()) if at > time.time() - _SECONDS]
        before, now = document.get("gpus", 0), len(gpu_uuids())
        if now < before:
            self._give_up(f"of {before} GPUs {now} are left")

    def look(self) -> bool:
        reason = first_reason()
        if not reason or self.are_broken:
            return False
        if len(self._ended) >= _LIMIT:
            self._give_up(f"{reason}, for the {_LIMIT + 1}th time in {_SECONDS / 60:.0f} minutes")
            return False
        self._file.write({"ended": [*self._ended, time.time()], "gpus": len(gpu_uuids())})
        _log.critical("%s; this process ends, and another one takes its place", reason)
        return True

    def _give_up(self, reason: str) -> None:
        self.are_broken = True
        _log.critical("%s: a new process is no help; /ping fails, so that the instance is replaced", reason)
