"""Ensembles of trees under the name of Triton's backend for them, `fil`, on the CPU.

Its names and parameters are kept: one input `input__0`, one output `output__0`, and `treeshap_output` where it is
declared. All three libraries die of damaged files: of a signal, an abort, or a wish for more memory than there is; some
files they load, and die of later, when a row follows a damaged tree. So a file that was never loaded is tried in a
process of its own (`try_load`), for the time of the trial only: rows go through the serving process in a fifth of the
time that a process of its own would take for them.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from model_handlers.base import Handler, Runtime, Traits
from model_handlers.config.autocomplete import complete
from model_handlers.config.model_config import Guess, number, switch, warn_of_unknown
from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory
from model_handlers.system.priority import usual_priority
from model_handlers.system.threads import Threads, start_thread
from model_handlers.tensor import FP32
from model_handlers.trees.forests import (
    PACKAGES,
    PRELOAD,
    imported,
    kind_of,
    library_of,
    open_forest,
    threads_of,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.autocomplete import SignatureTensor
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array
    from model_handlers.trees.forests import Forest

    Compute = Callable[[Array], Array]


_LEAST_ROWS = 128  # of a part: a call takes as long as some dozens of them


class _Job:
    def __init__(self, compute: Compute, parts: list[Array]) -> None:
        self._compute = compute
        self._parts = parts
        self._next = itertools.count()
        self._done = threading.Semaphore(0)
        self._found: list[Array] = [*parts]
        self._errors: list[Exception] = []

    def work(self) -> None:
        while (index := next(self._next)) < len(self._parts):
            try:
                self._found[index] = self._compute(self._parts[index])
            except Exception as error:  # noqa: BLE001 - raised by `result`
                self._errors.append(error)
            finally:
                self._done.release()

    def result(self) -> Array:
        for _ in self._parts:
            self._done.acquire()
        if self._errors:
            raise self._errors[0]
        return np.concatenate(self._found)


class Crew:
    """The threads of a model that compute a batch of rows together, a part each; several batches at a time.

    The libraries have OpenMP for that. It has a team of threads for each thread that executes, LightGBM keeps how many
    for all models at once, and where a thread can't be started OpenMP ends the process. So the libraries compute with
    one thread, and these call them side by side; the thread that executes is one of `threads`.
    """

    def __init__(self, threads: Threads, model: str) -> None:
        self._threads = threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._members: list[threading.Thread] = []
        try:
            for number in range(1, threads.count):
                name = f"rows of '{model}' {number}"
                member = threading.Thread(target=self._serve, name=name, daemon=True)
                start_thread(member)
                self._members.append(member)
        except BaseException:
            self.close()
            raise

    def compute(self, compute: Compute, rows: Array) -> Array:
        """What `compute` returns for the rows, a row for each."""
        count = min(len(rows) // _LEAST_ROWS, 1 + len(self._members))
        if count < 2:
            return compute(rows)
        job = _Job(compute, np.array_split(rows, count))
        for _ in range(count - 1):
            self._jobs.put(job)
        job.work()
        return job.result()

    def close(self) -> None:
        """End the threads, and give them back. Once more does nothing."""
        for _ in self._members:
            self._jobs.put(None)
        for member in self._members:
            member.join()
        self._members = []
        self._threads.give_back()

    def _serve(self) -> None:
        usual_priority()  # it was started by a load
        while (job := self._jobs.get()) is not None:
            job.work()


_DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of scores (n, columns).

    Attributes:
        columns: how many numbers a client gets for a row.
        classes: whether that is the class.
        both: whether the score of the first of two classes is worked out.
        threshold: scores beyond it mean the second of two classes.
    """

    columns: int
    classes: bool = False
    both: bool = False
    threshold: float = _DEFAULT_THRESHOLD

    def of(self, scores: Array) -> Array:
        """The output (n, columns) of FP32; (n,) of one column, since FIL leaves out dimensions of one."""
        if self.both:
            scores = np.concatenate([1 - scores, scores], axis=1)
        elif self.classes and scores.shape[1] == 1:
            scores = scores > self.threshold
        elif self.classes:
            scores = scores.argmax(axis=1, keepdims=True)
        output = scores.astype(np.float32, copy=False)
        return output.reshape(-1) if self.columns == 1 else output


def outcome_of(config: ModelConfig, forest: Forest) -> Outcome:
    classes = switch(config, "is_classifier", default=switch(config, "output_class", default=False))
    threshold = number(config, "threshold", _DEFAULT_THRESHOLD)
    if switch(config, "predict_proba", default=False):
        if forest.columns == 1 and not forest.binary:
            raise invalid_model(
                f"model '{config.name}': parameter 'predict_proba' asks for the score of each class, but this model "
                "knows no classes: leave it out"
            )
        return Outcome(max(forest.columns, 2), both=forest.columns == 1)
    if classes and not forest.labels:
        return Outcome(1, classes=True, threshold=threshold)
    return Outcome(forest.columns)


