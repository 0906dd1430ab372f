"""Inference scripts as SageMaker's own containers take them: in all three modes, through the same code."""

from __future__ import annotations

import functools
import io
import json
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import botocore.exceptions
import numpy as np
import pytest
import tritonclient.http as triton

from tests.contract import digits, models, scripts
from tests.contract.digits import ROWS
from tests.contract.server import Server, eventually, post

ROW = json.dumps(ROWS[:1].tolist()).encode()
MEGABYTES_20 = 20_000_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The models by their names, each in a folder as its archive unpacks."""
    base = tmp_path_factory.mktemp("scripts")
    files = {"model.joblib": digits.dumped()}
    return {
        "digits": scripts.lay_out(base / "digits", scripts.CLASSIFIER, **files),
        "rooted": scripts.lay_out(base / "rooted", scripts.CLASSIFIER, "inference.py", **files),
        "tells": scripts.lay_out(base / "tells", scripts.TELLS, **{"code/helper.py": "NUMBER = 1"}),
        "twin": scripts.lay_out(base / "twin", scripts.TELLS, **{"code/helper.py": "NUMBER = 2"}),
        "custom": scripts.lay_out(base / "custom", scripts.CUSTOM),
        "broken": scripts.lay_out(base / "broken", "def model_fn(model_dir): raise OSError('no weights here')"),
        "pieces": scripts.lay_out(base / "pieces", scripts.STREAMS),
        "plus": models.lay_out(base / "plus", models.plus(1)),
    }


@dataclass
class Asked:
    """An answer, whoever asked: SageMaker's container contract, or boto3."""

    status: int
    content_type: str
    body: bytes
    attributes: str = ""

    @property
    def json(self) -> Any:
        """The document in the body."""
        return json.loads(self.body)


class ByPlatform:
    """SageMaker drives: it loads from folders and invokes by path."""

    def __init__(self, server, folders):
        self.server = server
        for name, folder in folders.items():
            if name != "broken":
                assert server.ask("POST", "/models", {"model_name": name, "url": str(folder)}).status == 200

    def ask(self, name, body, content_type=None, accept=None, attributes=None):
        """One invocation."""
        headers = {"Content-Type": content_type, "Accept": accept, "X-Amzn-SageMaker-Custom-Attributes": attributes}
        given = {key: value for key, value in headers.items() if value is not None}
        answer = self.server.ask("POST", f"/models/{name}/invoke", body, **given)
        told = answer.headers.get("x-amzn-sagemaker-custom-attributes", "")
        return Asked(answer.status, answer.headers["content-type"], answer.body, told)


class ByHeader(ByPlatform):
    """Archives of a store, by HTTP and the target model's header."""

    def __init__(self, server):
        self.server = server

    def ask(self, name, body, content_type=None, accept=None, attributes=None):
        """One invocation."""
        headers = {"Content-Type": content_type, "Accept": accept, "X-Amzn-SageMaker-Custom-Attributes": attributes}
        given = {key: value for key, value in headers.items() if value is not None}
        target = {"X-Amzn-SageMaker-Target-Model": f"{name}.tar.gz"}
        answer = self.server.ask("POST", "/invocations", body, **target, **given)
        told = answer.headers.get("x-amzn-sagemaker-custom-attributes", "")
        return Asked(answer.status, answer.headers["content-type"], answer.body, told)


class ByBoto:
    """Archives of a store in S3, by boto3."""

    def __init__(self, server, client):
        self.server = server
        self._client = client

    def ask(self, name, body, content_type=None, accept=None, attributes=None):
        """One invocation; a model's error is the answer that boto3 tells of."""
        given = {"ContentType": content_type, "Accept": accept, "CustomAttributes": attributes}
        given = {key: value for key, value in given.items() if value is not None}
        try:
            answer = self._client.invoke_endpoint(EndpointName="e", TargetModel=f"{name}.tar.gz", Body=body, **given)
        except botocore.exceptions.ClientError as error:
            original = error.response  # a KeyError below: it was no ModelError
            return Asked(original["OriginalStatusCode"], "application/json", original["OriginalMessage"].encode())
        told = answer.get("CustomAttributes", "")
        return Asked(200, answer["ContentType"], answer["Body"].read(), told)


