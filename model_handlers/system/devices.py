"""What memory this machine has, free and total, and where instances of models go. psutil lives here alone.

Every number is bytes. GPUs are the business of `gpus`.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from model_handlers.base import CPU, Device, Footprint, by_device
from model_handlers.config.model_config import InstanceKind
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.system import memory
from model_handlers.system.gpus import Gpu, complaint, gpu_uuids, gpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.config.model_config import InstanceGroup, ModelConfig

__all__ = ["Gpu", "gpu_uuids", "gpus"]
_log = logging.getLogger("mme.devices")


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control groups' limit where that is lower."""
    total: int = psutil.virtual_memory().total
    limit = memory.group_limit()
    return total if limit is None else min(total, limit)


def free_memory() -> int:
    """Bytes of memory that are free for this process, those of files that nobody maps among them."""
    available: int = psutil.virtual_memory().available
    free = memory.group_free()
    return available if free is None else min(available, free)


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that the machine has, and that are in use by anybody."""
    memory = psutil.virtual_memory()
    return memory.total, memory.total - memory.available


def processor_share() -> float:
    """The share of the processors, 0 to 1, that was busy since this was last asked; 0 the first time."""
    busy: float = psutil.cpu_percent(None)
    return busy / 100


def device_memory_used() -> tuple[int, ...]:
    """Bytes in use on each GPU by its number, by anybody."""
    return by_device({gpu.index: gpu.used for gpu in gpus()}) if gpu_uuids() else ()


def private_memory(process: int | str = "self") -> int:
    """Bytes of a process that are its own: resident pages less file-backed and shared ones.

    Raises:
        OSError: there is no such process.
    """
    return touched_memory(Path(f"/proc/{process}/statm").read_bytes())[1]


def touched_memory(statm: bytes) -> tuple[int, int]:
    """Bytes that a process has touched, and those of them that are of no file, whoever shares them."""
    _, resident, of_files, _ = statm.split(None, 3)
    return int(resident) * mmap.PAGESIZE, (int(resident) - int(of_files)) * mmap.PAGESIZE


def unshared_memory(process: int) -> int:
    """Bytes of a process that no other shares, files among them; found by walking through its memory.

    Raises:
        OSError: there is no such process.
    """
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def file_for(device: Device, config: ModelConfig, version_directory: Path) -> Path:
    """The model file for a device: that for its compute capability (`cc_model_filenames`), else the usual one.

    Raises:
        MmeError: INVALID_MODEL where neither is there.
    """
    path, capability = version_directory / config.default_model_filename, ""
    if config.cc_model_filenames and device.kind == "gpu":
        capability = next((gpu.capability for gpu in gpus() if gpu.index == device.index), "")
        path = version_directory / config.cc_model_filenames.get(capability, config.default_model_filename)
    if config.cc_model_filenames and not path.exists():
        able = f" of compute capability {capability}" if capability else ""
        raise invalid_model(
            f"model '{config.name}' has no file for {device}{able}: '{path.name}' is not there; cc_model_filenames has "
            f"{', '.join(sorted(config.cc_model_filenames))}"
        )
    return path


def place(
    groups: Sequence[InstanceGroup], model: str, *, gpu_capable: bool, require_gpu: bool
) -> list[tuple[str, Device]]:
    """The lanes that instance groups ask for, `count` on each device: their names, `<group>_<index>`, and devices.

    Without a GPU, KIND_GPU groups run on the CPU, which is logged once for all of them, unless `require_gpu` forbids.
    A KIND_MODEL group has `count` in all, which the model itself places: they are told the first GPU.

    Raises:
        MmeError: INVALID_MODEL for a GPU that is not there, UNAVAILABLE when a GPU is required and there is none.
    """
    available = tuple(gpu_uuids()) if gpu_capable else ()
    stranded = [group.name for group in groups if group.kind is InstanceKind.GPU and not available]
    if stranded:
        _warn_no_gpu(", ".join(stranded), model, require_gpu=require_gpu)
    return [
        (f"{group.name}_{index}", device)
        for group in groups
        for index, device in enumerate(_devices(group, model, available))
    ]


def settled(groups: Sequence[InstanceGroup], model: str, *, gpu_capable: bool) -> tuple[InstanceGroup, ...]:
    """The groups with the kind and the GPUs that they have on this machine, as clients and models are told them.

    Raises:
        MmeError: as `place`.
    """
    available = tuple(gpu_uuids()) if gpu_capable else ()
    return tuple(_settled(group, _devices(group, model, available)) for group in groups)


def size_on(groups: Sequence[InstanceGroup], lanes: Sequence[tuple[str, Device]], size: int) -> Footprint:
    """A model's files, of `size` bytes, as often as memory is to hold them: once on the host, once on each GPU.

    One that places itself (KIND_MODEL) may be there because it is too large for one GPU: it is spread over all of them.
    """
    host = size if any(device == CPU for _, device in lanes) else 0
    numbers = {device.index for _, device in lanes if device.kind == "gpu"}
    if numbers and any(group.kind is InstanceKind.MODEL for group in groups):
        size //= len(gpu_uuids())
        numbers = set(gpu_uuids())
    return Footprint(host, by_device(dict.fromkeys(numbers, size)))


def _settled(group: InstanceGroup, devices: Sequence[Device]) -> InstanceGroup:
    if group.kind is InstanceKind.MODEL:
        return group
    on = tuple(dict.fromkeys(device.index for device in devices if device.kind == "gpu"))
    return replace(group, kind=InstanceKind.GPU if on else InstanceKind.CPU, gpus=on)


def _devices(group: InstanceGroup, model: str, available: Sequence[int]) -> tuple[Device, ...]:
    missing = [gpu for gpu in group.gpus if gpu not in available]
    if available and missing and group.kind is InstanceKind.GPU:
        raise invalid_model(
            f"instance group {group.name} of model {model} specifies invalid or unsupported gpu id {missing[0]}. "
            f"GPUs on this machine are: {', '.join(map(str, available))}"
        )
    if group.kind is InstanceKind.CPU or missing or not available:
        return (CPU,) * group.count
    # A model that places itself is there once for all of them: the first stands for it.
    everywhere = available[:1] if group.kind is InstanceKind.MODEL else available
    return tuple(Device("gpu", index) for index in group.gpus or everywhere for _ in range(group.count))


def _no_gpu() -> str:
    said = complaint()
    return f"no GPUs are available: NVIDIA's driver says '{said}'" if said else "no GPUs are available"


def _warn_no_gpu(names: str, model: str, *, require_gpu: bool) -> None:
    reason = "the installed framework was built without GPU support" if gpu_uuids() else _no_gpu()
    sentence = f"instance group {names} of model {model} has kind KIND_GPU but {reason}"
    if require_gpu:
        raise MmeError(Kind.UNAVAILABLE, f"{sentence}, and MME_REQUIRE_GPU forbids to run it on the CPU")
    _log.warning("%s; it runs on the CPU", sentence, extra={"target_model": model})
