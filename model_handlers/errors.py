"""The root of the one error tree, and what frameworks raise as errors of ours. PURE.

Every error that leaves a layer is an `MmeError` with a `Kind`. A kind says what went wrong in terms of models and
memory; it is never an HTTP status: `container/inference/errors.py` has that table. Nothing matches on message text but
`Framework`, where frameworks say in words alone that memory does not suffice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum

_log = logging.getLogger("mme.errors")


class Kind(Enum):
    """What went wrong, from the point of view of the engine."""

    INVALID_ARGUMENT = "invalid argument"  # the request is wrong: a name, a type, a shape, a size
    UNSUPPORTED_MEDIA_TYPE = "unsupported media type"  # a body of a content type that the model does not read
    NOT_ACCEPTABLE = "not acceptable"  # the client accepts no content type that the model writes
    TOO_LARGE = "too large"  # the request or a part of it exceeds a limit
    INVALID_MODEL = "invalid model"  # the archive, its config or its model file is wrong
    UNKNOWN_MODEL = "unknown model"  # no such model here or in the store
    UNKNOWN_VERSION = "unknown version"  # the model is here, the version is not
    ALREADY_EXISTS = "already exists"  # a model of that name is loaded or being loaded
    UNSUPPORTED = "unsupported"  # a feature or method that is not offered
    RESTRICTED = "restricted"  # a part of the API for clients that bring a secret, which this one did not
    FORBIDDEN = "forbidden"  # what the server's settings do not allow; asking again changes nothing
    QUEUE_FULL = "queue full"  # the model's queue has reached max_queue_size
    QUEUE_TIMEOUT = "queue timeout"  # the request waited longer than its queue policy allows
    TIMED_OUT = "timed out"  # the limit of an execution, or of a request, has passed
    UNAVAILABLE = "unavailable"  # not now: draining, unloading, no memory free in time, store unreachable
    OUT_OF_MEMORY = "out of memory"  # memory (host, device or disk) does not suffice, and nothing else
    CANCELLED = "cancelled"  # the client left before the answer
    EXECUTION_FAILED = "execution failed"  # the framework raised while it ran the model
    # What a model may say of a request in its own words, and nothing else: none of it is about models.
    NOT_FOUND = "not found"  # something that the request asks for
    CONFLICT = "conflict"  # something that the request would make is there already
    UNKNOWN = "unknown"  # what it is, the model does not say
    INTERNAL = "internal"  # a bug of ours


class MmeError(Exception):
    """An error with a kind and one sentence that names what is wrong and says what to do.

    The sentence is text, whatever it names: bytes of a file's name that are no characters are written as escapes, since
    no client can be sent anything else.
    """

    def __init__(self, kind: Kind, message: str, said: int = 0) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.kind = kind  # what went wrong; the only thing that code may branch on
        # the status that a model's own code calls it, handed through to clients; 0 for none, which is nearly always
        self.said = said
        self.version: int | None = None  # of a load, the version of the model that could not be loaded, if it is known
        # of a load, the models that the ensemble consists of that could not be loaded; none of any other model
        self.parts: tuple[str, ...] = ()
        self.logged = False  # whether the log has it already, as it has every load that failed

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __repr__(self) -> str:
        return f"<MmeError {self.kind.name}: {self.message}>"

    def bare(self) -> MmeError:
        """Itself, without the frames that it came through and the errors behind it.

        Frames hold what was worked on, and often the error: a body of any size would wait for the collector of garbage.
        """
        self.__context__ = self.__cause__ = None
        return self.with_traceback(None)


def known(problem: Exception, what: str = "this request") -> MmeError:
    """The error as one of ours, without its frames; anything else is a bug, and its traceback belongs into the log."""
    if isinstance(problem, MmeError):
        return problem.bare()  # what keeps it does not keep the request
    _log.error("the server failed on %s", what, exc_info=problem)
    return MmeError(Kind.INTERNAL, f"the server failed on {what}: {type(problem).__name__}: {problem}")


class ElsewhereError(MmeError):
    """What a model lacks is no part of it, and may be there the next time. Kind INVALID_MODEL."""

    def __init__(self, message: str) -> None:
        super().__init__(Kind.INVALID_MODEL, message)


class RefusedError(MmeError):
    """What the model needs is not offered, whatever is installed. Kind UNSUPPORTED."""

    def __init__(self, message: str) -> None:
        super().__init__(Kind.UNSUPPORTED, message)


class DamagedError(MmeError):
    """Bytes are not those that were packed or sent, by their checksum: they may come right the next time."""


class LostProcessError(MmeError):
    """Nothing works any more on the GPU, in the process that raises it, which is to end; another begins."""

    __slots__ = ()


class NotBegunError(MmeError):
    """A request whose execution never began: what was to execute it has ended. Kind UNAVAILABLE."""

    def __init__(self, model: str) -> None:
        super().__init__(Kind.UNAVAILABLE, f"model '{model}': its process never began with this request; try again")


class ChildDiedError(MmeError):
    """A model's process is no more, and this is why."""


