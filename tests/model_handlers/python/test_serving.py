"""Python models behind a real server: processes, batching, failures, and what is left of them."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

import container
from tests.processes import below
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(container.__file__).parents[1]

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] },
         { name: "TOGETHER" data_type: TYPE_INT32 dims: [ 1 ] },
         { name: "PID" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""
BATCHING = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 10000000 }"

MODEL = """
import os
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        print("printed by", args["model_instance_name"])
        pb_utils.Logger.log_warn("logged in " + pb_utils.get_model_dir())

    def execute(self, requests):
        return [self.answer(r, len(requests)) for r in requests]

    def answer(self, request, together):
        a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        if a[0, 0] == -1:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("no negatives", pb_utils.TritonError.INVALID_ARG)
            )
        if a[0, 0] == -4:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("x" * 100000 + "the end"))
        if a[0, 0] == -2:
            raise ValueError("nobody gets an answer")
        if a[0, 0] == -3:
            sys.exit(1)
        if a[0, 0] == -9:
            os.kill(os.getpid(), 9)
        a += 0  # the model's own
        ones = np.ones((len(a), 1))
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("SUM", a.sum(axis=1, keepdims=True)),
            pb_utils.Tensor("TOGETHER", (together * ones).astype(np.int32)),
            pb_utils.Tensor("PID", (os.getpid() * ones).astype(np.int64)),
        ])

    def finalize(self):
        print("finalized")
"""


class Server:
    """`mme serve` with these words and variables, its log in a file."""

    def __init__(self, folder, *words, **variables):
        self.port = 0
        self.log = folder / "log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("MME_", "SAGEMAKER_", "AWS_"))}
        environ |= {"PYTHONPATH": str(ROOT), "MME_LOG_FORMAT": "json", "MME_MEMORY_BUDGET": "2GB", **variables}
        command = [sys.executable, "-c", "import sys; from container.cli.main import main; sys.exit(main())", "serve"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *words, "--host", "127.0.0.1", "--port", "0"],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
        wait_for(lambda: self.process.poll() is not None or self.ready(), self)
        self.client = tritonclient.http.InferenceServerClient(
            f"127.0.0.1:{self.port}", concurrency=8, network_timeout=PATIENCE
        )

    def ready(self):
        """Whether it listens, answers, and has loaded what it loads at its start."""
        listens = re.search(r"Listening at: http://[^ ]+:(\d+)", self.log.read_text())
        if listens is None:
            return False
        self.port = int(listens[1])
        try:
            return self.call("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def call(self, method, path, document=None):
        """Status and body of a request."""
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, method=method)
        if body is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def infer(self, model, *rows):
        """Outputs by name."""
        return columns(self.client.infer(model, [tensor_of(*rows)]))

    def lines(self, model):
        """What the log says of a model."""
        read = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in read if line.get("target_model") == model]

    def processes(self):
        """The server's and those of its models, whoever started them."""
        return [self.process.pid, *below(self.process.pid)]

    def stop(self):
        """End it as SageMaker does: nothing of it is left."""
        self.client.close()
        processes = self.processes()
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in processes), self)


