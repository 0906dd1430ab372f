"""NVML without a driver: what `pynvml` offers of it, over GPUs that a test describes.

Stands in where nothing real can run: the machines that the tests run on have no GPU.
"""

# ruff: noqa: ARG002 - the methods are NVML's
from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """One GPU, or a MIG device of one.

    `silent` ones know no load, power or energy, `lost` ones nothing but their name; `denied` ones are counted and not
    handed out; `cut` ones are in MIG mode without any part.
    """

    uuid: str
    total: int = 1000
    used: int = 100
    silent: bool = False
    lost: bool = False
    denied: bool = False
    cut: bool = False
    parts: tuple[FakeGpu, ...] = ()
    capability: tuple[int, int] = (9, 0)
    bus: int = 0


@dataclass
class FakeNvml:
    """Installed as `pynvml`."""

    listed: list[FakeGpu] = field(default_factory=list)
    NVMLError: type[Exception] = pynvml.NVMLError
    NVML_DEVICE_MIG_ENABLE: int = pynvml.NVML_DEVICE_MIG_ENABLE
    NVML_ERROR_LIBRARY_NOT_FOUND: int = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    broken: int = 0  # NVML's number for why it does not start
    open: int = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(self.broken)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.listed)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._handed_out(self.listed[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.listed:
            for found in (gpu, *gpu.parts):
                if found.uuid == uuid:
                    return found
        raise self.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        return b"Fake"

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        if gpu.lost:
            raise self.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        if gpu.lost:
            raise self.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(domain=0, bus=gpu.bus, device=0)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> list[int]:
        return list(gpu.capability)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        self._speak(gpu)
        return [int(gpu.cut or bool(gpu.parts))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.parts):
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._handed_out(gpu.parts[index])

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self._speak(gpu)
        return SimpleNamespace(gpu=25, memory=50)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        self._speak(gpu)
        return 60_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        self._speak(gpu)
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        self._speak(gpu)
        return 123_000

    def _handed_out(self, gpu: FakeGpu) -> FakeGpu:
        if gpu.denied:
            raise self.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return gpu

    def _speak(self, gpu: FakeGpu) -> None:
        if gpu.silent:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
