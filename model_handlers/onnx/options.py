"""How a session runs: threads, optimisation, memory; from a configuration's parameters, as Triton's backend names them.

Pure but for a look at the processors.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_model
from model_handlers.onnx.arena import SHRINKAGE, USES_SHARED
from model_handlers.onnx.providers import CUDA_PARAMETERS
from model_handlers.onnx.runtime import FATAL, onnx_runtime
from model_handlers.parameters import integer, warn_of_unknown
from model_handlers.threads import processors, take_threads

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.config import ModelConfig
    from model_handlers.threads import Threads

# optimization.graph.level and the parameter `level` use the same numbers.
_GRAPH_LEVELS = {-1: "ORT_DISABLE_ALL", 1: "ORT_ENABLE_BASIC", 2: "ORT_ENABLE_EXTENDED", 0: "ORT_ENABLE_ALL"}
_THREADS = _WITHIN, _BETWEEN, _MODE = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode")
_SHOWN = 200  # characters of a file name in a message
_BESIDE = "put the library beside the model or its config.pbtxt, and name it by its file name"
_PARAMETERS = frozenset(
    (
        *_THREADS,
        "level",
        "enable_mem_arena",
        "enable_mem_pattern",
        SHRINKAGE,
        *CUDA_PARAMETERS,
    )
)


def session_threads(config: ModelConfig, threads: int) -> Threads:
    """Threads for a session that computes on so many, or as its configuration says.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is no such number, UNAVAILABLE where there are not so many.
    """
    parameter = next((name for name in _THREADS if integer(config, name, 0, range(1025))), "")
    within = integer(config, _WITHIN, 0, range(1025)) or threads
    return take_threads(within + (_between(config) - 1 if parameter else 0), config.name, parameter)


def _between(config: ModelConfig) -> int:
    """On how many threads operators are executed side by side."""
    # With one thread between operators ONNX Runtime would run them one after the other, whatever the mode.
    usual = processors() if integer(config, _MODE, 0, range(2)) else 1
    return integer(config, _BETWEEN, 0, range(1025)) or usual


def session_options(config: ModelConfig, threads: int) -> Any:
    """The options of a session of this model, which computes on `threads` threads unless the configuration says more.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is no such number.
    """
    runtime = onnx_runtime()
    warn_of_unknown(config, _PARAMETERS, "ONNX models", "mme.onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.intra_op_num_threads = integer(config, _WITHIN, 0, range(1025)) or threads
    options.inter_op_num_threads = _between(config)
    if integer(config, _MODE, 0, range(2)):
        options.execution_mode = runtime.ExecutionMode.ORT_PARALLEL
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, graph_level(config))
    options.enable_cpu_mem_arena = bool(integer(config, "enable_mem_arena", 1, range(2)))
    if options.enable_cpu_mem_arena:  # where none is shared, it has its own
        options.add_session_config_entry(USES_SHARED, "1")
    options.enable_mem_pattern = bool(integer(config, "enable_mem_pattern", 1, range(2)))
    return options


def register_operations(options: Any, config: ModelConfig, model_file: Path) -> None:
    """Register the libraries of custom operations that the configuration names with a session's options.

    A library is code: only files of the model's own folder are loaded, beside the model or its configuration, never a
    path elsewhere or a name that the system would search for.

    Raises:
        MmeError: INVALID_MODEL for a name outside of the folder, a file that is not there, or no such library.
    """
    for name in config.op_libraries:
        subject = f"model '{config.name}': model_operations.op_library_filename '{name[:_SHOWN]}'"
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise invalid_model(f"{subject} is outside of the model's folder: {_BESIDE}")
        places = (model_file.parent / name, model_file.parent.parent / name)
        library = next((place for place in places if place.is_file()), None)
        if library is None:
            raise invalid_model(f"{subject} is not there: {_BESIDE}")
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:  # of any of a dozen classes, as for sessions
            words = " ".join(str(error).split())
            raise invalid_model(f"{subject} is no library of ONNX Runtime operations: {words}") from error


def graph_level(config: ModelConfig) -> str:
    """How far the graph is optimised, by ONNX Runtime's name for it.

    Raises:
        MmeError: INVALID_MODEL for a level that does not exist.
    """
    level = integer(config, "level", config.optimization_level, range(-1, 3))
    if level not in _GRAPH_LEVELS:
        raise invalid_model(f"model '{config.name}': optimization.graph.level must be -1, 0, 1 or 2, got {level}")
    return _GRAPH_LEVELS[level]


def run_options(config: ModelConfig) -> Any:
    """The options of each execution: None, or that the named arenas give back what they hold when it is done."""
    arenas = config.parameters.get(SHRINKAGE)
    if not arenas:
        return None
    options = onnx_runtime().RunOptions()
    options.add_run_config_entry(SHRINKAGE, arenas)
    return options
