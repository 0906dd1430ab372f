"""The one arena that the sessions of the serving process execute in on the CPU.

With an arena each, sessions keep what their largest execution took: ten of them ten times as much. One for all keeps
what was needed at a time, is as quick, and takes a ceiling; docs/cache.md has the measurements. A model's process has
one session, and the arena that comes with it. Called on threads that load, and on the one that trims.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from model_handlers.onnx.runtime import CPU_PROVIDER, FATAL, onnx_runtime

SHRINKAGE = "memory.enable_memory_arena_shrinkage"
USES_SHARED = "session.use_env_allocators"
_AS_REQUESTED = 1  # grow by what is asked for: doubling keeps what nothing uses
_DEFAULT = -1
# A model that returns its input, of one float: the smallest that can be executed.
_IDENTITY = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)


@functools.lru_cache(maxsize=1)  # the arena registered last is the one that sessions get
def share_arena(limit: int) -> None:
    """Have sessions made from now on in this process share an arena of at most `limit` bytes, their weights among them.

    Sessions ask for it by `USES_SHARED`.
    """
    onnx_runtime()
    from onnxruntime.capi import _pybind_state as runtime  # noqa: PLC0415 - see `onnx_runtime`

    memory = runtime.OrtMemoryInfo("Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)
    arena = runtime.OrtArenaCfg(limit, _AS_REQUESTED, _DEFAULT, _DEFAULT)
    runtime.create_and_register_allocator(memory, arena)


def trim_arena() -> None:
    """Give back what the shared arena holds and no execution uses: ONNX Runtime does so at the end of an execution."""
    runtime: Any = onnx_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry(USES_SHARED, "1")
    session = runtime.InferenceSession(_IDENTITY, options, providers=[CPU_PROVIDER])
    shrinks = runtime.RunOptions()
    shrinks.add_run_config_entry(SHRINKAGE, "cpu:0")
    session.run(None, {"x": np.zeros(1, np.float32)}, shrinks)
