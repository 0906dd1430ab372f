"""How a PyTorch model runs: from its configuration's parameters, as Triton's backend names them.

Most are switches of the whole process, of the thread that executes, or of PyTorch itself; a model in a process of its
own is alone with them, and one that sets those of the process gets such a process. Applied on the load thread; `around`
surrounds every execution.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_handlers.parameters import integer, switch, warn_of_unknown
from model_handlers.threads import default_threads

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.config import ModelConfig

_KNOWN = (
    "DISABLE_OPTIMIZED_EXECUTION",
    "INFERENCE_MODE",
    "DISABLE_CUDNN",
    "ENABLE_CACHE_CLEANING",
    "ENABLE_WEIGHT_SHARING",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
    "ENABLE_TENSOR_FUSER",
    "INTRA_OP_THREAD_COUNT",
    "INTER_OP_THREAD_COUNT",
    "NUM_THREADS",
    "NUM_INTEROP_THREADS",
)
_WITHOUT_EFFECT = {
    "TORCH_COMPILE_OPTIONAL_PARAMETERS": "nothing is compiled while models are served; an AOTInductor package is",
}
_THREADS = range(1025)
# Private to PyTorch, and all that there is: what Triton's backend calls by its C++ names.
_JIT_SWITCHES = {
    "ENABLE_JIT_EXECUTOR": "_jit_set_profiling_executor",
    "ENABLE_JIT_PROFILING": "_jit_set_profiling_mode",
    "ENABLE_TENSOR_FUSER": "_jit_set_texpr_fuser_enabled",
}


_THREADS_BETWEEN = ("INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS")


@dataclass(frozen=True, slots=True)
class Options:
    """What an execution is surrounded with.

    Attributes:
        inference_mode: whether tensors are made that no gradient can ever be asked of; no_grad otherwise.
        optimized: whether TorchScript may specialise and fuse.
        cudnn: whether cuDNN may be used.
        clean: whether the device's unused memory is given back after every execution.
        share: whether instances in one process and on one device share the model.
    """

    inference_mode: bool = True
    optimized: bool = True
    cudnn: bool = True
    clean: bool = False
    share: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> Options:
        """What a configuration asks for.

        Raises:
            MmeError: INVALID_MODEL for a parameter that is not what it should be.
        """
        warn_of_unknown(config, _KNOWN, "PyTorch models", "mme.pytorch", _WITHOUT_EFFECT)
        return cls(
            switch(config, "INFERENCE_MODE", default=True),
            not switch(config, "DISABLE_OPTIMIZED_EXECUTION", default=False),
            not switch(config, "DISABLE_CUDNN", default=False),
            switch(config, "ENABLE_CACHE_CLEANING", default=False),
            switch(config, "ENABLE_WEIGHT_SHARING", default=False),
        )

    def around(self, torch: Any) -> contextlib.ExitStack:
        """A context in which the model is to be called."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self.inference_mode else torch.no_grad())
            if not self.optimized:
                stack.enter_context(torch.jit.optimized_execution(should_optimize=False))
            if not self.cudnn:
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            return stack.pop_all()


def sets_process(config: ModelConfig) -> bool:
    """Whether a configuration sets what all models of a process have in common.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is not what it should be.
    """
    return (
        switch(config, "DISABLE_CUDNN", default=False)
        or any(integer(config, key, 0, _THREADS) for key in _THREADS_BETWEEN)
        or any(key in config.parameters for key in _JIT_SWITCHES)
    )


def set_up_process(torch: Any, config: ModelConfig, model_file: Path) -> None:
    """Threads and the switches of TorchScript's interpreter.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is not what it should be.
    """
    within = integer(config, "INTRA_OP_THREAD_COUNT", 0, _THREADS) or integer(config, "NUM_THREADS", 0, _THREADS)
    between = next((count for key in _THREADS_BETWEEN if (count := integer(config, key, 0, _THREADS))), 0)
    torch.set_num_threads(within or default_threads(model_file))
    if between:
        with contextlib.suppress(RuntimeError):  # it can be set once a process, which is one model's unless inline
            torch.set_num_interop_threads(between)
    for key, function in _JIT_SWITCHES.items():
        if key in config.parameters:
            getattr(torch._C, function)(switch(config, key, default=True))  # noqa: SLF001 - see above