@pytest.fixture(scope="module")
def platform(tmp_path_factory, folders):
    """See `ByPlatform`."""
    with Server(tmp_path_factory.mktemp("platform"), {"SAGEMAKER_MULTI_MODEL": "true"}) as server:
        yield ByPlatform(server, folders)


@pytest.fixture(scope="module")
def in_s3(tmp_path_factory, folders, bucket, s3, s3_url, aws):
    """The environment of a server of these models as archives in S3, packed by `mme pack`."""
    packed = tmp_path_factory.mktemp("archives")
    for name, folder in folders.items():
        archive = models.pack(folder, packed / f"{name}.tar.gz")
        s3.upload_file(str(archive), bucket, f"scripts/{name}.tar.gz")
    return {"MME_MODEL_STORE": f"s3://{bucket}/scripts", **aws(s3_url)}


@pytest.fixture(scope="module")
def store(tmp_path_factory, folders, in_s3):
    """Such a server; the models' processes are those of the module, as it is."""
    with Server(tmp_path_factory.mktemp("store"), in_s3) as server:
        for name in folders:
            server.ask("POST", f"/v2/repository/models/{name}.tar.gz/load", {})
        yield server


@pytest.fixture
def cold(store, s3, bucket):
    """Puts a model where that server finds it by a name that it has not heard before; returns what asks it."""
    own = uuid.uuid4().hex

    def put(name):
        s3.copy({"Bucket": bucket, "Key": f"scripts/{name}.tar.gz"}, bucket, f"scripts/{own}.tar.gz")
        return functools.partial(ByHeader(store).ask, own)

    yield put
    assert store.ask("POST", f"/v2/repository/models/{own}.tar.gz/unload", {}).status == 200


@pytest.fixture(scope="module", params=[pytest.param("platform", marks=pytest.mark.long), "header", "boto3"])
def asker(request):
    """Every way to ask multi-model servers."""
    if request.param == "platform":
        return request.getfixturevalue("platform")
    server = request.getfixturevalue("store")
    return ByHeader(server) if request.param == "header" else ByBoto(server, request.getfixturevalue("runtime")(server))


def npy(array):
    """An array in numpy's format."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


FORMS = {
    "application/json": (lambda rows: json.dumps(rows.tolist()).encode(), json.loads),
    "text/csv": (
        lambda rows: "\n".join(",".join(map(str, row)) for row in rows.tolist()).encode(),
        lambda body: [int(line) for line in body.split()],
    ),
    "application/x-npy": (npy, lambda body: np.load(io.BytesIO(body)).tolist()),
}


@pytest.mark.parametrize("accept", FORMS)
@pytest.mark.parametrize("content_type", FORMS)
@pytest.mark.parametrize("name", ["digits", "rooted"])
def test_a_model_of_scikit_learn_is_served_as_it_is(asker, name, content_type, accept):
    """A joblib file and `model_fn` in `code/` or at the root, without configuration; JSON, CSV and npy both ways."""
    write, (_, read) = FORMS[content_type][0], FORMS[accept]

    answer = asker.ask(name, write(ROWS), content_type, accept)

    assert (answer.status, answer.content_type) == (200, accept)
    assert read(answer.body) == digits.MODEL.predict(ROWS).tolist()


def test_what_headers_say_reaches_the_script(asker):
    """Content type, accept and custom attributes; the latter come back as well."""
    answer = asker.ask("tells", b"\x00\x01\x02", "image/png", "text/x-told", "trace=7")

    assert (answer.status, answer.content_type, answer.attributes) == (200, "application/json", "trace=7")
    told = answer.json
    assert told["body"] == ["bytes", 3]
    assert (told["content_type"], told["accept"], told["attributes"]) == ("image/png", "text/x-told", "trace=7")
    assert told["model"]["files"] == ["code"]
    assert told["model"]["gpu"] is None


@pytest.mark.parametrize("body", [b"", b"{", b'{"inputs": 3}', b"1,2", json.dumps(models.ONE).encode()])
def test_a_body_is_handed_over_whatever_it_holds(asker, body):
    """Empty, no JSON, no request of KServe's, or one that would be: the script decides, cold or warm."""
    answer = asker.ask("tells", body)

    assert answer.status == 200
    assert answer.json["body"] == ["str", len(body)]
    assert (answer.json["content_type"], answer.json["accept"]) == ("application/json", "application/json")


