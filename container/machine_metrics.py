"""What the machine is doing, in Prometheus's terms: its GPUs and its processors, under Triton's names.

Asks drivers, so it runs on the thread that answers a scrape, never on the event loop. A machine without a GPU has no
GPU metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

from model_handlers import devices
from model_handlers.gpus import readings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Name, text, field of a reading.
_OF_GPUS = (
    ("nv_gpu_utilization", "GPU utilization, 0.0 to 1.0", "utilization"),
    ("nv_gpu_memory_total_bytes", "GPU memory, bytes", "total"),
    ("nv_gpu_memory_used_bytes", "GPU memory in use by anybody, bytes", "used"),
    ("nv_gpu_power_usage", "GPU power draw, watts", "power"),
    ("nv_gpu_power_limit", "GPU power limit, watts", "power_limit"),
)


class MachineCollector:
    """Families of one scrape."""

    def collect(self) -> Iterator[Metric]:
        """Every family that has a value."""
        found = readings()
        for name, text, field in _OF_GPUS:
            yield from _of_gpus(GaugeMetricFamily(name, text), {gpu.uuid: getattr(gpu, field) for gpu in found})
        energy = Metric("nv_energy_consumption", "GPU energy since the driver was loaded, joules", "unknown")
        yield from _of_gpus(energy, {gpu.uuid: gpu.energy for gpu in found})
        total, used = devices.machine_memory()
        # Triton's pool of pinned memory: there is none here, and who looks for it finds that.
        yield GaugeMetricFamily("nv_pinned_memory_pool_total_bytes", "Pool of pinned memory, which is not needed", 0)
        yield GaugeMetricFamily("nv_pinned_memory_pool_used_bytes", "Pool of pinned memory in use", 0)
        yield GaugeMetricFamily("nv_cpu_utilization", "CPU utilization, 0.0 to 1.0", devices.processor_share())
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "The machine's memory, bytes", total)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "The machine's memory in use, bytes", used)


def _of_gpus(family: Metric, values: dict[str, float | None]) -> Iterator[Metric]:
    """The family with the value of each GPU that has one, if any has."""
    for uuid, value in values.items():
        if value is not None:
            family.add_sample(family.name, {"gpu_uuid": uuid}, value)
    if family.samples:
        yield family
