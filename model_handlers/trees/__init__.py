"""Ensembles of trees."""

from model_handlers.trees.handler import TreesHandler

__all__ = ["TreesHandler"]