@pytest.mark.parametrize("content_type", ["application/vnd.sagemaker-triton.binary+json;json-header-size=9999", "x"])
def test_a_content_type_of_tensors_means_nothing_to_a_script(asker, content_type):
    """It is handed over with the body."""
    answer = asker.ask("tells", b"abc", content_type)

    assert answer.json["content_type"] == content_type


@pytest.mark.parametrize("size", [0, 1, 70_000, MEGABYTES_20])
def test_bodies_of_every_size_pass_both_ways(asker, size):
    """Twenty megabytes and nothing at all come back byte for byte."""
    body = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()

    answer = asker.ask("tells", body, "image/x-echo")

    assert (answer.status, answer.content_type) == (200, "image/x-echoed")
    assert answer.body == body


def test_functions_of_ones_own_read_and_write_what_they_like(asker):
    """Raw floats in, raw floats out; and what the toolkit's encoders know."""
    floats = np.array([1.5, 2.0], "<f4")

    raw = asker.ask("custom", floats.tobytes(), "application/x-floats", "application/x-floats")
    assert raw.content_type == "application/x-floats"
    assert np.frombuffer(raw.body, "<f4").tolist() == [3.0, 4.0]
    assert asker.ask("custom", b"[1, 2]", "application/json", "text/csv").body == b"2.0\n4.0\n"


@pytest.mark.parametrize(
    ("name", "body", "content_type", "accept", "status", "words"),
    [
        (
            "digits",
            b"<x/>",
            "text/xml",
            None,
            415,
            "application/json, text/csv, application/jsonlines, application/x-npy and application/x-npz",
        ),
        (
            "digits",
            ROW,
            "application/x-www-form-urlencoded",
            None,
            415,
            "curl says so unless told otherwise: -H 'Content-Type: application/json'",
        ),
        (
            "digits",
            ROW,
            "application/json",
            "image/png",
            406,
            "application/json, text/csv, application/jsonlines and application/x-npy",
        ),
        ("digits", b"[[1", "application/json", None, 400, "the body is not application/json"),
        (
            "digits",
            b"[[1]]",
            "application/json",
            None,
            400,
            "a row of the body has 1 numbers, and the model 64 features",
        ),
        ("custom", b"a", "text/html", None, 415, "text/html"),
        ("custom", b"[1]", "application/json", "text/html", 406, "text/html"),
        ("tells", b"fail", "text/csv", None, 500, "ValueError: the body says so"),
        ("tells", b"fail", "text/csv", None, 500, "code/inference.py("),
        ("tells", b"exit", "text/csv", None, 500, "SystemExit: 3"),
        ("tells", b"\xff", "text/csv", None, 400, "not UTF-8"),
        ("tells", b"status 422", "text/csv", None, 422, "the script says so"),
        ("tells", b"status 429", "text/csv", None, 429, "the script says so"),
        ("tells", b"status 404", "text/csv", None, 400, "the script says so"),
        ("tells", b"status 503", "text/csv", None, 503, "the script says so"),
        ("tells", b"status 200", "text/csv", None, 400, "the script says so"),
    ],
)
def test_errors_have_the_statuses_of_sagemakers_containers(asker, name, body, content_type, accept, status, words):
    """415 and 406 for types, 500 with the traceback for what the script raises, or what it says; and it goes on."""
    answer = asker.ask(name, body, content_type, accept)

    assert (answer.status, answer.content_type) == (status, "application/json")
    assert words in answer.json["error"]
    assert asker.ask("tells", b"well").status == 200


def test_a_script_without_memory_is_told_as_such(cold):
    """507 is how SageMaker learns that others have to go."""
    answer = cold("tells")(b"memory", "text/csv")

    assert answer.status == 507
    assert "ran out of memory" in answer.json["error"]


