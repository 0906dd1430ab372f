"""KServe v2 as Triton's own client speaks it: `tritonclient.http` from PyPI, unchanged."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.contract import models
from tests.contract.server import Server, eventually

LABELLED = """
max_batch_size: 8
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }
"""
BATCHED = "max_batch_size: 8\n"
# Waits for four before it executes; for longer than any test.
FOURS = "max_batch_size: 4\ndynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 600000000 }\n"
NARROW = FOURS.replace("dynamic_batching {", "dynamic_batching { default_queue_policy { max_queue_size: 1 }")
HASTY = FOURS.replace(
    "dynamic_batching {", "dynamic_batching { default_queue_policy { default_timeout_microseconds: 50000 }"
)
CROWDED = "max_batch_size: 16\ndynamic_batching { max_queue_delay_microseconds: 200000 }\n"

# Its config.pbtxt leaves to the code what its tensors are, and to the file what runs it.
COMPLETING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [4]})
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def lay_out_echo(directory, datatype, dims):
    """A model that answers OUTPUT0 with INPUT0."""
    tensor = f"data_type: TYPE_{datatype} dims: {dims}"
    config = f'backend: "identity" input {{ name: "INPUT0" {tensor} }} output {{ name: "OUTPUT0" {tensor} }}'
    models.lay_out(directory, None, config)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A Triton model repository."""
    folder = tmp_path_factory.mktemp("repository")
    models.lay_out(folder / "plus", models.plus(1), BATCHED)
    models.lay_out(folder / "bare", models.plus(2))
    models.lay_out(folder / "types", models.every_type(), BATCHED)
    models.lay_out(folder / "pick", models.pick())
    lay_out_echo(folder / "image", "STRING", [1])
    lay_out_echo(folder / "whole", "INT64", [-1])
    lay_out_echo(folder / "half", "FP16", [-1])
    lay_out_echo(folder / "double", "FP64", [-1])
    labelled = models.lay_out(folder / "labelled", models.plus(1), LABELLED)
    (labelled / "labels.txt").write_text("ant\nbee\ncat\n")
    models.lay_out(folder / "completing", COMPLETING, 'input { name: "X" } output { name: "Y" }')
    for name, config in {"fours": FOURS, "narrow": NARROW, "hasty": HASTY, "crowded": CROWDED}.items():
        models.lay_out(folder / name, models.plus(1), config)
    models.lay_out(folder / "versions", models.plus(1), "version_policy { specific { versions: [1, 3] } }\n")
    for version in (2, 3):
        models.lay_out(folder / "versions", models.plus(version), version=version)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, repository):
    """A server of the repository, all of whose models are ready."""
    environ = {
        "MME_MODEL_REPOSITORY": str(repository),
        "MME_PING_MODE": "ready",
        "MME_DRAIN_SECONDS": "0.5",
        "MME_ALLOW_LOAD_OVERRIDES": "true",
    }
    with Server(tmp_path_factory.mktemp("kserve"), environ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """Triton's client."""
    client = triton.InferenceServerClient(server.address, concurrency=16)
    yield client
    client.close()


def tensor(name, array, *, binary=True, datatype=""):
    """An input."""
    made = triton.InferInput(name, array.shape, datatype or np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def row(*numbers):
    """An input X of `plus`."""
    return [tensor("X", np.array([numbers], np.float32))]


def statistics(client, name, version=""):
    """The statistics of one model version."""
    (stats,) = client.get_inference_statistics(name, version)["model_stats"]
    return stats


def test_server_and_models_are_live_and_ready(client):
    """Liveness and readiness of the server, of models and of versions; what is not there is not ready."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("plus")
    assert client.is_model_ready("versions", "3")
    assert not client.is_model_ready("versions", "2")
    assert not client.is_model_ready("nobody")


def test_code_completes_tensors_that_config_pbtxt_only_names(client):
    """Whether the text names the backend or the file gives it away."""
    x = np.array([1, 2, 3, 4], np.float32)

    answer = client.infer("completing", [tensor("X", x)])

    np.testing.assert_array_equal(answer.as_numpy("Y"), x)
    assert client.get_model_metadata("completing")["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [4]}]


@pytest.mark.parametrize(("said", "lacking"), [({}, "data_type"), ({"data_type": "TYPE_FP32"}, "dims")])
def test_nobody_completes_tensors_of_a_model_without_code(client, said, lacking):
    """Once its file has told that it is no Python."""
    with pytest.raises(InferenceServerException, match=f"model input 'X' must specify '{lacking}' for bare"):
        client.load_model("bare", config=json.dumps({"input": [{"name": "X", **said}]}))


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(client, binary_in, binary_out):
    """Tensors go both ways in JSON and in binary, with the request's id."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    result = client.infer(
        "plus",
        [tensor("X", x, binary=binary_in)],
        outputs=[triton.InferRequestedOutput("Y", binary_data=binary_out)],
        request_id="seven",
    )

    np.testing.assert_array_equal(result.as_numpy("Y"), x + 1)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("seven", "plus", "1")
    assert ("parameters" in response["outputs"][0]) == binary_out


VALUES = {**models.VALUES, "UINT64": np.array([[0, 2**63 - 1], [1, 2]], np.uint64)}


def types_request(*, binary):
    """All inputs of `types`; FP16 has no JSON form."""
    return [
        tensor(f"IN_{name}", values, binary=binary or name == "FP16", datatype=name) for name, values in VALUES.items()
    ]


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_every_data_type(client, binary):
    """Every data type survives the way there and back, to its limits, BYTES and FP16 included."""
    outputs = [triton.InferRequestedOutput(f"OUT_{name}", binary_data=binary or name == "FP16") for name in VALUES]

    result = client.infer("types", types_request(binary=binary), outputs=outputs)

    for name, sent in VALUES.items():
        came = result.as_numpy(f"OUT_{name}")
        if name == "BYTES":
            came = np.vectorize(lambda item: item.decode() if isinstance(item, bytes) else item, otypes="O")(came)
        else:
            assert came.dtype == sent.dtype, name
        np.testing.assert_array_equal(came, sent, err_msg=name)


def test_fp16_is_not_answered_in_json(client):
    """Nor has it one on the way back: asking for it is the client's mistake."""
    wanted = [triton.InferRequestedOutput("OUTPUT0", binary_data=False)]
    with pytest.raises(InferenceServerException, match="sending FP16 data via JSON is not supported") as caught:
        client.infer("half", [tensor("INPUT0", np.array([1], np.float16))], outputs=wanted)
    assert caught.value.status() == "400"


@pytest.mark.parametrize("binary", [True, False])
def test_nan_and_infinities(server, client, binary):
    """They come as the words that Triton's client and Python have for them, and go in JSON as null, which is NaN."""
    numbers = np.array([np.nan, np.inf, -np.inf, 0.5])
    wanted = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
    answer = client.infer("double", [tensor("INPUT0", numbers, binary=binary)], outputs=wanted)
    told = numbers if binary else np.array([np.nan, np.nan, np.nan, 0.5])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), told)

    flat = server.ask("POST", "/v2/models/double/generate", {"INPUT0": numbers.tolist()})
    assert flat.json["OUTPUT0"] == [None, None, None, 0.5]
    again = server.ask("POST", "/v2/models/double/generate", {"INPUT0": flat.json["OUTPUT0"]})
    assert again.json == flat.json


