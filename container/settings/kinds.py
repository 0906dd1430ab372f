"""What settings are: kinds of values, the row of the table, and the error of those that refuse to start.

They know no variable's name, read no environment and touch no disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable

    Parser = Callable[[str], Any]


NO_EFFECT = "no effect:"  # how the help of a variable begins that changes nothing
DEFAULT_PORT = 8080  # SageMaker's, where it names no other
DEFAULT_GRPC_PORT = 8001  # Triton's
DEFAULT_MAX_BODY = 64 * 1024 * 1024  # Triton's
LONGEST_INVOCATION = 3600.0  # seconds that SageMaker waits at most, in batch transform jobs and asynchronous endpoints
ASYNCHRONOUS = {"MME_REQUEST_TIMEOUT": f"{LONGEST_INVOCATION:g}"}  # variables of the latter's containers


class SettingsError(MmeError):
    """Settings that refuse to start.

    Attributes:
        problems: one sentence for each, naming the variable and what it may be.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(Kind.INVALID_ARGUMENT, "\n".join(self.problems))


class Refused(ValueError):  # noqa: N818 - it is a value that is refused, and reads so where it is raised
    """A value that is understood and cannot be honoured; its text says why and what to do instead."""


class Mode(Enum):
    """Where models come from and who decides which are loaded."""

    PLATFORM = "platform"  # SageMaker unpacks, loads and unloads
    SINGLE = "single"  # one model directory, pinned
    STORE = "store"  # archives in S3 or a folder, loaded when they are asked for
    REPOSITORY = "repository"  # a Triton model repository on disk or in S3, loaded at start


class RateLimit(Enum):
    """Whether instances wait for resources before they execute."""

    OFF = "off"
    EXECUTION_COUNT = "execution_count"


class GrpcCompression(Enum):
    """How much answers over gRPC are compressed, in Triton's words."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class PingMode(Enum):
    """What a 200 from /ping means."""

    LIVE = "live"  # the server answers
    READY = "ready"  # the models of the start-up list are loaded


class LogFormat(Enum):
    """How a log line looks."""

    AUTO = "auto"  # text on a terminal, JSON lines elsewhere
    TEXT = "text"
    JSON = "json"
    TRITON = "default"  # as Triton writes lines unless told otherwise
    ISO8601 = "ISO8601"  # and as it writes them when told so


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """What there is of a resource on a device, or on every device that is not named."""

    name: str
    count: int
    device: str = ""

    @property
    def pool(self) -> tuple[str, str]:
        """What the engine knows it by."""
        return self.name.lower(), self.device

    def __str__(self) -> str:
        return f"{self.name}:{self.count}" + (f":{self.device}" if self.device else "")


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What models get that batch and do not say how much: those of a backend, or with "" of any other."""

    backend: str
    size: int

    def __str__(self) -> str:
        return f"{self.backend}:{self.size}" if self.backend else str(self.size)


def to_text(value: object) -> str:
    """The text that parses back into `value`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    if isinstance(value, float):
        return f"{Decimal(repr(value)):f}"  # never in exponents
    return str(value.value) if isinstance(value, Enum) else str(value)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Attributes:
        name: the variable.
        field: the attribute of `Settings` that it sets, or "".
        parse: text to value; raises ValueError with what is allowed.
        help: one line for people.
        flag: the same as an option of `mme serve`, or "".
        default: how to write the default where the field's own value does not say it.
    """

    name: str
    field: str
    parse: Parser
    help: str
    flag: str = ""
    default: str = ""

    @property
    def label(self) -> str:
        """How messages name it: by its flag too, because a value may have come either way."""
        return f"{self.flag}/{self.name}" if self.flag else self.name

    @property
    def allowed(self) -> str:
        """What the value may be, in the parser's own words."""
        try:
            self.parse("\0")
        except ValueError as error:
            return str(error)
        return "any text"

    @property
    def has_notice(self) -> bool:
        """Whether a given value is worth a log line, since it changes nothing."""
        return self.help.startswith(NO_EFFECT)


def ours(name: str, parse: Parser, help: str, *, field: str = "", flag: bool = True, default: str = "") -> Variable:  # noqa: A002 - as there
    """A variable of our own. Its field is called as it is, if not said otherwise, and so is its flag, if it has one."""
    plain = name.removeprefix("MME_").lower()
    return Variable(name, field or plain, parse, help, f"--{plain.replace('_', '-')}" if flag else "", default)
