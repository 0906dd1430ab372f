"""PyTorch's and TensorFlow's models through a server: batches of several clients, unloading and loading again."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.contract.rows import ROWS, assert_each_gets_its_own, infer
from tests.contract.saved_models import unpack
from tests.contract.server import Server, eventually
from tests.frameworks import framework_later

torch = framework_later("torch")

TORCH = """
backend: "pytorch" max_batch_size: 6 dynamic_batching { max_queue_delay_microseconds: 20000 }
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] }
instance_group { count: 2 }
"""
NAMES = {"script": ("INPUT__0", "OUTPUT__0"), "saved": ("x", "y")}


@pytest.fixture(scope="module")
def expected():
    """What each model has to answer to ROWS, by its name; filled when the models are made."""
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory, expected):
    """A server of one model of each kind: the one with a configuration, the other without."""
    folder = tmp_path_factory.mktemp("repository")
    for name in NAMES:
        (folder / name / "1").mkdir(parents=True)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of torch.jit is deprecated
        torch.jit.script(module).save(folder / "script/1/model.pt")
    (folder / "script/config.pbtxt").write_text(TORCH)
    expected["script"] = module(torch.from_numpy(ROWS)).detach().numpy()
    unpack("rows_times", folder / "saved/1")
    expected["saved"] = ROWS @ ROWS[:3, :2]
    environ = {"MME_MODEL_REPOSITORY": str(folder), "MME_PING_MODE": "ready"}
    with Server(tmp_path_factory.mktemp("server"), environ) as server:
        yield server


@pytest.mark.parametrize("model", NAMES)
def test_clients_of_any_size_get_their_own_rows(server, expected, model):
    """Requests of one row and of several, at the same time, are answered as the library answers each of them."""
    most = 6 if model == "script" else 4
    cuts = [(0, 1), (1, 3), (3, 4), (4, 8), (0, most), (6, 12) if model == "script" else (8, 12)]

    assert_each_gets_its_own(server, model, NAMES[model], cuts, expected[model])


def test_the_wrong_type_is_the_clients_error(server):
    """What the configuration declares is held against the request before PyTorch sees it."""
    tensor = {"name": "INPUT__0", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
    answer = server.ask("POST", "/v2/models/script/infer", {"inputs": [tensor]})

    assert answer.status == 400
    assert "inference input 'INPUT__0' data-type is 'FP64', but model 'script' expects 'FP32'" in answer.error


@pytest.mark.parametrize("model", NAMES)
def test_a_model_is_unloaded_and_loaded_again(server, expected, model):
    """Unloaded its processes are gone and it takes no memory; loaded again it answers as before."""
    assert unloaded(server, model) == (2 if model == "script" else 1)

    assert server.ask("POST", f"/v2/repository/models/{model}/load", {}).status == 200
    assert server.metric("mme_model_memory_bytes", model=model, kind="host") > 0
    np.testing.assert_allclose(infer(server, model, NAMES[model], ROWS[:2]), expected[model][:2], rtol=1e-4, atol=1e-5)
    unloaded(server, model)


def unloaded(server, model):
    """Unload it: how many processes it had, which are gone."""
    processes = [process for process, name in server.processes.items() if name.startswith(f"{model}_")]
    assert server.ask("POST", f"/v2/repository/models/{model}/unload", {}).status == 200
    eventually(lambda: not any(process.is_running() for process in processes), "the processes to end")
    assert server.metric("mme_model_memory_bytes", model=model, kind="host") == 0
    return len(processes)
