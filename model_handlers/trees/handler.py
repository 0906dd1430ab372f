"""Ensembles of trees under the name of Triton's backend for them, `fil`, on the CPU; its names and parameters are kept.

Each format is computed by the library that wrote it, and a treelite checkpoint by treelite's GTIL, which also stands
in for a library that is not installed. So values are the library's own, and so is the speed. 300 trees, one thread,
microseconds a batch of 1 / 32 / 1,000 rows:

    XGBoost model (depth 8)       by xgboost 110 / 160 /  2,400    by GTIL 39 /   590 / 18,000
    LightGBM model (127 leaves)   by lightgbm 25 / 730 / 24,000    by GTIL 65 / 1,230 / 37,000

Loading takes 5 to 30 ms by any of them, and a few times the file in memory. All three release the GIL while they
compute and may be called by several threads at once; each of them computes with one: see `Crew`.

All three die of damaged files: of a signal, an abort, or a wish for more memory than there is; some they load, and die
of later, when a row follows a damaged tree. So a file that was never loaded is tried in a process of its own
(`try_load`), for the time of the trial only: rows go through the serving process in a fifth of the time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import struct
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Device, Handler, Runtime, Traits
from model_handlers.config.autocomplete import SignatureTensor, complete
from model_handlers.config.model_config import Guess, ModelConfig, choice, integer, number, switch, warn_of_unknown
from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory, unsupported
from model_handlers.system.importing import import_without, is_installed, variable
from model_handlers.system.threads import Threads, default_threads, start_thread, take_threads, usual_priority
from model_handlers.tensor import FP32, Array
from model_handlers.trees.soundness import check_lightgbm, check_treelite, check_xgboost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    Compute = Callable[[Array], Array]
    Work = Callable[[], None]


_TAIL = 200
_JSON_VERSION = re.compile(rb'"version"\s*:\s*\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]')
_UBJ_VERSION = re.compile(rb"version\[#L.{8}(.{3,15})", re.DOTALL)
_LIGHTGBM_VERSION = re.compile(r"^version=(v\d+)\s*$", re.MULTILINE)
_CHECKPOINT_MAJORS = range(1, 100)


class FileKind(Enum):
    """A format of trees, by FIL's word for it (`model_type`)."""

    XGBOOST = "xgboost"  # the binary of XGBoost before 2.0
    XGBOOST_JSON = "xgboost_json"
    XGBOOST_UBJ = "xgboost_ubj"
    LIGHTGBM = "lightgbm"
    TREELITE = "treelite_checkpoint"


_SUFFIXES = {
    ".json": FileKind.XGBOOST_JSON,
    ".ubj": FileKind.XGBOOST_UBJ,
    ".txt": FileKind.LIGHTGBM,
    ".tl": FileKind.TREELITE,
}


def kind_of(config: ModelConfig, model_file: Path) -> FileKind:
    """What the configuration says that the file is, else what its name says.

    XGBoost writes JSON or UBJSON into a file of any name but for two suffixes, so its kinds are told apart by content.
    """
    by_name = _SUFFIXES.get(model_file.suffix.lower(), FileKind.XGBOOST)
    kind = FileKind(choice(config, "model_type", by_name.value, [kind.value for kind in FileKind]))
    return _xgboost_kind(kind, model_file) if kind.value.startswith("xgboost") else kind


def _xgboost_kind(kind: FileKind, model_file: Path) -> FileKind:
    with model_file.open("rb") as file:
        head = file.read(2)
    if not head.startswith(b"{"):
        return kind
    return FileKind.XGBOOST_JSON if head[1:].strip() in {b"", b'"', b"}"} else FileKind.XGBOOST_UBJ


def xgboost_version(kind: FileKind, model_file: Path) -> tuple[int, ...]:
    """The version of XGBoost that wrote a file, which its last bytes tell; () where they don't."""
    with model_file.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(file.tell() - _TAIL, 0))
        tail = file.read()
    if kind is FileKind.XGBOOST_JSON:
        found = _JSON_VERSION.search(tail)
        return tuple(map(int, found.groups())) if found else ()
    found = _UBJ_VERSION.search(tail)
    return _ubj_integers(found[1]) if found else ()


def _ubj_integers(data: bytes) -> tuple[int, ...]:
    sizes = {ord("i"): ">b", ord("U"): ">B", ord("I"): ">h", ord("l"): ">i"}
    numbers: list[int] = []
    at = 0
    while at < len(data) and data[at] in sizes and len(numbers) < 3:
        form = sizes[data[at]]
        numbers.append(struct.unpack_from(form, data, at + 1)[0])
        at += 1 + struct.calcsize(form)
    return tuple(numbers)


