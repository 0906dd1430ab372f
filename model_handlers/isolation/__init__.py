"""Instances in processes of their own: any handler, behind the same interface, where its failure hurts nobody else.

From the outside in: `handler` is the handler that the engine sees, `process` one life of one child, `fork_client` and
`fork_server` start and end children, `child` is what runs inside, `segments` and `framing` are how tensors and
messages cross.
"""

from model_handlers.isolation.handler import IsolatedHandler
from model_handlers.isolation.parameters import placement_of

__all__ = ["IsolatedHandler", "placement_of"]
