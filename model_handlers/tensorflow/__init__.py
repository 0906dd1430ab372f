"""TensorFlow's models: `handler` is what the engine sees, `runtime` alone imports the framework."""

from model_handlers.tensorflow.handler import GraphdefHandler, SavedModelHandler

__all__ = ["GraphdefHandler", "SavedModelHandler"]