INPUT, OUTPUT, CONTRIBUTIONS = "input__0", "output__0", "treeshap_output"
_ROWS_ON_TRIAL = (0.0, np.nan, 1e30, -1e30)
_DEFAULT_MAX_BATCH_SIZE = 32768  # a row is small, and any number of them can be computed together
_PARAMETERS = frozenset(
    (
        "model_type",
        "is_classifier",
        "output_class",
        "predict_proba",
        "threshold",
        "cpu_nthread",
        "xgboost_allow_unknown_field",
    )
)
_ON_GPUS = "it tunes FIL on a GPU, and trees are computed on the CPU here"
_HARMLESS = {
    **dict.fromkeys(("algo", "blocks_per_sm", "threads_per_tree", "transfer_threshold"), _ON_GPUS),
    **dict.fromkeys(
        ("storage_type", "layout", "chunk_size", "use_experimental_optimizations"),
        "it tunes how FIL lays trees out, which are kept as their own library keeps them here",
    ),
}


class TreesHandler(Handler):
    """One model of trees."""

    backend: ClassVar[str] = "fil"
    default_filename: ClassVar[str] = "xgboost.json"

    def __init__(self, forest: Forest, config: ModelConfig, crew: Crew) -> None:
        self._crew = crew
        self._outcome = outcome_of(config, forest)
        super().__init__(_complete(config, forest, self._outcome.columns))
        self._forest = forest

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:
        runtime = Runtime(packages=PACKAGES, provide=lambda: imported(library_of(kind_of(config, model_file))))
        return Traits(
            inline=True, memory_only=True, verify_first=True, estimate_factor=3.0, runtime=runtime, preload=PRELOAD
        )

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        threads_of(config, model_file).give_back()  # it refuses a parameter
        forest = open_forest(config, model_file)
        return _complete(config, forest, outcome_of(config, forest).columns)

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> TreesHandler:  # noqa: ARG003 - the CPU's, shared by lanes
        """Read the file; parameters are named as FIL names them."""
        warn_of_unknown(config, _PARAMETERS, "models of trees", "mme.trees", _HARMLESS)
        crew = Crew(threads_of(config, model_file), config.name)
        try:
            return cls(open_forest(config, model_file), config, crew)
        except BaseException:
            crew.close()
            raise

    @classmethod
    def try_load(cls, config: ModelConfig, model_file: Path) -> None:
        """Read the file, look through its trees, and send a few rows through them."""
        try:
            handler = cls(open_forest(config, model_file, on_trial=True), config, Crew(Threads(1), config.name))
            rows = np.outer(_ROWS_ON_TRIAL, np.ones(handler.config.inputs[0].dims[-1])).astype(np.float32)
            handler.execute({INPUT: rows}, [spec.name for spec in handler.config.outputs])
        except MmeError as error:
            if error.kind in {Kind.INVALID_MODEL, Kind.UNSUPPORTED}:
                raise
            raise invalid_model(
                f"model '{config.name}': '{model_file.name}' can be read, but not computed, and must be damaged: "
                f"{error.message}"
            ) from error

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        rows = np.ascontiguousarray(inputs[INPUT], np.float32)
        try:
            compute, forest = self._crew.compute, self._forest
            return [
                self._outcome.of(compute(forest.scores, rows))
                if name == OUTPUT
                else compute(forest.contributions, rows).astype(np.float32, copy=False)
                for name in outputs
            ]
        except MemoryError as error:
            raise out_of_memory(f"model '{self.config.name}' ran out of memory: {error}") from error
        except Exception as error:  # each library has errors of its own
            raise MmeError(
                Kind.EXECUTION_FAILED, f"the trees of model '{self.config.name}' could not be computed: {words(error)}"
            ) from error

    def close(self) -> None:
        """Drop the trees: each library frees them in its destructor."""
        self._crew.close()
        del self._forest


def _complete(config: ModelConfig, forest: Forest, columns: int) -> ModelConfig:
    declared = config.input(INPUT)
    if declared is not None and declared.dims[-1] != forest.features:
        raise invalid_model(
            f"model '{config.name}': its trees take {forest.features} features, but config.pbtxt declares input "
            f"'{INPUT}' with dims {list(declared.dims)}; write dims: [ {forest.features} ]"
        )
    outputs: list[SignatureTensor] = [(OUTPUT, FP32, (-1, columns))]
    if config.output(CONTRIBUTIONS) is not None:
        if not forest.explains:
            raise invalid_model(
                f"model '{config.name}': output '{CONTRIBUTIONS}' needs the library that made the model, XGBoost or "
                "LightGBM, installed here, and a file in its own format"
            )
        outputs.append((CONTRIBUTIONS, FP32, (-1, forest.columns * (forest.features + 1))))
    largest = config.default_max_batch_size or _DEFAULT_MAX_BATCH_SIZE
    completed = complete(config, [(INPUT, FP32, (-1, forest.features))], outputs, largest)
    return replace(completed, guess=Guess.NONE)  # each row goes through the trees by itself: there is nothing to guess
