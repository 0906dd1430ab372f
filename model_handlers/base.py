"""What a framework must offer to be served.

A handler class serves one backend. `autocomplete` completes a configuration from the model file without loading it;
`load` makes an instance that holds the model on one device; the instance executes batches until it is closed. Handlers
know tensors, files and devices. They never queue, never choose a device, and raise `MmeError` alone: each maps its
framework's exceptions where it calls the framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import starmap, zip_longest
from operator import add, sub
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from model_handlers.errors import MmeError, invalid_model
from model_handlers.system.importing import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
    from pathlib import Path

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.environment import Wanted
    from model_handlers.model_calls import Outside
    from model_handlers.requests import ModelRequest, ModelResponse
    from model_handlers.tensor import Array

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Device:
    """A place where a model can live: the host's CPUs, or one GPU by its index."""

    kind: str  # "cpu" or "gpu"
    index: int = 0

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"gpu:{self.index}"


CPU = Device("cpu")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model takes: on the host, and on each device by its number, up to the last that it takes any of.

    `shared` names what others may map or be forked from too, name → bytes, counted once in sums. Only what was measured
    or is expected of models has it; differences do not.
    """

    host: int = 0
    devices: tuple[int, ...] = ()
    shared: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.devices and not self.devices[-1]:
            last = max((number for number, size in enumerate(self.devices) if size), default=-1)
            object.__setattr__(self, "devices", self.devices[: last + 1])

    def __add__(self, other: Footprint) -> Footprint:
        shared = {**self.shared, **other.shared} if self.shared and other.shared else self.shared or other.shared
        return Footprint(self.host + other.host, _each(add, self.devices, other.devices), shared)

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(self.host - other.host, _each(sub, self.devices, other.devices))

    @property
    def device(self) -> int:
        """On all devices together: to be shown, and nothing to decide by."""
        return sum(self.devices)

    def whole(self) -> Footprint:
        """What this takes where no other model maps any of the files."""
        return Footprint(self.host + sum(self.shared.values()), self.devices)

    def beyond(self, other: Footprint) -> Footprint:
        """What this takes more than `other`, never less than nothing."""
        return Footprint(max(self.host - other.host, 0), _each(_more, self.devices, other.devices))

    def within(self, other: Footprint) -> Footprint:
        """What this takes, of each memory no more than `other` does."""
        return Footprint(min(self.host, other.host), _each(min, self.devices, other.devices))

    def most(self, other: Footprint) -> Footprint:
        """The larger of the two of each memory."""
        return Footprint(max(self.host, other.host), _each(max, self.devices, other.devices))

    def fits(self, room: Footprint) -> bool:
        """Return whether this goes into `room`, in each memory that it takes any of: the others may be overdrawn."""
        if self.host > 0 and self.host > room.host:
            return False
        there = room.devices
        for number, size in enumerate(self.devices):
            if size > 0 and size > (there[number] if number < len(there) else 0):
                return False
        return True

    def scaled(self, factor: float) -> Footprint:
        return Footprint(int(self.host * factor), tuple(int(size * factor) for size in self.devices))

    def on(self, numbers: Collection[int]) -> Footprint:
        """This on the host, and of devices on these alone."""
        return replace(self, devices=tuple(size if n in numbers else 0 for n, size in enumerate(self.devices)))


def total(footprints: Iterable[Footprint], first: Footprint | None = None) -> Footprint:
    """All of them together, and `first`, without what they share: `sum`, at a third of the price."""
    host, devices = (0, []) if first is None else (first.host, list(first.devices))
    for footprint in footprints:
        host += footprint.host
        for number, size in enumerate(footprint.devices):
            if number < len(devices):
                devices[number] += size
            else:
                devices.append(size)
    return Footprint(host, tuple(devices))


class Tally:
    """What some models take together: each its own, and each file once, which so many `users` map.

    A tally of others begins with them, and leaves theirs as it is.
    """

    def __init__(self, others: Tally | None = None) -> None:
        self.count: int = others.count if others else 0
        self.total: Footprint = others.total if others else Footprint()
        self.users: MutableMapping[str, int] = ChainMap({}, others.users) if others else {}
        self._own_users = others is None

    def __repr__(self) -> str:
        return f"<Tally of {self.count} models, {self.total}>"

    def add(self, own: Footprint, files: Mapping[str, int]) -> None:
        self.count += 1
        self.total += own
        for file, size in files.items():
            users = self.users.get(file, 0)
            self.users[file] = users + 1
            if not users:
                self.total += Footprint(size)

    def remove(self, own: Footprint, files: Mapping[str, int]) -> None:
        self.count -= 1
        self.total -= own
        for file, size in files.items():
            self.users[file] -= 1
            if not self.users[file]:
                self.total -= Footprint(size)
                if self._own_users:
                    del self.users[file]


def by_device(sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Bytes by the number of a device, as a footprint has them: numbers may have gaps."""
    return tuple(sizes.get(number, 0) for number in range(max(sizes, default=-1) + 1))


