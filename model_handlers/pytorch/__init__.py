"""PyTorch's models: `handler` is what the engine sees, `runtime` alone imports the framework."""

from model_handlers.pytorch.handler import Pt2Handler, TorchHandler

__all__ = ["Pt2Handler", "TorchHandler"]
