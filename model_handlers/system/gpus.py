"""GPUs as the driver lists them and as CUDA numbers them: memory, load and power, by NVML. pynvml lives here alone.

NVML shows every GPU of the machine; CUDA shows a process those that CUDA_VISIBLE_DEVICES leaves, numbered anew. Models
are placed by CUDA's numbers, so this is where the two are brought together (`visible`, which is PURE). A GPU that is
cut into MIG devices stands for the first of them. CUDA shows a process one MIG device at most, and then no other GPU.
Asking on a machine without a GPU, or without a driver, is not an error: there are none.
"""

from __future__ import annotations

import functools
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from model_handlers.base import Device

VARIABLE = "CUDA_VISIBLE_DEVICES"
# CUDA would number the fastest first. Set before anything of CUDA is loaded, for child processes too.
_ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
_PART = "MIG-"
_PREFIXES = ("GPU-", _PART)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or MIG device, that this process may use; bytes of memory.

    Attributes:
        index: CUDA's number for it.
        uuid: its name for everybody, `GPU-…` or `MIG-…`.
        capability: its compute capability, such as `9.0`; "" where the driver does not say.
    """

    index: int
    name: str
    uuid: str
    total: int
    free: int
    capability: str = ""

    @property
    def used(self) -> int:
        """By anybody."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class Reading:
    """What a GPU is doing. None where its driver does not say: MIG devices have no power of their own.

    Attributes:
        uuid: the GPU's.
        total, used: bytes of memory.
        utilization: the share of the last moment in which it computed, 0 to 1.
        power, power_limit: watts.
        energy: joules since the driver was loaded.
    """

    uuid: str
    total: int
    used: int
    utilization: float | None
    power: float | None
    power_limit: float | None
    energy: float | None


def visible(uuids: Sequence[str], wanted: str | None) -> list[str]:
    """Which of the machine's GPUs CUDA shows, in its order.

    Args:
        uuids: of all GPUs, in the order of the bus.
        wanted: CUDA_VISIBLE_DEVICES, None where it is not set.

    Returns:
        UUIDs: of GPUs of the machine, and of MIG devices, which are named in full. As with CUDA the first entry that
        means no GPU hides those behind it, and one that comes twice hides all.
    """
    if wanted is None:
        return list(uuids)
    shown: list[str] = []
    for entry in (text.strip() for text in wanted.split(",")):
        if entry.startswith(_PART):
            found = [entry]
        elif entry.startswith(_PREFIXES):
            found = [uuid for uuid in uuids if uuid.startswith(entry)]
        else:
            found = [uuids[int(entry)]] if entry.isdecimal() and int(entry) < len(uuids) else []
        if len(found) != 1:
            break
        if found[0] in shown:
            return []
        shown += found
    return shown


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use and that tell their memory, () where there is none."""
    with _nvml() as nvml:
        if nvml is None:
            return ()
        found = []
        for index, (uuid, handle) in enumerate(_handles(nvml)):
            memory = _memory(nvml, handle)
            if memory is None:
                continue
            name = _text(nvml.nvmlDeviceGetName(handle))
            found.append(Gpu(index, name, uuid, int(memory.total), int(memory.free), _capability(nvml, handle)))
        return tuple(found)


def complaint() -> str:
    """Why the driver does not tell its GPUs, in its own words; "" where it does, and where there is no driver."""
    import pynvml  # noqa: PLC0415 - as in `_nvml`

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return "" if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND else str(error).rstrip(".")
    pynvml.nvmlShutdown()
    return ""


def uuid_of(devices: Iterable[Device]) -> str:
    """The name of the one GPU among devices; "" where there is none of them, or several."""
    numbers = {device.index for device in devices if device.kind == "gpu"}
    return next((gpu.uuid for gpu in gpus() if numbers == {gpu.index}), "") if numbers else ""


def _capability(nvml: Any, handle: Any) -> str:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return ""
    return f"{major}.{minor}"


def readings() -> tuple[Reading, ...]:
    """What each of them is doing. Takes milliseconds, so never on the event loop."""
    with _nvml() as nvml:
        found = [] if nvml is None else [_reading(nvml, uuid, handle) for uuid, handle in _handles(nvml)]
        return tuple(reading for reading in found if reading is not None)


def _reading(nvml: Any, uuid: str, handle: Any) -> Reading | None:
    def asked(ask: Callable[[Any], Any], unit: float) -> float | None:
        try:
            return float(ask(handle)) / unit
        except nvml.NVMLError:
            return None

    memory = _memory(nvml, handle)
    if memory is None:
        return None
    return Reading(
        uuid,
        int(memory.total),
        int(memory.total) - int(memory.free),
        asked(lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, 100),
        asked(nvml.nvmlDeviceGetPowerUsage, 1000),
        asked(nvml.nvmlDeviceGetEnforcedPowerLimit, 1000),
        asked(nvml.nvmlDeviceGetTotalEnergyConsumption, 1000),
    )


def _memory(nvml: Any, handle: Any) -> Any:
    """Total, used and free; None for a GPU that is lost, or that has none but the host's."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None


def _handles(nvml: Any) -> list[tuple[str, Any]]:
    """UUID and handle of each GPU that CUDA shows: of MIG devices one, and then nothing else."""
    os.environ.setdefault(*_ORDER)
    present = _present(nvml)
    found = []
    for uuid in visible(list(present), os.environ.get(VARIABLE)):  # the driver's variable, which CUDA reads as well
        try:
            handle = present[uuid] if uuid in present else nvml.nvmlDeviceGetHandleByUUID(uuid)
            found.append((_text(nvml.nvmlDeviceGetUUID(handle)), handle))
        except nvml.NVMLError:  # a MIG device of another machine
            break
    parts = [each for each in found if each[0].startswith(_PART)]
    return parts[:1] or found


def _present(nvml: Any) -> dict[str, Any]:
    """The machine's GPUs by UUID, in the order of the bus: each one's handle, or that of the MIG device it stands for.

    Drivers count what a control group keeps from this process, or what has left the bus, and then don't hand it out.
    """
    present = {}
    for gpu in _by_place(nvml, list(_handed_out(nvml))):
        with suppress(nvml.NVMLError):
            handle = _mig_device(nvml, gpu) if _is_cut(nvml, gpu) else gpu
            if handle is not None:
                present[_text(nvml.nvmlDeviceGetUUID(gpu))] = handle
    return present


def _handed_out(nvml: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetHandleByIndex(index)


def _by_place(nvml: Any, found: list[Any]) -> list[Any]:
    """In the order of the bus, as CUDA numbers them. NVML lists them so, too, and promises no order."""

    def place(gpu: Any) -> tuple[int, int, int]:
        info = nvml.nvmlDeviceGetPciInfo(gpu)
        return info.domain, info.bus, info.device

    try:
        return sorted(found, key=place)
    except nvml.NVMLError:  # one is lost
        return found


def _is_cut(nvml: Any, gpu: Any) -> bool:
    """Whether it is cut into MIG devices."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # most GPUs can't be
        return False


def _mig_device(nvml: Any, gpu: Any) -> Any:
    """The first of its MIG devices that this process may use, whatever its number; None where there is none."""
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
    return None


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML while it is needed; None where there is no driver."""
    import pynvml  # noqa: PLC0415 - dlopens the driver's library; a CPU machine should not pay for it at start

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _text(value: Any) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


@functools.cache
def gpu_uuids() -> Mapping[int, str]:
    """The name of each GPU that models may be on, by CUDA's number, which may have gaps; asked of the driver once."""
    return {gpu.index: gpu.uuid for gpu in gpus()}
