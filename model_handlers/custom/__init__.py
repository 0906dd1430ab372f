"""Handlers of others: `found` tells where they are, `handler` runs one that an archive brings along.

An installed package registers a backend by an entry point; an archive brings one as handler.py beside its model.
"""

from model_handlers.custom.handler import FileHandler, RequestsFileHandler

__all__ = ["FileHandler", "RequestsFileHandler"]
