"""Processes for models: which handler stands for one, what it is told to load; files tried where a crash hurts none.

A damaged file can have a C++ reader end its process, and every model in it, which can't be caught. So a file never
loaded before is loaded first in a process that may die of it, then where it is to serve. That costs a fork, and the
load twice, once in the life of a file: see `serve/loading/verify.py`.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.base import PLACEMENT
from model_handlers.config.convert import config_fields
from model_handlers.errors import ChildDiedError, Kind, MmeError, invalid_model
from model_handlers.executor import home_of_load
from model_handlers.system.threads import advised
from model_handlers.worker.executor import Worker
from model_handlers.worker.instance import NONSENSE, InstanceProcess
from model_handlers.worker.limits import Deadlines
from model_handlers.worker.memory import SIZES
from model_handlers.worker.policies import BusyPoll
from model_handlers.worker.process import Child
from model_handlers.worker.wire import error_from

if TYPE_CHECKING:
    from model_handlers.base import Device, Handler
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.environment import Environment


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
) -> Worker:
    """Load a model by `handler_class` in a process, for that lane, in an environment or in ours.

    The process is new unless `shared`, by default where the class wants that on a GPU and the configuration allows it.
    Raises MmeError: as the handler's `load`; INVALID_MODEL when the process died or hung, EXECUTION_FAILED when it was
    killed from outside, OUT_OF_MEMORY when the system ended it for that, UNAVAILABLE when no process can be had.
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
    on_gpu = device.kind == "gpu"
    traits = handler_class.traits(config, model_file)
    preload = traits.preload if program is None else ""
    if traits.code is not None and program is None and not on_gpu:  # what it imports might touch a GPU before the fork
        preload = traits.code.preload()
    if shared is None:
        shared = on_gpu and program is None and PLACEMENT not in config.parameters and traits.gpu_shared
    host = f"{handler_class.backend} on {device}" if shared else ""

    home = home_of_load()
    assert home is not None  # noqa: S101 - what loads models has a loop
    process = InstanceProcess(load, config, lane, program, preload, host)
    return Worker(config, process, home, sees_requests=traits.sees_requests, uses_gpu=on_gpu)


_SECONDS = 60.0  # for any file; the first waits until the fork server has imported the libraries
_BYTES_A_SECOND = 1 << 20  # a hundredth of what the slowest reader takes in
_REAP_SECONDS = 5.0


def verify_file(handler_class: type[Handler], config: ModelConfig, model_file: Path) -> None:
    """Load a file by `handler_class.try_load` in a process of its own; return if that went well.

    Raises MmeError: as `try_load`; INVALID_MODEL when the process died or hung of the file, OUT_OF_MEMORY when it was
    ended for that, UNAVAILABLE when no process can be had, or it was ended from outside.
    """
    message = {
        "do": "try",
        "handler": f"{handler_class.__module__}:{handler_class.__qualname__}",
        "config": config_fields(config),
        "model_file": str(model_file),
    }
    try:
        child = Child(config.name, f"{config.name} on trial", preload=handler_class.traits(config, model_file).preload)
    except OSError as error:
        sentence = f"model '{config.name}': no process can be started to try its file in: {advised(error)}"
        raise MmeError(Kind.UNAVAILABLE, sentence) from error
    doing = f"while it read '{model_file.name}', which was never loaded before: the file is damaged"
    try:
        reply = child.call(message, (), _seconds(config, model_file), doing)
        if "error" in reply:
            raise _fault(error_from(reply["error"]))
    except ChildDiedError as death:
        if death.kind in {Kind.OUT_OF_MEMORY, Kind.UNAVAILABLE}:
            raise
        if child.killed or child.exit_code is None:  # whatever ended it, or its fork server, it was not this file
            sentence = f"model '{config.name}': its file could not be tried; load it again"
            raise MmeError(Kind.UNAVAILABLE, sentence) from death
        raise invalid_model(death.message) from death
    except NONSENSE as nonsense:
        raise invalid_model(f"model '{config.name}': a process sent nonsense {doing}: {nonsense}") from nonsense
    finally:
        child.close(_REAP_SECONDS)


def _fault(error: MmeError) -> MmeError:
    """Why a file is refused; one whose reader wanted more than `restraint` allows is no reason to unload others."""
    if error.kind is not Kind.OUT_OF_MEMORY:
        return error
    return invalid_model(f"{error.message}: more than a file of its size can need, so it must be damaged")


def _seconds(config: ModelConfig, model_file: Path) -> float:
    return min(Deadlines.of(config).load, _SECONDS + model_file.stat().st_size / _BYTES_A_SECOND)
