"""PyTorch's models."""

from model_handlers.pytorch.handler import CodeHandler, Pt2Handler, TorchHandler

__all__ = ["CodeHandler", "Pt2Handler", "TorchHandler"]
