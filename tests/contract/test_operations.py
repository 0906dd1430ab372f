"""What goes wrong around a server: S3, STS, credentials and workers that end. Each has its sentence, and an end."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from tests.contract.server import SCRIPTS, clean_environment, eventually, kill
from tests.contract.test_ensembles import PYTHON, python_model
from tests.processes import is_over

LOOPBACK = {"MME_HOST": "127.0.0.1", "MME_PORT": "0"}
STORE = {"MME_MODEL_STORE": "s3://bucket/models", "AWS_DEFAULT_REGION": "us-east-1"}
CONTAINER = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"AWS_ENDPOINT_URL_S3": "minio:9000"}, "Invalid endpoint: minio:9000"),
        ({**CONTAINER, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/no/token"}, "/no/token"),
        ({**CONTAINER, "AWS_CONTAINER_AUTHORIZATION_TOKEN": "t\n"}, "Auth token value is not a legal header value"),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://example.org/"}, "Unsupported host 'example.org'"),
        ({"AWS_PROFILE": "nobody"}, "nobody"),
    ],
)
def test_a_start_that_can_not_succeed_ends_with_one_sentence(environ, words, tmp_path):
    """What boto3 refuses to be told it would refuse again: exit status 3, and no traceback."""
    ended = subprocess.run(
        [SCRIPTS / "serve"],
        env=clean_environment(tmp_path, **LOOPBACK, MME_CACHE_DIR=str(tmp_path / "cache"), **STORE, **environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    log = ended.stdout + ended.stderr
    assert ended.returncode == 3, log
    assert "Traceback" not in log
    assert sum(words in line for line in log.splitlines()) == 1, log


def test_five_workers_that_never_served_end_the_server(tmp_path):
    """Each is killed as soon as it is there: the sixth is not started, and the log says why."""
    log = tmp_path / "log"
    environ = clean_environment(
        tmp_path, **LOOPBACK, MME_CACHE_DIR=str(tmp_path / "cache"), MME_MODEL_STORE=str(tmp_path)
    )
    with log.open("wb") as out:
        process = subprocess.Popen([SCRIPTS / "serve"], env=environ, stdout=out, stderr=subprocess.STDOUT)
    for number in range(5):
        workers = eventually(lambda count=number: _booted(log)[count:], "another worker")
        os.kill(workers[0], signal.SIGKILL)

    assert process.wait(60) == 3
    assert len(_booted(log)) == 5
    assert log.read_text().count("5 worker processes in a row ended before /ping was answered 200") == 1


def _booted(log):
    return [int(pid) for pid in re.findall(r"Booting worker with pid: (\d+)", log.read_text())]


def test_a_model_whose_loads_end_workers_is_left_out(serve, tmp_path):
    """Two workers end in the middle of its load, before they served: the next one does not bring it back, once."""
    begun, held = tmp_path / "begun", tmp_path / "held"
    source = PYTHON.replace(
        "    def execute",
        f"    def initialize(self, args):\n        open({str(begun)!r}, 'w').close()\n"
        f"        while os.path.exists({str(held)!r}):\n            time.sleep(0.02)\n\n    def execute",
        1,
    ).replace("import numpy", "import os, time\nimport numpy")
    python_model(tmp_path / "models/a", source)
    python_model(tmp_path / "models/b", PYTHON)
    server = serve({"MME_MODEL_REPOSITORY": str(tmp_path / "models"), "MME_PING_MODE": "live"})
    eventually(lambda: server.ask("GET", "/v2/models/a/ready").status == 200, "the model")
    eventually(lambda: server.ask("GET", "/v2/models/b/ready").status == 200, "the other model")
    held.touch()
    begun.unlink()
    before = server.worker
    before.kill()
    for _ in range(2):
        eventually(begun.exists, "the load of another worker")
        eventually(lambda: server.ask("GET", "/v2/models/b/ready").status == 200, "the other model")
        begun.unlink()
        before = server.worker
        before.kill()
    eventually(lambda: server.ask("GET", "/v2/models/b/ready").status == 200, "the other model")

    assert is_over(before)
    assert not begun.exists()
    assert [line["message"] for line in server.lines if "two workers ended" in line["message"]] == [
        "not brought back, since two workers ended while they loaded them: 'a'; mend them, then load them by name"
    ]
    held.unlink()
    assert server.ask("POST", "/v2/repository/models/a/load", {}).status == 200


def test_a_worker_that_served_is_followed_by_another(serve, tmp_path):
    """Whatever ended it."""
    server = serve({"MME_MODEL_STORE": str(tmp_path)})
    for _ in range(3):
        kill(server)
    assert server.process.poll() is None
