"""PyTorch's models: `handler` is what the engine sees, `runtime` alone imports the framework."""

from model_handlers.pytorch.handler import CodeHandler, Pt2Handler, TorchHandler

__all__ = ["CodeHandler", "Pt2Handler", "TorchHandler"]