def test_nan_and_infinities_as_triton_writes_them(serve, repository):
    """Where the setting says so, in every answer."""
    server = serve({"MME_MODEL_REPOSITORY": str(repository), "MME_JSON_NONFINITE": "literal"})
    flat = server.ask("POST", "/v2/models/double/generate", {"INPUT0": [float("nan"), float("inf"), -1.5]})
    assert b'"OUTPUT0":[NaN,Infinity,-1.5]' in flat.body
    assert (
        b"NaN"
        in server.ask(
            "POST",
            "/v2/models/double/infer",
            {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP64", "data": [None]}]},
        ).body
    )


def test_generate_takes_a_list_of_one_element_for_it(server):
    """As a client may nest a text that it would send to infer."""
    answer = server.ask("POST", "/v2/models/image/generate", {"INPUT0": [["a text"]]})
    assert answer.json["OUTPUT0"] == "a text"


def test_versions(client):
    """The latest served version answers unless one is named; an unserved one is unknown."""
    assert client.infer("versions", row(0, 0, 0, 0)).as_numpy("Y")[0, 0] == 3
    assert client.infer("versions", row(0, 0, 0, 0), model_version="1").as_numpy("Y")[0, 0] == 1
    with pytest.raises(InferenceServerException, match="version 2 is not found") as raised:
        client.infer("versions", row(0, 0, 0, 0), model_version="2")
    assert raised.value.status() == "404"


@pytest.mark.parametrize(
    ("name", "inputs", "status", "message"),
    [
        ("nobody", [("X", [[1, 2, 3, 4]], "FP32")], "404", "Request for unknown model: 'nobody' is not found"),
        ("plus", [("Q", [[1, 2, 3, 4]], "FP32")], "400", "'Q'"),
        ("plus", [("X", [[1, 2, 3, 4]], "FP64")], "400", "data-type is 'FP64', but model 'plus' expects 'FP32'"),
        ("plus", [("X", [[1, 2, 3]], "FP32")], "400", "unexpected shape for input 'X' for model 'plus'"),
        ("plus", [("X", [[1, 2, 3, 4]] * 9, "FP32")], "400", "batch-size must be <= 8 for 'plus'"),
        ("pick", [("I", [[7]], "INT64")], "500", "ONNX Runtime failed while running model 'pick'"),
    ],
    ids=["model", "name", "type", "shape", "batch", "execution"],
)
def test_errors_reach_the_client_as_sentences(client, name, inputs, status, message):
    """What is wrong comes back in Triton's words with its status; the next request is served."""
    types = {"FP32": np.float32, "FP64": np.float64, "INT64": np.int64}
    tensors = [tensor(key, np.array(data, types[kind])) for key, data, kind in inputs]

    with pytest.raises(InferenceServerException) as raised:
        client.infer(name, tensors)

    assert message in raised.value.message()
    assert raised.value.status() == status
    np.testing.assert_array_equal(client.infer("plus", row(1, 2, 3, 4)).as_numpy("Y"), [[2, 3, 4, 5]])


def test_requests_that_wait_make_one_batch(client):
    """Four requests that come apart are executed together once there are four, each with its own answer."""
    answers = [client.async_infer("fours", row(n, n, n, n)) for n in range(4)]

    for number, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.get_result().as_numpy("Y"), [[number + 1] * 4])
    stats = statistics(client, "fours")
    assert (stats["execution_count"], stats["inference_count"]) == (1, 4)
    assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in stats["batch_stats"]] == [(4, 1)]


