"""Ensembles behind the real server: ONNX and Python models as the steps of one target model."""

from __future__ import annotations

import json
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http

from tests.contract import models
from tests.contract.server import Server

STEP = (
    """step {{ model_name: "{model}" input_map {{ key: "X" value: "{x}" }} output_map {{ key: "Y" value: "{y}" }} }}"""
)
ENSEMBLE = """platform: "ensemble"
max_batch_size: {batch}
input {{ name: "IN" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ {dims} ] }}
{more}
ensemble_scheduling {{ {steps} }}
"""
BATCHING = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [ 4 ] }\n"

PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = request.inputs()[0].as_numpy()
        if x.ravel()[0] == -99:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no -99", pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 10)])
"""

NAMED = """
import json


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        names = args["model_name"], args["model_instance_name"], config["name"], config["instance_group"][0]["name"]
        self.names = " ".join(names)

    def execute(self, requests):
        raise ValueError(f"they call me {self.names}")
"""

PIXELS = PYTHON.replace("x * 10", "(x * 10).astype(np.uint8)")

REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = request.inputs()[0].as_numpy()
            for i in range(int(x.ravel()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + i)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def steps(*chain):
    """`model x y` each."""
    return " ".join(STEP.format(model=m, x=x, y=y) for m, x, y in (each.split() for each in chain))


def ensemble(folder, *chain, batch=8, dims=4, more=""):
    """An ensemble of such steps."""
    models.lay_out(folder, None, ENSEMBLE.format(batch=batch, dims=dims, more=more, steps=steps(*chain)))


def python_model(folder, source, more="max_batch_size: 8", dims=4):
    """A Python model X → Y."""
    tensors = (
        f'input {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }} '
        f'output {{ name: "Y" data_type: TYPE_FP32 dims: [ {dims} ] }}'
    )
    models.lay_out(folder, source, f'backend: "python"\n{more}\n{tensors}\n')


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder of models and of ensembles of them."""
    root = tmp_path_factory.mktemp("repository")
    models.lay_out(root / "one", models.plus(1), BATCHING)
    models.lay_out(root / "two", models.plus(2), "max_batch_size: 8\n")
    models.lay_out(root / "bare", models.plus(100))
    python_model(root / "ten", PYTHON)
    python_model(root / "plain", PYTHON, "max_batch_size: 0")
    python_model(root / "rows", PYTHON, "max_batch_size: 0", "-1, 4")
    python_model(root / "pixels", PIXELS)
    python_model(root / "repeat", REPEAT, "max_batch_size: 8 model_transaction_policy { decoupled: true }")
    ensemble(root / "chain", "one IN a", "ten a b", "two b OUT")
    ensemble(root / "fork", "one IN a", "two IN SIDE", "two a OUT", more=SIDE)
    ensemble(root / "nested", "one IN OUT")
    step = STEP.format(model="chain", x="IN", y="a").replace('"X"', '"IN"').replace('"Y"', '"OUT"')
    (root / "nested" / "config.pbtxt").write_text(
        ENSEMBLE.format(batch=8, dims=4, more="", steps=f"{step} {steps('one a OUT')}")
    )
    ensemble(root / "streamed", "repeat IN a", "one a OUT")
    ensemble(root / "unbatched", "one IN a", "plain a OUT")
    ensemble(root / "rows_first", "rows IN a", "one a OUT", batch=0, dims="-1, 4")
    ensemble(root / "rows_last", "one IN a", "rows a OUT")
    python_model(root / "named", NAMED)
    ensemble(root / "naming", "named IN OUT")
    python_model(root / "series", PYTHON, "max_batch_size: 8 sequence_batching { }")
    ensemble(root / "serial", "series IN OUT")
    ensemble(root / "shown", "pixels IN a", "one a OUT")
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory, repository):
    """A server with all of them in memory."""
    with Server(tmp_path_factory.mktemp("server"), {"MME_MODEL_REPOSITORY": str(repository)}) as running:
        for model in repository.iterdir():
            assert running.ask("POST", f"/v2/repository/models/{model.name}/load").status == 200
        yield running


