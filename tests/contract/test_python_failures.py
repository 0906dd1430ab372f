"""Python models that misbehave, behind the real server: one clear error for the client, nothing for anybody else."""

from __future__ import annotations

import itertools
import json
import shutil
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.contract.server import PATIENCE, Server, eventually, post
from tests.processes import below, still_there

CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
# For those that take for ever alone: on a busy machine everybody takes long.
IMPATIENT = """
parameters { key: "MME_EXECUTION_TIMEOUT" value: { string_value: "2" } }
parameters { key: "MME_LOAD_TIMEOUT" value: { string_value: "5" } }
"""

HEAD = """
import ctypes, os, resource, shutil, signal, subprocess, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

def babble():
    for fd in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
            os.write(int(fd), b"junk" * 100)


GOOD = [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[7]], np.int32))])]
"""

EXECUTE = """
class TritonPythonModel:
    def execute(self, requests):
        if requests[0].request_id() != "bad":
            return GOOD
{body}
"""

INITIALIZE = """
class TritonPythonModel:
    def initialize(self, args):
{body}

    def execute(self, requests):
        return GOOD
"""

# What execute does → the status and words of the answer.
EXECUTIONS = {
    "too few": ("return []", 500, "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
    "too many": ("return GOOD * 2", 500, "InferenceResponse(s) size is:2"),
    "none at all": ("return None", 500, "Expected a list in the execute return, found type '<class 'NoneType'>'"),
    "none in the list": ("return [None]", 500, "found type '<class 'NoneType'>'"),
    "no list": ("return GOOD[0]", 500, "Expected a list in the execute return"),
    "no response": ("return [GOOD]", 500, "Expected an 'InferenceResponse' object"),
    "a wrong name": (
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('OTHER', np.array([[7]], np.int32))])]",
        500,
        "returned unexpected inference output 'OTHER', its outputs are: OUT",
    ),
    "a wrong type": (
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([[7.0]]))])]",
        500,
        "returned output 'OUT' as FP64, expected INT32",
    ),
    "an exception": ("raise ValueError('bad luck')", 500, "message: ValueError: bad luck"),
    "its own error": (
        "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('not that', pb_utils.TritonError.INVALID_ARG))]",
        400,
        "not that",
    ),
    "sys.exit": ("sys.exit(3)", 500, "SystemExit: 3"),
    "os._exit": ("os._exit(4)", 500, "ended with exit code 4 while it executed a batch"),
    "a segmentation fault": ("ctypes.string_at(0)", 500, "was killed by SIGSEGV while it executed a batch"),
    "abort": ("print('so long', file=sys.stderr); os.abort()", 500, "so long"),
    "its own death": ("os.kill(os.getpid(), signal.SIGKILL)", 500, "was killed by SIGKILL"),
    "a fork that comes back": ("os.fork(); return GOOD", 200, ""),
    "a child left behind": ("subprocess.Popen(['sleep', '1000'], start_new_session=True); os._exit(5)", 500, "code 5"),
    "a memory error": (
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31)); return [bytearray(1 << 33)]",
        507,
        "ran out of memory",
    ),
    "an out-of-memory exit": ("os._exit(137)", 507, "ended with exit code 137"),
    "eternal sleep": ("time.sleep(10**6)", 504, "gave no answer within 2 s"),
    "an endless loop": ("while True: pass", 504, "gave no answer within 2 s"),
    "a flood of words": ("print('x' * 10**6); [print('y' * 100) for _ in range(5000)]; return GOOD", 200, ""),
    "nonsense on every socket": ("babble(); return GOOD", 500, "was ended, since it sent"),
}

# model.py, or what initialize does → the words of the load's error.
LOADS = {
    "a syntax error": ("class TritonPythonModel:\n    def", "1/model.py line "),
    "no such import": ("import no_such_module", "No module named 'no_such_module'"),
    "no class": ("x = 1", "defines no class TritonPythonModel"),
    "an exception": (INITIALIZE.format(body=" " * 8 + "raise RuntimeError('no weights')"), "RuntimeError: no weights"),
    "sys.exit": (INITIALIZE.format(body=" " * 8 + "sys.exit(1)"), "SystemExit: 1"),
    "os._exit": (INITIALIZE.format(body=" " * 8 + "os._exit(6)"), "ended with exit code 6 while it loaded the model"),
    "a segmentation fault": (INITIALIZE.format(body=" " * 8 + "ctypes.string_at(0)"), "SIGSEGV while it loaded"),
    "eternal sleep": (INITIALIZE.format(body=" " * 8 + "time.sleep(10**6)"), "gave no answer within 5 s"),
}
# What befalls a model that is loaded, by nobody's fault but others' → the status and words of the load's error.
BEFALLS = {
    "its process is killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        500,
        "was killed by SIGKILL while it loaded the model; load it again",
    ),
    "its folder is removed": (
        "shutil.rmtree(args['model_repository']); open(args['model_repository'] + '/1/weights')",
        503,
        "was removed while it was loaded; put it back, and load it again",
    ),
}
NUMBERS = itertools.count()