class ChildOutgrownError(ChildDiedError):
    """It was ended for the memory that it took; no other model leaving would help it. Kind OUT_OF_MEMORY."""


def invalid_argument(message: str) -> MmeError:
    return MmeError(Kind.INVALID_ARGUMENT, message)


def invalid_model(message: str) -> MmeError:
    return MmeError(Kind.INVALID_MODEL, message)


def unsupported(message: str) -> MmeError:
    return MmeError(Kind.UNSUPPORTED, message)


def unavailable(message: str) -> MmeError:
    return MmeError(Kind.UNAVAILABLE, message)


def out_of_memory(message: str) -> MmeError:
    """Memory does not suffice. SageMaker evicts other models when it sees this: raise it for nothing else."""
    return MmeError(Kind.OUT_OF_MEMORY, message)


# cuBLAS and its kin, whose handles have memory of their own, and cuDNN
_OF_CUDA = ("ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED")


@dataclass(frozen=True, slots=True)
class Framework:
    """How a framework fails."""

    # refuses, fails: the beginning of the sentence about a load, and about an execution; the model's name is next
    refuses: str
    fails: str
    memory_words: tuple[str, ...] = ()  # what its exceptions say of memory that have neither a class nor a code for it

    def is_full(self, error: Exception) -> bool:
        return isinstance(error, MemoryError) or any(word in str(error) for word in self.memory_words)

    def error(self, error: Exception, model: str, words: str, *, loading: bool, is_full: bool = False) -> MmeError:
        """What to raise in place of `error`; `words` are what it says. `is_full` tells that its class is of memory."""
        if is_full or self.is_full(error):
            return out_of_memory(f"model '{model}' ran out of memory: {words}")
        if loading:
            return invalid_model(f"{self.refuses} '{model}': {words}")
        return MmeError(Kind.EXECUTION_FAILED, f"{self.fails} '{model}': {words}")


ONNX_RUNTIME = Framework(
    "ONNX Runtime can't load model",
    "ONNX Runtime failed while running model",
    ("bad_alloc", "allocate memory", "out of memory", "CUDA_ERROR_OUT_OF_MEMORY", *_OF_CUDA),
)
OPENVINO = Framework("OpenVINO can't load model", "OpenVINO failed while running model")
PYTORCH = Framework(
    "PyTorch can't load model",
    "PyTorch execute failure: model",
    (
        "can't allocate memory",
        "CUDA out of memory",
        "CUDA error: out of memory",  # of the context or a kernel's code, before anything is allocated
        "not enough memory",
        "std::bad_alloc",
        *_OF_CUDA,
    ),
)
TENSORFLOW = Framework("TensorFlow can't load model", "TensorFlow failed while running model")