def test_a_script_that_ends_its_process_is_started_again(cold):
    """The request is answered with what happened, the next one by a new process."""
    ask = cold("tells")
    before = ask(b"").json["model"]["pid"]

    died = ask(b"die", "text/csv")

    assert died.status == 500
    assert "SIGKILL" in died.json["error"]
    assert ask(b"").json["model"]["pid"] != before


def test_scripts_of_one_name_do_not_mix(asker):
    """Two models whose modules are called alike have processes, and so modules, of their own."""
    numbers = [asker.ask(name, b"").json["number"] for name in ("tells", "twin", "tells", "twin")]

    assert numbers == [1, 2, 1, 2]


def test_many_invocations_at_a_time_get_their_own_answers(asker):
    """Of several models, in parallel."""

    def one(number):
        name = ("tells", "twin")[number % 2]
        told = asker.ask(name, b"x" * number, "text/csv", f"accept/{number}").json
        return (
            told["number"] == 1 + number % 2 and told["body"] == ["str", number] and told["accept"][7:] == str(number)
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(300)))


def test_a_model_of_triton_beside_scripts_is_what_it_was(asker):
    """Tensors in KServe's JSON, and the old errors."""
    answer = asker.ask("plus", json.dumps(models.ONE).encode(), "application/json")
    assert models.y(answer.json) == [2, 3, 4, 5]
    wrong = asker.ask("plus", b"1,2", "text/csv")
    assert wrong.status == 400
    assert "failed to parse the request JSON buffer" in wrong.json["error"]


# -- loading ---------------------------------------------------------------------------------------------------------


def test_a_model_fn_that_fails_is_named_by_the_load(serve, folders):
    """LOAD answers with the exception and its line, and the model is not there."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    answer = server.ask("POST", "/models", {"model_name": "broken", "url": str(folders["broken"])})

    assert answer.status == 400
    assert "failed while model_fn ran: OSError: no weights here" in answer.error
    assert "code/inference.py(1): model_fn" in answer.error
    assert server.ask("GET", "/models/broken").status == 404


def test_a_model_fn_that_fails_is_named_to_who_asks(store):
    """The same through TargetModel, with whatever body."""
    answer = ByHeader(store).ask("broken", b"1,2", "text/csv")

    assert answer.status == 400
    assert "OSError: no weights here" in answer.json["error"]


def test_a_body_for_nobody_is_for_an_unknown_model(store):
    """A body that nothing can read does not hide that there is no such model."""
    answer = ByHeader(store).ask("nobody", b"1,2", "text/csv")

    assert answer.status == 404
    assert "nobody.tar.gz" in answer.json["error"]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"a,b", "text/csv"),
        (b"", None),
        (b"a,b", "application/vnd.sagemaker-triton.binary+json;json-header-size=0"),
        (b"a,b", "application/vnd.sagemaker-triton.binary+json;json-header-size=9999"),
        (json.dumps(models.ONE).encode(), "application/json"),
    ],
)
def test_a_cold_script_is_asked_with_the_body_that_loaded_it(cold, body, content_type):
    """Nobody knew what the body was for before the load: nothing, tensors in JSON, or their binary form."""
    answer = cold("twin")(body, content_type)

    assert answer.status == 200
    assert answer.json["body"][1] == len(body)
    assert answer.json["content_type"] == (content_type or "application/json")


def test_a_model_that_turns_from_a_script_into_tensors(store, folders, s3, bucket, tmp_path):
    """Under one name: what a body means is what the archive of that day says, without a restart."""
    for source, status in (("tells", 200), ("plus", 400), ("tells", 200)):
        archive = models.pack(folders[source], tmp_path / f"{source}.tar.gz")
        s3.upload_file(str(archive), bucket, "scripts/turning.tar.gz")
        for _ in range(2):
            assert ByHeader(store).ask("turning", b"1,2", "text/csv").status == status
        assert store.ask("POST", "/v2/repository/models/turning.tar.gz/unload", {}).status == 200
    s3.delete_object(Bucket=bucket, Key="scripts/turning.tar.gz")


@pytest.mark.parametrize("inference_type", [pytest.param("generate", marks=pytest.mark.long), "generate_stream"])
def test_a_script_is_a_script_whatever_bodies_mean_to_other_models(serve, in_s3, inference_type):
    """Triton's inference types are about tensors; an answer that waited for its load says so all the same."""
    server = serve({**in_s3, "SAGEMAKER_TRITON_INFERENCE_TYPE": inference_type})
    headers = {"X-Amzn-SageMaker-Target-Model": "twin.tar.gz", "Content-Type": "text/csv"}

    for cold in (True, False):
        answer = server.ask("POST", "/invocations", b"1,2", **headers)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json["number"] == 2
        assert ("server-timing" in answer.headers) == cold


