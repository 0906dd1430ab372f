"""Threads: how many models compute on, at which priority, what the system refuses, whether a load's are still wanted.

With pools of their own, models would have thousands of threads on many processors. So those of the serving process take
theirs from one `ThreadBudget`: the first get one a processor, later ones half of what is left, then only the one that
executes them. Errors say which limit of the operator's was met. Any thread may ask.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import os
import platform
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from model_handlers.base import Ambient
from model_handlers.errors import Kind, MmeError
from model_handlers.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    """Start a thread. Raises MmeError: UNAVAILABLE, as many threads and processes are there as may be."""
    try:
        thread.start()
    except RuntimeError as error:
        raise no_room_for(thread.name) from error


def no_room_for(thread: str) -> MmeError:
    return MmeError(Kind.UNAVAILABLE, f"thread '{thread}' can't be started: {_NO_TASKS}")


def prove_room(count: int, name: str) -> None:
    """Start so many threads and some more, ended at once: a library may hang or die without. MmeError: UNAVAILABLE."""
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


_SMALL_MODEL = 1 << 20  # bytes of the model file


def default_threads(model_file: Path) -> int:
    """One thread for a small model: splitting its operators costs more than it gains, and a pool costs threads."""
    small = model_file.is_file() and model_file.stat().st_size < _SMALL_MODEL
    return 1 if small else processors()


def processors() -> int:
    """Processors bound to or granted time of: more threads use up a period's time, and then all stand still."""
    granted = memory.granted_processors()
    bound = len(os.sched_getaffinity(0))
    return bound if granted is None else max(min(bound, math.ceil(granted)), 1)


class Threads:
    """Threads that a model may compute on: `count`, the one that executes it among them."""

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
    """Threads of frameworks in one process, beside those that execute models: `taken` of `limit`. On any thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ThreadBudget: {self.taken} of {self.limit} threads>"

    def take(self, wanted: int, model: str, parameter: str) -> Threads:
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
        with self._lock:
            self.taken -= count


_budget: Ambient[ThreadBudget] = Ambient("whose threads models take that are loaded here")
within = _budget.given  # models that are loaded inside take their threads from this; from none, as many as they want


def take_threads(wanted: int, model: str, parameter: str = "") -> Threads:
    """Threads for a model that is loaded here, `wanted` or fewer. UNAVAILABLE: `parameter` asks for too many."""
    budget = _budget.get()
    return Threads(wanted) if budget is None else budget.take(wanted, model, parameter)


T = TypeVar("T")

_CHECK_SECONDS = 0.05


class CancelToken:
    """Whether nothing waits for a load any more, which `cancelled` says; `subject` is what is loaded."""

    def __init__(self, subject: str = "a model", cancelled: Callable[[], bool] = lambda: False) -> None:
        self.subject = subject
        self._cancelled = cancelled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.subject}>"

    @property
    def cancelled(self) -> bool:
        return self._cancelled()

    def check(self) -> None:
        """Go on, or raise. Raises MmeError: CANCELLED."""
        if self.cancelled:
            raise MmeError(Kind.CANCELLED, f"the load of {self.subject} was cancelled")

    def wait(self, ready: Callable[[float], T | None]) -> T:
        """Call `ready`, which waits for so many seconds at most, until it returns something; `check` in between."""
        while (result := ready(_CHECK_SECONDS)) is None:
            self.check()
        return result

    def sleep(self, seconds: float) -> bool:
        """Wait; return whether the time went by without a cancellation."""
        ends = time.monotonic() + seconds
        while not self.cancelled:
            left = ends - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, _CHECK_SECONDS))
        return False


NEVER = CancelToken()


# -- priority ----------------------------------------------------------------------------------------------------------
#
# A thread hands its priority down to all that it starts, so what outlives a load is given the usual one again. That
# takes a right that root in a container may lack: without it loads have the usual share of a core. To take that in long
# turns needs no right: of two that want a core Linux prefers the one that wants it for a shorter time (since 6.12).

_NICENESS = 10  # a tenth of the processor time of threads at 0, where there is not enough for all
_PROCESSES = Path("/proc")
_CAP_SYS_NICE = 1 << 23
_RANGE = 20  # RLIMIT_NICE counts from the other end: 20 allows 0
_LONG_TURNS = 100_000_000  # ns, the longest there are
_USUAL_TURNS = 0  # the system's own
_syscall = ctypes.PyDLL(None).syscall  # takes a microsecond: nothing to let others have Python's lock for
_SCHED_SETATTR, _SCHED_GETATTR = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))


class _Attributes(ctypes.Structure):
    """The kernel's `sched_attr`; the C library of Debian 12 does not have it."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),  # a turn's length
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def lower_priority() -> None:
    """The calling thread leaves the cores to inference; both its share and its turns are per thread on Linux."""
    if may_raise_priority():
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    _take_turns(0, _LONG_TURNS)


