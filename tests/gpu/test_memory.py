"""The memory of a real GPU: it is filled with models, the least used go, and what they held comes back.

Never yet run on a GPU. What the test does was run with the host's memory in the place of the device's: see `heavy`.
"""

from __future__ import annotations

import pytest

from model_handlers.system import devices
from tests.contract.server import Server, eventually
from tests.gpu.heavy import BUILT_FOR_GPUS, Crowd, lay_out

MEGABYTES = 1024  # beside which the handles of a session, up to 200 MiB, are little
FITTING = 4  # of such models in the budget
MODELS = [f"m{number}" for number in range(6)]
PINNED = [f"pinned{number}" for number in range(4)]
SLACK = 768 << 20  # bytes: kernels that were loaded stay, and each of four sessions has handles


def can_use_a_gpu(backend: str) -> bool:
    """Whether PyTorch is there and finds one; the mark tells of ONNX Runtime."""
    return backend != "pytorch" or pytest.importorskip("torch").cuda.is_available()


@pytest.fixture(scope="module", params=[pytest.param("onnxruntime", marks=BUILT_FOR_GPUS), "pytorch"])
def crowd(request, tmp_path_factory):
    """A server on the first GPU, whose budget holds four of the models and a bit: in its process, and in one of theirs."""
    backend = request.param
    if not can_use_a_gpu(backend):
        pytest.skip("PyTorch sees no GPU")
    repository = tmp_path_factory.mktemp("repository")
    for name in MODELS:
        lay_out(repository / name, MEGABYTES, kind="GPU", backend=backend)
    for name in PINNED:
        lay_out(repository / name, MEGABYTES, kind="GPU", backend=backend, pinned=True)
    lay_out(repository / "first", 1, kind="GPU", backend=backend)
    budget = int((FITTING + 0.9) * MEGABYTES) << 20
    environ = {
        "MME_MODEL_REPOSITORY": str(repository),
        "MME_LOAD_MODEL": "first",
        "MME_GPU_MEMORY_BUDGET": str(budget),
        "MME_REQUIRE_GPU": "true",
        "CUDA_VISIBLE_DEVICES": devices.gpus()[0].uuid,
        "CUDA_CACHE_PATH": str(tmp_path_factory.mktemp("cuda")),  # else it is in the home directory
    }
    with Server(tmp_path_factory.mktemp("server"), environ) as server:
        crowd = Crowd(server, "device", lambda: devices.gpus()[0].used)
        eventually(lambda: crowd.ask("first") == 200, "the first model, with CUDA's context")
        yield crowd


def unload(crowd: Crowd, models: list[str]) -> None:
    """Have them unloaded, those too that are in memory no more."""
    for name in models:
        crowd.server.ask("POST", f"/v2/repository/models/{name}/unload", {})


def fill_and_empty(crowd: Crowd, size: int, slack: int) -> None:
    """Six models into a budget of four: the oldest two go; one that is asked again comes back, and the next oldest goes."""
    for name in MODELS:  # what each of them takes is known from now on, and not guessed
        assert crowd.ask(name) == 200
    unload(crowd, MODELS)
    before = crowd.used()
    for name in MODELS:
        assert crowd.ask(name) == 200
    assert crowd.resident(MODELS) == MODELS[2:]
    assert all(crowd.bytes_of(name) >= 0.9 * size for name in MODELS[2:])
    assert FITTING * size - slack <= crowd.used() - before <= (FITTING + 1) * size + slack

    assert crowd.ask(MODELS[2]) == 200
    assert crowd.ask(MODELS[0]) == 200
    assert crowd.resident(MODELS) == [MODELS[0], MODELS[2], MODELS[4], MODELS[5]]

    unload(crowd, MODELS)
    eventually(lambda: crowd.used() - before <= slack, "the memory of what was unloaded")


def test_the_least_used_leave_the_gpu_and_their_memory_comes_back(crowd):
    """NVML's own figure grows with the models that are loaded, and falls when they are unloaded."""
    fill_and_empty(crowd, MEGABYTES << 20, SLACK)


def only_when_nobody_gives_way(crowd: Crowd, statuses: set[int]) -> None:
    """Models that are pinned fill the budget: one more is refused for want of memory; without one of them it fits."""
    for name in PINNED:
        assert crowd.ask(name) == 200
    assert crowd.ask(MODELS[0]) in statuses
    assert crowd.resident(PINNED) == PINNED

    unload(crowd, PINNED[:1])
    assert crowd.ask(MODELS[0]) == 200
    unload(crowd, [*PINNED, MODELS[0]])


def test_want_of_memory_is_told_only_when_nobody_gives_way(crowd):
    """507 by SageMaker's contract, 503 by KServe's."""
    only_when_nobody_gives_way(crowd, {503, 507})


def test_the_gauges_are_nvmls(crowd):
    """/metrics shows the GPU that the models are on, by its UUID, and none else."""
    gpu = devices.gpus()[0]

    assert crowd.server.metric("nv_gpu_memory_total_bytes", gpu_uuid=gpu.uuid) == gpu.total
    used = crowd.server.metric("nv_gpu_memory_used_bytes", gpu_uuid=gpu.uuid)
    assert abs(used - devices.gpus()[0].used) < SLACK
    assert 0 <= crowd.server.metric("nv_gpu_utilization", gpu_uuid=gpu.uuid) <= 1
