"""Ensembles of trees: `handler` is what the engine sees, `libraries` alone imports the libraries."""

from model_handlers.trees.handler import TreesHandler

__all__ = ["TreesHandler"]