def write(repository, name, source, words=""):
    """A model in the repository; the words of its error tell whether it takes for ever."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(HEAD + textwrap.dedent(source))
    (version.parent / "config.pbtxt").write_text(CONFIG + (IMPATIENT if "gave no answer" in words else ""))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder with a good model in it."""
    folder = tmp_path_factory.mktemp("repository")
    write(folder, "neighbour", EXECUTE.format(body=""))
    return folder


@pytest.fixture(scope="module")
def environ(repository):
    """Of a server of the good model; others are loaded when a test has written them."""
    return {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "neighbour"}


@pytest.fixture(scope="module")
def server(tmp_path_factory, environ):
    """A server whose good model stays in its process, whatever others do in theirs."""
    with Server(tmp_path_factory.mktemp("server"), environ) as running:
        assert ask(running, "neighbour").status == 200
        yield running


@pytest.fixture
def own_server(serve, environ):
    """A server that may lose the good model's process."""
    running = serve(environ)
    assert ask(running, "neighbour").status == 200
    return running


@pytest.fixture
def name():
    """A model's, of which the server has not heard yet."""
    return f"m{next(NUMBERS)}"


def ask(server, model, request_id=""):
    """The answer to one request."""
    body = {"id": request_id, "inputs": [{"name": "N", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}
    return server.ask("POST", f"/v2/models/{model}/infer", body)


class Neighbour(threading.Thread):
    """Somebody who uses the good model all the while."""

    def __init__(self, server):
        super().__init__()
        self._server = server
        self._done = threading.Event()
        self.statuses = []

    def run(self):
        """Ask until told to stop, a hundred times a second at most."""
        while not self._done.wait(0.01):
            self.statuses.append(ask(self._server, "neighbour").status)

    def __enter__(self):
        self.start()
        eventually(lambda: self.statuses, "the neighbour's first answer")
        return self

    def __exit__(self, *_):
        self._done.set()
        self.join(PATIENCE)


def processes(server):
    """The processes below the server's worker and its fork server, by name."""
    return sorted(server.processes.values())


def test_a_load_that_fails_is_logged_once(serve, tmp_path):
    """However it was asked for, and however many requests are told of it until it is loaded again."""
    write(tmp_path, "broken", INITIALIZE.format(body=" " * 8 + "raise MemoryError('no weights')"))
    server = serve({"MME_MODEL_REPOSITORY": str(tmp_path)})
    eventually(lambda: "start-up model 'broken' did not load" in server.log, "the load at start")
    statuses = {ask(server, "broken").status for _ in range(4)}

    def said(words):
        return [line["level"] for line in server.lines if words in line["message"]]

    assert statuses == {507}
    assert said("no weights") == said("load failed: ") != []
    assert said("did not load") == ["error"]


@pytest.mark.parametrize("deed", EXECUTIONS)
def test_an_execution_that_goes_wrong(request, server, repository, name, deed):
    """Its client is told what happened; others are answered, and so is the next request to the same model."""
    body, status, words = EXECUTIONS[deed]
    if status == 507:  # for memory, others are unloaded
        server = request.getfixturevalue("own_server")
    write(repository, name, EXECUTE.format(body=" " * 8 + body), words)
    assert ask(server, name).status == 200
    before = processes(server)
    with Neighbour(server) as neighbour:
        bad = ask(server, name, "bad")
        again = ask(server, name)
        # who was unloaded to make room is back when it is asked for
        eventually(lambda: processes(server) == before, "the processes to be those before")
    assert (bad.status, again.status) == (status, 200), (bad.body, again.body)
    if words:
        assert words in bad.error
    assert set(neighbour.statuses) == {200}
    assert server.ask("POST", f"/v2/repository/models/{name}/unload").status == 200
    eventually(lambda: len(processes(server)) == len(before) - 1, "the process to be gone")


COUNTS = """
class TritonPythonModel:
    def execute(self, requests):
        if requests[0].request_id() == "bad":
            os.abort()
        n = pb_utils.get_input_tensor_by_name(requests[0], "N").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", n * 10 + len(requests))])]
"""


def test_many_requests_of_a_quick_model_that_does_not_batch(server, repository, name):
    """Each is executed for itself, and gets its own answer; a death costs those few that were executed with it."""
    write(repository, name, COUNTS)
    path = f"/v2/models/{name}/infer"
    failed = []

    def client(number):
        with server.connect() as connection:
            for turn in range(150):
                n = 1000 * number + turn
                bad = (number, turn) == (3, 100)
                tensor = {"name": "N", "shape": [1, 1], "datatype": "INT32", "data": [n]}
                answer = connection.send(post(path, {"id": "bad" if bad else str(n), "inputs": [tensor]})).answer()
                if answer.status == 200:
                    assert answer.json["outputs"][0]["data"] == [n * 10 + 1]
                else:
                    failed.append((bad, answer.status, answer.error))

    ask(server, name)
    with ThreadPoolExecutor(24) as clients:
        list(clients.map(client, range(24)))

    assert True in {bad for bad, _, _ in failed}
    assert len(failed) <= 24
    assert {status for _, status, _ in failed} == {500}
    assert all("was killed by SIGABRT" in error for _, _, error in failed)
    [counted] = server.ask("GET", f"/v2/models/{name}/stats").json["model_stats"]
    assert counted["inference_count"] == 1 + 24 * 150 - len(failed)
    assert [batch["batch_size"] for batch in counted["batch_stats"]] == [1]
    server.ask("POST", f"/v2/repository/models/{name}/unload", {})


def test_a_model_that_calls_itself_unavailable_fails_as_a_model(server, repository, name):
    """boto3 tries again what a server says of itself; of a model's error it tells the client, with the model's status."""
    own = "pb_utils.TritonError('no database', pb_utils.TritonError.UNAVAILABLE)"
    write(repository, name, EXECUTE.format(body=f"        return [pb_utils.InferenceResponse(error={own})]"))
    assert (ask(server, name, "bad").status, ask(server, name, "bad").error) == (503, "no database")
    body = {"id": "bad", "inputs": [{"name": "N", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}
    answer = server.ask("POST", "/endpoints/e/invocations", body, X_Amzn_SageMaker_Target_Model=name)
    assert (answer.status, answer.headers["x-amzn-errortype"]) == (424, "ModelError")
    assert (answer.json["OriginalStatusCode"], json.loads(answer.json["OriginalMessage"])["error"]) == (
        503,
        "no database",
    )
    server.ask("POST", f"/v2/repository/models/{name}/unload", {})


@pytest.mark.parametrize("deed", LOADS)
def test_a_load_that_goes_wrong(server, repository, name, deed):
    """Whoever asked is told why; others are answered, and no process is left."""
    source, words = LOADS[deed]
    write(repository, name, source, words)
    before = processes(server)
    with Neighbour(server) as neighbour:
        answer = ask(server, name)

    assert answer.status == 400
    assert words in answer.error
    assert set(neighbour.statuses) == {200}
    eventually(lambda: processes(server) == before, "the process to be gone")


@pytest.mark.parametrize("what", BEFALLS)
def test_what_others_do_to_a_model_that_is_loaded_does_not_make_it_invalid(server, repository, name, what):
    """A 400 would say that it will never load, and an archive would be thrown away."""
    body, status, words = BEFALLS[what]
    write(repository, name, INITIALIZE.format(body=f"        {body}"))
    answer = ask(server, name)

    assert (answer.status, words in answer.error) == (status, True), answer.error
    shutil.rmtree(repository / name, ignore_errors=True)
    write(repository, name, INITIALIZE.format(body="        pass"))
    assert server.ask("POST", f"/v2/repository/models/{name}/load").status == 200
    assert ask(server, name).status == 200
    server.ask("POST", f"/v2/repository/models/{name}/unload", {})


@pytest.mark.parametrize(
    ("statement", "logged"),
    [
        ("import logging; logging.getLogger('mine').warning('beware of %s', 'dogs')", "beware of dogs"),
        ("return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([7], np.int32))])]", "with shape [1]"),
    ],
)
def test_warnings_from_a_models_process_are_warnings(server, repository, name, statement, logged):
    """Those of its author, and those of ours about it."""
    write(repository, name, EXECUTE.format(body=f"        {statement}\n        return GOOD"))
    assert ask(server, name, "bad").status == 200
    lines = eventually(
        lambda: [json.loads(line) for line in server.log.splitlines() if logged in line and f'"{name}"' in line],
        "the line",
    )
    assert [line["level"] for line in lines] == ["warning"]
    server.ask("POST", f"/v2/repository/models/{name}/unload", {})


def test_a_dead_server_leaves_no_process(own_server, repository, name):
    """Kill -9 of everything that gunicorn started: the models' processes end by themselves."""
    write(repository, name, EXECUTE.format(body=" " * 8 + "time.sleep(10**6)"))
    ask(own_server, name)
    family = [own_server.worker, *still_there(below(own_server.worker.pid))]
    own_server.worker.kill()
    _, alive = psutil.wait_procs(family, PATIENCE)

    assert not alive
    eventually(lambda: ask_quietly(own_server) == 200, "the next worker to answer")


def ask_quietly(server):
    """The status, 0 while nobody listens."""
    try:
        return ask(server, "neighbour").status
    except (OSError, json.JSONDecodeError):
        return 0
