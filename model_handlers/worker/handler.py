"""A handler whose model lives in a process of its own: the same methods, the work done elsewhere.

Owns the process (`Child`), the memory shared with it and the budgets of restarts. `start` and `close` are called on
load threads, the rest on the lane's thread; a lock keeps two executions apart, because the process has one thread for
them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Footprint, Handler
from model_handlers.config.convert import config_from
from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices, memory
from model_handlers.system.threads import advised
from model_handlers.worker.fork_client import ChildDiedError, ChildOutgrownError, forks_with
from model_handlers.worker.load_watch import LoadWatch, allowed
from model_handlers.worker.memory import SegmentPool, memory_refusal
from model_handlers.worker.parameters import Deadlines
from model_handlers.worker.policies import OUTGROWN_LIMIT, OUTGROWN_WINDOW, OVERRUN_WINDOW, RestartBudget
from model_handlers.worker.process import Child, admit, leave
from model_handlers.worker.wire import Packing, ProtocolError, error_from, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array
    from model_handlers.worker.fork_server import Program
    from model_handlers.worker.memory import Segment
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


class _Begun:
    """A batch that was begun: its process, and where it lies, None where it could not be sent ahead."""

    def __init__(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], child: Child, segment: Segment | None
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.child = child
        self.segment = segment


class IsolatedHandler(Handler):
    """One model in one process, for one lane. Made by `start.start_isolated`.

    Attributes:
        child: the process that the model is in; another one after a death.
    """

    backend: ClassVar[str] = ""
    default_filename: ClassVar[str] = ""
    apart: ClassVar[bool] = True
    ahead: ClassVar[bool] = True

    def __init__(
        self,
        load: Message,  # the message that has the process load the model
        config: ModelConfig,  # the configuration, not completed yet
        lane: str,  # the name of the lane that will execute it
        *,
        uses_gpu: bool,  # whether what the load takes on GPUs is to be measured; nothing else loads meanwhile
        # program, preload: see `Child`
        program: Program | None = None,
        preload: str = "",
        host: str = "",  # the name of the process that it shares with others; "" for one of its own
    ) -> None:
        self._load = load
        self._host = host
        self._program = program
        self._preload = preload
        self._lane = lane
        self.deadlines = Deadlines.of(config)  # how long the process may take for what
        self._restarts = RestartBudget()
        self._overruns = RestartBudget(OVERRUN_WINDOW, delay=0.0, why=_OVERRAN)
        self._outgrowths = RestartBudget(OUTGROWN_WINDOW, 0.0, OUTGROWN_LIMIT, "took too much memory too often")
        self._budget = self._restarts  # that counts, by how the last process ended
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._segments = SegmentPool()
        self._batch = 0
        self._unfinished = 0  # batches that were begun
        self._unsent = 0  # of those; no other may be sent before them
        self._is_marked_dead = False
        self._last_death = ""
        self._taken = Footprint()
        self._at_load = 0  # bytes of the host that the process took once it had loaded; 0 where that is not known
        self._shared_taken = 0  # bytes of its segments, when they could be looked at last
        super().__init__(config)
        before = devices.device_memory_used() if uses_gpu else ()
        with self._lock:
            self.child, self.config = self._begin()
        if uses_gpu:
            now = Footprint(self._taken.host, devices.device_memory_used())
            self._taken = now.beyond(Footprint(0, before))
        quota = allowed()
        if quota is not None:
            quota.settle(self.memory().host)

    def __repr__(self) -> str:
        return f"<IsolatedHandler {self._lane} in {self.child!r}>"

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Never asked: the handler inside completes what it loads."""
        raise NotImplementedError

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> Handler:
        """Never asked: see `start.start_isolated`."""
        raise NotImplementedError

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run one batch in the process; returns read-only views of memory shared with it.

        Raises MmeError: as the handler inside; EXECUTION_FAILED, TIMED_OUT or OUT_OF_MEMORY when the process ended of
        this batch, UNAVAILABLE when it ended too often before.
        """
        with self._lock:
            return self._finish(self._begin_batch(inputs, outputs))

    def begin(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> _Begun:
        """Send a batch to the process, which executes it behind the one that it has."""
        with self._lock:
            return self._begin_batch(inputs, outputs)

    def finish(self, begun: _Begun) -> list[Array]:
        """Wait for it; one that the process never began, since it died of another, is begun again."""
        with self._lock:
            return self._finish(begun)

    def _begin_batch(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> _Begun:
        message, packing = self._packed_inputs(inputs, outputs)
        if not self._unfinished:
            self._revive()  # else `finish` of the first of them tells what became of the process
        segment = None if self._unsent else self._send_ahead(message, packing)
        self._unfinished += 1
        self._unsent += segment is None
        return _Begun(inputs, outputs, self.child, segment)

    def _finish(self, begun: _Begun) -> list[Array]:
        self._unfinished -= 1
        segment = begun.segment
        self._unsent -= segment is None
        if segment is None or begun.child is not self.child or self._is_marked_dead:
            self._revive()
            reply, shared = self._run(*self._packed_inputs(begun.inputs, begun.outputs))
        else:
            reply, shared = self._answered(segment)
        try:
            named = zip(begun.outputs, reply["outputs"], strict=True)
            return [unpack(shared, place, name, self.config.name) for name, place in named]
        except NONSENSE as error:
            raise self._broken(error) from None

    def _packed_inputs(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> tuple[Message, Packing]:
        packing = Packing()
        places = {name: packing.add(array, f"input '{name}'") for name, array in inputs.items()}
        return {"inputs": places, "outputs": list(outputs)}, packing

    def _send_ahead(self, message: Message, packing: Packing) -> Segment | None:
        """Send a batch without waiting for anything; None where that can't be done, and nothing was sent."""
        if not self.child.alive:
            return None
        segment, fds = self._write(message, packing)
        try:
            begun = self.child.begin(message, fds, self._limit)
        except BaseException:
            self._unwrite(message, segment, fds)
            raise
        if not begun:
            self._unwrite(message, segment, fds)
            return None
        return segment

    def _answered(self, segment: Segment) -> tuple[Message, Array]:
        try:
            reply = self.child.answer(EXECUTING, self._limit)
        except ChildDiedError as death:
            self._mark_dead(death)
            raise
        try:
            return reply, self._accept(reply, segment)
        except NONSENSE as error:
            raise self._broken(error) from None

    def memory(self) -> Footprint:
        """What the process takes alone, with shared memory and its GPU; `shared` is what it was forked with."""
        private = self.child.private_memory()
        if private is not None:
            self._taken = Footprint(private, self._taken.devices)
        if self._lock.acquire(blocking=False):  # else a batch executes
            try:
                self._shared_taken = self._segments.taken
            finally:
                self._lock.release()
        return self._taken + Footprint(self._shared_taken, shared=self._forked_with())

    def _forked_with(self) -> dict[str, int]:
        if not self._preload:
            return {}
        try:
            return {f"fork server of {self._preload}": memory.private_memory(forks_with(self._preload).pid)}
        except OSError:  # it died, and its children with it
            return {}

    def give_back(self, *, idle: bool) -> bool:
        """Have an idle process trim its heap, and retire what batches made large. Others retire it by their need."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            complete = not self._segments.busy
            if idle and not self._unfinished and self.child.alive:
                self._segments.rest()
                message = {"do": "rest", "retired": self._segments.take_retired()}
                self.child.call(message, (), max(self._limit, _RESTING_SECONDS), "while it gave memory back")
        except ChildDiedError as death:
            self._mark_dead(death)
            complete = True
        finally:
            self._lock.release()
        return complete

    def growth(self) -> int:
        """What it took more when `memory` was last asked than when it had loaded."""
        return self._taken.host + self._shared_taken - self._at_load if self._at_load else 0

    def outgrow(self, budget: str) -> None:
        taken = (self._taken.host + self._shared_taken) / 1e6
        self.child.outgrow(f"it took {taken:.1f} MB, {self._at_load / 1e6:.1f} MB of them to load, and {budget}")
        self._taken = Footprint(self._at_load, self._taken.devices)  # its place, to which it comes back
        self._shared_taken = 0

    def is_down(self) -> bool:
        return not self.child.alive and self._budget.is_used_up(time.monotonic())

    def close(self) -> None:
        """End the process. When this returns it is gone, its memory with it; views of outputs stay good."""
        self._closed.set()
        with self._lock:
            self.child.close(self.deadlines.close)
            self._segments.close()
            self._fail_open(MmeError(Kind.UNAVAILABLE, f"model '{self.config.name}' was unloaded"))

    @property
    def _limit(self) -> float:
        return self.deadlines.load if self.warming else self.deadlines.execution

    def _run(self, message: Message, packing: Packing) -> tuple[Message, Array]:
        segment, fds = self._write(message, packing)
        try:
            self.child.prepare(message, fds, self._limit)
        except MmeError:
            self._unwrite(message, segment, fds)
            raise
        return self._answered(segment)

    def _write(self, message: Message, packing: Packing) -> tuple[Segment, list[int]]:
        segment, fds = self._segment(packing.end)
        packing.write(segment.memory())
        self._batch += 1
        segment.batch, segment.out = self._batch, True
        message |= {
            "do": "run",
            "batch": self._batch,
            "segment": [segment.id, segment.size],
            "retired": self._segments.take_retired(),
            "at": packing.end,
        }
        return segment, fds

    def _unwrite(self, message: Message, segment: Segment, fds: list[int]) -> None:
        segment.out = False
        self._segments.retired += message["retired"]
        if fds:
            self._segments.retire(segment)

    def _accept(self, reply: Message, segment: Segment) -> Array:
        """Follow what became of the segment; return its bytes. Raises MmeError: what the handler inside raised."""
        if reply["ran"] != segment.batch:
            raise ProtocolError(f"an answer to batch {reply['ran']} instead of {segment.batch}")
        segment.out = False
        error = error_from(reply["error"]) if "error" in reply else None
        segment.follow(reply["size"])
        shared = segment.lend()
        if reply["kept"]:
            self._segments.give_up(segment)
        if error is not None:
            raise error
        self._segments.used(reply["end"])  # which may give the segment back, now that its bytes are lent
        return shared

    def _segment(self, size: int) -> tuple[Segment, list[int]]:
        try:
            segment, fresh = self._segments.take(size)
        except OSError as error:
            sentence = f"model '{self.config.name}': {size} bytes of shared memory can't be had: {error}"
            raise memory_refusal(error, sentence) from error
        return segment, [segment.fd] if fresh else []

    def _broken(self, error: Exception) -> ChildDiedError:
        death = self.child.broke(error, EXECUTING)
        self._mark_dead(death)
        return death

    def _mark_dead(self, death: ChildDiedError) -> None:
        _log.error("%s", death, extra={"target_model": self.config.name})
        self._is_marked_dead = True
        self._last_death = death.message
        if isinstance(death, ChildOutgrownError):
            self._budget = self._outgrowths
        else:
            self._budget = self._overruns if death.kind is Kind.TIMED_OUT else self._restarts
        self.child.close(0)
        self._segments.close()
        self._fail_open(death)

    def _fail_open(self, why: MmeError) -> None:
        """The process is gone, and this is what is told to requests that still expect something of it."""

    def _begin(self) -> tuple[Child, ModelConfig]:
        try:
            return self._begin_once()
        except _NeverBeganError:  # once more, of a fork server that leaves out what the one before died of
            return self._begin_once()

    def _begin_once(self) -> tuple[Child, ModelConfig]:
        try:
            child = self._new_child()
            hosted = child.host.private_memory() if child.host is not None else 0
        except OSError as error:
            raise MmeError(
                Kind.UNAVAILABLE, f"model '{self.config.name}': no process can be started for it: {advised(error)}"
            ) from error
        try:
            self._connected(child)
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
            self._disconnected()
            raise
        child.close(self.deadlines.close)
        self._disconnected()
        raise refusal

    def _connected(self, child: Child) -> None:
        """There is a new process, which is to load the model next."""

    def _disconnected(self) -> None:
        """It is gone, and nothing more is to be heard of it."""

    def _new_child(self) -> Child:
        if not self._host:
            return Child(self.config.name, self._lane, self._program, self._preload)
        host = admit(self._host, self._preload)
        try:
            return Child(self.config.name, self._lane, host=host)
        except BaseException:
            leave(host)
            raise

    def _revive(self) -> None:
        if not self.child.has_died():
            return
        name = self.config.name
        if self._closed.is_set():
            raise MmeError(Kind.UNAVAILABLE, f"model '{name}' is unloaded")
        if not self._is_marked_dead:  # it died between batches
            self._mark_dead(self.child.death(IDLE))
        self._segments = SegmentPool()
        now = time.monotonic()
        at = self._budget.next_at(now)
        if at is None:
            raise MmeError(Kind.UNAVAILABLE, self._used_up(now))
        if at > now:
            self._closed.wait(at - now)
        self._budget.restarted(time.monotonic())
        _log.warning("starting the process of '%s' anew", self._lane, extra={"target_model": name})
        try:
            self.child, _ = self._begin()
            self._is_marked_dead = False
        except MmeError as error:
            self._last_death = error.message
            kind = error.kind if error.kind is Kind.OUT_OF_MEMORY else Kind.UNAVAILABLE
            raise MmeError(kind, f"model '{name}' can't be loaded again after its process died: {error}") from error

    def _used_up(self, now: float) -> str:
        budget = self._budget
        return (
            f"model '{self.config.name}': the process of '{self._lane}' {budget.why} and is not started again for "
            f"{max(budget.free_at() - now, 0):.0f} s ({budget.limit} restarts within {budget.window:.0f} s); "
            f"the last time: {self._last_death}"
        )


def _refusal(child: Child, death: ChildDiedError) -> MmeError:
    if death.kind in {Kind.OUT_OF_MEMORY, Kind.UNAVAILABLE}:
        return death
    if child.host is None and child.exit_code is None:  # whatever ended its fork server, it was not this model
        error = _NeverBeganError if child.never_began else MmeError
        return error(Kind.UNAVAILABLE, f"{death.message}; load it again")
    if child.killed:  # the model may be as good as any, though it may have been for what it took
        return MmeError(Kind.EXECUTION_FAILED, f"{death.message}; load it again")
    return MmeError(Kind.INVALID_MODEL, death.message)
