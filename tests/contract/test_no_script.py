"""Archives that bring no inference script, as SageMaker's XGBoost, TensorFlow and Hugging Face containers take them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.contract import models, scripts
from tests.contract.saved_models import unpack
from tests.frameworks import framework

ROWS = np.random.default_rng(0).random((20, 3)).astype(np.float32)
_LONG = pytest.mark.long
BODY = b"0.5,0.25,0.75\n"
TRANSFORMERS = """
class Pipeline:
    def __init__(self, task):
        self.task = task
    def __call__(self, inputs, **parameters):
        return [{"label": self.task, "score": len(inputs)}]

def pipeline(task, model, device):
    return Pipeline(task)
"""
PIPELINE = {
    "config.json": json.dumps({"architectures": ["BertForSequenceClassification"]}),
    "model.safetensors": b"",
    "transformers.py": TRANSFORMERS,  # a stand-in, which an archive may hold as anything else
}


@pytest.fixture
def booster(tmp_path):
    """The folder of a model of XGBoost, as its archive unpacks, and what it predicts for the body."""
    xgboost = framework("xgboost")
    model = xgboost.train({"max_depth": 3}, xgboost.DMatrix(ROWS, ROWS.sum(1)), 3)
    folder = tmp_path / "opt" / "model"
    folder.mkdir(parents=True)
    (folder / "xgboost-model").write_bytes(bytes(model.save_raw("ubj")))
    row = np.array([[0.5, 0.25, 0.75]], np.float32)
    return folder, pytest.approx(float(model.predict(xgboost.DMatrix(row))[0]), rel=1e-5)


def test_a_booster_among_many_models_answers_in_json(serve, booster):
    """As the notebooks about multi-model endpoints read it."""
    folder, expected = booster
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    assert server.ask("POST", "/models", {"model_name": "0a1b", "url": str(folder)}).status == 200

    told = {"Content-Type": "text/csv"}
    answer = server.ask("POST", "/models/0a1b/invoke", BODY, **told)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json[0] == expected
    refused = server.ask("POST", "/models/0a1b/invoke", b"1,2,3,4,5", **told)
    assert refused.status == 400
    assert "5 numbers, and the model 3 features" in refused.error


@_LONG
@pytest.mark.parametrize("kind", ["folder", "archive", "alone"])
def test_a_booster_in_a_folder_of_its_archive_is_served(serve, booster, tmp_path, kind):
    """`tar -czf model.tar.gz model` in place of what lies in it; the platform's unpacking makes no difference."""
    folder, expected = booster
    if kind == "archive":
        (tmp_path / "store").mkdir()
        models.pack(folder.parent, tmp_path / "store" / "a.tar.gz")
        server, path = serve({"MME_MODEL_STORE": str(tmp_path / "store")}), "/models/a.tar.gz/invoke"
    elif kind == "folder":
        server, path = serve({"SAGEMAKER_MULTI_MODEL": "true"}), "/models/0a1b/invoke"
        assert server.ask("POST", "/models", {"model_name": "0a1b", "url": str(folder.parent)}).status == 200
    else:
        server, path = serve({"MME_MODEL_DIR": str(folder.parent)}), "/invocations"

    answer = server.ask("POST", path, BODY, **{"Content-Type": "text/csv", "Accept": "text/csv"})
    assert (answer.status, float(answer.body)) == (200, expected)


@pytest.mark.parametrize(("environ", "ends"), [({}, ""), pytest.param({"SAGEMAKER_BATCH": "true"}, "\n", marks=_LONG)])
def test_a_booster_alone_answers_in_csv(serve, booster, environ, ends):
    """On a line of its own in a batch transform."""
    folder, expected = booster
    server = serve({"MME_MODEL_DIR": str(folder), **environ})

    answer = server.ask("POST", "/invocations", BODY, **{"Content-Type": "text/csv"})
    assert (answer.status, answer.headers["content-type"]) == (200, "text/csv")
    assert float(answer.body) == expected
    assert answer.body.decode().endswith(ends)
    assert ends or b"\n" not in answer.body


def test_a_model_of_hugging_face_is_its_pipeline(serve, tmp_path):
    """Its task is told by its architecture, or by HF_TASK for all that bring no script."""
    folder = scripts.lay_out(tmp_path / "hf", "", "README.md", **PIPELINE)
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    assert server.ask("POST", "/models", {"model_name": "a", "url": str(folder)}).status == 200
    answer = server.ask("POST", "/models/a/invoke", b'{"inputs": "hello"}', **{"Content-Type": "application/json"})
    assert (answer.status, answer.json) == (200, [{"label": "text-classification", "score": 5}])

    server = serve({"MME_MODEL_DIR": str(folder), "HF_TASK": "fill-mask"})
    answer = server.ask("POST", "/invocations", b'{"inputs": "hello"}', **{"Content-Type": "application/json"})
    assert (answer.status, answer.json) == (200, [{"label": "fill-mask", "score": 5}])


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The folder of a SavedModel that halves and adds two, as its archive unpacks."""
    return unpack("half_plus_two", tmp_path_factory.mktemp("opt") / "model")


def test_a_saved_model_among_many_answers_as_tensorflow_serving(serve, half, tmp_path):
    """With a script of its own, too; what its clients get wrong is a 400."""
    script = scripts.lay_out(tmp_path / "own", scripts.HANDLERS)
    shutil.copytree(half, script, dirs_exist_ok=True)
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    for name, folder in (("plain", half), ("own", script)):
        assert server.ask("POST", "/models", {"model_name": name, "url": str(folder)}).status == 200

    plain = server.ask("POST", "/models/plain/invoke", {"instances": [1.0, 2.0]}, Content_Type="application/json")
    assert (plain.status, plain.json) == (200, {"predictions": [2.5, 3.0]})
    refused = server.ask("POST", "/models/plain/invoke", {"instances": [[1.0]]}, Content_Type="application/json")
    assert refused.status == 400
    assert "input 'x' has shape [1, 1], but [-1] is expected" in refused.error
    own = server.ask("POST", "/models/own/invoke", b"1.0", Content_Type="text/csv")
    assert (own.status, own.json) == (200, {"predictions": [2.5], "by": "script"})


@_LONG
def test_a_saved_model_alone_is_served(serve, half):
    """Its folder is no model directory of Triton's."""
    server = serve({"MME_MODEL_DIR": str(half), "SAGEMAKER_TFS_ENABLE_BATCHING": "true"})
    answer = server.ask("POST", "/invocations", b"1.0\n2.0", Content_Type="text/csv")
    assert (answer.status, answer.json) == (200, {"predictions": [2.5, 3.0]})
