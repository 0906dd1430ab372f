"""TensorRT's engines: `handler` is what the engine sees, `runtime` and `cuda` alone import NVIDIA's libraries.

Nothing in here has run on a GPU yet. What has been run: engines were built with TensorRT-RTX on a CPU, and everything
that executes was run against a stand-in for TensorRT and CUDA that keeps their promises in the host's memory.
"""

from model_handlers.tensorrt.handler import TensorrtHandler

__all__ = ["TensorrtHandler"]
