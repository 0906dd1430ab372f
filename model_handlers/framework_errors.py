"""What a framework raises, as an error of ours. The one place that looks for the words in which it says so of memory.

PURE.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory

# cuBLAS and its kin, whose handles have memory of their own, and cuDNN
_OF_CUDA = ("ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED")


@dataclass(frozen=True, slots=True)
class Framework:
    """How a framework fails.

    Attributes:
        refuses, fails: the beginning of the sentence about a load, and about an execution; the model's name is next.
        memory_words: what its exceptions say of memory that have neither a class nor a code for it.
    """

    refuses: str
    fails: str
    memory_words: tuple[str, ...] = ()

    def is_full(self, error: Exception) -> bool:
        """Whether an exception says that memory does not suffice."""
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
