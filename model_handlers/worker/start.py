"""Which handler stands for a model in a process of its own, and what its process is told to load."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.config.convert import config_fields
from model_handlers.worker.handler import IsolatedHandler
from model_handlers.worker.memory import SIZES
from model_handlers.worker.parameters import PLACEMENT
from model_handlers.worker.policies import BusyPoll
from model_handlers.worker.requests_handler import IsolatedRequestsHandler

if TYPE_CHECKING:
    from model_handlers.base import Device, Handler
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.environments.environment import Environment


_EXEC_CHILD = Path(__file__).with_name("exec_child.py")


def start_isolated(
    handler_class: type[Handler],
    config: ModelConfig,
    model_file: Path,
    device: Device,
    lane: str,
    environment: Environment | None = None,
    *,
    shared: bool | None = None,
) -> IsolatedHandler:
    """Load a model by `handler_class` in a process, for the lane of that name, in an environment or in ours.

    The process is a new one, unless it is shared: as `shared` says, else where the class wants that of models on a
    GPU, and the configuration does not ask for a process.

    Raises:
        MmeError: what the handler's `load` raised; INVALID_MODEL when the process died or hung while loading,
            EXECUTION_FAILED when somebody killed it, OUT_OF_MEMORY when the system ended it for want of memory,
            UNAVAILABLE when no process can be had.
    """
    load = {
        "do": "load",
        "handler": f"{handler_class.__module__}:{handler_class.__qualname__}",
        "config": config_fields(config),
        "model_file": str(model_file),
        "device": [device.kind, device.index],
        "lane": lane,
        "growth": SIZES.growth,
        "busy_poll": BusyPoll.longest,
    }
    program = None
    if environment is not None:
        program = environment.program("-I", str(_EXEC_CHILD), lane, platform.python_version(), speaks=True)
    isolated = IsolatedRequestsHandler if handler_class.sees_requests else IsolatedHandler
    on_gpu = device.kind == "gpu"
    preload = "" if program is not None else handler_class.preloads(config, model_file, on_gpu=on_gpu)
    if shared is None:
        shared = (
            on_gpu
            and program is None
            and PLACEMENT not in config.parameters
            and handler_class.shares_gpu_process(config, model_file)
        )
    host = f"{handler_class.backend} on {device}" if shared else ""
    return isolated(load, config, lane, uses_gpu=on_gpu, program=program, preload=preload, host=host)
