"""Trees and OpenVINO's models through a server: batches of several clients, unloading and loading again."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.rows import ROWS, assert_each_gets_its_own, infer
from tests.contract.server import Server
from tests.frameworks import framework_later

xgboost = framework_later("xgboost")
openvino = framework_later("openvino")
ops = framework_later("openvino.opset13")

TREES = 'backend: "fil" max_batch_size: 6 dynamic_batching { max_queue_delay_microseconds: 20000 }'
NAMES = {"trees": ("input__0", "output__0"), "layer": ("x", "y")}


@pytest.fixture(scope="module")
def expected():
    """What the libraries themselves answer to ROWS, by the model's name; filled when the models are made."""
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory, expected):
    """A server of one model of each kind: the one with a configuration, the other without."""
    folder = tmp_path_factory.mktemp("repository")
    for name in NAMES:
        (folder / name / "1").mkdir(parents=True)
    options = {"objective": "reg:squarederror", "max_depth": 2, "nthread": 1}
    booster = xgboost.train(options, xgboost.DMatrix(ROWS, ROWS.sum(axis=1)), 3)
    booster.save_model(folder / "trees/1/xgboost.ubj")
    (folder / "trees/config.pbtxt").write_text(TREES)
    expected["trees"] = booster.predict(xgboost.DMatrix(ROWS))
    x = ops.parameter([-1, 3], np.float32, name="x")
    y = ops.matmul(x, ops.constant(np.ones((3, 2), np.float32)), transpose_a=False, transpose_b=False)
    x.output(0).set_names({"x"})
    y.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([ops.result(y)], [x], "layer"), folder / "layer/1/model.xml")
    expected["layer"] = ROWS @ np.ones((3, 2), np.float32)
    environ = {"MME_MODEL_REPOSITORY": str(folder), "MME_PING_MODE": "ready"}
    with Server(tmp_path_factory.mktemp("server"), environ) as server:
        yield server


@pytest.mark.parametrize("model", NAMES)
def test_clients_of_any_size_get_their_own_rows(server, expected, model):
    """Requests of one row and of several, at the same time, are answered as the library answers each of them."""
    cuts = [(0, 1), (1, 3), (3, 4), (4, 8), (8, 12), (0, 4)]

    assert_each_gets_its_own(server, model, NAMES[model], cuts, expected[model])


def test_a_library_is_not_counted_as_its_first_models(server):
    """XGBoost takes tens of megabytes, a model of three trees next to nothing."""
    assert 0 < server.metric("mme_model_memory_bytes", model="trees", kind="host") < 10 << 20


@pytest.mark.parametrize("model", NAMES)
def test_a_model_is_unloaded_and_loaded_again(server, expected, model):
    """Unloaded it is not ready, and takes no memory; loaded again it answers as before."""
    assert server.ask("POST", f"/v2/repository/models/{model}/unload", {}).status == 200
    assert server.ask("GET", f"/v2/models/{model}/ready").status == 400
    assert server.metric("mme_model_memory_bytes", model=model, kind="host") == 0

    assert server.ask("POST", f"/v2/repository/models/{model}/load", {}).status == 200
    assert server.metric("mme_model_memory_bytes", model=model, kind="host") > 0
    np.testing.assert_allclose(infer(server, model, NAMES[model], ROWS[:2]), expected[model][:2], rtol=1e-4, atol=1e-5)


def test_the_wrong_number_of_features_is_the_clients_error(server):
    """A row of another width is refused with both shapes."""
    error = infer(server, "trees", NAMES["trees"], np.ones((1, 4), np.float32))

    assert "unexpected shape for input 'input__0' for model 'trees'. Expected [-1,3], got [1,4]" in error