def test_what_a_script_prints_and_logs_is_in_the_log(store):
    """With the model's name; its logging shows from INFO on, as in SageMaker's containers."""
    ByHeader(store).ask("tells", b"", "text/x-logged")

    def logged(words):
        lines = [line for line in store.lines if words in line["message"]]
        return lines and lines[-1]["target_model"]

    assert eventually(lambda: logged("asked with text/x-logged"), "the line that the script logged") == "tells.tar.gz"
    assert eventually(lambda: logged("loading from "), "the line that the script printed") == "rooted.tar.gz"


# -- KServe's routes ---------------------------------------------------------------------------------------------------


def test_kserve_sees_an_ordinary_model_of_bytes(store):
    """Metadata, configuration and statistics are those of a model with one UINT8 tensor on either side."""
    metadata = store.ask("GET", "/v2/models/digits.tar.gz").json
    (tensor,) = metadata["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("BODY", "UINT8", [-1])
    assert metadata["outputs"] == metadata["inputs"]
    config = store.ask("GET", "/v2/models/digits.tar.gz/config").json
    assert (config["backend"], config["max_batch_size"]) == ("sagemaker", 0)

    before = store.ask("GET", "/v2/models/digits.tar.gz/stats").json["model_stats"][0]["inference_count"]
    ByHeader(store).ask("digits", b"[" + json.dumps(ROWS[0].tolist()).encode() + b"]")
    after = store.ask("GET", "/v2/models/digits.tar.gz/stats").json["model_stats"][0]["inference_count"]
    assert after == before + 1


def test_kserve_infers_with_tensors_and_parameters(store):
    """Triton's client sends the body as a tensor and the content type as a parameter, and gets both back."""
    body = np.frombuffer(FORMS["text/csv"][0](ROWS[:2]), np.uint8)
    tensor = triton.InferInput("BODY", [len(body)], "UINT8")
    tensor.set_data_from_numpy(body)

    with triton.InferenceServerClient(store.address) as client:
        result = client.infer("digits.tar.gz", [tensor], parameters={"content_type": "text/csv", "accept": "text/csv"})

    assert len(result.as_numpy("BODY").tobytes().split()) == 2
    assert result.get_response()["parameters"]["content_type"] == "text/csv"


def test_kserve_errors_are_the_same(store):
    """A content type that is not read is 415 there as well."""
    request = {"inputs": [{"name": "BODY", "shape": [1], "datatype": "UINT8", "data": [65]}]}
    request["parameters"] = {"content_type": "text/xml"}

    answer = store.ask("POST", "/v2/models/digits.tar.gz/infer", request)

    assert answer.status == 415
    assert "text/xml" in answer.error


# -- one model -------------------------------------------------------------------------------------------------------


def test_a_single_script_is_what_invocations_asks(serve, folders):
    """The folder that SageMaker mounts is the model, called `model`; /ping waits for it."""
    server = serve({"MME_MODEL_DIR": str(folders["custom"])})

    answer = server.ask("POST", "/invocations", b"1,2\n3,4\n", Content_Type="text/csv", Accept="text/csv")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/csv"
    assert answer.body.split() == [b"2.0,4.0", b"6.0,8.0"]
    assert server.ask("GET", "/models").json["models"] == [{"modelName": "model", "modelUrl": str(folders["custom"])}]
    assert server.ask("POST", "/invocations", b"", Content_Type="text/xml").status == 415


def test_boto3_streams_the_answer_of_a_script(serve, folders, runtime):
    """invoke_endpoint_with_response_stream: the one answer in frames, with the script's content type."""
    client = runtime(serve({"MME_MODEL_DIR": str(folders["tells"])}))

    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="e", Body=b"\x01" * 100_000, ContentType="image/x-echo", Accept="a/b"
    )

    assert answer["ContentType"] == "image/x-echoed"
    assert b"".join(part["PayloadPart"]["Bytes"] for part in answer["Body"]) == b"\x01" * 100_000
    told = client.invoke_endpoint_with_response_stream(EndpointName="e", Body=b"", Accept="a/b")
    assert json.loads(b"".join(part["PayloadPart"]["Bytes"] for part in told["Body"]))["accept"] == "a/b"


