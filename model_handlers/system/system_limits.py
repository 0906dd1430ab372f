"""What the system may refuse because there is so much of it already: threads, processes, open files.

Those limits are the operator's to raise, and models that serve go on. So whoever asks for more gets a sentence that
says which limit it is. Any thread may ask.
"""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

from model_handlers.errors import Kind, MmeError

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
    """Start a thread.

    Raises:
        MmeError: UNAVAILABLE, as many threads and processes are there as may be.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise no_room_for(thread.name) from error


def no_room_for(thread: str) -> MmeError:
    """As many threads and processes are there as may be. Kind UNAVAILABLE."""
    return MmeError(Kind.UNAVAILABLE, f"thread '{thread}' can't be started: {_NO_TASKS}")


def prove_room(count: int, name: str) -> None:
    """Start so many threads and some more, which end at once: for a library that hangs, or dies, where it can't.

    Raises:
        MmeError: UNAVAILABLE, as many threads and processes are there as may be.
    """
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
