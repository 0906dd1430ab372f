"""What the machine has, and where instance groups go. The machine of the tests has no GPU: its count is set by hand."""

import gc
import logging
import mmap
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from model_handlers.base import CPU, Device
from model_handlers.config.model_config import InstanceGroup, InstanceKind
from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices, memory

AUTO, GPU, ON_CPU, MODEL = InstanceKind.AUTO, InstanceKind.GPU, InstanceKind.CPU, InstanceKind.MODEL
GPU0, GPU1 = Device("gpu", 0), Device("gpu", 1)


@pytest.fixture
def machine(monkeypatch):
    """Sets how many GPUs the machine has."""
    return lambda count: monkeypatch.setattr(devices, "gpu_uuids", lambda: {n: f"GPU-{n}" for n in range(count)})


def place(*groups, capable=True, required=False):
    """The lanes of these groups."""
    return devices.place(groups, "m", gpu_capable=capable, require_gpu=required)


def placed(group, **options):
    """The devices of one group."""
    return [device for _, device in place(group, **options)]


def refused(*groups, **options):
    """The error of groups that can't be placed."""
    with pytest.raises(MmeError) as caught:
        place(*groups, **options)
    return caught.value


# -- placing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "group", "expected"),
    [
        (0, InstanceGroup("g"), [CPU]),
        (0, InstanceGroup("g", count=3), [CPU] * 3),
        (0, InstanceGroup("g", AUTO, gpus=(0, 1)), [CPU]),
        (0, InstanceGroup("g", MODEL, count=2), [CPU] * 2),
        (0, InstanceGroup("g", ON_CPU, count=2), [CPU] * 2),
        (2, InstanceGroup("g", ON_CPU, count=2), [CPU] * 2),
        (2, InstanceGroup("g"), [GPU0, GPU1]),
        (2, InstanceGroup("g", GPU), [GPU0, GPU1]),
        (2, InstanceGroup("g", MODEL), [GPU0]),
        (2, InstanceGroup("g", MODEL, count=2), [GPU0, GPU0]),
        (2, InstanceGroup("g", GPU, count=2), [GPU0, GPU0, GPU1, GPU1]),
        (2, InstanceGroup("g", GPU, gpus=(1,)), [GPU1]),
        (2, InstanceGroup("g", AUTO, count=2, gpus=(1, 0)), [GPU1, GPU1, GPU0, GPU0]),
        (2, InstanceGroup("g", AUTO, gpus=(0, 2)), [CPU]),
    ],
    ids=lambda value: f"{value.kind.name}x{value.count} on {value.gpus}" if isinstance(value, InstanceGroup) else None,
)
def test_a_group_goes_where_its_kind_says(machine, gpus, group, expected):
    """`count` lanes on each device: all GPUs or those named; one device alone for KIND_MODEL; else the CPU."""
    machine(gpus)

    assert placed(group) == expected


def test_lanes_are_named_after_their_group(machine):
    """Each lane is called `<group>_<index>`, and the groups come in their order."""
    machine(1)

    assert place(InstanceGroup("fast", GPU, 2), InstanceGroup("slow", ON_CPU)) == [
        ("fast_0", GPU0),
        ("fast_1", GPU0),
        ("slow_0", CPU),
    ]


@pytest.mark.parametrize(
    ("gpus", "group", "kind", "on"),
    [
        (0, InstanceGroup("g"), ON_CPU, ()),
        (0, InstanceGroup("g", GPU, gpus=(0, 1)), ON_CPU, ()),
        (2, InstanceGroup("g", count=2), GPU, (0, 1)),
        (2, InstanceGroup("g", GPU, gpus=(1,)), GPU, (1,)),
        (2, InstanceGroup("g", AUTO, gpus=(0, 2)), ON_CPU, ()),
        (2, InstanceGroup("g", MODEL, count=2), MODEL, ()),
    ],
)
def test_a_group_tells_where_it_went(machine, gpus, group, kind, on):
    """Its kind and its GPUs on this machine; a model that chooses for itself is not told."""
    machine(gpus)
    (told,) = devices.settled((group,), "m", gpu_capable=True)

    assert told == replace(group, kind=kind, gpus=on)


def test_a_gpu_that_is_not_there_is_refused(machine):
    """KIND_GPU with an id beyond the last one is INVALID_MODEL, with the id and those that exist."""
    machine(2)
    error = refused(InstanceGroup("g", GPU, gpus=(0, 7)))

    assert error.kind is Kind.INVALID_MODEL
    assert error.message == (
        "instance group g of model m specifies invalid or unsupported gpu id 7. GPUs on this machine are: 0, 1"
    )


