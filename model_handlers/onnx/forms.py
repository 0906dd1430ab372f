"""ONNX models as forms: a graph whose large weights are files beside it, which ONNX Runtime maps.

Mapped weights are used where they lie only if the session does not *prepack* them: rearrange them for the processor
into private memory. That is the price of mapping, and why a model that turns hot is packed. A graph that is optimised
at each load makes new weights each time (transposed, merged), private ones again: hence the refined form, which is the
optimised graph, and depends on ONNX Runtime's version and the processor.

A sentence encoder of 90 MB (MiniLM, one thread, 32 tokens; a plain session: load 84 ms, ten of them 970 MiB):

    form      weights   load     ten sessions   batch 1 / 8 / 32
    written   mapped    14 ms        98 MiB     7.3 / 30 / 119 ms
    refined   mapped    10 ms        97 MiB     7.2 / 30 / 119 ms
    refined   packed    38 ms       462 MiB     5.2 / 27 / 115 ms, as the plain session

`load` is called on load threads, the others in processes of their own.
"""

from __future__ import annotations

import functools
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.mapped import Trial
from model_handlers.onnx.external import SMALLEST, take_weights_out
from model_handlers.onnx.options import graph_level, session_options
from model_handlers.onnx.runtime import create_session, onnx_runtime, translated
from model_handlers.onnx.signature import signature
from model_handlers.system import devices, heap
from model_handlers.system.threads import processors
from model_handlers.tensor import BYTES

if TYPE_CHECKING:
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.mapped import Draft
    from model_handlers.tensor import Array

_CPU_LINES = ("model name", "flags", "CPU part", "Features")  # of /proc/cpuinfo, on x86-64 and on Arm
_RUNS = 5
_ENOUGH_NS = 500_000_000  # of runs of one model
_CLOSE = 1e-2  # relative: kernels for packed weights may add up in another order, or in another precision


def refinement(config: ModelConfig) -> str:
    """What an optimised graph depends on."""
    return "\n".join([onnx_runtime().__version__, platform.machine(), _processor(), graph_level(config)])


@functools.cache
def _processor() -> str:
    first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    return "\n".join(line for line in first.splitlines() if line.startswith(_CPU_LINES))


def refine(config: ModelConfig, form: Path, draft: Draft) -> bytes:
    """The graph of the optimised model."""
    options = session_options(config, processors())
    options.add_session_config_entry("session.disable_prepacking", "1")
    optimised = draft.folder / "optimised"
    options.optimized_model_filepath = str(optimised)
    for key, value in {"file_name": "weights", "min_size_in_bytes": str(SMALLEST)}.items():
        options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", value)
    create_session(form, options, config.name)
    return take_weights_out(optimised, draft)


def load(config: ModelConfig, form: Path, threads: int, *, refined: bool, packed: bool) -> Any:
    """A session over a form."""
    options = session_options(config, threads)
    if refined:
        options.graph_optimization_level = onnx_runtime().GraphOptimizationLevel.ORT_DISABLE_ALL
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
        # Planning which tensors share a buffer is two thirds of the load; the arena reuses memory anyhow.
        options.enable_mem_reuse = False
    return create_session(form, options, config.name)


def try_out(config: ModelConfig, form: Path) -> Trial:
    """What it is like to have an optimised model loaded."""
    mapped_answers, mapped_bytes, mapped_ns, _ = _try(config, form, packed=False)
    packed_answers, packed_bytes, packed_ns, names = _try(config, form, packed=True)
    alike = all(map(same_numbers, mapped_answers, packed_answers))
    return Trial(mapped_bytes, packed_bytes, mapped_ns, packed_ns, names, alike)


def _try(config: ModelConfig, form: Path, *, packed: bool) -> tuple[list[Array], int, int, tuple[str, ...]]:
    """What it answers to zeros, its private bytes, the shortest execution in ns, and the names of what it maps."""
    heap.trim()
    before = devices.private_memory()
    session = load(config, form, processors(), refined=True, packed=packed)
    zeros = _zeros(session, config.name)
    took: list[int] = []
    while len(took) <= _RUNS and sum(took) < _ENOUGH_NS:
        began = time.perf_counter_ns()
        try:
            answers: list[Array] = session.run(None, zeros)
        except Exception as error:  # of any of a dozen classes
            raise translated(error, config.name, loading=True) from error
        took.append(time.perf_counter_ns() - began)
    heap.trim()
    names = tuple(sorted({path.name for path in _mapped_files() if path.parent == form.parent}))
    return answers, max(devices.private_memory() - before, 0), min(took), names


def _mapped_files() -> list[Path]:
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [Path(row[5]) for row in rows if len(row) == 6]


def _zeros(session: Any, model: str) -> dict[str, Array]:
    zeros = {}
    for name, data_type, shape in signature(session, model)[0]:
        zeros[name] = np.zeros([max(dim, 1) for dim in shape], dtype=data_type.dtype)
        if data_type is BYTES:
            zeros[name].fill("")
    return zeros


def same_numbers(one: Array, other: Array) -> bool:
    """Whether one answer is the other but for rounding: a hundredth of the largest number, of floats alone."""
    if one.dtype.kind != "f":
        return one.shape == other.shape and bool(np.all(one == other))
    scale = float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one)))
    return one.shape == other.shape and np.allclose(one, other, rtol=_CLOSE, atol=_CLOSE * scale, equal_nan=True)