def lightgbm_version(model_file: Path) -> str:
    with model_file.open(errors="replace") as file:
        found = _LIGHTGBM_VERSION.search(file.read(_TAIL))
    return found[1] if found else ""


def checkpoint_version(model: str, model_file: Path) -> tuple[int, int, int]:
    """The version of treelite that wrote a checkpoint. Raises INVALID_MODEL where none did."""
    with model_file.open("rb") as file:
        head = file.read(12)
    version: tuple[int, int, int] = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if version[0] not in _CHECKPOINT_MAJORS:
        raise invalid_model(
            f"model '{model}': '{model_file.name}' is no treelite checkpoint; set the parameter 'model_type' to what "
            "it is, or write it with treelite.Model.serialize"
        )
    return version


PACKAGES = ("xgboost", "xgboost-cpu", "lightgbm", "treelite")
PRELOAD = "model_handlers.trees.handler:preload"
_OPENMP = "OMP_NUM_THREADS"
_LIBRARIES = ("xgboost", "lightgbm", "treelite")
_STAMP = re.compile(r"^\[\d\d:\d\d:\d\d\] (?:\S+:\d+: )?")
_CHECK = re.compile(r"^Check failed: .*?: ")
_MOST_WORDS = 300


@functools.cache
def imported(name: str) -> Any:
    """The library of that name, imported when the first model needs it."""
    try:
        with variable(_OPENMP, "1"):  # for OpenMP that is loaded meanwhile, where it is not told: see `Crew`
            # For wrappers in scikit-learn's style they would import all of that: 65 MiB and seconds.
            module = import_without(name, "sklearn")
    except ImportError as error:
        raise unsupported(
            f"this model of trees needs {name}, which is not installed; run `pip install 'mme[trees]'`"
        ) from error
    except OSError as error:  # LightGBM wants libgomp.so.1, which slim images leave out
        raise unsupported(
            f"this model of trees needs {name}, which can't be imported ({error}); install that, too"
        ) from error
    if name == "lightgbm":  # it would write to standard output, where lines are JSON
        module.register_logger(logging.getLogger("mme.lightgbm"))
    return module


def preload() -> None:
    """Import what can be imported, for the processes that are forked from this one. Why not, a model is told."""
    for name in filter(is_installed, _LIBRARIES):
        with contextlib.suppress(MmeError):
            imported(name)


def words(error: Exception) -> str:
    """What a library says, in one line, without its clock, its source files and its stack."""
    text = str(error).partition("Stack trace")[0].partition("\n\n")[0].strip()
    text = _CHECK.sub("", _STAMP.sub("", text))
    return " ".join(text.split())[:_MOST_WORDS] or type(error).__name__


_LIGHTGBM_VERSIONS = ("v2", "v3", "v4")
_THREADS = "cpu_nthread"
_END_OF_TREES = "\nend of trees"


class Forest:
    """Trees of one file, as their library computes them.

    `predict` and `explain` are the library's: of rows (n, features) of FP32 the scores, and what each feature
    contributed with the bias behind them; `explain` is None where it can't tell.
    """

    def __init__(
        self, features: int, predict: Compute, explain: Compute | None, *, binary: bool, labels: bool = False
    ) -> None:
        self.features = features  # how many numbers a row has
        self.binary = binary  # whether there are two classes and a score is that of the second
        self.labels = labels  # whether a score is the class itself
        self.explains = explain is not None
        self._predict = predict
        self._explain = explain
        self.columns = self.scores(np.zeros((1, features), np.float32)).shape[1]  # of a score: classes, or targets

    def scores(self, rows: Array) -> Array:
        return self._predict(rows).reshape(len(rows), -1)

    def contributions(self, rows: Array) -> Array:
        assert self._explain is not None  # noqa: S101 - else a configuration that asks for them is refused
        return self._explain(rows).reshape(len(rows), -1)


def library_of(kind: FileKind) -> str:
    if kind in {FileKind.XGBOOST_JSON, FileKind.XGBOOST_UBJ} and is_installed("xgboost"):
        return "xgboost"
    if kind is FileKind.LIGHTGBM and is_installed("lightgbm"):
        return "lightgbm"
    return "treelite"