def _each(work: Callable[[int, int], R], these: tuple[int, ...], those: tuple[int, ...]) -> tuple[R, ...]:
    if not these and not those:
        return ()
    if len(these) == len(those):
        return tuple(map(work, these, those))
    return tuple(starmap(work, zip_longest(these, those, fillvalue=0)))


def _more(size: int, other: int) -> int:
    return max(size - other, 0)


class Placement(Enum):
    """Where an instance executes: on a thread of the serving process, or in a process of its own."""

    INLINE = "inline"
    PROCESS = "process"


PLACEMENT = "MME_PLACEMENT"


def placement_of(config: ModelConfig, usual: Placement) -> Placement:
    """Where a model's instances execute, by its configuration, else its traits. MmeError: INVALID_MODEL."""
    text = config.parameters.get(PLACEMENT)
    if text is None:
        return usual
    try:
        return Placement(text.strip().lower())
    except ValueError:
        choices = " or ".join(f"'{placement.value}'" for placement in Placement)
        raise invalid_model(f"model '{config.name}': parameter '{PLACEMENT}' must be {choices}, got '{text}'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What executes models of a kind: a process has it once, and imports it when the first model needs it."""

    # of PyPI, whose versions tell what executes a model; those that are not installed are left out
    packages: tuple[str, ...] = ()
    # imports it, before what a model takes is measured; raises MmeError: UNSUPPORTED where it is not installed
    provide: Callable[[], object] = lambda: None
    gpu_capable: Callable[[], bool] = lambda: False  # whether it was built for GPUs
    # has its models in this process take from one place, of so many bytes of the host, what executions take
    share: Callable[[int], None] = lambda _: None
    trim: Callable[[], None] = lambda: None  # gives back what they share and no execution uses; on any thread

    def versions(self) -> str:
        return ", ".join(f"{package} {version}" for package in self.packages if (version := version_of(package)))


class AuthorCode(Protocol):
    """The code of a model's author, which is read here and executed in a process of its own."""

    def preload(self) -> str:
        """What that is forked from: `module:function`, which imports the framework that the code imports."""

    def environment(self) -> Wanted | None:
        """The environment that the model asks for, None where ours will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is known of a model before it is loaded, of its class, configuration and file."""

    placement: Placement = Placement.INLINE  # where instances execute when the configuration does not say
    # whether a short execution on the CPU may run on the event loop: it must release the GIL while it computes, never
    # block on anything but the CPU, and never run code of the model's author
    inline: bool = False
    warms: bool = False  # whether it may be executed with made-up data before it serves; whatever is inline may
    # whether batches come as lists of requests (`execute_requests`) instead of collated tensors (`execute`): models
    # that are code of the model's author
    sees_requests: bool = False
    # whether `close` gives back memory and nothing else: it is not called where the process ends
    memory_only: bool = False
    # whether a file that was never loaded here is tried in a process of its own before it is loaded into the serving
    # one: what reads it may die of a damaged one. See `Handler.try_load`, `worker/start.py`.
    verify_first: bool = False
    custom_ops: bool = False  # whether it loads the libraries of operations that a configuration names
    estimate_factor: float = 1.5  # bytes in memory for a byte on disk, for a model never seen before
    runtime: Runtime = Runtime()  # what executes it
    # `module:function`, called once for all processes that execute such models; it imports the runtime
    preload: str = ""
    # whether it shares its backend's process on a GPU, and what the runtime keeps there: it has to give back what it
    # took when it is closed
    gpu_shared: bool = False
    code: AuthorCode | None = None  # that of the model's author; None where there is none


class Ambient(Generic[T]):
    """A value that a load is given on its thread, for all that it calls; None where nothing is given."""

    def __init__(self, name: str) -> None:
        self._value: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        return self._value.get()

    @contextmanager
    def given(self, value: T | None) -> Iterator[None]:
        """What runs inside has this one."""
        token = self._value.set(value)
        try:
            yield
        finally:
            self._value.reset(token)


_offered: Ambient[Outside] = Ambient("outside of the models that are loaded")
offering = _offered.given  # models that are loaded inside may ask this of the server
offered = _offered.get  # what a model that is loaded here and now may ask; None for nothing


class LoadedModel(ABC):
    """A model in memory, on one device, here or in a process of its own; it executes batches until it is closed."""

    # inline, warms, sees_requests, memory_only: see `Traits`; `inline` on this device
    inline: bool = False
    warms: bool = False
    sees_requests: bool = False
    memory_only: bool = False
    trim_runtime: Callable[[], None] | None = None  # see `Runtime.trim`; None where the runtime is in another process
    apart: ClassVar[bool] = False  # whether it is in a process of its own, and a `worker.executor.Worker`
    tells_ready: bool = False  # whether its model has a say in whether it is ready: see `ask_ready`

    def __init__(self, config: ModelConfig) -> None:
        self.config = config  # the configuration, completed from the model file
        # what its model may ask of the server, None for nothing. Set before it is loaded.
        self.outside: Outside | None = offered()

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run one batch. Several threads may call at once.

        `inputs` has one array a declared input, batch dimension first where the model batches; returns one an entry of
        `outputs`, the names of those that are wanted, in that order.
        Raises MmeError: EXECUTION_FAILED with the framework's words, OUT_OF_MEMORY when it ran out of room.
        """
        raise NotImplementedError

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        """Run one batch of requests, where `sees_requests`. Raises MmeError: what befell the whole batch.

        Returns for each its response, or its own error; None where its responder has got its responses, or will;
        PUT_BACK where it is to be executed once more.
        """
        raise NotImplementedError

    def ask_ready(self, done: Callable[[bool], None]) -> None:
        """Ask the model, where `tells_ready`, whether it is ready for requests. Returns at once.

        `done` is told on any thread, once or, by a model that hangs, never. Until then it is not asked again.
        """
        done(True)

    def give_back(self, *, idle: bool) -> bool:  # noqa: ARG002 - for those that keep anything
        """Give back memory that executions took and no recent one needed; called now and then, on any thread.

        `idle` says that nothing was executed since the last time; return whether an idle one has given back all that it
        can.
        """
        return True

    def warm(self, *, begins: bool) -> None:  # noqa: B027 - those of this process have no limit
        """What it executes from now on is part of its load, whose time limit counts then, or no longer."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything the model holds. Called once, when nothing executes any more."""


class Handler(LoadedModel):
    """A model of one framework: a subclass has `autocomplete`, `load`, `close`, and `execute` or `execute_requests`."""

    backend: ClassVar[str]  # the name that selects the class in config.pbtxt
    default_filename: ClassVar[str]  # the model file in a version directory when the configuration names none

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.sees_requests = type(self).execute_requests is not LoadedModel.execute_requests

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:  # noqa: ARG003 - for those that look
        """What is known of a model before it is loaded. The file may be missing, the configuration wrong."""
        return Traits(sees_requests=cls.execute_requests is not LoadedModel.execute_requests)

    @classmethod
    @abstractmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Fill what `config` leaves out (inputs, outputs, batch size) from the model file, and check the rest.

        Raises MmeError: INVALID_MODEL, naming the field that disagrees with the file.
        """

    @classmethod
    @abstractmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> Handler:
        """Load the model on `device`. Runs on a load thread, at low priority, for as long as it takes.

        `lane` names the instance that will execute it, the first of them where several share the handler. What `config`
        leaves out is completed from the model, so that a load reads the file once: see `config`.
        Raises MmeError: INVALID_MODEL when the framework refuses the file, OUT_OF_MEMORY when it finds no room.
        """

    @classmethod
    def try_load(cls, config: ModelConfig, model_file: Path) -> None:
        """Load the model, and look for whatever in it could harm a process that executes it; keep nothing.

        Called in a process that may die of it, where `verify_first`. Raises MmeError: as `load`; INVALID_MODEL for
        what was found.
        """
        cls.load(config, model_file, CPU, "").close()


M = TypeVar("M", bound=LoadedModel)


def settled(model: M, traits: Traits, device: Device = CPU) -> M:
    """A model loaded on a device of this process, as it was said to be; on a GPU, which has it wait, never inline."""
    model.inline = traits.inline and device == CPU
    model.warms, model.memory_only = traits.warms or traits.inline, traits.memory_only
    model.trim_runtime = traits.runtime.trim
    return model
