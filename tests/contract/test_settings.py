"""What the environment may say, and how the log looks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess

import pytest

from tests.contract import models
from tests.contract.server import SCRIPTS, clean_environment, eventually


@pytest.mark.parametrize(
    ("command", "environ", "sentences"),
    [
        (("serve",), {"MME_PORT": "x", "MME_MAX_BODY": "y"}, ["MME_PORT='x'", "MME_MAX_BODY='y'"]),
        (("mme", "serve"), {"MME_MODEL_STORE": "/nowhere/at/all"}, ["there is no such folder"]),
    ],
    ids=["bad values", "no folder"],
)
def test_what_can_not_be_honoured_refuses_to_start(tmp_path, command, environ, sentences):
    """Bad values end the start with exit code 2, by name and all at once; so does what the machine has not."""
    assert_refused(tmp_path, command, environ, sentences)


SLOW = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
WAITS = """
import os, time
class TritonPythonModel:
    def initialize(self, args):
        print("it waits", flush=True)
        while not os.path.exists("{path}"):
            time.sleep(0.01)
    def execute(self, requests):
        return [None for _ in requests]
"""


def assert_refused(home, command, environ, sentences):
    """The command ends at once, and says so."""
    done = subprocess.run(
        [SCRIPTS / command[0], *command[1:]],
        env=clean_environment(home, **environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    for sentence in sentences:
        assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_fails_makes_a_server_unready_that_is_strict(serve, tmp_path, strict):
    """With --strict-readiness, of a repository as well: neither KServe's route nor /ping tells anybody to send requests."""
    models.lay_out(tmp_path / "r" / "plus", models.plus(1))
    models.lay_out(tmp_path / "r" / "broken", b"broken")
    words = ("--strict-readiness=true",) if strict else ()
    command = ("mme", "serve", "--model-repository", str(tmp_path / "r"), "--model-control-mode=none", *words)
    server = serve({}, command=command, ready=False)
    eventually(lambda: server.ask("GET", "/v2/models/plus/ready").status == 200, "the model that is whole")
    eventually(lambda: "'broken' did not load" in server.log, "the one that is not")
    if not strict:
        eventually(lambda: server.ask("GET", "/v2/health/ready").status == 200, "the end of the loads at start")
    assert [server.ask("GET", path).status for path in ("/v2/health/ready", "/ping")] == (
        [400, 503] if strict else [200, 200]
    )


_OTHER_MODES = [
    pytest.param((word,), marks=pytest.mark.long) for word in ("--model-control-mode=none", "--load-model=slow")
]


@pytest.mark.parametrize("words", [(), *_OTHER_MODES])
def test_a_repository_is_ready_when_its_loads_at_start_are_over(serve, tmp_path, words):
    """In every mode, so that a rollout waits; who asks before is answered as soon as that model is there."""
    go_on = tmp_path / "go-on"
    models.lay_out(tmp_path / "r" / "plus", models.plus(1))
    models.lay_out(tmp_path / "r" / "slow", WAITS.format(path=go_on), SLOW)
    command = ("mme", "serve", "--model-repository", str(tmp_path / "r"), *words)
    server = serve({}, command=command, ready=False)
    eventually(lambda: server.ask("GET", "/v2/health/live").status == 200, "the server")

    try:
        assert server.ask("GET", "/ping").status == 200
        eventually(lambda: "it waits" in server.log, "a load that has begun")
        assert server.ask("GET", "/v2/health/ready").status == 400
    finally:
        go_on.touch()
    eventually(lambda: server.ask("GET", "/v2/health/ready").status == 200, "the end of the loads at start")
    assert server.ask("GET", "/v2/models/slow/ready").status == 200


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "Address already in use"), pytest.param("192.0.2.1", "Cannot assign", marks=pytest.mark.long)],
)
def test_a_place_that_can_not_be_listened_to_is_said_and_ends(serve, tmp_path, host, why):
    """A second server on the same port, or one at somebody else's address, ends with a sentence that says what to do."""
    first = serve({"SAGEMAKER_MULTI_MODEL": "true"})

    environ = {"SAGEMAKER_MULTI_MODEL": "true", "MME_HOST": host, "MME_PORT": str(first.port)}
    done = subprocess.run(
        [SCRIPTS / "serve"],
        env=clean_environment(tmp_path, **environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert f"the server cannot listen to HTTP requests at {host}:{first.port}: {why}" in done.stderr
    assert "choose another --port/MME_PORT" in done.stderr
    assert "Traceback" not in done.stderr


def test_log_lines_are_json_where_nobody_reads_them(serve, tmp_path):
    """Off a terminal each line of the log is one JSON object with time, level, logger and message; pings leave none."""
    store = tmp_path / "store"
    models.pack(models.lay_out(tmp_path / "plus", models.plus(1)), store / "plus.tar.gz")
    server = serve({"MME_MODEL_STORE": str(store)})
    assert server.ask("POST", "/invocations", models.ONE, X_Amzn_SageMaker_Target_Model="plus").status == 200
    for _ in range(10):
        server.ask("GET", "/ping")
    assert server.stop() == 0

    lines = server.lines
    assert all({"timestamp", "level", "logger", "message"} <= line.keys() for line in lines)
    (loaded,) = [line for line in lines if line.get("target_model") == "plus.tar.gz"]
    assert loaded["message"].startswith("loaded in")
    assert not [line for line in lines if "ping" in json.dumps(line)]
    assert len(lines) < 15


def test_log_lines_are_text_on_a_terminal(tmp_path):
    """On a terminal the log is text for people."""
    master, terminal = pty.openpty()
    ours = {"SAGEMAKER_MULTI_MODEL": "true", "MME_HOST": "127.0.0.1", "MME_PORT": "0"}
    process = subprocess.Popen(
        [SCRIPTS / "serve"],
        env=clean_environment(tmp_path, TERM="xterm", MME_CACHE_DIR=str(tmp_path / "cache"), **ours),
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    os.set_blocking(master, False)
    shown = bytearray()

    def seen(text):
        with contextlib.suppress(OSError):  # nothing now, or nobody has the other end any more
            shown.extend(os.read(master, 65536))
        return text in shown

    try:
        eventually(lambda: seen(b"serving in platform mode"), "the first lines")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b'{"' not in shown
    assert b"Listening at" in shown
    assert b"\x1b[" in shown, "in colours"