def test_concurrent_requests_are_batched_and_all_answered(client):
    """Under load with a queue delay batches are larger than one, and everybody gets the rows that are theirs."""
    answers = [client.async_infer("crowded", row(n, n, n, n)) for n in range(64)]

    for number, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.get_result().as_numpy("Y"), [[number + 1] * 4])
    stats = statistics(client, "crowded")
    assert stats["inference_count"] == stats["inference_stats"]["success"]["count"] == 64
    assert stats["execution_count"] < 64
    assert max(batch["batch_size"] for batch in stats["batch_stats"]) > 1


def test_a_full_queue_refuses(server, client):
    """With max_queue_size waiting, the next request is refused at once with 503; those that wait are answered."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.ask, "POST", "/v2/models/narrow/infer", models.ONE)
        eventually(lambda: server.metric("nv_inference_pending_request_count", model="narrow") == 1, "it to wait")

        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as raised:
            client.infer("narrow", row(1, 2, 3, 4))
        assert raised.value.status() == "503"

        assert server.metric("nv_inference_request_failure", model="narrow", reason="REJECTED") == 1
        client.unload_model("narrow")  # nobody else will come: whoever waits is told at last
        assert waiting.result().status == 503
    client.load_model("narrow")
    assert client.is_model_ready("narrow")


def test_a_request_that_waited_too_long_is_refused(client):
    """A request whose time in the queue is over is refused with 503 and counted."""
    before = statistics(client, "hasty")["inference_stats"]["fail"]["count"]

    with pytest.raises(InferenceServerException, match="timeout expired") as raised:
        client.infer("hasty", row(1, 2, 3, 4))

    assert raised.value.status() == "503"
    assert statistics(client, "hasty")["inference_stats"]["fail"]["count"] == before + 1


def test_repository_index_load_and_unload(server, client, repository):
    """The index lists ready and other models by name; unload and load take effect; one added on disk can be loaded."""
    index = {(row["name"], row.get("version", "")): row for row in client.get_model_repository_index()}
    assert index["plus", "1"]["state"] == index["versions", "3"]["state"] == "READY"
    assert index["plus", "1"]["cache"]["host_bytes"] > 0, "what only this server tells does not hurt the client"

    client.unload_model("bare")
    assert not client.is_model_ready("bare")
    assert "bare" in {row["name"] for row in client.get_model_repository_index()}, "it is still there on disk"

    client.load_model("bare")
    assert client.is_model_ready("bare")
    before = server.metric("mme_model_loads_total", model="bare")
    client.load_model("bare")  # once more, and nothing changed: nothing is done
    os.utime(repository / "bare" / "1" / "model.onnx")
    client.load_model("bare")
    assert server.metric("mme_model_loads_total", model="bare") == before + 1
    np.testing.assert_array_equal(client.infer("bare", row(1, 2, 3, 4)).as_numpy("Y"), [[3, 4, 5, 6]])

    models.lay_out(repository / "late", models.plus(9))
    client.load_model("late")
    models.lay_out(repository / "anew", models.plus(9))
    names = [row["name"] for row in client.get_model_repository_index()]
    assert names[0] == "anew", "which was never loaded"
    assert names == sorted(names)
    np.testing.assert_array_equal(client.infer("late", row(1, 2, 3, 4)).as_numpy("Y"), [[10, 11, 12, 13]])
    with pytest.raises(InferenceServerException, match="nobody"):
        client.load_model("nobody")


def test_a_new_version_that_does_not_load_is_named(client, repository):
    """The load says which one it is and why, and so does the index as long as the version before goes on."""

    def index():
        rows = client.get_model_repository_index()
        return {row["version"]: (row["state"], row.get("reason", "")) for row in rows if row["name"] == "growing"}

    directory = models.lay_out(repository / "growing", models.plus(1))
    client.load_model("growing")
    models.lay_out(directory, b"broken", version=2)
    with pytest.raises(InferenceServerException) as raised:
        client.load_model("growing")
    what = "ONNX Runtime can't load model 'growing'"
    begins = f"load failed for model 'growing': version 2 is at UNAVAILABLE state: Internal: {what}"
    assert raised.value.message().startswith(begins)
    found = index()
    assert (found.keys(), found["1"], found["2"][0]) == ({"1", "2"}, ("READY", ""), "UNAVAILABLE")
    assert found["2"][1].startswith(what)
    assert client.infer("growing", row(0, 0, 0, 0)).as_numpy("Y")[0, 0] == 1

    client.unload_model("growing")
    with pytest.raises(InferenceServerException, match="version 2 is at UNAVAILABLE state"):
        client.load_model("growing")
    assert index().keys() == {"2"}

    (directory / "2" / "model.onnx").write_bytes(models.plus(2))
    client.load_model("growing")
    assert index() == {"2": ("READY", "")}
    shutil.rmtree(directory)
    client.unload_model("growing")


@pytest.mark.parametrize("binary", [True, False])
def test_outputs_can_be_asked_for_as_classes(client, binary):
    """As Triton's client does: the highest, with place and label, of each element of a batch."""
    wanted = [triton.InferRequestedOutput("Y", binary_data=binary, class_count=2)]
    numbers = [tensor("X", np.array([[1, 3, 2, 0], [0, 0, 0, 9]], np.float32))]
    for _ in range(2):  # the second time its header is known
        answer = client.infer("labelled", numbers, outputs=wanted)
        texts = [[b"4.000000:1:bee", b"3.000000:2:cat"], [b"10.000000:3", b"1.000000:0:ant"]]
        np.testing.assert_array_equal(answer.as_numpy("Y").astype("S"), np.array(texts))
        assert answer.get_output("Y")["datatype"] == "BYTES"


