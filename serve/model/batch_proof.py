"""Whether requests of a model may share a batch, where no configuration says that its first dimension is one.

Triton batches wherever every first dimension is of any size. Where that dimension is time, a batch mixes the data of
its clients, and each of them gets 200. So what names leave open is proven by the model's own requests: those that wait
together are executed one by one, and as a batch in both orders, and compared. Clients get the single answers. Three
batches of different contents that agree prove it; one that differs, or fails where its requests do not, refutes it.

A batch proves something only if its requests differ, and their answers differ by far more than rounding does. After one
that proves nothing, more and more batches are let go by before the next one is tried. Thread-safe.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from model_handlers.config.model_config import Guess
from model_handlers.errors import Kind
from model_handlers.tensor import BF16, FP16, encode_bytes_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array, DataType
    from serve.model.tensors import Batch
    from serve.request import InferenceRequest, InferenceResponse

    Contents = frozenset[bytes]  # digests of the requests of a batch
    Joined = Sequence[Sequence[InferenceResponse]]  # answers to the requests of a batch, of each order of them

_log = logging.getLogger("mme.model")
ENOUGH = 3  # batches that agree
_LONGEST_PAUSE = 1023  # batches between two that are tried
# Of the largest number, or of 1 for what may be probabilities: kernels differ by as much between two batch sizes.
_TOLERANCE = 0.005
_ROUNDED = {FP16: 0.01, BF16: 0.02}
_TELLING = 10.0  # times the difference to the batch that answers have to differ from one another
PASSING = frozenset({Kind.OUT_OF_MEMORY, Kind.TIMED_OUT, Kind.UNAVAILABLE})  # errors that say nothing of the model


class Batching(Enum):
    """What is known of a guessed batch dimension."""

    NAMED = "named"  # the names of the model's dimensions say that it is the batch
    PROVEN = "proven"
    UNPROVEN = "unproven"
    REFUTED = "refuted"
    OTHER = "other"  # the names say that it is something else
    OFF = "off"  # nothing is guessed on this server


JOINED = frozenset({Batching.NAMED, Batching.PROVEN})
_BY_NAME = {Guess.BATCH: Batching.NAMED, Guess.OTHER: Batching.OTHER, Guess.UNKNOWN: Batching.UNPROVEN}


class Comparison(NamedTuple):
    """What came of a batch beside its requests alone."""

    differs: str  # in what, as the rest of a sentence; "" for nothing
    telling: bool  # whether another client's data would have shown


class BatchProof:
    """What is known of the batch dimension of one version of a model.

    Args:
        verdict: what was found before, of the same file.
        guesses: whether anything is guessed at all.
    """

    def __init__(self, config: ModelConfig, verdict: Batching | None = None, *, guesses: bool = True) -> None:
        self._config = config
        state = verdict if verdict is not None and config.guess is Guess.UNKNOWN else _BY_NAME[config.guess]
        self.state = state if guesses else Batching.OFF
        self.joins = self.state in JOINED
        self._listeners: list[Callable[[Batching], None]] = []
        self._lock = threading.Lock()
        self._agreed: set[Contents] = set()
        self._pause = self._left = 0

    def __repr__(self) -> str:
        return f"<BatchProof of {self._config.name}: {self.state.value}>"

    def listen(self, listener: Callable[[Batching], None]) -> None:
        """Have each change of the state told, on any thread."""
        self._listeners.append(listener)

    @property
    def alone(self) -> bool:
        """Whether requests are executed one by one for good."""
        return not self.joins and self.state is not Batching.UNPROVEN

    def wants(self, batch: Batch) -> Contents | None:
        """The contents of a batch that is to be tried; None for one that would prove nothing new."""
        with self._lock:
            if self.state is not Batching.UNPROVEN:
                return None
            if self._left:
                self._left -= 1
                return None
        contents = frozenset(map(_digest, batch))
        with self._lock:
            if len(contents) > 1 and contents not in self._agreed:
                return contents
            self._wait_longer()
        return None

    def judge(self, contents: Contents, singles: Sequence[InferenceResponse], joined: Joined) -> None:
        """Learn from a batch that was tried, in each of several orders."""
        found = [compare(singles, answers) for answers in joined]
        differs = next((each.differs for each in found if each.differs), "")
        if differs:
            self._refute(f"in a batch of {len(singles)} requests {differs}")
            return
        with self._lock:
            if self.state is not Batching.UNPROVEN:
                return
            if not all(each.telling for each in found):
                self._wait_longer()
                return
            self._agreed.add(contents)
            self._pause = 0
            if len(self._agreed) < ENOUGH:
                return
            self._become(Batching.PROVEN)
        self._tell()

    def failed(self, count: int, error: MmeError) -> None:
        """Learn from a batch that failed, though none of its requests did alone."""
        if error.kind in PASSING:
            with self._lock:
                self._wait_longer()
        else:
            self._refute(f"a batch of {count} requests failed, which succeed alone: {error.message}")

    def doubt(self) -> None:
        """A batch has failed since the proof, or against the names: have it proven once more."""
        with self._lock:
            if not self.joins:
                return
            self._become(Batching.UNPROVEN)
            self._agreed.clear()
        self._tell()

    def _refute(self, why: str) -> None:
        with self._lock:
            if self.state is not Batching.UNPROVEN:
                return
            self._become(Batching.REFUTED)
        name, size = self._config.name, self._config.max_batch_size
        dims = ", ".join(map(str, self._config.inputs[0].shape(size)))
        _log.warning(
            "model '%s' does not batch, which its file left open: %s. Its requests are executed one by one. Write into "
            "config.pbtxt max_batch_size: 0 and whole shapes (of input '%s' dims: [ %s ]), or max_batch_size: %d to "
            "have it batch all the same",
            name,
            why,
            self._config.inputs[0].name,
            dims,
            size,
            extra={"target_model": name},
        )
        self._tell()

    def _become(self, state: Batching) -> None:
        self.state = state
        self.joins = state in JOINED

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self.state)

    def _wait_longer(self) -> None:
        self._pause = self._left = min(2 * self._pause + 1, _LONGEST_PAUSE)


def _digest(request: InferenceRequest) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in request.inputs:
        digest.update(repr(array.shape).encode())
        digest.update(encode_bytes_elements(array) if array.dtype.kind == "O" else array.tobytes())
    return digest.digest()


def compare(singles: Sequence[InferenceResponse], joined: Sequence[InferenceResponse]) -> Comparison:
    pairs: dict[str, tuple[DataType, list[tuple[Array, Array]]]] = {}
    for alone, together in zip(singles, joined, strict=True):
        for (name, data_type, one), (_, _, other) in zip(alone.outputs, together.outputs, strict=True):
            pairs.setdefault(name, (data_type, []))[1].append((one, other))
    telling = False
    for name, (data_type, arrays) in pairs.items():
        found = _compared(data_type, arrays)
        if found.differs:
            return Comparison(f"output '{name}' {found.differs}", telling=False)
        telling = telling or found.telling
    return Comparison("", telling)


def _compared(data_type: DataType, arrays: list[tuple[Array, Array]]) -> Comparison:
    for one, other in arrays:
        if one.shape != other.shape:
            return Comparison(f"has shape {list(other.shape)}, and {list(one.shape)} alone", telling=False)
    rows = np.concatenate([one for one, _ in arrays])
    rows, others = rows.reshape(len(rows), -1), np.concatenate([other for _, other in arrays]).reshape(len(rows), -1)
    if not rows.size:
        return Comparison("", telling=False)
    if data_type is not BF16 and rows.dtype.kind != "f":
        same = bool(np.array_equal(rows, others))
        return Comparison("" if same else "holds other values than alone", telling=bool(np.any(rows != rows[0])))
    return _compared_floats(data_type, _as_floats(rows, data_type), _as_floats(others, data_type))


def _compared_floats(data_type: DataType, rows: Array, others: Array) -> Comparison:
    finite = np.isfinite(rows)
    if not np.array_equal(np.where(finite, 0.0, rows), np.where(np.isfinite(others), 0.0, others), equal_nan=True):
        return Comparison("is infinite or no number elsewhere than alone", telling=False)
    rows, others = np.where(finite, rows, 0.0), np.where(finite, others, 0.0)
    apart = float(np.max(np.abs(rows - others)))
    largest = float(np.max(np.abs(rows)))
    scale = 1.0 if np.min(rows) >= 0.0 and largest <= 1.0 else largest
    if apart > _ROUNDED.get(data_type, _TOLERANCE) * scale:
        return Comparison(f"differs by {apart:.3g} from what it is alone", telling=False)
    spread = float(np.max(np.ptp(rows, axis=0)))
    return Comparison("", telling=spread > 0.0 and spread >= _TELLING * apart)


def _as_floats(array: Array, data_type: DataType) -> Array:
    if data_type is BF16:
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float64)
