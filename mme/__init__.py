"""Many models in your own process: `Server` is the engine behind mme's container, without a port.

    with mme.Server(model_repository="models", memory_budget="4GB") as server:
        outputs = server.model("bert").infer({"input_ids": ids, "attention_mask": mask})

From coroutines it is `async with`, and `infer_async`.
"""

import logging

from mme.model import Model, Outputs
from mme.server import Server
from model_handlers.errors import Kind
from model_handlers.errors import MmeError as Error

__all__ = ["Error", "Kind", "Model", "Outputs", "Server"]

logging.getLogger("mme").addHandler(logging.NullHandler())