def test_classes_of_whole_numbers_are_whole(client):
    """To the last digit, highest first."""
    numbers = [tensor("INPUT0", np.array([2**62 + 1, -5, 2**62 + 2]))]
    answer = client.infer("whole", numbers, outputs=[triton.InferRequestedOutput("OUTPUT0", class_count=3)])
    assert answer.as_numpy("OUTPUT0").tolist() == [b"%d:2" % (2**62 + 2), b"%d:0" % (2**62 + 1), b"-5:1"]


def test_a_model_is_loaded_anew_under_a_stream_of_requests(server, client):
    """Requests that never stop are all answered by the old one or by the new one, and none waits for a load."""
    answers, done = [[], [], []], threading.Event()

    def ask(mine):
        while not done.is_set():
            mine.append(server.ask("POST", "/v2/models/bare/infer", models.ONE))

    def all_see(number):
        eventually(lambda: all(mine and models.y(mine[-1].json)[0] == number for mine in answers), f"{number}")

    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(ask, mine) for mine in answers]
        try:
            all_see(3)
            for number in (1, 5, 6):
                client.load_model("bare", config="{}", files={"file:1/model.onnx": models.plus(number)})
                all_see(number + 1)
            client.load_model("bare")
            all_see(3)
        finally:
            done.set()
    assert [stream.exception() for stream in streams] == [None] * 3

    everything = [answer for mine in answers for answer in mine]
    assert {answer.status for answer in everything} == {200}
    assert {models.y(answer.json)[0] for answer in everything} == {2, 3, 6, 7}
    assert not any("server-timing" in answer.headers for answer in everything)


