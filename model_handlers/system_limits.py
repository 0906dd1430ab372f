"""What the system may refuse because there is so much of it already: threads, processes, open files.

Those limits are the operator's to raise, and models that serve go on. So whoever asks for more gets a sentence that
says which limit it is. Any thread may ask.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    import threading

_NO_TASKS = "raise the limit of processes and threads (ulimit -u, or the container's pids limit)"
_NO_FILES = "raise the limit of open files (ulimit -n)"
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