def open_forest(config: ModelConfig, model_file: Path, *, on_trial: bool = False) -> Forest:
    """Read a file. On trial its trees are looked through as well, before anything is computed: see `soundness`."""
    kind = kind_of(config, model_file)
    name = library_of(kind)
    imported(name)
    try:
        if name == "xgboost":
            return XgboostForest(config, model_file, kind, on_trial=on_trial)
        if name == "lightgbm":
            return LightgbmForest(config, model_file, on_trial=on_trial)
        return TreeliteForest(config, model_file, kind, on_trial=on_trial)
    except MmeError:
        raise
    except MemoryError as error:
        raise out_of_memory(f"model '{config.name}' found no memory to load into: {error}") from error
    except Exception as error:  # each library has errors of its own, and of the formats that it parses
        raise invalid_model(
            f"model '{config.name}': {name} can't read '{model_file.name}' as {kind.value}: {words(error)}"
        ) from error


def threads_of(config: ModelConfig, model_file: Path) -> Threads:
    asked = integer(config, _THREADS, 0, range(1025))
    return take_threads(asked or default_threads(model_file), config.name, _THREADS if asked else "")


class XgboostForest(Forest):
    """Trees that XGBoost computes."""

    def __init__(self, config: ModelConfig, model_file: Path, kind: FileKind, *, on_trial: bool) -> None:
        xgboost = imported("xgboost")
        wrote = xgboost_version(kind, model_file)
        if kind is FileKind.XGBOOST_UBJ and not wrote:  # which XGBoost might read for ever
            raise _incomplete(config, model_file, "XGBoost in UBJSON: its last bytes are the version")
        _not_newer(config, model_file, "XGBoost", wrote, xgboost.__version__)
        booster = xgboost.Booster({"nthread": 1})
        with xgboost.config_context(verbosity=0):
            booster.load_model(model_file)
        learner = json.loads(booster.save_config())["learner"]
        objective = learner["learner_train_param"]["objective"]
        if learner["gradient_booster"]["name"] == "gblinear":
            raise invalid_model(
                f"model '{config.name}' is linear (XGBoost's booster 'gblinear'), no model of trees: "
                "convert it to ONNX and serve it by backend 'onnxruntime'"
            )
        if objective == "multi:softmax" and switch(config, "predict_proba", default=False):
            objective = "multi:softprob"
            booster.set_param({"objective": objective})
        if on_trial:
            check_xgboost(booster.save_raw("ubj"), learner["learner_model_param"])
        super().__init__(
            booster.num_features(),
            lambda rows: booster.inplace_predict(rows, validate_features=False, strict_shape=True),
            lambda rows: booster.predict(xgboost.DMatrix(rows, nthread=1), pred_contribs=True, validate_features=False),
            binary=objective.startswith("binary:"),
            labels=objective == "multi:softmax",
        )


class LightgbmForest(Forest):
    """Trees that LightGBM computes."""

    def __init__(self, config: ModelConfig, model_file: Path, *, on_trial: bool) -> None:
        version = lightgbm_version(model_file)
        if version and version not in _LIGHTGBM_VERSIONS:
            raise invalid_model(
                f"model '{config.name}': '{model_file.name}' is in version {version} of LightGBM's text format; "
                f"those that are read here are {', '.join(_LIGHTGBM_VERSIONS)}"
            )
        text = _trees_text(config, model_file)
        if on_trial:
            check_lightgbm(text)
        booster = imported("lightgbm").Booster(model_str=text)
        super().__init__(
            booster.num_feature(),
            functools.partial(booster.predict, num_threads=1),
            functools.partial(booster.predict, pred_contrib=True, num_threads=1),
            binary="\nobjective=binary" in text.partition("\nTree=0")[0],
        )


class TreeliteForest(Forest):
    """By treelite's GTIL, which reads all the formats."""

    def __init__(self, config: ModelConfig, model_file: Path, kind: FileKind, *, on_trial: bool) -> None:
        treelite = imported("treelite")
        model = _read_by_treelite(treelite, config, model_file, kind)
        task = int(model.get_header_accessor().get_field("task_type")[0])
        if on_trial:
            check_treelite(model)
        predict = functools.partial(treelite.gtil.predict, model, nthread=1)
        super().__init__(model.num_feature, predict, None, binary=task == 0)


