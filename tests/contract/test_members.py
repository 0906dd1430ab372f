"""An archive of several models: one that requests are for, and its members, which only it can call."""

from __future__ import annotations

import tarfile

import pytest

from tests.contract import models

ENTRY = 'parameters { key: "MME_ENTRY" value: { string_value: "true" } }\n'
TENSORS = """backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
"""

# Calls each of the models in turn, with what the one before answered.
CHAIN = """
import triton_python_backend_utils as pb_utils

ORDER = {order}


class TritonPythonModel:
    def execute(self, requests):
        return [self.run(request) for request in requests]

    def run(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "X")
        for name in ORDER:
            answer = pb_utils.InferenceRequest(
                model_name=name, inputs=[pb_utils.Tensor("X", tensor.as_numpy())], requested_output_names=["Y"]
            ).exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            tensor = pb_utils.get_output_tensor_by_name(answer, "Y")
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor.as_numpy())])
"""

TIMES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * {factor})])
            for request in requests
        ]
"""


def python_model(folder, source, config=TENSORS):
    """A Python model in a folder."""
    models.lay_out(folder, source, config)


def pipeline(folder, order, add, factor, config=TENSORS + ENTRY):
    """Models `chain`, `add` (ONNX) and `times` in a folder, the first of them for requests."""
    python_model(folder / "chain", CHAIN.format(order=order), config)
    python_model(folder / "times", TIMES.format(factor=factor))
    models.lay_out(folder / "add", models.plus(add), "max_batch_size: 8\n")
    return folder


def packed(folder, archive):
    """The folder's models in an archive."""
    with tarfile.open(archive, "w:gz") as tar:
        for model in sorted(folder.iterdir()):
            tar.add(model, model.name)
    return archive


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Archives whose members have the same names."""
    source, store = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store")
    packed(pipeline(source / "a", ["add", "times"], add=1, factor=10), store / "a.tar.gz")
    packed(pipeline(source / "b", ["times", "add"], add=2, factor=3), store / "b.tar.gz")
    packed(pipeline(source / "by-name", ["add"], add=5, factor=1, config=TENSORS), store / "chain.tar.gz")
    packed(pipeline(source / "nobody", ["add"], add=5, factor=1, config=TENSORS), store / "nobody.tar.gz")
    packed(pipeline(source / "other", ["a.tar.gz", "gone"], add=1, factor=1), store / "other.tar.gz")
    python_model(source / "circle" / "chain", CHAIN.format(order=["back"]), TENSORS + ENTRY)
    python_model(source / "circle" / "back", CHAIN.format(order=["circle"]))
    packed(source / "circle", store / "circle.tar.gz")
    python_model(source / "broken" / "chain", CHAIN.format(order=["bad"]), TENSORS + ENTRY)
    python_model(source / "broken" / "bad", "raise ValueError('no such luck')")
    packed(source / "broken", store / "broken.tar.gz")
    return store


@pytest.fixture
def server(serve, store):
    """A server of them."""
    return serve({"MME_MODEL_STORE": str(store)})


def ask(server, target, values=(1, 2, 3, 4)):
    """The answer of a target to one row."""
    tensor = {"name": "X", "shape": [1, 4], "datatype": "FP32", "data": list(values)}
    return server.ask("POST", "/invocations", {"inputs": [tensor]}, X_Amzn_SageMaker_Target_Model=target)


def row(answer):
    """What it says."""
    assert answer.status == 200, answer.body
    return answer.json["outputs"][0]["data"]


def test_each_archive_calls_its_own_members(server):
    """Two archives may both have an `add` and a `times`."""
    assert row(ask(server, "a.tar.gz")) == [20, 30, 40, 50]
    assert row(ask(server, "b.tar.gz")) == [5, 8, 11, 14]


def test_the_model_named_as_the_archive_is_asked(server):
    """Where no configuration says who is."""
    assert row(ask(server, "chain.tar.gz")) == [6, 7, 8, 9]


def test_an_archive_that_does_not_say_who_is_asked_is_refused(server):
    """By the names of its models, and with what to write where."""
    answer = ask(server, "nobody.tar.gz")

    assert answer.status == 400
    assert "'add', 'chain', 'times'" in answer.error
    assert "MME_ENTRY" in answer.error


def test_other_archives_can_be_called_and_their_members_not(server):
    """A name that is no member is that of a target model; errors name what was called."""
    answer = ask(server, "other.tar.gz")

    assert answer.status == 400
    assert "'gone.tar.gz' is not in the store" in answer.error
    assert "a.tar.gz" in {entry["name"] for entry in server.ask("POST", "/v2/repository/index", {}).json}


def test_a_circle_is_refused(server):
    """Whoever waits for an answer can't be called for it; the server does not hang."""
    answer = ask(server, "circle.tar.gz")

    assert answer.status == 400
    assert "which waits for it" in answer.error


def test_a_member_that_can_not_be_loaded_fails_the_whole(server):
    """The error names it, and nothing of the archive stays in memory."""
    answer = ask(server, "broken.tar.gz")

    assert answer.status == 400
    assert "broken.tar.gz:bad" in answer.error
    assert "no such luck" in answer.error
    assert not [name for name in server.processes.values() if "broken" in name]


def members(server):
    """The processes of the archive's members."""
    return [process for process, name in server.processes.items() if name.startswith("a.tar.gz")]


def test_members_come_and_go_with_their_archive(server):
    """One target model: the index has no members, and an unload ends their processes too."""
    ask(server, "a.tar.gz")
    running = members(server)
    index = server.ask("POST", "/v2/repository/index", {}).json
    memory = server.metric("mme_model_memory_bytes", model="a.tar.gz", kind="host")

    assert server.ask("POST", "/v2/repository/models/a.tar.gz/unload").status == 200
    assert len(running) == 2, server.processes  # the two Python models; the ONNX one lives in the server
    assert members(server) == []
    assert not [entry["name"] for entry in index if ":" in entry["name"]]
    assert memory > 0
    assert row(ask(server, "a.tar.gz")) == [20, 30, 40, 50]