def test_the_variables_of_sagemakers_containers_are_honoured(serve, folders, tmp_path):
    """What the SageMaker SDK sets for every framework: program, directory, workers, accepted type, region, log level."""
    folder = scripts.lay_out(tmp_path / "model", scripts.TELLS, "code/serve_it.py", **{"code/helper.py": "NUMBER = 5"})
    server = serve(
        {
            "MME_MODEL_DIR": str(folder),
            "SAGEMAKER_PROGRAM": "serve_it.py",
            "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code",
            "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "2",
            "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
            "SAGEMAKER_REGION": "us-east-1",
        }
    )

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: server.ask("POST", "/invocations", b"").json, range(64)))

    assert {each["number"] for each in told} == {5}
    assert {each["accept"] for each in told} == {"text/csv"}
    assert len({each["model"]["pid"] for each in told}) == 2


def test_a_body_that_comes_while_its_model_leaves_memory_waits_for_it_to_come_back(store, tmp_path):
    """It is never taken for tensors: a model that is still answering somebody takes no new requests, nor is it unknown."""
    name, go_on = "pieces.tar.gz", tmp_path / "go on"

    def ask(**said):
        return store.ask("POST", "/invocations", said, X_Amzn_SageMaker_Target_Model=name)

    def state():
        return next(row["state"] for row in store.ask("POST", "/v2/repository/index", {}).json if row["name"] == name)

    def missed():
        return store.metric("mme_model_cache_misses_total", model=name)

    with ThreadPoolExecutor(3) as pool:
        long = store.connect()
        long.send(
            post("/invocations", {"pieces": 2, "wait_at": 1, "file": str(go_on)}, X_Amzn_SageMaker_Target_Model=name)
        )
        eventually(lambda: long.socket.recv(4096), "the first piece")
        unloaded = pool.submit(store.ask, "POST", f"/v2/repository/models/{name}/unload", {})
        eventually(lambda: state() == "UNLOADING", "the unload")
        before = missed()
        answer = pool.submit(ask, pieces=1)
        eventually(lambda: answer.done() or missed() > before, "the next request")
        go_on.touch()
        assert answer.result().body == b"piece 0;"
        assert unloaded.result().status == 200
        long.close()
    store.ask("POST", f"/v2/repository/models/{name}/unload", {})  # the process that came back is this test's


def test_a_script_in_an_archive_of_its_own_is_fetched(serve, tmp_path, s3, s3_url, bucket, aws):
    """SAGEMAKER_SUBMIT_DIRECTORY may be in S3, as the SageMaker SDK has it for scikit-learn."""
    source = scripts.lay_out(tmp_path / "source", scripts.TELLS, "inference.py", **{"helper.py": "NUMBER = 3"})
    s3.upload_file(str(models.pack(source, tmp_path / "sourcedir.tar.gz")), bucket, "job/source/sourcedir.tar.gz")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").touch()
    submitted = {"SAGEMAKER_SUBMIT_DIRECTORY": f"s3://{bucket}/job/source/sourcedir.tar.gz"}

    server = serve({"MME_MODEL_DIR": str(folder), **submitted, **aws(s3_url)})

    told = server.ask("POST", "/invocations", b"1,2", Content_Type="text/csv").json
    assert (told["number"], told["model"]["files"]) == (3, ["weights"])


