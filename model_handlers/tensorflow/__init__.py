"""TensorFlow's models."""

from model_handlers.tensorflow.handler import GraphdefHandler, SavedModelHandler

__all__ = ["GraphdefHandler", "SavedModelHandler"]