def test_a_load_may_bring_a_configuration_and_files_of_its_own(server, client):
    """As Triton's clients send them: for that load, and the next is of the model's own again."""
    config = json.dumps({"max_batch_size": 2})
    client.load_model("bare", config=config, files={"file:1/model.onnx": models.plus(7)})
    assert client.get_model_config("bare")["max_batch_size"] == 2
    np.testing.assert_array_equal(client.infer("bare", row(1, 2, 3, 4)).as_numpy("Y"), [[8, 9, 10, 11]])

    with pytest.raises(InferenceServerException, match="must stay within model directory"):
        client.load_model("bare", config=config, files={"file:../1/model.onnx": b""})

    lines = base64.encodebytes(models.plus(8)).decode()  # as the client in C++ sends them, whose lines end too
    parameters = {"config": config, "file:1/model.onnx": lines}
    assert server.ask("POST", "/v2/repository/models/bare/load", {"parameters": parameters}).status == 200
    np.testing.assert_array_equal(client.infer("bare", row(1, 2, 3, 4)).as_numpy("Y"), [[9, 10, 11, 12]])
    client.load_model("bare")
    np.testing.assert_array_equal(client.infer("bare", row(1, 2, 3, 4)).as_numpy("Y"), [[3, 4, 5, 6]])


@pytest.mark.parametrize("body", [b"\xff\xd8\xff an image", b""])
def test_a_raw_request_for_a_string_is_that_string(server, body):
    """As one sends an image: the body is the one element, without a length before it."""
    answer = server.ask("POST", "/v2/models/image/infer", body, Inference_Header_Content_Length="0")

    assert answer.status == 200
    length = int(answer.headers["inference-header-content-length"])
    assert answer.body[length:] == len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("compressed", ["gzip", "deflate"])
def test_compressed_requests(client, compressed):
    """Triton's client may compress what it sends."""
    result = client.infer("plus", row(1, 2, 3, 4), request_compression_algorithm=compressed)

    np.testing.assert_array_equal(result.as_numpy("Y"), [[2, 3, 4, 5]])