def test_a_script_in_a_mounted_archive_serves_every_model(serve, tmp_path):
    """As Amazon's containers take SAGEMAKER_SUBMIT_DIRECTORY; SAGEMAKER_PROGRAM names the file in it."""
    source = scripts.lay_out(tmp_path / "source", scripts.TELLS, "script.py", **{"helper.py": "NUMBER = 3"})
    archive = shutil.make_archive(str(tmp_path / "user_code"), "gztar", source)
    server = serve(
        {
            "SAGEMAKER_MULTI_MODEL": "true",
            "SAGEMAKER_PROGRAM": "script.py",
            "SAGEMAKER_SUBMIT_DIRECTORY": archive,
            "MME_CACHE_DIR": str(tmp_path / "cache"),
        }
    )

    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).touch()
        assert server.ask("POST", "/models", {"model_name": name, "url": str(folder)}).status == 200
        told = server.ask("POST", f"/models/{name}/invoke", b"1,2", Content_Type="text/csv").json
        assert (told["number"], told["model"]["files"]) == (3, [name])


def test_a_single_script_that_fails_keeps_ping_unhealthy(serve, folders):
    """The server lives, and the log says why the model does not."""
    server = serve({"MME_MODEL_DIR": str(folders["broken"])}, ready=False)

    eventually(lambda: "no weights here" in server.log, "the reason in the log")
    assert server.ask("GET", "/ping").status == 503
    assert server.ask("POST", "/invocations", b"1,2", Content_Type="text/csv").status == 400


def test_models_of_one_framework_import_it_once(serve, tmp_path):
    """Their processes begin with it, draw numbers of their own, and heed what variables a script sets before it.

    Also those that require nothing but what the server has: it is not installed again. What they share counts once.
    """
    requires = {"code/requirements.txt": "scikit-learn>=0.24\nnumpy>=1.20  # as trained\n"}
    for name, before, files in (
        ("a", "", {}),
        ("b", "", {}),
        ("met", "", requires),
        ("alone", "os.environ['MME_TEST_OF_THREADS'] = '1'", requires),
    ):
        folder = scripts.lay_out(tmp_path / name, scripts.BEGINS.replace("# before", before), **files)
        models.pack(folder, tmp_path / f"{name}.tar.gz")
    server = serve({"MME_MODEL_STORE": str(tmp_path)})
    told = {name: ByHeader(server).ask(f"{name}", b"{}").json for name in ("a", "b", "met", "alone")}
    there = {name: each["there"] for name, each in told.items()}
    assert there == {"a": True, "b": True, "met": True, "alone": False}
    assert len({each["draws"] for each in told.values()}) == 4
    assert not (server.cache / "environments").exists()
    own = [server.metric("mme_model_memory_bytes", model=f"{name}.tar.gz", kind="host") for name in ("a", "b", "met")]
    assert own[0] > own[1] + 30e6
    assert own[0] > own[2] + 30e6


@pytest.mark.parametrize(
    ("budget", "statuses"),
    [("150MiB", [200, 200, 200]), pytest.param("64MiB", [507, 507, 507], marks=pytest.mark.long)],
)
def test_what_models_of_one_framework_share_has_to_fit_once(serve, tmp_path, budget, statuses):
    """Beside what is their own: it is nothing that a model needs which finds it there, nor one that was there before."""
    for name in "ab":
        scripts.lay_out(tmp_path / name, scripts.BEGINS)
    server = serve({"SAGEMAKER_MULTI_MODEL": "true", "MME_MEMORY_BUDGET": budget})

    def load(name):
        return server.ask("POST", "/models", {"model_name": name, "url": str(tmp_path / name)}).status

    loaded = [load("a"), load("b")]
    server.ask("DELETE", "/models/a")
    assert [*loaded, load("a")] == statuses


def test_what_a_script_logs_keeps_its_level(serve, tmp_path):
    """And its logger's name."""
    source = "import logging\nlogging.getLogger('mine').warning('beware of %s', 'dogs')\nmodel_fn = print"
    models.pack(scripts.lay_out(tmp_path / "warns", source), tmp_path / "warns.tar.gz")
    server = serve({"MME_MODEL_STORE": str(tmp_path)})
    assert ByHeader(server).ask("warns", b"[]").status != 404

    def logged():
        return [json.loads(line) for line in server.log.splitlines() if "beware of dogs" in line]

    [line] = eventually(logged, "the line of the script")
    assert (line["level"], line["message"], line["target_model"]) == ("warning", "mine: beware of dogs", "warns.tar.gz")