@pytest.fixture
def new_server(serve, repository):
    """A server whose statistics begin with the test; it loads what it is asked for."""
    return serve({"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "one"})


def ask(server, model, *rows, outputs=(), name="IN", **headers):
    """The answer to rows of four."""
    data = [value for row in rows for value in row]
    body = {"inputs": [{"name": name, "shape": [len(rows), 4], "datatype": "FP32", "data": data}]}
    if outputs:
        body["outputs"] = [{"name": output} for output in outputs]
    return server.ask("POST", f"/v2/models/{model}/infer", body, **headers)


def out(answer, name="OUT"):
    """The rows of an output."""
    assert answer.status == 200, answer.body
    (output,) = [each for each in answer.json["outputs"] if each["name"] == name]
    return np.reshape(output["data"], output["shape"]).tolist()


def test_tensors_go_from_step_to_step(server):
    """ONNX, Python, ONNX; whole batches."""
    assert out(ask(server, "chain", [1, 2, 3, 4])) == [[22, 32, 42, 52]]
    assert out(ask(server, "chain", [0] * 4, [1] * 4)) == [[12] * 4, [22] * 4]


def test_only_what_is_asked_for_runs(new_server):
    """Steps that feed no wanted output are left out, as their statistics show."""
    side = ask(new_server, "fork", [1] * 4, outputs=["SIDE"])
    both = ask(new_server, "fork", [1] * 4)
    assert out(side, "SIDE") == [[3] * 4]
    assert [each["name"] for each in side.json["outputs"]] == ["SIDE"]
    assert (out(both), out(both, "SIDE")) == ([[4] * 4], [[3] * 4])

    counted = {
        each["name"]: each["inference_count"] for each in new_server.ask("GET", "/v2/models/stats").json["model_stats"]
    }
    assert (counted["fork"], counted["one"], counted["two"]) == (2, 1, 3)


def test_an_ensemble_may_be_a_step(server):
    """Its parts are those of the outer one."""
    assert out(ask(server, "nested", [1, 2, 3, 4])) == [[23, 33, 43, 53]]


def test_requests_of_an_ensemble_are_batched_in_its_steps(new_server):
    """Four at a time reach a step that waits for four together."""
    ask(new_server, "chain", [1] * 4)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: out(ask(new_server, "chain", [i] * 4)), range(4)))
    assert answers == [[[(i + 1) * 10 + 2] * 4] for i in range(4)]

    (stats,) = [s for s in new_server.ask("GET", "/v2/models/stats").json["model_stats"] if s["name"] == "one"]
    assert stats["inference_count"] == 5
    assert stats["execution_count"] < 5


def test_a_batch_dimension_comes_and_goes(server):
    """Between a step that batches and one that does not, for one row."""
    assert out(ask(server, "unbatched", [1, 2, 3, 4])) == [[20, 30, 40, 50]]


def test_rows_of_a_model_that_does_not_batch_are_a_batch_to_one_that_does(server):
    """In either direction, and towards the client: what has as many dimensions as its reader takes is left as it is."""
    rows = [1, 2, 3, 4], [5, 6, 7, 8]

    assert out(ask(server, "rows_first", *rows)) == [[11, 21, 31, 41], [51, 61, 71, 81]]
    assert out(ask(server, "rows_last", *rows)) == [[20, 30, 40, 50], [60, 70, 80, 90]]


