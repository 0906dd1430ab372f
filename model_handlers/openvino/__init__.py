"""Models by OpenVINO: `handler` is what the engine sees, `runtime` alone imports the framework."""

from model_handlers.openvino.handler import OpenvinoHandler

__all__ = ["OpenvinoHandler"]
