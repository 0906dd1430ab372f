"""The ends of worker processes: what each leaves behind, when the master starts another one, and when it gives up.

A worker that ends unasked is followed by another after a pause, which doubles. Five in a row of which none came to
answer a /ping with 200 are a start that can't succeed: the server ends, with the last error. A worker that has served
is always followed, as is one that lived for a minute and loads nothing: not every platform asks for /ping. A model
whose load was under way at two ends of the first kind is not brought back.

A worker that has lost a GPU ends, and another one loads its models again. A GPU that is lost again and again, or that
the next process does not see, is broken: then /ping fails, so that the platform replaces the instance.
"""

from __future__ import annotations

import logging
import mmap
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING

from model_handlers.system.devices import first_reason, gpu_uuids
from serve.state_file import StateFile, goes_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


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
    """Of one worker.

    Attributes:
        pause: seconds that it waits before it begins.
        left_out: models that it does not bring back, since two workers before it ended while they loaded them.
    """

    def __init__(self) -> None:
        self.pause = 0.0
        self.left_out: frozenset[str] = frozenset()
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
        """It ends of this."""
        self._put(_ERROR, f"{type(error).__name__}: {error}"[:_LONGEST].encode(errors="replace"), _NAMES)

    @property
    def error(self) -> str:
        """What it ended of, "" where it could not tell."""
        return self._text(_ERROR)

    def loads(self, names: Iterable[str]) -> None:
        """The models that are being loaded now."""
        self._put(_NAMES, "\0".join(names).encode(), _SIZE)

    @property
    def loading(self) -> frozenset[str]:
        """Those that were being loaded when it ended."""
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
        for path in directory.glob(f"{_PREFIX}*"):
            if not goes_on(path.name.removeprefix(_PREFIX)):
                path.unlink(missing_ok=True)
        self._read()

    def _read(self) -> None:
        document = self._file.read()
        self._ended = [at for at in document.get("ended", ()) if at > time.time() - _SECONDS]
        before, now = document.get("gpus", 0), len(gpu_uuids())
        if now < before:
            self._give_up(f"of {before} GPUs {now} are left")

    def look(self) -> bool:
        """Whether this process is to end."""
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
