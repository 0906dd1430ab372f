"""Which GPUs there are and what they do. No GPU is here: but for one test, NVML is a stand-in."""

import sys

import pynvml
import pytest

from model_handlers.base import Device, Footprint
from model_handlers.config.model_config import InstanceGroup, InstanceKind, ModelConfig
from model_handlers.errors import MmeError
from model_handlers.system import devices
from tests.fake_nvml import FakeGpu, FakeNvml

A, B, C = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"
MIG = "MIG-1234-5678"


@pytest.fixture
def machine(monkeypatch):
    """Sets the machine's GPUs, and CUDA_VISIBLE_DEVICES."""

    def machine(*listed, shown=None):
        devices.gpu_uuids.cache_clear()
        fake = FakeNvml(list(listed))
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv(devices.VARIABLE, raising=False)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        if shown is not None:
            monkeypatch.setenv(devices.VARIABLE, shown)
        return fake

    yield machine
    devices.gpu_uuids.cache_clear()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,7,1", [A]),
        ("1,nonsense,2", [B]),
        ("0,0", []),
        (C, [C]),
        ("GPU-c,GPU-aab", [C, B]),
        ("GPU-aa", []),
        ("GPU-x,0", []),
        (MIG, [MIG]),
        ("MIG-GPU-aaaa/3/0", ["MIG-GPU-aaaa/3/0"]),
    ],
)
def test_cuda_shows_what_its_variable_names(wanted, expected):
    """Numbers, UUIDs and what they begin with, MIG devices; the first that means none ends the list, twice is none."""
    assert devices.visible([A, B, C], wanted) == expected


def test_gpus_are_numbered_as_cuda_numbers_them(machine):
    """Of three GPUs CUDA_VISIBLE_DEVICES shows two, in its own order; each has its memory and its name."""
    fake = machine(FakeGpu(A), FakeGpu(B, 2000, 500), FakeGpu(C, 3000, 0), shown="2,1")

    assert devices.gpus() == (
        devices.Gpu(0, "Fake", C, 3000, 3000, "9.0"),
        devices.Gpu(1, "Fake", B, 2000, 1500, "9.0"),
    )
    assert devices.gpus()[1].used == 500
    assert fake.open == 0  # and NVML is left as it was found


def test_gpus_are_numbered_by_their_places_on_the_bus(machine):
    """As CUDA does with PCI_BUS_ID, whatever order NVML lists them in."""
    machine(FakeGpu(A, bus=0xB0), FakeGpu(B, bus=0x1E), FakeGpu(C, bus=0x5C))
    assert [gpu.uuid for gpu in devices.gpus()] == [B, C, A]

    machine(FakeGpu(A, bus=0xB0), FakeGpu(B, bus=0x1E), FakeGpu(C, bus=0x5C), shown="2,0")
    assert [gpu.uuid for gpu in devices.gpus()] == [A, B]


@pytest.mark.parametrize("shown", [None, "0", A])
@pytest.mark.parametrize("denied", [(), (FakeGpu("MIG-other", 400, 0, denied=True),)], ids=["both", "the second"])
def test_a_gpu_in_parts_stands_for_the_first_that_this_process_may_use(machine, shown, denied):
    """One that is cut into MIG devices is one of them, by its UUID, with its memory.

    Numbers of parts have gaps, where one was taken away or was given to another container.
    """
    parts = (FakeGpu(MIG, 400, 40), FakeGpu("MIG-third", 400, 0))
    machine(FakeGpu(A, parts=(*denied, *parts)), shown=shown)

    assert [(gpu.uuid, gpu.total) for gpu in devices.gpus()] == [(MIG, 400)]


@pytest.mark.parametrize(
    "listed",
    [
        (FakeGpu(A, parts=(FakeGpu(MIG),)), FakeGpu(B, parts=(FakeGpu("MIG-other"),))),
        (FakeGpu(A), FakeGpu(B, parts=(FakeGpu(MIG), FakeGpu("MIG-other")))),
    ],
    ids=["two in parts", "one whole, one in parts"],
)
def test_with_a_part_there_is_no_other_gpu(machine, listed):
    """CUDA shows a process one MIG device, and no whole GPU beside it: models go where CUDA has a device."""
    machine(*listed)

    assert [(gpu.index, gpu.uuid) for gpu in devices.gpus()] == [(0, MIG)]


def test_of_several_parts_cuda_shows_one(machine):
    """Whoever names two MIG devices gets the first."""
    machine(FakeGpu(A, parts=(FakeGpu("MIG-other"), FakeGpu(MIG))), shown=f"{MIG},MIG-other")

    assert [gpu.uuid for gpu in devices.gpus()] == [MIG]


@pytest.mark.parametrize(
    ("first", "index"),
    [(FakeGpu(A, denied=True), 0), (FakeGpu(A, cut=True), 0), (FakeGpu(A, lost=True), 1)],
    ids=["another's", "without parts", "lost"],
)
def test_a_gpu_that_cannot_be_used_takes_no_other_with_it(machine, first, index):
    """One of another container or in MIG mode without a part is not counted, a lost one is; the next is listed and read."""
    machine(first, FakeGpu(B))

    assert [(gpu.index, gpu.uuid) for gpu in devices.gpus()] == [(index, B)]
    assert [reading.uuid for reading in devices.readings()] == [B]