def lower_priority_for_good() -> None:
    """The same for the calling process, whose only thread this is, and for good: it takes no right to give it up."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    _take_turns(0, _LONG_TURNS)


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Do something at that priority; what it leaves behind, threads and processes, has the usual one in the end."""
    before = threads()
    lower_priority()
    try:
        yield
    finally:
        usual_priority()
        begun = threads() - before
        left = _descendants() if has_started_any() else ()
        for thread in begun.union(*map(threads, left)):
            _recall(thread)


def usual_priority(thread: int = 0) -> None:
    """Give a thread, by default the calling one, the priority of those that serve, as far as that is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, 0)
    _take_turns(thread, _USUAL_TURNS)


def _recall(thread: int) -> None:
    """Take from a thread what it has inherited of a load's priority, and nothing that it chose itself."""
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) == _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, 0)
    attributes = _attributes(thread)
    if attributes is not None and attributes.runtime == _LONG_TURNS:
        _take_turns(thread, _USUAL_TURNS)


def _take_turns(thread: int, nanoseconds: int) -> None:
    """Have a thread keep a core for so long once it has it. Where that can't be had all is as it was."""
    attributes = _attributes(thread)
    if attributes is not None:
        attributes.runtime = nanoseconds
        _syscall(_SCHED_SETATTR, thread, ctypes.byref(attributes), 0)


def _attributes(thread: int) -> _Attributes | None:
    attributes = _Attributes()
    asked = _SCHED_GETATTR, thread, ctypes.byref(attributes), ctypes.sizeof(attributes), 0
    return attributes if _SCHED_GETATTR and _syscall(*asked) == 0 else None


def threads(process: int | str = "self") -> set[int]:
    """The threads of a process, none where it has ended. Python's lock is not held for long, several times a load."""
    try:
        return set(map(int, os.listdir(f"/proc/{process}/task")))  # noqa: PTH208 - a fifth of the time
    except OSError:
        return set()


def _descendants() -> set[int]:
    """The processes below this one, and of a model's process those that were."""
    children: dict[int, list[int]] = {}
    found, parents = set(), [os.getpid()]
    for process, parent in processes():
        children.setdefault(parent, []).append(process)
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if family_of(process) == os.getpid():
                found.add(process)
    while parents:
        below = children.get(parents.pop(), [])
        found.update(below)
        parents += below
    return found


@functools.cache
def may_raise_priority() -> bool:
    """Return whether this process may give a thread the usual priority again."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= _RANGE:
        return True
    try:
        lines = (_PROCESSES / "self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _CAP_SYS_NICE)


_FILE_LOCKS = 10  # the resource module does not name it


def found_family() -> None:
    """What the calling process starts from now on is of its family."""
    with contextlib.suppress(OSError, ValueError):  # fewer than that are allowed
        resource.setrlimit(_FILE_LOCKS, (os.getpid(), resource.getrlimit(_FILE_LOCKS)[1]))


def processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                yield int(entry.name), int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])


def children() -> list[int]:
    """This process's children, inherited and unburied too; complete if no other thread buries meanwhile."""
    try:
        lists = [(task / "children").read_bytes() for task in Path("/proc/self/task").iterdir()]
    except OSError:  # a thread ended meanwhile, or the system keeps no such lists
        return [process for process, parent in processes() if parent == os.getpid()]
    return [int(number) for numbers in lists for number in numbers.split()]


def has_started_any() -> bool:
    """Return whether the calling process has children, or had any and waited for their end."""
    return bool(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss or children())


def family_of(process: int = 0) -> int:
    """The founder of a process's family, our own by default; -1 for none. OSError: ended, or another user's."""
    return resource.prlimit(process, _FILE_LOCKS)[0]
