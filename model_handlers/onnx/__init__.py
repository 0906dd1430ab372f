"""ONNX models by ONNX Runtime."""

from model_handlers.onnx.handler import OnnxHandler

__all__ = ["OnnxHandler"]
