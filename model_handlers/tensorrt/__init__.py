"""TensorRT's engines.

Only TensorRT-RTX on a CPU has built engines so far; what executes was run against a stand-in for TensorRT and CUDA.
"""

from model_handlers.tensorrt.engine import TensorrtHandler

__all__ = ["TensorrtHandler"]
