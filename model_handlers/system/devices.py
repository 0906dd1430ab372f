"""GPUs as the driver lists them and as CUDA numbers them; where instances go; GPUs that answer nothing any more.

NVML shows every GPU, CUDA those of CUDA_VISIBLE_DEVICES, numbered again; models are placed by CUDA's numbers
(`visible`). A GPU cut into MIG devices stands for the first: CUDA shows a process one at most, and then no other GPU.
No GPU or driver is no error: there are none. pynvml lives here alone. A GPU that answers only errors is lost to a
process for good: one of models alone ends by the error; the serving process tells the reason to what can end it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from model_handlers.base import CPU, Device, Footprint, by_device
from model_handlers.config.model_config import InstanceGroup, InstanceKind, ModelConfig
from model_handlers.errors import Kind, LostProcessError, MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


_log = logging.getLogger("mme.devices")


def device_memory_used() -> tuple[int, ...]:
    return by_device({gpu.index: gpu.used for gpu in gpus()}) if gpu_uuids() else ()


def file_for(device: Device, config: ModelConfig, version_directory: Path) -> Path:
    """The model file for a device (`cc_model_filenames`), else the usual. MmeError: INVALID_MODEL for none."""
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
    """The lanes that instance groups ask for, `count` on each device: names `<group>_<index>`, and devices.

    Without a GPU, KIND_GPU runs on the CPU, logged once, unless `require_gpu`. KIND_MODEL has `count` in all, told the
    first GPU. Raises MmeError: INVALID_MODEL for a GPU that is not there, UNAVAILABLE for a required one.
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
    """The groups with their kinds and GPUs on this machine, as clients and models are told. Raises as `place`."""
    available = tuple(gpu_uuids()) if gpu_capable else ()
    return tuple(_settled(group, _devices(group, model, available)) for group in groups)


def size_on(groups: Sequence[InstanceGroup], lanes: Sequence[tuple[str, Device]], size: int) -> Footprint:
    """A model's `size` bytes, once on the host and on each GPU; KIND_MODEL may be too large for one: it is spread."""
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


VARIABLE = "CUDA_VISIBLE_DEVICES"
# CUDA would number the fastest first. Set before anything of CUDA is loaded, for child processes too.
_ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
_PART = "MIG-"
_PREFIXES = ("GPU-", _PART)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or MIG device, that this process may use; bytes of memory."""

    index: int  # CUDA's number for it
    name: str
    uuid: str  # its name everywhere, `GPU-…` or `MIG-…`
    total: int
    free: int
    capability: str = ""  # its compute capability, such as `9.0`; "" where the driver does not say

    @property
    def used(self) -> int:
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class Reading:
    """What a GPU is doing. None where its driver does not say: MIG devices have no power of their own."""

    uuid: str
    total: int
    used: int
    utilization: float | None  # the share of the last moment in which it computed, 0 to 1
    # power, power_limit: watts
    power: float | None
    power_limit: float | None
    energy: float | None  # joules since the driver was loaded


def visible(uuids: Sequence[str], wanted: str | None) -> list[str]:
    """Which of the machine's GPUs CUDA shows, in its order: UUIDs of GPUs, and of MIG devices, which are named in full.

    `uuids` are those of all GPUs in the order of the bus, `wanted` is CUDA_VISIBLE_DEVICES, None where it is not set.
    As with CUDA the first entry that means no GPU hides those behind it, and one that comes twice hides all.
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
    """The GPUs by UUID in bus order, or the MIG device each stands for; not all that drivers count are handed out."""
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
    return value.decode() if isinstance(value, bytes) else str(value)


@functools.cache
def gpu_uuids() -> Mapping[int, str]:
    """The name of each GPU that models may be on, by CUDA's number, which may have gaps; asked of the driver once."""
    return {gpu.index: gpu.uuid for gpu in gpus()}


_reasons: list[str] = []


def lost_process(failure: MmeError, words: str = "") -> LostProcessError:
    """What went wrong, where the GPU answers nothing but errors because of it; `words` are the driver's."""
    kind = Kind.UNAVAILABLE if failure.kind is Kind.INVALID_MODEL else failure.kind  # the file may be as good as any
    because = f" ({words})" if words else ""
    sentence = f"{failure.message}; in this process the GPU answers nothing but errors now{because}"
    if not _reasons:
        _reasons.append(sentence)
    return LostProcessError(kind, sentence)


def first_reason() -> str:
    return _reasons[0] if _reasons else ""


_LIBRARY = "libcuda.so.1"
# CUDA's errors of which it says that the process has to end: memory and links that are damaged, kernels that reached
# where they must not, took too long, or asserted what was not so; and the one of which it does not know what it is.
_FOR_GOOD = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911, 999})


@functools.cache
def driver() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def lost(failure: MmeError, index: int) -> MmeError:
    """`failure`, or what to raise in its place where the GPU of that number answers nothing but errors from now on."""
    words = "" if failure.kind is Kind.INVALID_ARGUMENT else _trouble(driver(), index)
    return lost_process(failure, words) if words else failure


def _trouble(library: Any, index: int) -> str:
    """What the driver answers to everything now, "" if it works: any call can return the error of earlier work."""
    if library is None:
        return ""
    device, active, flags = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
    error = library.cuDeviceGet(ctypes.byref(device), index)
    error = error or library.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if not error and active.value:  # asking for more would make a context
        error = _of_context(library, device)
    return _words(library, error) if error in _FOR_GOOD else ""


def _of_context(library: Any, device: ctypes.c_int) -> int:
    context = ctypes.c_void_p()
    error: int = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if error:
        return error
    error = library.cuCtxPushCurrent_v2(context)
    if not error:
        error = library.cuCtxSynchronize()
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
    library.cuDevicePrimaryCtxRelease_v2(device)
    return error


def _words(library: Any, error: int) -> str:
    words = ctypes.c_char_p()
    library.cuGetErrorString(error, ctypes.byref(words))
    return f"CUDA error {error}, {(words.value or b'which it has no words for').decode()}"
