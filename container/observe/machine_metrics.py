"""What the machine is doing, in Prometheus's terms: its GPUs and its processors, under Triton's names.

Asks drivers, so it runs on the thread that answers a scrape, never on the event loop. A machine without a GPU has no
GPU metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from container.observe.exposition import labels_of
from model_handlers.system import memory
from model_handlers.system.devices import readings

if TYPE_CHECKING:
    from container.observe.exposition import Exposition

# Name, text, kind, field of a reading.
_OF_GPUS = (
    ("nv_gpu_utilization", "GPU utilization, 0.0 to 1.0", "gauge", "utilization"),
    ("nv_gpu_memory_total_bytes", "GPU memory, bytes", "gauge", "total"),
    ("nv_gpu_memory_used_bytes", "GPU memory in use by anybody, bytes", "gauge", "used"),
    ("nv_gpu_power_usage", "GPU power draw, watts", "gauge", "power"),
    ("nv_gpu_power_limit", "GPU power limit, watts", "gauge", "power_limit"),
    ("nv_energy_consumption", "GPU energy since the driver was loaded, joules", "counter", "energy"),
)


def write_machine(out: Exposition) -> None:
    """Write every family that has a value."""
    found = readings()
    for name, text, kind, field in _OF_GPUS:
        values = [(gpu.uuid, value) for gpu in found if (value := getattr(gpu, field)) is not None]
        if values:
            out.family(name, text, kind)
        for uuid, value in values:
            out.sample(name, labels_of({"gpu_uuid": uuid}), value)
    total, used = memory.machine_memory()
    # Triton's pool of pinned memory: there is none here, and who looks for it finds that.
    out.one("nv_pinned_memory_pool_total_bytes", "Pool of pinned memory, which is not needed", "gauge", 0)
    out.one("nv_pinned_memory_pool_used_bytes", "Pool of pinned memory in use", "gauge", 0)
    out.one("nv_cpu_utilization", "CPU utilization, 0.0 to 1.0", "gauge", memory.processor_share())
    out.one("nv_cpu_memory_total_bytes", "The machine's memory, bytes", "gauge", total)
    out.one("nv_cpu_memory_used_bytes", "The machine's memory in use, bytes", "gauge", used)
