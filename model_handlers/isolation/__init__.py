"""Instances in processes of their own: any handler, behind the same interface, where its failure hurts nobody else.

From the outside in: `handler` and `requests_handler` are what the engine sees, `process` one life of one child,
`fork_client` and `fork_server` start and end children, `child` and `events` are what runs inside, `segments` and
`framing` are how tensors and messages of batches cross, `channel` and `listener` what is said beside them.
"""

from model_handlers.isolation.parameters import placement_of
from model_handlers.isolation.start import start_isolated

__all__ = ["placement_of", "start_isolated"]
