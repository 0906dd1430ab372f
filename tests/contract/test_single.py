"""One model as SageMaker mounts it: which directory is served, and when /ping is healthy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.contract import models
from tests.contract.server import PATIENCE, SCRIPTS, clean_environment, eventually


@pytest.fixture
def model_dir(tmp_path):
    """A function that lays out /opt/ml/model with these models."""

    def lay_out(**contents: bytes) -> dict[str, str]:
        folder = tmp_path / "opt/ml/model"
        folder.mkdir(parents=True)
        for name, model in contents.items():
            models.lay_out(folder / name, model)
        return {"MME_MODEL_DIR": str(folder)}

    return lay_out


def test_ping_is_healthy_when_the_model_is_loaded_and_not_before(serve, model_dir):
    """While the model loads /ping is 503 and the server is alive; once it is loaded /ping is 200 and it answers."""
    environ = model_dir(plus=b"")
    pipe = Path(environ["MME_MODEL_DIR"], "plus/1/model.onnx")
    pipe.unlink()
    os.mkfifo(pipe)  # the load waits for whoever writes into it
    server = serve(environ, ready=False)

    ping = server.ask("GET", "/ping")
    assert (ping.status, ping.body) == (503, b"")
    assert server.ask("GET", "/v2/health/ready").status == 400
    assert server.ask("GET", "/v2/health/live").status == 200
    assert server.ask("GET", "/models").json == {"models": []}
    pipe.write_bytes(models.plus(4))

    eventually(lambda: server.ask("GET", "/ping").status == 200, "a healthy ping")
    assert server.ask("GET", "/v2/health/ready").status == 200
    assert models.y(server.ask("POST", "/invocations", models.ONE).json) == [5, 6, 7, 8]


def test_the_only_directory_is_the_model(serve, model_dir):
    """Without a name the only directory is served, with a warning; /invocations and its own name reach it."""
    server = serve(model_dir(plus=models.plus(1)))

    assert models.y(server.ask("POST", "/invocations", models.ONE).json) == [2, 3, 4, 5]
    assert models.y(server.ask("POST", "/v2/models/plus/infer", models.ONE).json) == [2, 3, 4, 5]
    assert "WARNING: No SAGEMAKER_TRITON_DEFAULT_MODEL_NAME provided" in server.log
    assert [row["modelName"] for row in server.ask("GET", "/models").json["models"]] == ["plus"]


def test_the_named_directory_is_the_model(serve, model_dir):
    """SAGEMAKER_TRITON_DEFAULT_MODEL_NAME chooses among several directories; nobody is warned."""
    environ = model_dir(one=models.plus(1), two=models.plus(2))
    server = serve({**environ, "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "two"})

    assert models.y(server.ask("POST", "/invocations", models.ONE).json) == [3, 4, 5, 6]
    assert "WARNING" not in server.log


def test_a_broken_model_is_never_healthy_and_the_log_says_why(serve, model_dir):
    """A model that does not load leaves /ping at 503 and says why in the log; the process goes on answering."""
    server = serve(model_dir(broken=b"not a model"), ready=False)

    eventually(lambda: "'broken' did not load" in server.log, "the line that says that it is lacking")
    reason, lacking = [line for line in server.lines if line["level"] == "error"]
    assert "ONNX Runtime can't load model 'broken'" in reason["message"]
    assert lacking["message"] == "start-up model 'broken' did not load"
    assert reason["target_model"] == lacking["target_model"] == "broken"
    for _ in range(3):
        assert server.ask("GET", "/ping").status == 503
    assert server.ask("GET", "/v2/health/live").status == 200
    invoked = server.ask("POST", "/invocations", models.ONE)
    assert (invoked.status, "can't load model 'broken'" in invoked.error) == (400, True)


def test_an_unclear_model_refuses_to_start(tmp_path, model_dir):
    """Several directories without a name, as all that `choose_single_model` refuses: exit code 2 and Triton's sentence."""
    done = subprocess.run(
        [SCRIPTS / "serve"],
        env=clean_environment(tmp_path, MME_PORT="0", **model_dir(one=b"", two=b"")),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert "ERROR: More than 1 model directory found in model repository." in done.stderr
    assert "Traceback" not in done.stderr
