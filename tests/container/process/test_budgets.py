"""Budgets in bytes, out of what a machine has and what the operator wants of it."""

import shutil

import pytest

from container.process import service
from container.process.service import disk_budget, framework_threads, memory_budget
from container.settings import Settings, SettingsError
from model_handlers.base import Footprint
from model_handlers.system import devices, memory
from model_handlers.system.devices import Gpu
from serve.options import Share


@pytest.fixture
def machine(monkeypatch):
    """A machine of 1000 bytes with GPUs of the given sizes."""

    def make(*gpus):
        monkeypatch.setattr(memory, "host_memory", lambda: 1000)
        found = tuple(Gpu(index, "GPU", f"GPU-{index}", total, total) for index, total in enumerate(gpus))
        monkeypatch.setattr(devices, "gpus", lambda: found)

    return make


@pytest.mark.parametrize(
    ("setting", "host", "each"),
    [
        (None, 800, (180, 360)),
        (0.5, 500, (100, 200)),
        (1.0, 1000, (200, 400)),
        (123, 123, (123, 123)),
        (5000, 5000, (5000, 5000)),
        (Share(0.9, 100), 800, (80, 260)),
    ],
)
def test_a_budget_is_bytes_a_share_or_what_there_is(machine, setting, host, each):
    """Of the host once, and of each of two GPUs; unset, a share that leaves the system what it needs."""
    machine(200, 400)

    assert memory_budget(Settings(memory_budget=setting, gpu_memory_budget=setting)) == Footprint(host, each)


def test_without_a_gpu_there_is_no_budget_for_any(machine):
    """Whatever the setting says."""
    machine()
    for setting in (None, 0.5, 123, Share(0.5, 10**9)):
        assert memory_budget(Settings(memory_budget=7, gpu_memory_budget=setting)) == Footprint(7, ())


@pytest.mark.parametrize("name", ["memory_budget", "gpu_memory_budget"])
def test_a_reserve_that_leaves_nothing_refuses_to_start(machine, name):
    """The variable, what it says and what there is are in the sentence."""
    machine(1000)
    setting = {name: Share(0.9, 900)}
    variable = f"MME_{name.upper()}"
    with pytest.raises(SettingsError, match=f"{variable}=0.9-900: that leaves nothing of 1000 bytes"):
        memory_budget(Settings(**setting))


def test_a_disk_budget_is_bytes_or_a_share_of_the_file_system(tmp_path):
    """Of the one on which the cache directory will lie, though it is not there yet; unset, the disk tier decides."""
    cache = tmp_path / "not" / "there"
    total = shutil.disk_usage(tmp_path).total

    assert disk_budget(Settings(cache_dir=cache)) is None
    assert disk_budget(Settings(cache_dir=cache, disk_budget=123)) == 123
    assert disk_budget(Settings(cache_dir=cache, disk_budget=0.5)) == total // 2
    assert disk_budget(Settings(cache_dir=cache, disk_budget=Share(1.0, 1000))) == total - 1000
    with pytest.raises(SettingsError, match="MME_DISK_BUDGET"):
        disk_budget(Settings(cache_dir=cache, disk_budget=Share(1.0, 10**18)))


@pytest.mark.parametrize(
    ("settings", "processors", "free", "expected"),
    [
        ({}, 2, None, 64),
        ({}, 64, None, 256),
        ({}, 64, 400, 200),
        ({}, 64, 4000, 256),
        ({"framework_threads": 1000}, 2, 400, 1000),
    ],
)
def test_threads_of_frameworks_follow_processors_and_the_limit_of_processes(
    monkeypatch, settings, processors, free, expected
):
    """Four a processor, 64 at least, half of what is left at most; the operator's word is the last."""
    monkeypatch.setattr(service, "processors", lambda: processors)
    monkeypatch.setattr(service.memory, "free_tasks", lambda: free)
    assert framework_threads(Settings(**settings)) == expected
