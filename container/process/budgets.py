"""What the operator's budgets come to on this machine: settings in, bytes out."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from container.settings.kinds import SettingsError, to_text
from model_handlers.base import Footprint, by_device
from model_handlers.system import devices, memory
from model_handlers.system.threads import processors
from serve.sizes import DEVICE_SHARE, HOST_SHARE, bytes_of

if TYPE_CHECKING:
    from container.settings import Settings
    from serve.sizes import MemoryBudget

_REQUESTS_PART = 8  # of the memory budget, for requests on the way
_LEAST_FOR_REQUESTS = 256 << 20
_THREADS_EACH = 4  # of frameworks, a processor
_LEAST_THREADS = 64


def memory_budget(settings: Settings) -> Footprint:
    """Bytes for all models together, on the host and on each GPU by its number.

    Raises:
        SettingsError: when a reserve leaves nothing.
    """
    host = _bytes("MME_MEMORY_BUDGET", settings.memory_budget, memory.host_memory(), HOST_SHARE)
    each = {
        gpu.index: _bytes("MME_GPU_MEMORY_BUDGET", settings.gpu_memory_budget, gpu.total, DEVICE_SHARE)
        for gpu in devices.gpus()
    }
    return Footprint(host, by_device(each))


def request_memory(settings: Settings) -> int:
    """Bytes for all requests on the way together.

    Raises:
        SettingsError: when two of the largest bodies do not fit.
    """
    least = 2 * settings.max_body_bytes
    if settings.request_memory is None:
        return max(memory_budget(settings).host // _REQUESTS_PART, _LEAST_FOR_REQUESTS, least)
    if settings.request_memory < least:
        raise SettingsError(
            f"MME_REQUEST_MEMORY={settings.request_memory}: at least {least} bytes, twice the largest body: raise it, "
            "or lower MME_MAX_BODY"
        )
    return settings.request_memory


def framework_threads(settings: Settings) -> int:
    """Threads that frameworks may have in the serving process: by the processors, and by what the system allows."""
    if settings.framework_threads is not None:
        return settings.framework_threads
    usual = max(_THREADS_EACH * processors(), _LEAST_THREADS)
    free = memory.free_tasks()
    return usual if free is None else min(usual, free // 2)


def disk_budget(settings: Settings) -> int | None:
    """Bytes for all unpacked archives, a share being one of the file system; None where nothing is set.

    Raises:
        SettingsError: when a reserve leaves nothing.
    """
    if settings.disk_budget is None:
        return None
    there = next(folder for folder in (settings.cache_dir, *settings.cache_dir.parents) if folder.is_dir())
    return _bytes("MME_DISK_BUDGET", settings.disk_budget, shutil.disk_usage(there).total, 1.0)


def _bytes(variable: str, setting: MemoryBudget, available: int, default_share: float) -> int:
    """A budget out of so many bytes that there are."""
    try:
        return bytes_of(setting, available, default_share)
    except ValueError as error:
        raise SettingsError(f"{variable}={to_text(setting)}: {error}") from None
