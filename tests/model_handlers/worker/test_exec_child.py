"""Models on interpreters of their own: what they find there, and that every rule of a forked process holds."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.config.pbtxt import parse_config
from model_handlers.environment import Environment
from model_handlers.errors import Kind, MmeError
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelRequest
from model_handlers.scripts.host import ScriptHandler
from tests.environments import another_interpreter, facts_of, too_old, venv, version_of, write_model
from tests.processes import ends_with_all_it_started
from tests.waiting import eventually

pytestmark = pytest.mark.slow

DEEDS = """
import ctypes, signal, subprocess, time


def segfault():
    ctypes.string_at(0)


def die():
    print("first words\\nlast words", file=sys.stderr)
    os._exit(3)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def leave():
    return subprocess.Popen(["sleep", "3600"], start_new_session=True).pid


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def python():
    return subprocess.run(["python", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout
"""
DO = "return globals()[pb_utils.get_input_tensor_by_name(request, 'S').as_numpy().flat[0].decode()]()"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """An environment of our own version with nothing but numpy."""
    return venv(tmp_path_factory.mktemp("environment") / "env")


@pytest.fixture
def load(start, tmp_path, prefix):
    """Loads a model into an environment."""

    def load(facts="", environment=None, **model):
        folder = write_model(tmp_path / "m", facts, **model)
        config = parse_config((folder / "config.pbtxt").read_text(), model="m")
        return start(PythonHandler, CPU, folder / "1/model.py", config, Environment(environment or prefix))

    return load


def ask(handler, deed="", parameters=None):
    """The facts that a model answers with."""
    inputs = {"A": np.ones((1, 2), np.float32)} | ({"S": np.array([[deed.encode()]], object)} if deed else {})
    [answer] = handler.execute_requests([ModelRequest(inputs, ("FACTS",), parameters=parameters or {})])
    if isinstance(answer, MmeError):
        raise answer
    return facts_of(answer.outputs["FACTS"])


def fails(handler, deed):
    """The error of doing so."""
    with pytest.raises(MmeError) as raised:
        ask(handler, deed)
    return raised.value


def test_a_model_finds_its_environment_and_none_of_our_packages(load, tmp_path, prefix):
    """Interpreter, packages and variables are the environment's; of ours it can import the one package it runs in."""
    facts = """
        import importlib.util
        wanted = ("VIRTUAL_ENV", "PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONNOUSERSITE")
        names = ("numpy", "orjson", "google", "psutil", "flask", "serve", "container", "model_handlers")
        return {
            "prefix": sys.prefix,
            "executable": sys.executable,
            "there": [name for name in names if importlib.util.find_spec(name)],
            "path": sys.path,
            "environ": {name: os.environ.get(name) for name in wanted},
            "arguments": len(sys.argv),
        }
    """
    got = ask(load(facts))

    assert got["prefix"] == str(prefix)
    assert got["executable"] == str(prefix / "bin/python")
    assert got["there"] == ["numpy", "model_handlers"]
    model = str(tmp_path / "m")
    assert [path for path in got["path"] if not path.startswith((model, str(prefix), sys.base_prefix))] == []
    assert [path for path in got["path"] if "site-packages" in path and not path.startswith(str(prefix))] == []
    environ = got["environ"]
    assert environ["PATH"] == f"{prefix}/bin{os.pathsep}{os.environ['PATH']}"
    assert environ["LD_LIBRARY_PATH"].startswith(f"{prefix}/lib")
    assert (environ["VIRTUAL_ENV"], environ["PYTHONNOUSERSITE"]) == (str(prefix), "1")
    assert (environ["PYTHONHOME"], environ["PYTHONPATH"]) == (None, None)
    assert got["arguments"] == 1


@pytest.mark.long
@pytest.mark.parametrize("which", ["newest", "oldest"])
def test_another_version_of_python_serves(load, tmp_path, which):
    """Batches, strings and parameters cross to an interpreter that is not ours."""
    python = another_interpreter(which)
    environment = venv(tmp_path / "other", python)
    facts = """
        return {
            "version": sys.version_info[:3],
            "told": self.told["model_config"],
            "text": pb_utils.get_input_tensor_by_name(request, "S").as_numpy().flat[0].decode(),
            "parameters": json.loads(request.parameters()),
        }
    """
    got = ask(load(facts, environment), "größe", {"a": 1, "b": 2.5, "c": "ä", "d": True})

    assert tuple(got["version"]) == version_of(python)
    assert got["text"] == "größe"
    assert got["parameters"] == {"a": 1, "b": 2.5, "c": "ä", "d": True}
    assert '"max_batch_size": 8' in got["told"]


class Answers:
    """Takes the responses to one request. See `requests.Responder`."""

    def __init__(self):
        self.got = []
        self.over = threading.Event()

    def send(self, response, *, final):
        """Keep it."""
        self.got.append(response)
        if final:
            self.over.set()

    def is_cancelled(self):
        """Never."""
        return False

    def when_cancelled(self, tell):
        """Never."""


def test_responses_of_its_own_accord_come_from_there(load):
    """Small ones and large ones, though the interpreter may have been built without the names of shared memory."""
    methods = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        for size in (1, 1 << 20):
            facts = np.array([["x" * size]], object)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("FACTS", facts)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    head = "import os\nvars(os).pop('memfd_create', None)\n"
    handler = load(methods=methods, head=head, extra="model_transaction_policy { decoupled: true }")
    answers = Answers()
    request = ModelRequest({"A": np.ones((1, 2), np.float32)}, ("FACTS",), responder=answers)
    assert handler.execute_requests([request]) == [None]
    assert answers.over.wait(60)

    *responses, last = answers.got
    assert [len(response.outputs["FACTS"].item()) for response in responses] == [1, 1 << 20]
    assert last is None


def test_a_model_may_complete_its_configuration_there(load):
    """`auto_complete_config` needs nothing of ours in the environment either."""
    methods = """
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "MORE", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_dynamic_batching()
        return config
    """
    handler = load(methods=methods)

    assert [spec.name for spec in handler.config.outputs] == ["FACTS", "MORE"]
    assert handler.config.dynamic_batching is not None


def test_a_script_serves_there(start, tmp_path, prefix):
    """A `model_fn` needs nothing of ours in its environment either."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/inference.py").write_text(
        "import json, sys\n"
        "def model_fn(model_dir): return sys.prefix\n"
        "def predict_fn(data, model): return [model, data]\n"
    )
    config = ModelConfig("m", default_model_filename="code/inference.py")
    handler = start(ScriptHandler, CPU, tmp_path / "code/inference.py", config, Environment(prefix))
    body = np.frombuffer(b"[1, 2.5]", np.uint8)
    parameters = {"content_type": "application/json", "accept": "application/json"}
    [answer] = handler.execute_requests([ModelRequest({"BODY": body}, ("BODY",), parameters=parameters)])

    assert json.loads(answer.outputs["BODY"].tobytes()) == [str(prefix), [1, 2.5]]


@pytest.mark.long
def test_a_python_that_is_too_old_is_refused_by_both_versions(load, tmp_path):
    """The sentence names the environment, its version, the least one and ours."""
    environment = too_old(tmp_path / "old")
    with pytest.raises(MmeError, match=r"model 'm': its environment .* has Python 3\.[789]\.\d+; models run") as raised:
        load("", environment)

    assert raised.value.kind is Kind.INVALID_MODEL
    assert "Python 3.10 or newer" in raised.value.message
    assert f"this server on {'.'.join(map(str, sys.version_info[:3]))}" in raised.value.message


def test_an_environment_without_numpy_is_refused(load, tmp_path):
    """The sentence says what is missing, and where."""
    environment = venv(tmp_path / "bare", numpy=False)
    with pytest.raises(MmeError, match=r"has no numpy, .*: install it there") as raised:
        load("", environment)

    assert raised.value.kind is Kind.INVALID_MODEL
    assert f"model 'm': its environment {environment} has" in raised.value.message


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "#!/nowhere/python\n",
            "exit code 127 while it loaded the model; .*bin/python can't be executed: No such file",
        ),
        ("#!/bin/sh\necho its last words >&2\nexit 5\n", "exit code 5 while it loaded the model; .*: its last words"),
        ("#!/bin/sh\nkill -SEGV $$\n", "was killed by SIGSEGV while it loaded the model"),
    ],
    ids=["no interpreter", "exits", "crashes"],
)
def test_an_interpreter_that_does_not_start_says_why(load, tmp_path, script, words):
    """The load is refused with the exit code or signal, and the last that was written to standard error."""
    (tmp_path / "broken/bin").mkdir(parents=True)
    (tmp_path / "broken/bin/python").write_text(script)
    (tmp_path / "broken/bin/python").chmod(0o755)
    with pytest.raises(MmeError, match=words) as raised:
        load("", tmp_path / "broken")

    assert raised.value.kind is Kind.INVALID_MODEL


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("segfault", ["was killed by SIGSEGV", "Fatal Python error: Segmentation fault"]),
        ("die", ["ended with exit code 3", "first words | last words"]),
        ("kill", ["was killed by SIGKILL"]),
    ],
)
def test_death_fails_the_batch_and_the_next_one_finds_a_new_process(load, prefix, deed, words):
    """The error has signal or exit code and the last words; the new process has the same environment."""
    handler = load(DO, head=DEEDS)
    first = handler.child.pid
    error = fails(handler, deed)

    assert error.kind is Kind.EXECUTION_FAILED
    for word in ["model 'm'", "'m_0_0'", "while it executed a batch", *words]:
        assert word in error.message
    assert ask(handler, "python").strip() == str(prefix)
    assert handler.child.pid != first


def test_a_hang_is_ended(load):
    """A batch that takes longer than MME_EXECUTION_TIMEOUT is ended with its process."""
    handler = load(DO, head=DEEDS, parameters={"MME_EXECUTION_TIMEOUT": "0.5"})
    first = handler.child.pid
    error = fails(handler, "hang")

    assert "gave no answer within 0.5 s" in error.message
    assert not psutil.pid_exists(first)


def test_a_load_that_hangs_is_ended(load):
    """MME_LOAD_TIMEOUT bounds the start of the interpreter and the model's `initialize` together."""
    with pytest.raises(MmeError, match=r"gave no answer within 0\.5 s, while it loaded the model") as raised:
        load(head=DEEDS, begun="time.sleep(3600)", parameters={"MME_LOAD_TIMEOUT": "0.5"})

    assert raised.value.kind is Kind.INVALID_MODEL


@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_a_model_started_goes_with_it(load, end):
    """A process in a session of its own is ended when the model is."""
    handler = load(DO, head=DEEDS)
    left = ask(handler, "leave")
    assert psutil.pid_exists(left)
    if end == "kill":
        fails(handler, "kill")
    handler.close()

    assert not psutil.pid_exists(left)


def test_an_interrupt_is_ignored(load):
    """Ctrl-C is not for a model's process."""
    assert ask(load(DO, head=DEEDS), "interrupt") is None


def test_output_is_logged_under_the_models_name(load, caplog, prefix):
    """Lines come one by one while the model runs, though its standard output is a pipe."""
    with caplog.at_level(logging.INFO, "mme.model"):
        handler = load()
        eventually(lambda: caplog.records, "its line")
        handler.close()
    [line] = [record for record in caplog.records if record.name == "mme.model"]

    assert line.getMessage() == f"printed by {prefix}"
    assert (line.target_model, line.stream) == ("m", "stdout")


PARENT = """
import asyncio, signal, sys, threading
from pathlib import Path
import numpy as np
from model_handlers.base import CPU
from model_handlers.requests import ModelRequest
from model_handlers.environment import Environment
from model_handlers.executor import ExecutorLoop, at_home
from model_handlers.worker.start import start_isolated
from model_handlers.config.pbtxt import parse_config
from model_handlers.python.handler import PythonHandler
from serve.threads import ThreadPool

folder, prefix = map(Path, sys.argv[1:])
config = parse_config((folder / "config.pbtxt").read_text(), model="m")
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
home = ExecutorLoop(loop, ThreadPool("work"))


def start(lane):
    with at_home(home):
        return start_isolated(PythonHandler, config, folder / "1/model.py", CPU, lane, Environment(prefix))


def do(handler, deed):
    inputs = {"A": np.ones((1, 2), np.float32), "S": np.array([[deed]], object)}
    handler.execute_requests([ModelRequest(inputs, ("FACTS",))])


handlers = [start(f"m_0_{i}") for i in range(3)]
do(handlers[2], b"leave")
threading.Thread(target=do, args=(handlers[1], b"hang"), daemon=True).start()
print("up", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=lambda n: n.name
)
def test_death_of_the_serving_process(tmp_path, prefix, number):
    """However the serving process dies, its models' processes are gone within moments: idle, hanging, left behind."""
    folder = write_model(tmp_path / "m", DO, head=DEEDS)
    (tmp_path / "parent.py").write_text(PARENT)
    assert ends_with_all_it_started(number, tmp_path / "parent.py", folder, prefix) == 1 + 3 + 1


def test_the_package_is_found_where_it_lies_among_others(tmp_path, prefix):
    """Installed among the server's packages, ours is the only one of them that the model can import."""
    installed = tmp_path / "site-packages"
    source = Path(sys.modules["model_handlers"].__file__).parent
    shutil.copytree(source, installed / "model_handlers", ignore=shutil.ignore_patterns("__pycache__"))
    (installed / "neighbour.py").write_text("")
    facts = """
        import importlib.util
        import model_handlers
        return [model_handlers.__file__, importlib.util.find_spec("neighbour") is None]
    """
    folder = write_model(tmp_path / "m", facts)
    (tmp_path / "asks.py").write_text(
        PARENT.partition("def do(")[0] + "\n"
        "[answer] = start('m').execute_requests("
        "[ModelRequest({'A': np.ones((1, 2), np.float32)}, ('FACTS',))])\n"
        "print(answer.outputs['FACTS'].flat[0].decode())\n"
    )
    path = [str(installed), *(entry for entry in sys.path if "site-packages" in entry)]
    done = subprocess.run(
        [sys.executable, "-P", tmp_path / "asks.py", folder, prefix],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert done.stdout.splitlines()[-1:] == [f'["{installed}/model_handlers/__init__.py", true]'], done.stderr