def test_a_mig_device_is_found_by_its_name(machine):
    """CUDA_VISIBLE_DEVICES may name a part; one that is not there is no GPU, and no error."""
    parts = (FakeGpu("MIG-other", 400, 0), FakeGpu(MIG, 400, 40))
    machine(FakeGpu(A, parts=parts), shown=MIG)

    assert devices.gpus() == (devices.Gpu(0, "Fake", MIG, 400, 360, "9.0"),)
    machine(FakeGpu(A, parts=parts), shown="MIG-elsewhere")
    assert devices.gpus() == ()


def test_the_one_gpu_of_a_model_has_a_name(machine):
    """By which its metrics are labelled; the CPU has none, and several GPUs have no one name."""
    machine(FakeGpu(A), FakeGpu(B))
    cpu, first, second = Device("cpu"), Device("gpu", 0), Device("gpu", 1)
    assert [devices.uuid_of(where) for where in ([cpu], [second, second], [first, cpu], [first, second], [])] == [
        "",
        B,
        A,
        "",
        "",
    ]


def test_what_gpus_do_is_read(machine):
    """Memory in bytes, load as a share, power in watts, energy in joules; what a driver does not say is None."""
    machine(FakeGpu(A), FakeGpu(B, silent=True))

    assert devices.readings() == (
        devices.Reading(A, 1000, 100, 0.25, 60.5, 700.0, 123.0),
        devices.Reading(B, 1000, 100, None, None, None, None),
    )


def test_memory_in_use_is_that_of_the_gpus_that_are_shown(machine):
    """By CUDA's numbers. What others do on GPUs that this process may not use is none of its models' business."""
    machine(FakeGpu(A, used=1), FakeGpu(B, used=20), FakeGpu(C, used=300), shown="1,0")
    assert devices.device_memory_used() == (20, 1)

    machine(FakeGpu(A, lost=True), FakeGpu(B, used=20))
    assert devices.device_memory_used() == (0, 20)


def test_models_are_placed_where_a_gpu_tells_its_memory(machine):
    """The numbers of the others stay what they are: models went to the first where it was lost, and not to the second."""
    machine(FakeGpu(A), FakeGpu(B, lost=True), FakeGpu(C))
    lanes = devices.place((InstanceGroup("g", InstanceKind.GPU),), "m", gpu_capable=True, require_gpu=True)

    assert [device for _, device in lanes] == [Device("gpu", 0), Device("gpu", 2)]
    with pytest.raises(MmeError, match=r"unsupported gpu id 1\. GPUs on this machine are: 0, 2"):
        devices.place((InstanceGroup("g", InstanceKind.GPU, gpus=(1,)),), "m", gpu_capable=True, require_gpu=True)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (InstanceGroup("g"), Footprint(0, (600, 0, 600))),
        (InstanceGroup("g", InstanceKind.GPU, 3, gpus=(2,)), Footprint(0, (0, 0, 600))),
        (InstanceGroup("g", InstanceKind.MODEL), Footprint(0, (300, 0, 300))),
        (InstanceGroup("g", InstanceKind.CPU, 2), Footprint(600)),
    ],
    ids=lambda value: value.kind.name if isinstance(value, InstanceGroup) else None,
)
def test_each_gpu_holds_a_models_files_once(machine, group, expected):
    """However many instances are there. A model that places itself may be larger than any of them: it is spread."""
    machine(FakeGpu(A), FakeGpu(B, lost=True), FakeGpu(C))
    lanes = devices.place((group,), "m", gpu_capable=True, require_gpu=True)

    assert devices.size_on((group,), lanes, 600) == expected


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (0, ""),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, ""),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
    ],
)
def test_a_driver_that_does_not_answer_is_quoted(machine, caplog, broken, said):
    """A model for a GPU runs on the CPU then, and the line that says so says what the driver said."""
    machine().broken = broken
    group = InstanceGroup("g", InstanceKind.GPU)

    with caplog.at_level("WARNING", "mme.devices"):
        devices.place((group,), "m", gpu_capable=True, require_gpu=False)
    why = f": NVIDIA's driver says '{said}'" if said else ""
    assert [record.getMessage() for record in caplog.records] == [
        f"instance group g of model m has kind KIND_GPU but no GPUs are available{why}; it runs on the CPU"
    ]


@pytest.mark.parametrize(
    ("capability", "device", "expected"),
    [((9, 0), "gpu", "h100.plan"), ((8, 0), "gpu", "model.plan"), ((9, 0), "cpu", "model.plan")],
    ids=["named", "not named", "cpu"],
)
def test_a_model_may_have_a_file_for_a_compute_capability(machine, tmp_path, capability, device, expected):
    """`cc_model_filenames` names files by what GPUs can do; the usual one is for all others."""
    machine(FakeGpu(A, capability=capability))
    for name in ("h100.plan", "model.plan"):
        (tmp_path / name).touch()
    config = ModelConfig("m", default_model_filename="model.plan", cc_model_filenames={"9.0": "h100.plan"})

    assert devices.file_for(Device(device), config, tmp_path).name == expected


def test_a_gpu_without_a_file_is_told_with_those_that_have_one(machine, tmp_path):
    """The sentence names the GPU's compute capability, and those that there are files for."""
    machine(FakeGpu(A, capability=(7, 5)))
    config = ModelConfig(
        "m", default_model_filename="model.plan", cc_model_filenames={"9.0": "h.plan", "8.6": "a.plan"}
    )
    with pytest.raises(MmeError, match=r"gpu:0 of compute capability 7\.5: .* cc_model_filenames has 8\.6, 9\.0"):
        devices.file_for(Device("gpu"), config, tmp_path)


@pytest.mark.skipif(bool(devices.gpus()), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_has_no_readings():
    """No driver is not an error: by the real NVML."""
    assert devices.readings() == ()