def tensor_of(*rows):
    """The input of a request of rows [row, 1]."""
    array = np.array([[row, 1] for row in rows], np.float32)
    tensor = tritonclient.http.InferInput("A", array.shape, "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


def columns(result):
    """The outputs of a response by name, each a number a row."""
    return {name: result.as_numpy(name)[:, 0].tolist() for name in ("SUM", "TOGETHER", "PID")}


def wait_for(condition, server):
    """Until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.01)


def write(root, name, extra="", source=MODEL):
    """A model's folder."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(CONFIG + extra)
    (root / name / "1/model.py").write_text(textwrap.dedent(source))
    return root / name


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Servers of a module start and end processes while tests run: see `Server.stop`."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A repository of three equal models, one of which batches."""
    folder = tmp_path_factory.mktemp("serving")
    for name, extra in (("plain", ""), ("batching", BATCHING), ("fragile", ""), ("leaving", "")):
        write(folder / "repository", name, extra)
    server = Server(folder, "--model-repository", str(folder / "repository"))
    yield server
    server.stop()


def together(server, model, *rows):
    """Answers or errors of requests sent at once, by row."""
    pending = {row: server.client.async_infer(model, [tensor_of(row)]) for row in rows}
    answers = {}
    for row, answer in pending.items():
        try:
            answers[row] = columns(answer.get_result())
        except InferenceServerException as error:
            answers[row] = error
    return answers


def test_a_client_is_answered_from_another_process(server):
    """Binary tensors go through the model's process and back, one or several rows."""
    answer = server.infer("plain", 1, 2, 3)
    assert answer["SUM"] == [2, 3, 4]
    [pid] = set(answer["PID"])
    assert pid != server.process.pid
    assert server.process.pid in [parent.pid for parent in psutil.Process(pid).parents()]


def test_requests_are_batched_into_one_execute(server):
    """Four requests at once are one list of four for the model, as its configuration prefers."""
    answers = together(server, "batching", 1, 2, 3, 4)
    assert {row: answer["SUM"] for row, answer in answers.items()} == {1: [2], 2: [3], 3: [4], 4: [5]}
    assert [answer["TOGETHER"] for answer in answers.values()] == [[4]] * 4


def test_the_error_of_one_request_stays_with_it(server):
    """The others of its batch are answered; its own says what the model said, as a bad argument."""
    answers = together(server, "batching", 1, 2, -1, 4)
    error = answers.pop(-1)
    assert (error.message(), error.status()) == ("no negatives", "400")
    assert [answer["TOGETHER"] for answer in answers.values()] == [[4]] * 3


def test_a_long_error_comes_whole(server):
    """As long as a model makes it, within reason."""
    [error] = together(server, "plain", -4).values()
    assert error.message() == "x" * 100000 + "the end"


@pytest.mark.parametrize(("row", "words"), [(-2, "ValueError: nobody gets an answer"), (-3, "SystemExit: 1")])
def test_an_exception_is_the_error_of_its_batch_and_the_process_lives(server, row, words):
    """Type, message and place come to the client; the next request is answered by the same process."""
    before = server.infer("plain", 1)["PID"]
    with pytest.raises(InferenceServerException) as caught:
        server.infer("plain", row)
    assert caught.value.status() == "500"
    assert "Failed to process the request(s) for model 'plain_0', message: " + words in caught.value.message()
    assert "plain/1/model.py(" in caught.value.message()
    assert server.infer("plain", 1)["PID"] == before


def test_what_a_model_prints_and_logs_is_in_the_log_under_its_name(server):
    """Standard output and `Logger` alike, from the first line on."""
    wait_for(lambda: len(server.lines("plain")) >= 2, server)
    messages = " | ".join(line["message"] for line in server.lines("plain"))
    assert "printed by plain_0" in messages
    [logged] = [line for line in server.lines("plain") if line["message"].startswith("logged in ")]
    assert logged["message"].endswith("repository/plain/1")
    assert logged["level"] == "warning"


def test_a_process_that_is_killed_costs_its_requests_alone(server):
    """The client is told of the signal; the next request is answered by a new process; other models never notice."""
    other = server.infer("plain", 1)["PID"]
    [before] = server.infer("fragile", 1)["PID"]
    with pytest.raises(InferenceServerException, match="SIGKILL"):
        server.infer("fragile", -9)
    [after] = server.infer("fragile", 1)["PID"]
    assert after != before
    os.kill(after, signal.SIGKILL)  # while idle
    wait_for(lambda: not psutil.pid_exists(after), server)
    assert server.infer("fragile", 5)["SUM"] == [6]
    assert server.infer("plain", 1)["PID"] == other


def test_unloading_finalizes_and_ends_the_process(server):
    """When the unload is answered, or soon after, no process is left, and `finalize` has run."""
    [pid] = server.infer("leaving", 1)["PID"]
    server.client.unload_model("leaving")
    wait_for(lambda: not psutil.pid_exists(pid), server)
    wait_for(lambda: any(line["message"] == "finalized" for line in server.lines("leaving")), server)


BROKEN = {
    "syntax": ("class X:\n    def\n", 400, "1/model.py line 2: SyntaxError"),
    "initialize": (
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no weights')\n"
            "    def execute(self, requests):\n        return []\n"
        ),
        400,
        "ValueError: no weights",
    ),
    "killed": ("import os\nos.kill(os.getpid(), 9)\n", 500, "SIGKILL"),
    "requirements": ("", 400, "requirements.txt can't be installed: ERROR: "),
}


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    """A server that SageMaker tells what to load, with a model in it."""
    folder = tmp_path_factory.mktemp("platform")
    server = Server(folder, SAGEMAKER_MULTI_MODEL="true")
    write(folder, "neighbour")
    assert server.call("POST", "/models", {"model_name": "neighbour", "url": str(folder / "neighbour")})[0] == 200
    yield server
    assert server.infer("neighbour", 1)["SUM"] == [2]
    server.stop()


def test_a_model_is_loaded_and_unloaded_as_the_platform_says(platform, tmp_path):
    """POST /models answers 200 once the process is up; DELETE gives everything back."""
    for name in ("first", "second"):
        folder = write(tmp_path, name)
        assert platform.call("POST", "/models", {"model_name": name, "url": str(folder)})[0] == 200
        assert platform.infer(name, 1)["SUM"] == [2]
    pids = [platform.infer(name, 1)["PID"][0] for name in ("first", "second")]
    for name in ("first", "second"):
        assert platform.call("DELETE", f"/models/{name}")[0] == 200
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_model_fails_its_load_with_one_clear_error(platform, tmp_path, what):
    """The platform reads why; the server goes on, and no process is left."""
    source, status, words = BROKEN[what]
    folder = write(tmp_path, what, source=source)
    if what == "requirements":
        (folder / "requirements.txt").write_text("nosuchpackage==1.0\n")
        (folder / "wheels").mkdir()
    before = len(platform.processes())
    got, body = platform.call("POST", "/models", {"model_name": what, "url": str(folder)})
    assert words in body
    assert got == status
    wait_for(lambda: len(platform.processes()) <= before, platform)


def test_an_interrupt_does_not_wait_for_a_model(tmp_path):
    """SIGINT ends server and models at once, though one executes for an hour."""
    source = """
        import time
        import triton_python_backend_utils as pb_utils


        class TritonPythonModel:
            def execute(self, requests):
                print("executing", flush=True)
                time.sleep(3600)
    """
    write(tmp_path / "models", "sleeper", "", source)
    server = Server(tmp_path, "--model-repository", str(tmp_path / "models"))
    try:
        waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        request = {"inputs": [{"name": "A", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}]}
        waiting.request("POST", "/v2/models/sleeper/infer", json.dumps(request))
        wait_for(lambda: any(line["message"] == "executing" for line in server.lines("sleeper")), server)
        processes = server.processes()

        server.process.send_signal(signal.SIGINT)

        assert server.process.wait(PATIENCE) == 0
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in processes), server)
        with pytest.raises(ConnectionError):
            waiting.getresponse()
        waiting.close()
    finally:
        server.client.close()
        server.process.kill()
