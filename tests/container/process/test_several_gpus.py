"""Memory of each of several GPUs by itself. The GPUs are a stand-in for NVML's; server, cache and models are real."""

import os
import sys

import pytest

from container.cli.models import memory_text
from container.settings import Mode
from model_handlers.system import devices
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.metric_text import families_of

MB = 10**6
FIRST, LAST = "GPU-aaaa", "GPU-dddd"
# Of NVML's stand-in it takes so much of its GPU as the model's file says, and gives it back.
_HANDLER = """
import sys

from model_handlers.base import Handler
from model_handlers.config.validate import normalise
from model_handlers.errors import out_of_memory


class Heavy(Handler):
    backend = "heavy"
    default_filename = "size"

    @classmethod
    def autocomplete(cls, config, model_file):
        return normalise(config)

    @classmethod
    def load(cls, config, model_file, device, lane):
        handler = cls(normalise(config))
        handler.gpu = sys.modules["pynvml"].listed[device.index]
        handler.size = int(model_file.read_text())
        if handler.gpu.used + handler.size > handler.gpu.total:
            raise out_of_memory(f"no memory left on {device}")
        handler.gpu.used += handler.size
        return handler

    def execute(self, inputs, outputs):
        return [inputs["X"]]

    def close(self):
        self.gpu.used -= self.size
"""


def write_heavy(repository, name, megabytes, on, pinned):
    """Such a model, with an instance on each of these GPUs, or of all."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "handler.py").write_text(_HANDLER)
    (version / "size").write_text(str(megabytes * MB))
    (version / "padding").write_bytes(bytes(megabytes * MB // 100))
    (version.parent / "config.pbtxt").write_text(f"""
        backend: "heavy" instance_group {{ kind: KIND_GPU {f"gpus: {list(on)}" if on else ""} }}
        input {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }} output {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }}
        parameters {{ key: "MME_PLACEMENT" value: {{ string_value: "inline" }} }}
        parameters {{ key: "MME_PIN" value: {{ string_value: "{str(pinned).lower()}" }} }}
    """)


@pytest.fixture
def nvml(monkeypatch):
    """Four GPUs of 1000 MB, of which other processes have 100 each."""
    uuids = (FIRST, "GPU-bbbb", "GPU-cccc", LAST)
    fake = FakeNvml([FakeGpu(uuid, 1000 * MB, 100 * MB) for uuid in uuids])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv(devices.VARIABLE, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    devices.gpu_uuids.cache_clear()
    yield fake
    devices.gpu_uuids.cache_clear()


@pytest.fixture
def server(nvml, start, tmp_path):
    """A repository server; `ask` lays out a model and asks it."""
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, load_models=(), gpu_memory_budget=0.8)

    def ask(name, megabytes, *, on=(), pinned=False, takes=None, files=0):
        write_heavy(tmp_path, name, megabytes, on, pinned)
        if files:
            os.truncate(tmp_path / name / "1" / "padding", files)
        if takes is not None:
            (tmp_path / name / "1" / "size").write_text(str(takes))
        return running.infer(name, {"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [1]}]})

    running.ask = ask
    return running


def resident(server):
    """Names of those in memory."""
    rows = server.http("POST", "/v2/repository/index", {}, b"{}").json
    return sorted(row["name"] for row in rows if row.get("state") == "READY")


def test_the_least_used_of_the_gpu_that_is_full_leaves(server, nvml):
    """Another GPU may have room, and hold what nobody has used for longer: neither is any help."""
    assert server.ask("oldest", 300, on=[3]).status == 200
    assert server.ask("old", 400, on=[0]).status == 200
    assert server.ask("young", 300, on=[0]).status == 200

    answer = server.ask("new", 400, on=[0])

    assert answer.status == 200, answer.body
    assert resident(server) == ["new", "oldest", "young"]
    assert [gpu.used // MB for gpu in nvml.listed] == [800, 100, 100, 400]


def test_a_model_costs_on_each_gpu_that_it_is_on(server, nvml):
    """Without `gpus` an instance is on each; whoever holds memory of the one that is short leaves all of them."""
    assert server.ask("everywhere", 500, on=()).status == 200
    assert server.ask("two", 100, on=[1, 2]).status == 200
    assert [gpu.used // MB for gpu in nvml.listed] == [600, 700, 700, 600]
    assert server.ask("new", 500, on=[3]).status == 200

    assert resident(server) == ["new", "two"]
    assert [gpu.used // MB for gpu in nvml.listed] == [100, 200, 200, 600]


def test_want_of_memory_names_the_gpu(server):
    """A model that can't fit beside those that are pinned is told of its own GPU alone."""
    assert server.ask("pinned", 700, on=[0], pinned=True).status == 200

    full, large = server.ask("new", 200, on=[0]), server.ask("large", 900, on=[2])

    assert full.status == large.status == 507
    assert "700.0 MB on GPU 0 of 1073.7 MB and 800.0 MB on GPU 0 are taken by 1 pinned models" in full.error
    assert "more than the whole memory budget of 1073.7 MB and 800.0 MB on GPU 2: raise MME_GPU_MEM" in large.error
    assert server.ask("other", 200, on=[3]).status == 200


def test_a_model_on_a_gpu_alone_takes_none_of_the_host_for_its_file(server, nvml):
    """What is measured there counts. On its GPU it takes no less than the file, whoever gives memory back meanwhile."""
    nvml.listed[1].used = 900 * MB
    answer = server.ask("large", 6000, on=[1], takes=0)
    assert answer.status == 200, answer.body

    (row,) = server.http("POST", "/v2/repository/index", {}, b"{}").json
    assert row["cache"]["host_bytes"] < 30 * MB
    assert row["cache"]["gpu_bytes"][0] == 0
    assert 60 * MB <= row["cache"]["gpu_bytes"][1] < 61 * MB


def test_a_model_that_was_never_measured_is_refused_no_gpu_that_its_files_fit(server, nvml):
    """Half as much again is a guess, of a handler that nobody knows; whoever is there makes room for all of it."""
    assert server.ask("there", 100, on=[1]).status == 200
    answer = server.ask("large", 650, on=[1], files=600 * MB)
    assert answer.status == 200, answer.body
    assert nvml.listed[1].used == 750 * MB

    refused = server.ask("larger", 700, on=[1], files=900 * MB)
    assert refused.status == 507
    assert resident(server) == ["large"]


def test_each_gpu_is_told_apart(server):
    """By /metrics, the index, `mme models` and the dashboard, with what its models take and may take."""
    assert server.ask("m", 300, on=[0, 3]).status == 200

    families = families_of(server.http("GET", "/metrics").body.decode())
    found = {
        (sample.name, sample.labels.get("model"), sample.labels.get("gpu_uuid")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("kind") == "device"
    }
    for uuid, used in ((FIRST, 300 * MB), ("GPU-bbbb", 0), (LAST, 300 * MB)):
        assert found["mme_memory_used_bytes", None, uuid] == used
        assert found["mme_memory_budget_bytes", None, uuid] == 800 * MB
        assert found.get(("mme_model_memory_bytes", "m", uuid), 0) == used
    (row,) = server.http("POST", "/v2/repository/index", {}, b"{}").json
    assert row["cache"]["device_bytes"] == 600 * MB
    assert row["cache"]["gpu_bytes"] == [300 * MB, 0, 0, 300 * MB]
    assert memory_text(row["cache"]).endswith("300.0 MB GPU 0 + 300.0 MB GPU 3")
