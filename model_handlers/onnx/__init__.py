"""ONNX models by ONNX Runtime: `handler` is what the engine sees, `runtime` alone imports the framework."""

from model_handlers.onnx.handler import OnnxHandler

__all__ = ["OnnxHandler"]
