"""Backends of others through a server: the one of the example, which its archive brings, and Triton's examples."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from container.cli import main
from tests.contract import models
from tests.contract.server import Server, eventually

ROOT = Path(__file__).parents[2]
NEAREST = ROOT / "examples" / "nearest"
IDENTITY = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }
"""
SQUARE = """
backend: "square"
model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
FLOWERS = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3], [5.9, 2.8, 4.3, 1.3]]
SPECIES = ["setosa", "virginica", "versicolor"]
# A handler that answers each request by itself, with what it was called.
ECHO = """
from model_handlers.base import Handler
from model_handlers.requests import ModelResponse
from model_handlers.config.validate import normalise


class Echo(Handler):
    backend = "echo"
    default_filename = "handler.py"

    @classmethod
    def autocomplete(cls, config, model_file):
        return normalise(config)

    @classmethod
    def load(cls, config, model_file, device, lane):
        return cls(config)

    def execute_requests(self, requests):
        return [ModelResponse({"OUT": request.inputs["IN"]}, {"id": request.id}) for request in requests]

    def close(self):
        pass
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder that Python looks for packages in: one that registers the handler above as a backend of its own."""
    folder = tmp_path_factory.mktemp("packages")
    source = ECHO.replace('"echo"', '"echoes"').replace('"handler.py"', '"model.echo"')
    (folder / "echoes.py").write_text(source)
    info = folder / "echoes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echoes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mme.handlers]\nechoes = echoes:Echo\n")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, packages):
    """A server over the example, over models that are configurations alone, and over one of an installed backend."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(NEAREST, folder / "nearest")
    configs = {"identity": IDENTITY, "repeat": models.REPEAT, "square": SQUARE}
    configs["echo"] = SQUARE.replace("square", "echo").replace("decoupled: true", "decoupled: false")
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "echo" / "1").mkdir()
    (folder / "echo" / "1" / "handler.py").write_text(ECHO)
    models.lay_out(folder / "installed", b"", configs["echo"].replace('"echo"', '"echoes"'), file="model.echo")
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    environ = {"MME_MODEL_REPOSITORY": str(folder), "MME_PING_MODE": "ready", "PYTHONPATH": path}
    with Server(tmp_path_factory.mktemp("server"), environ) as server:
        yield server


def infer(server, model, **inputs):
    """The answer to inputs of (datatype, shape, data)."""
    tensors = [{"name": name, "datatype": d, "shape": s, "data": v} for name, (d, s, v) in inputs.items()]
    return server.ask("POST", f"/v2/models/{model}/infer", {"id": "r1", "inputs": tensors})


def outputs(answer):
    """The tensors of an answer, by name."""
    assert answer.status == 200, answer.error
    return {tensor["name"]: tensor["data"] for tensor in answer.json["outputs"]}


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [2, 0]])
def test_the_example_answers(server, rows):
    """A batch of flowers gets a species and a distance each, from the archive's own handler."""
    flowers = [number for row in rows for number in FLOWERS[row]]
    found = outputs(infer(server, "nearest", FLOWERS=("FP32", [len(rows), 4], flowers)))

    assert found["SPECIES"] == [SPECIES[row] for row in rows]
    assert all(0 < distance < 2 for distance in found["DISTANCE"])


def test_the_example_lives_in_a_process_that_ends_with_it(server):
    """Code of an archive is not run in the serving process, and its process goes when the model does."""
    (process,) = [process for process, name in server.processes.items() if name.startswith("nearest")]
    assert server.ask("POST", "/v2/repository/models/nearest/unload", {}).status == 200

    eventually(lambda: not process.is_running(), "the process to end")
    assert server.metric("mme_model_memory_bytes", model="nearest", kind="host") == 0


def test_the_example_can_be_packed(tmp_path):
    """The command checks what it can, and takes the handler along."""
    archive = tmp_path / "nearest.tar.gz"

    assert main.main(["pack", str(NEAREST), "-o", str(archive)]) == 0
    with tarfile.open(archive) as packed:
        assert {"handler.py", "centroids.csv"} <= {Path(name).name for name in packed.getnames()}


def test_a_handler_of_an_archive_may_see_requests(server):
    """It gets each request as it came, and may answer with parameters."""
    answer = infer(server, "echo", IN=("INT32", [1], [7]))

    assert outputs(answer) == {"OUT": [7]}
    assert answer.json["parameters"] == {"id": "r1"}


def test_a_backend_that_an_installed_package_registers(server):
    """Its entry point is all that there is to it."""
    assert outputs(infer(server, "installed", IN=("INT32", [1], [8]))) == {"OUT": [8]}
    assert server.ask("GET", "/v2/models/installed").json["platform"] == "echoes"


def test_identity(server):
    """A configuration alone is a model, which hands back what it gets."""
    answer = infer(server, "identity", INPUT0=("INT32", [3], [1, 2, 3]))

    assert outputs(answer) == {"OUTPUT0": [1, 2, 3]}
    assert answer.json["parameters"] == {"param0": "an example string param", "param1": 42, "param2": False}
    assert server.ask("GET", "/v2/models/identity").json["platform"] == "identity"


def test_repeat_and_square_stream(server):
    """Decoupled examples answer as often as they are asked to."""
    repeat = server.ask("POST", "/v2/models/repeat/generate_stream", {"IN": [4, 5, 6], "DELAY": [0, 0, 0], "WAIT": 0})
    square = server.ask("POST", "/v2/models/square/generate_stream", {"IN": 3})

    assert [int(each) for each in re.findall(rb'"OUT":(\d+)', repeat.body)] == [4, 5, 6]
    assert [int(each) for each in re.findall(rb'"IDX":(\d+)', repeat.body)] == [0, 1, 2]
    assert [int(each) for each in re.findall(rb'"OUT":(\d+)', square.body)] == [3, 3, 3]


def test_the_documentation_shows_the_example():
    """docs/handlers.md holds the example as it is."""
    text = (ROOT / "docs" / "handlers.md").read_text()

    assert (NEAREST / "1" / "handler.py").read_text() in text
    assert (NEAREST / "config.pbtxt").read_text() in text