def test_whole_numbers_for_floats_are_shown_as_they_are_and_passed_on_as_declared(server):
    """A client makes an image of UINT8 that config.pbtxt calls FP32; the next step of an ensemble wants FP32."""
    (told,) = ask(server, "pixels", [1, 2, 3, 25], name="X").json["outputs"]
    assert (told["datatype"], told["data"]) == ("UINT8", [10, 20, 30, 250])
    (told,) = ask(server, "shown", [1, 2, 3, 25]).json["outputs"]
    assert (told["datatype"], told["data"]) == ("FP32", [11, 21, 31, 251])

    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}")
    given = tritonclient.http.InferInput("X", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    seen = client.infer("pixels", [given]).as_numpy("Y")
    client.close()
    assert (seen.dtype, seen.tolist()) == (np.uint8, [[10] * 4])


def test_each_response_of_a_decoupled_step_is_one_of_the_ensemble(server):
    """As events, in order; infer refuses it."""
    answer = server.ask("POST", "/v2/models/streamed/generate_stream", {"IN": [3, 0, 0, 0]})
    events = [json.loads(event.removeprefix(b"data: ")) for event in answer.body.split(b"\n\n")[:-1]]

    assert [event["OUT"][0] for event in events] == [4, 5, 6]
    assert ask(server, "streamed", [1] * 4).status == 501


def test_an_error_of_a_step_names_the_ensemble(server):
    """With the step's own status, and the next request is served."""
    answer = ask(server, "chain", [-100, 0, 0, 0])

    assert (answer.status, answer.error) == (400, "in ensemble 'chain', no -99")
    assert out(ask(server, "chain", [1] * 4)) == [[22] * 4]


@pytest.mark.parametrize(
    ("whole", "rows", "words"),
    {
        "its code": (
            "naming",
            1,
            "in ensemble 'naming', Failed to process the request(s) for model 'named_0', message: ",
        ),
        "its shapes": (
            "rows_first",
            9,
            "in ensemble 'rows_first', inference request batch-size must be <= 8 for 'one'",
        ),
        "its sequences": (
            "serial",
            1,
            "in ensemble 'serial', inference request to model 'series' must specify a non-zero",
        ),
        "an ensemble": ("nested", 1, "in ensemble 'nested', in ensemble 'chain', no -99"),
    }.values(),
)
def test_a_step_that_fails_is_called_as_its_author_calls_it(server, whole, rows, words):
    """In Triton's words, which begin with the ensemble: those who look for a model's name in them find it."""
    answer = ask(server, whole, *[[-100, 0, 0, 0]] * rows)

    assert answer.error.startswith(words), answer.error


def test_a_part_is_told_its_own_name(server):
    """Its code may ask what it is called, and knows nothing of ensembles."""
    answer = ask(server, "naming", [1, 2, 3, 4])

    assert (answer.status, "they call me named named_0 named named" in answer.error) == (500, True), answer.error


def test_requests_are_checked_against_the_ensemble(server):
    """Names and shapes are its own."""
    assert "unexpected inference input 'X' for model 'chain'" in ask(server, "chain", [1] * 4, name="X").error


def test_tritonclient_sees_an_ensemble(server):
    """Metadata, configuration and readiness as those of any model."""
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}")
    ask(server, "chain", [1] * 4)
    metadata, config = client.get_model_metadata("chain"), client.get_model_config("chain")
    ready = client.is_model_ready("chain")
    client.close()

    assert ready
    assert metadata["platform"] == "ensemble"
    assert metadata["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}]
    assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["one", "ten", "two"]


def test_an_archive_holds_an_ensemble_and_its_parts(serve, repository, tmp_path, runtime):
    """One target model, asked by boto3; its parts are nobody else's."""
    store = tmp_path / "store"
    store.mkdir()
    with tarfile.open(store / "e.tar.gz", "w:gz") as tar:
        for name in ("chain", "one", "ten", "two"):
            tar.add(repository / name, name)
    server = serve({"MME_MODEL_STORE": str(store)})
    body = {"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    answer = runtime(server).invoke_endpoint(
        EndpointName="e", TargetModel="e.tar.gz", ContentType="application/json", Body=json.dumps(body)
    )

    assert json.loads(answer["Body"].read())["outputs"][0]["data"] == [22, 32, 42, 52]
    assert [model["modelName"] for model in server.ask("GET", "/models").json["models"]] == ["e.tar.gz"]
    assert ask(server, "one", [1] * 4).status == 404


BROKEN = {
    "a circle": (["one b a", "two a b", "ten IN OUT"], "ensemble tensor 'a' is unused in ensemble 'e'"),
    "an output in a circle": (
        ["one OUT a", "two a OUT", "ten IN SIDE"],
        "output 'OUT' for ensemble 'e' is not written",
    ),
    "a tensor that comes from nowhere": (["one IN OUT", "two c SIDE"], "at least one of its depending tensors, 'c'"),
    "an unused tensor": (["one IN a", "two IN OUT"], "ensemble tensor 'a' is unused"),
    "an unused input": (["one a OUT", "two b a"], "ensemble input 'IN' for ensemble e' is not used"),
    "an output nobody writes": (["one IN SIDE"], "ensemble output 'OUT' for ensemble e' is not used"),
    "a tensor written twice": (["one IN OUT", "two IN OUT"], "in an output map only once for ensemble 'e' step 1"),
    "an unknown model": (["nobody IN OUT"], "contains models that are not available or ambiguous: nobody"),
}
SIDE = 'output { name: "SIDE" data_type: TYPE_FP32 dims: [ 4 ] }'


@pytest.mark.parametrize("what", BROKEN)
def test_an_inconsistent_ensemble_is_refused_by_name(broken, what):
    """When it is loaded, with Triton's words."""
    chain, words = BROKEN[what]
    more = SIDE if "SIDE" in str(chain) else ""
    assert words in broken(lambda folder: ensemble(folder, *chain, more=more))


CONFIGS = {
    "a wrong type": (
        "TYPE_FP32 dims: [ 4 ]",
        "TYPE_INT32 dims: [ 4 ]",
        "inconsistent data type: TYPE_INT32 is inferred from model e",
    ),
    "a wrong shape": ("dims: [ 4 ]", "dims: [ 5 ]", "inconsistent shape"),
    "too large a batch": ("max_batch_size: 8", "max_batch_size: 64", "only allows maximum batch size to be 8"),
    "a wrong input": ('key: "X"', 'key: "Z"', "input X in model one is not mapped to any ensemble tensors"),
    "a wrong output": ('key: "Y"', 'key: "Z"', "mapped from non-existing output Z in model one"),
    "a backend": ('platform: "ensemble"', 'platform: "ensemble" backend: "python"', "empty backend type"),
    "instances": (
        'platform: "ensemble"',
        'platform: "ensemble" instance_group { count: 2 }',
        "instance group should not",
    ),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_wrong_configuration_is_refused_by_name(broken, what):
    """Whatever disagrees with the models of its steps."""
    old, new, words = CONFIGS[what]

    def write(folder):
        ensemble(folder, "one IN OUT")
        text = (folder / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(text.replace(old, new))

    assert words in broken(write)


@pytest.fixture(scope="module")
def good_models(tmp_path_factory, repository):
    """A server of three good models in memory, and its repository."""
    root = tmp_path_factory.mktemp("broken")
    for name in ("one", "two", "ten"):
        (root / name).symlink_to(repository / name)
    with Server(tmp_path_factory.mktemp("server"), {"MME_MODEL_REPOSITORY": str(root)}) as running:
        for model in root.iterdir():
            assert running.ask("POST", f"/v2/repository/models/{model.name}/load").status == 200
        yield running, root


@pytest.fixture
def broken(good_models):
    """What the load of an ensemble `e` beside good models is refused with."""
    server, root = good_models

    def refusal(write):
        write(root / "e")
        return server.ask("POST", "/v2/repository/models/e/load").error

    yield refusal
    shutil.rmtree(root / "e")
