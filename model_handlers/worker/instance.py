"""The process of one instance over all its lives: start, restarts within budgets, death, what it takes, its end.

`start` and `close` are called on load threads, the rest on any thread that holds `lock`, which keeps two executions
apart: a process has one thread for them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from model_handlers.base import Footprint
from model_handlers.config.convert import config_from
from model_handlers.errors import ChildDiedError, ChildOutgrownError, Kind, MmeError
from model_handlers.system import devices, memory
from model_handlers.system.threads import advised
from model_handlers.worker.fork_client import forks_with
from model_handlers.worker.limits import Deadlines, LoadWatch, allowed
from model_handlers.worker.memory import SegmentPool
from model_handlers.worker.policies import OUTGROWN_LIMIT, OUTGROWN_WINDOW, OVERRUN_WINDOW, RestartBudget
from model_handlers.worker.process import Child, admit, leave
from model_handlers.worker.wire import ProtocolError, error_from

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.worker.fork_server import Program
    from model_handlers.worker.requests import OpenRequests
    from model_handlers.worker.wire import Message

_log = logging.getLogger("mme.isolation")
_OVERRAN = "took longer than MME_EXECUTION_TIMEOUT or the limit of a request too often"
NONSENSE = (ProtocolError, LookupError, TypeError, ValueError, AttributeError, OverflowError)  # of an answer's form
_LOADING = "while it loaded the model"
EXECUTING = "while it executed a batch"
IDLE = "while it executed nothing"
_RESTING_SECONDS = 30.0  # to give memory back, however short an execution may be


class _NeverBeganError(MmeError):
    """There was no process: its fork server ended before."""


class Restarts:
    """How often the process may be started again, by how it ended."""

    def __init__(self) -> None:
        self._deaths = RestartBudget()
        self._overruns = RestartBudget(OVERRUN_WINDOW, delay=0.0, why=_OVERRAN)
        self._outgrowths = RestartBudget(OUTGROWN_WINDOW, 0.0, OUTGROWN_LIMIT, "took too much memory too often")
        self.counts = self._deaths  # the budget of the last death
        self.last_death = ""

    def died(self, death: ChildDiedError) -> None:
        self.last_death = death.message
        if isinstance(death, ChildOutgrownError):
            self.counts = self._outgrowths
        else:
            self.counts = self._overruns if death.kind is Kind.TIMED_OUT else self._deaths

    def used_up(self, model: str, lane: str, now: float) -> str:
        """Say why there is no restart."""
        budget = self.counts
        return (
            f"model '{model}': the process of '{lane}' {budget.why} and is not started again for "
            f"{max(budget.free_at() - now, 0):.0f} s ({budget.limit} restarts within {budget.window:.0f} s); "
            f"the last time: {self.last_death}"
        )


class InstanceProcess:
    """One model in one process, for one instance.

    Attributes:
        child: the process that the model is in; another one after a death.
        segments: the memory shared with it.
        config: completed by what is loaded.
    """

    def __init__(
        self,
        load: Message,  # the message that has the process load the model
        config: ModelConfig,  # the configuration, not completed yet
        lane: str,  # the name of the instance
        # program, preload: see `Child`
        program: Program | None = None,
        preload: str = "",
        host: str = "",  # the name of the process that it shares with others; "" for one of its own
    ) -> None:
        self.config = config
        self.lane = lane
        self.deadlines = Deadlines.of(config)  # how long the process may take for what
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self.segments = SegmentPool()
        self.is_marked_dead = False
        self.tells_ready = False
        self.warming = False  # whether what it executes is part of its load, whose time limit counts then
        self.child: Child
        self._load = load
        self._lives: OpenRequests  # told of each life of the process
        self._program = program
        self._preload = preload
        self._host = host
        self._restarts = Restarts()
        self._taken = Footprint()
        self._at_load = 0  # bytes of the host that the process took once it had loaded; 0 where that is not known
        self._shared_taken = 0  # bytes of its segments, when they could be looked at last

    def __repr__(self) -> str:
        return f"{self.lane} in {self.child!r}"

    @property
    def limit(self) -> float:
        """Seconds that an execution may take."""
        return self.deadlines.load if self.warming else self.deadlines.execution

    def start(self, lives: OpenRequests, *, uses_gpu: bool) -> None:
        """Load the model; measure what that takes on GPUs too, where nothing else loads meanwhile."""
        self._lives = lives
        before = devices.device_memory_used() if uses_gpu else ()
        with self.lock:
            self.child, self.config = self._begin()
        if uses_gpu:
            now = Footprint(self._taken.host, devices.device_memory_used())
            self._taken = now.beyond(Footprint(0, before))
        quota = allowed()
        if quota is not None:
            quota.settle(self.footprint().host)

    # -- memory ----------------------------------------------------------------------------------------------------

    def footprint(self) -> Footprint:
        """What the process takes alone, with shared memory and its GPU; `shared` is what it was forked with."""
        private = self.child.private_memory()
        if private is not None:
            self._taken = Footprint(private, self._taken.devices)
        if self.lock.acquire(blocking=False):  # else a batch executes
            try:
                self._shared_taken = self.segments.taken
            finally:
                self.lock.release()
        return self._taken + Footprint(self._shared_taken, shared=self._forked_with())

    def _forked_with(self) -> dict[str, int]:
        if not self._preload:
            return {}
        try:
            return {f"fork server of {self._preload}": memory.private_memory(forks_with(self._preload).pid)}
        except OSError:  # it died, and its children with it
            return {}

    def trim(self, *, idle: bool) -> bool:
        """Have an idle process trim its heap, and retire what batches made large. Others retire it by their need."""
        if not self.lock.acquire(blocking=False):
            return False
        segments = self.segments
        try:
            complete = not segments.busy
            if idle and not segments.under_way and self.child.alive:
                segments.rest()
                message = {"do": "rest", "retired": segments.take_retired()}
                seconds = max(self.deadlines.execution, _RESTING_SECONDS)
                self.child.call(message, (), seconds, "while it gave memory back")
        except ChildDiedError as death:
            self.mark_dead(death)
            complete = True
        finally:
            self.lock.release()
        return complete

    def growth(self) -> int:
        """What it took more when `footprint` was last asked than when it had loaded."""
        return self._taken.host + self._shared_taken - self._at_load if self._at_load else 0

    def outgrow(self, budget: str) -> None:
        taken = (self._taken.host + self._shared_taken) / 1e6
        self.child.outgrow(f"it took {taken:.1f} MB, {self._at_load / 1e6:.1f} MB of them to load, and {budget}")
        self._taken = Footprint(self._at_load, self._taken.devices)  # its place, to which it comes back
        self._shared_taken = 0

    # -- life and death --------------------------------------------------------------------------------------------

    def is_down(self) -> bool:
        return not self.child.alive and self._restarts.counts.is_used_up(time.monotonic())

    def close(self) -> None:
        """End the process. When this returns it is gone, its memory with it; views of outputs stay good."""
        self.closed.set()
        with self.lock:
            self.child.close(self.deadlines.close)
            self.segments.close()
            self._lives.ended(MmeError(Kind.UNAVAILABLE, f"model '{self.config.name}' was unloaded"))

    def broken(self, error: Exception) -> ChildDiedError:
        """End a process that answered what it can't have meant; return what to raise."""
        death = self.child.broke(error, EXECUTING)
        self.mark_dead(death)
        return death

    def mark_dead(self, death: ChildDiedError) -> None:
        """The process is over: give back what is shared with it, and tell what still expects something of it."""
        self._lives.dying()
        _log.error("%s", death, extra={"target_model": self.config.name})
        self.is_marked_dead = True
        self._restarts.died(death)
        self.child.close(0)
        self.segments.close()
        self._lives.ended(death)

    def revive(self) -> None:
        """Have a process: start another one if it has died. Raises MmeError: UNAVAILABLE, OUT_OF_MEMORY."""
        if not self.child.has_died():
            return
        name = self.config.name
        if self.closed.is_set():
            raise MmeError(Kind.UNAVAILABLE, f"model '{name}' is unloaded")
        if not self.is_marked_dead:  # it died between batches
            self.mark_dead(self.child.death(IDLE))
        self.segments = SegmentPool()  # another process shares nothing yet
        now = time.monotonic()
        at = self._restarts.counts.next_at(now)
        if at is None:
            raise MmeError(Kind.UNAVAILABLE, self._restarts.used_up(name, self.lane, now))
        if at > now:
            self.closed.wait(at - now)
        self._restarts.counts.restarted(time.monotonic())
        _log.warning("starting the process of '%s' again", self.lane, extra={"target_model": name})
        try:
            self.child, _ = self._begin()
            self.is_marked_dead = False
        except MmeError as error:
            self._restarts.last_death = error.message
            kind = error.kind if error.kind is Kind.OUT_OF_MEMORY else Kind.UNAVAILABLE
            raise MmeError(kind, f"model '{name}' can't be loaded again after its process died: {error}") from error

    def _begin(self) -> tuple[Child, ModelConfig]:
        try:
            return self._begin_once()
        except _NeverBeganError:  # once more, of a fork server that leaves out what the one before died of
            return self._begin_once()
        finally:
            self._lives.loaded()

    def _begin_once(self) -> tuple[Child, ModelConfig]:
        try:
            child = self._new_child()
            hosted = child.host.private_memory() if child.host is not None else 0
        except OSError as error:
            raise MmeError(
                Kind.UNAVAILABLE, f"model '{self.config.name}': no process can be started for it: {advised(error)}"
            ) from error
        try:
            self._lives.connected(child)
            quota = allowed() if child.host is None else None
            with LoadWatch(child, quota) if quota is not None else contextlib.nullcontext() as look:
                reply = child.call(self._load, (), self.deadlines.load, _LOADING, look)
            if "loaded" in reply:
                if child.host is not None:  # what it takes is what its host takes more
                    self._taken = Footprint(max(child.host.private_memory() - hosted, 0), self._taken.devices)
                self._at_load = child.private_memory() or 0
                self.tells_ready = bool(reply["tells_ready"])
                return child, config_from(reply["loaded"])
            refusal = error_from(reply["error"])
        except ChildDiedError as death:
            refusal = _refusal(child, death)
        except NONSENSE as nonsense:
            sentence = f"model '{self.config.name}': its process sent nonsense {_LOADING}: {nonsense}"
            refusal = MmeError(Kind.INVALID_MODEL, sentence)
        except BaseException:
            child.close(0)
            self._lives.ended(MmeError(Kind.UNAVAILABLE, f"model '{self.config.name}' was not loaded"))
            raise
        child.close(self.deadlines.close)
        self._lives.ended(refusal)
        raise refusal

    def _new_child(self) -> Child:
        if not self._host:
            return Child(self.config.name, self.lane, self._program, self._preload)
        host = admit(self._host, self._preload)
        try:
            return Child(self.config.name, self.lane, host=host)
        except BaseException:
            leave(host)
            raise


def _refusal(child: Child, death: ChildDiedError) -> MmeError:
    if death.kind in {Kind.OUT_OF_MEMORY, Kind.UNAVAILABLE}:
        return death
    if child.host is None and child.exit_code is None:  # whatever ended its fork server, it was not this model
        error = _NeverBeganError if child.never_began else MmeError
        return error(Kind.UNAVAILABLE, f"{death.message}; load it again")
    if child.killed:  # the model may be as good as any, though it may have been for what it took
        return MmeError(Kind.EXECUTION_FAILED, f"{death.message}; load it again")
    return MmeError(Kind.INVALID_MODEL, death.message)