def test_without_a_gpu_a_gpu_group_runs_on_the_cpu_with_one_warning(machine, caplog):
    """KIND_GPU on a CPU machine runs there; one line says so, however many lanes and groups, and whichever ids."""
    machine(0)
    groups = InstanceGroup("a", GPU, count=3), InstanceGroup("b", ON_CPU), InstanceGroup("c", GPU, gpus=(0, 1))

    with caplog.at_level(logging.WARNING, "mme.devices"):
        assert [device for _, device in place(*groups)] == [CPU] * 5

    [record] = caplog.records
    assert record.getMessage() == (
        "instance group a, c of model m has kind KIND_GPU but no GPUs are available; it runs on the CPU"
    )
    assert record.target_model == "m"


@pytest.mark.parametrize("group", [InstanceGroup("g"), InstanceGroup("g", MODEL), InstanceGroup("g", ON_CPU)])
def test_what_does_not_ask_for_a_gpu_does_not_warn(machine, caplog, group):
    """KIND_AUTO, KIND_MODEL and KIND_CPU on a CPU machine are silent, even where a GPU is required of KIND_GPU."""
    machine(0)

    with caplog.at_level(logging.DEBUG, "mme.devices"):
        assert placed(group, required=True) == [CPU]

    assert caplog.records == []


def test_a_required_gpu_refuses_the_cpu(machine, caplog):
    """With `require_gpu`, KIND_GPU without a GPU is UNAVAILABLE, names the setting, and nothing is logged beside."""
    machine(0)
    error = refused(InstanceGroup("g", GPU), required=True)

    assert error.kind is Kind.UNAVAILABLE
    assert error.message == (
        "instance group g of model m has kind KIND_GPU but no GPUs are available, "
        "and MME_REQUIRE_GPU forbids to run it on the CPU"
    )
    assert caplog.records == []
    machine(1)
    assert placed(InstanceGroup("g", GPU), required=True) == [GPU0]


@pytest.mark.parametrize("kind", [AUTO, GPU, MODEL])
def test_a_framework_for_cpus_runs_on_the_cpu(machine, kind):
    """GPUs are no use to a framework that was built without them."""
    machine(2)

    assert placed(InstanceGroup("g", kind), capable=False) == [CPU]


def test_a_framework_for_cpus_is_named_as_the_reason(machine):
    """Where there is a GPU, the sentence blames the framework, so that nobody looks for a missing driver."""
    machine(2)
    error = refused(InstanceGroup("g", GPU), capable=False, required=True)

    assert "has kind KIND_GPU but the installed framework was built without GPU support" in error.message


# -- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(devices.gpus()), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_has_none():
    """No GPU and no driver is not an error: there are none, and their memory is nothing."""
    assert devices.gpus() == ()
    assert devices.gpu_uuids() == {}
    assert devices.device_memory_used() == ()


def settle():
    """What tests before have left for the garbage collection is given back now, not while we measure."""
    gc.collect()
    memory.trim()


def test_private_memory_follows_what_this_process_takes():
    """Pages that were written count, and count no more once they are given back."""
    settle()
    before = memory.private_memory()
    # mapped by itself: a block of the heap may be one that was freed and is still there
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        np.frombuffer(block, np.uint8)[:] = 1
        grown = memory.private_memory() - before

    assert grown > 31 << 20
    assert memory.private_memory() - before < 8 << 20


def test_mapped_files_are_not_private(tmp_path):
    """Weights that are mapped from a file belong to the page cache, and to everybody who maps them."""
    (tmp_path / "weights").write_bytes(bytes(32 << 20))
    settle()
    before = memory.private_memory()
    mapped = np.memmap(tmp_path / "weights", np.uint8, "r")

    assert int(mapped[::4096].sum()) == 0  # every page was read
    assert memory.private_memory() - before < 8 << 20


FREED_BLOCKS = """
import threading
from model_handlers.system import memory

memory.return_large_blocks()
before = memory.private_memory()
together = threading.Barrier(8)

def take():
    for _ in range(2):
        blocks = [bytearray(b"x") * (2 << 20) for _ in range(2)]
        together.wait(60)
        blocks.clear()

threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
memory.trim()
print(memory.private_memory() - before)
"""


def test_freed_blocks_go_back_to_the_system():
    """Large blocks that several threads took and freed, again and again, are the system's, in whichever heap they lay."""
    left = subprocess.check_output([sys.executable, "-c", FREED_BLOCKS], text=True, timeout=100)  # a heap of its own

    assert int(left) < 6 << 20