def _read_by_treelite(treelite: Any, config: ModelConfig, model_file: Path, kind: FileKind) -> Any:
    if kind is FileKind.TREELITE:
        version = checkpoint_version(config.name, model_file)
        _not_newer(config, model_file, "treelite", version, treelite.__version__)
        return treelite.Model.deserialize(model_file)
    if kind is FileKind.XGBOOST:
        return treelite.frontend.load_xgboost_model_legacy_binary(model_file)
    if kind is FileKind.LIGHTGBM:
        return treelite.frontend.load_lightgbm_model(model_file)
    unknown = switch(config, "xgboost_allow_unknown_field", default=False)
    form = "json" if kind is FileKind.XGBOOST_JSON else "ubjson"
    return treelite.frontend.load_xgboost_model(model_file, format_choice=form, allow_unknown_field=unknown)


def _not_newer(config: ModelConfig, model_file: Path, maker: str, wrote: tuple[int, ...], reads: str) -> None:
    # It might be read, and mean something else.
    if wrote and wrote[0] > int(reads.partition(".")[0]):
        raise invalid_model(
            f"model '{config.name}': '{model_file.name}' was written by {maker} {'.'.join(map(str, wrote))}, and "
            f"{reads} is installed here, which does not know that version: install a newer one, or save the model "
            "with an older one"
        )


def _trees_text(config: ModelConfig, model_file: Path) -> str:
    # Of what follows the end of its trees nothing is computed.
    text, end, _ = model_file.read_text(errors="replace").partition(_END_OF_TREES)
    if not text.startswith("tree\n") or not end:
        raise _incomplete(config, model_file, "LightGBM in text: 'tree' is its first line, 'end of trees' the last")
    return f"{text}{end}\n"


def _incomplete(config: ModelConfig, model_file: Path, what: str) -> MmeError:
    return invalid_model(
        f"model '{config.name}': '{model_file.name}' is no complete model of {what}; write it with Booster.save_model"
    )


_LEAST_ROWS = 128  # of a part: a call takes as long as some dozens of them


class Crew:
    """The threads of a model that compute a batch of rows together, a part each; several batches at a time.

    The libraries have OpenMP for that. It has a team of threads for each thread that executes, LightGBM keeps how many
    for all models at once, and where a thread can't be started OpenMP ends the process. So the libraries compute with
    one thread, and these call them side by side; the thread that executes is one of `threads`.
    """

    def __init__(self, threads: Threads, model: str) -> None:
        self._threads = threads
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
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
        count = min(len(rows) // _LEAST_ROWS, 1 + len(self._members))
        if count < 2:
            return compute(rows)
        found: list[Future[Array]] = [Future() for _ in range(count)]
        parts = iter(list(zip(found, np.array_split(rows, count), strict=True)))

        def work() -> None:
            for future, part in parts:  # of which each thread takes the next one
                try:
                    future.set_result(compute(part))
                except Exception as error:  # noqa: BLE001 - raised below
                    future.set_exception(error)

        for _ in range(count - 1):
            self._jobs.put(work)
        work()
        wait(found)  # before the first failure is raised, for others may compute on
        return np.concatenate([future.result() for future in found])

    def close(self) -> None:
        for _ in self._members:
            self._jobs.put(None)
        for member in self._members:
            member.join()
        self._members = []
        self._threads.give_back()

    def _serve(self) -> None:
        usual_priority()  # it was started by a load
        while (work := self._jobs.get()) is not None:
            work()


_DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class ScoreOutcome:
    """What becomes of scores (n, columns)."""

    columns: int  # how many numbers a client gets for a row
    classes: bool = False  # whether that is the class
    both: bool = False  # whether the score of the first of two classes is worked out
    threshold: float = _DEFAULT_THRESHOLD  # scores beyond it mean the second of two classes

    def of(self, scores: Array) -> Array:
        if self.both:
            scores = np.concatenate([1 - scores, scores], axis=1)
        elif self.classes and scores.shape[1] == 1:
            scores = scores > self.threshold
        elif self.classes:
            scores = scores.argmax(axis=1, keepdims=True)
        output = scores.astype(np.float32, copy=False)
        return output.reshape(-1) if self.columns == 1 else output


def outcome_of(config: ModelConfig, forest: Forest) -> ScoreOutcome:
    classes = switch(config, "is_classifier", default=switch(config, "output_class", default=False))
    threshold = number(config, "threshold", _DEFAULT_THRESHOLD)
    if switch(config, "predict_proba", default=False):
        if forest.columns == 1 and not forest.binary:
            raise invalid_model(
                f"model '{config.name}': parameter 'predict_proba' asks for the score of each class, but this model "
                "knows no classes: leave it out"
            )
        return ScoreOutcome(max(forest.columns, 2), both=forest.columns == 1)
    if classes and not forest.labels:
        return ScoreOutcome(1, classes=True, threshold=threshold)
    return ScoreOutcome(forest.columns)


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
