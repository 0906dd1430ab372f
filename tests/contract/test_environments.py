"""Python models that bring environments, before a real server: what they are answered from, and what ends with it."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.contract import models
from tests.contract.server import PATIENCE, Server, eventually, post
from tests.environments import pack, venv, write_model, write_wheel
from tests.processes import below, still_there

# pip asks rustc for its version, and rustup's rustc writes into the home directory.
_PATH = os.pathsep.join(path for path in os.environ["PATH"].split(os.pathsep) if not (Path(path) / "rustc").exists())
PLATFORM = {"SAGEMAKER_MULTI_MODEL": "true", "MME_LOG_FORMAT": "json", "PATH": _PATH}
BROUGHT = {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz"}
HANGS = """
import os, subprocess, sys, time


def build_wheel(*args):
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    print("building for ever", file=sys.stderr, flush=True)
    time.sleep(3600)
"""
_UNKNOWN = (
    "ERROR: Could not find a version that satisfies the requirement nosuchpackage==1.0 (from versions: none) | "
    "ERROR: No matching distribution found for nosuchpackage==1.0"
)
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "pkg"
version = "1"
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A packed environment that has all that it needs."""
    folder = tmp_path_factory.mktemp("packed")
    return pack(venv(folder / "env", whole=True), folder / "env.tar.gz").read_bytes()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of a package `greeting`."""
    file = write_wheel(tmp_path_factory.mktemp("wheels"), "greeting", greeting="WORD = 'hello'")
    return {f"wheels/{file.name}": file.read_bytes()}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A container that SageMaker drives, in which a process for a model was once started: its fork server stays."""
    folder = tmp_path_factory.mktemp("platform")
    with Server(folder, PLATFORM) as server:
        assert load(server, write_model(folder / "plain")).status == 200
        assert server.ask("DELETE", "/models/plain").status == 200
        yield server


def load(server, folder):
    """LOAD of an unpacked model."""
    return server.ask("POST", "/models", {"model_name": folder.name, "url": str(folder)})


def ask(server, name):
    """What the model tells about its process."""
    body = {"inputs": [{"name": "A", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    answer = server.ask("POST", f"/models/{name}/invoke", body)
    assert answer.status == 200, answer.body
    return json.loads(answer.json["outputs"][0]["data"][0])


def kept(server):
    """The environments that the server keeps."""
    folder = server.cache / "environments"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def said(server, name):
    """What the log has under a model's name."""
    return [line["message"] for line in server.lines if line.get("target_model") == name]


def sleepers(server):
    """The ends of chains of processes that tests begin."""
    return [process for process, name in server.processes.items() if name == "sleep"]


def test_a_model_is_answered_from_the_environment_that_it_brings(server, tmp_path, archive):
    """Packed beside its versions; a second model with an equal one, and a second load, find it unpacked."""
    prefixes, pids = set(), set()
    for name in ("one", "two"):
        folder = write_model(tmp_path / name, parameters=BROUGHT, files={"env.tar.gz": archive})
        assert load(server, folder).status == 200
        facts = ask(server, name)
        prefixes.add(facts["prefix"])
        pids.add(facts["pid"])
        assert f"printed by {facts['prefix']}" in said(server, name)
    assert server.ask("DELETE", "/models/one").status == 200
    assert load(server, tmp_path / "one").status == 200
    prefixes.add(ask(server, "one")["prefix"])

    [prefix] = prefixes
    assert prefix.startswith(f"{server.cache}/environments/packed-")
    assert len([name for name in kept(server) if name.endswith(".complete")]) == 1
    for name in ("one", "two"):
        assert server.ask("DELETE", f"/models/{name}").status == 200
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_model_is_answered_with_the_packages_that_it_requires(server, tmp_path, wheels):
    """Installed from the wheels that it brings; why, and pip's progress, is in the log under the model's name."""
    files = {"requirements.txt": "orjson\ngreeting\n", **wheels}
    folder = write_model(tmp_path / "requires", "import greeting, orjson\nreturn greeting.WORD", files=files)
    assert load(server, folder).status == 200

    assert ask(server, "requires") == "hello"
    assert "it gets packages and a Python of its own: greeting is not installed" in said(server, "requires")
    assert "Successfully installed greeting-1.0" in said(server, "requires")
    assert server.ask("DELETE", "/models/requires").status == 200


@pytest.mark.long
def test_a_model_is_answered_out_of_a_store(serve, tmp_path, archive, wheels):
    """Environment or wheels come in its own archive, as `mme pack` makes it; what others put beside counts at once."""
    store = tmp_path / "store"
    packed = write_model(tmp_path / "packed", parameters=BROUGHT, files={"env.tar.gz": archive})
    requires = write_model(
        tmp_path / "requires",
        "import greeting\nreturn greeting.WORD",
        files={"1/requirements.txt": "greeting", **wheels},
    )
    beside = tmp_path / "shared.tar.gz"
    shared = write_model(tmp_path / "shared", parameters={"EXECUTION_ENV_PATH": str(beside)})
    for folder in (packed, requires, shared):
        models.pack(folder, store / f"{folder.name}.tar.gz")
    server = serve({"MME_MODEL_STORE": str(store), "PATH": _PATH})

    assert ask(server, "packed.tar.gz")["prefix"].startswith(f"{server.cache}/environments/packed-")
    assert ask(server, "requires.tar.gz") == "hello"
    refusal = server.ask("POST", "/v2/repository/models/shared.tar.gz/load").error
    assert refusal.endswith(f"{beside} is not there: put it there before the model is loaded, or let the model bring it,"
                            " in $$TRITON_MODEL_DIRECTORY")  # fmt: skip
    beside.write_bytes(archive)
    assert ask(server, "shared.tar.gz")["prefix"] == ask(server, "packed.tar.gz")["prefix"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"requirements.txt": "nosuchpackage==1.0\n", "wheels/readme": ""},
            f"requirements.txt can't be installed: {_UNKNOWN}",
        ),
        ({"env.tar.gz": b"\x1f\x8b nothing of the kind"}, "/env.tar.gz is corrupt: "),
        ({}, "/env.tar.gz is not there: put it into the archive, or leave EXECUTION_ENV_PATH out"),
    ],
    ids=["requirement", "archive", "missing"],
)
def test_an_environment_that_can_not_be_made_fails_the_load(server, tmp_path, files, words):
    """SageMaker reads why, in one sentence; nothing is left, and the server goes on."""
    before = kept(server)
    parameters = {} if "requirements.txt" in files else BROUGHT
    answer = load(server, write_model(tmp_path / "broken", parameters=parameters, files=files))

    assert answer.status == 400
    assert answer.error.startswith("model 'broken': ")
    assert words in answer.error
    assert kept(server) == before
    assert server.ask("GET", "/models/broken").status == 404


def test_others_load_and_answer_while_an_environment_is_made(server, tmp_path):
    """However many installs are under way, and unloading the model ends its install with all that it started."""
    files = {"requirements.txt": "./pkg\n", "pkg/pyproject.toml": PROJECT, "pkg/backend.py": HANGS}
    slow = [write_model(tmp_path / f"slow-{number}", files=files) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load, server, folder) for folder in slow]
        eventually(lambda: sleepers(server), "an install to begin")
        quick = models.lay_out(tmp_path / "quick", models.plus(1))
        assert load(server, quick).status == 200
        assert models.y(server.ask("POST", "/models/quick/invoke", models.ONE).json) == [2, 3, 4, 5]
        assert server.ask("DELETE", "/models/quick").status == 200
        assert not any(task.done() for task in loads)
        for folder in slow:
            server.ask("POST", f"/v2/repository/models/{folder.name}/unload", {})
        assert [task.result().status for task in loads] == [503] * 4

    assert sleepers(server) == []
    assert [
        name for name in kept(server) if not name.endswith(".complete") and f"{name}.complete" not in kept(server)
    ] == []


def test_an_install_that_takes_too_long_fails_the_load(server, tmp_path):
    """The model's own MME_LOAD_TIMEOUT bounds it; pip is gone with its children."""
    files = {"requirements.txt": "./pkg\n", "pkg/pyproject.toml": PROJECT, "pkg/backend.py": HANGS}
    answer = load(server, write_model(tmp_path / "late", files=files, parameters={"MME_LOAD_TIMEOUT": "5"}))

    assert answer.status == 400
    assert answer.error == (
        "model 'late': its environment was not there within 5 s; give it more by the parameter 'MME_LOAD_TIMEOUT'"
    )
    assert sleepers(server) == []


@pytest.mark.parametrize("end", ["server", pytest.param("worker", marks=pytest.mark.long)])
def test_what_runs_in_an_environment_ends_with_the_server(tmp_path, archive, end):
    """Killed, so that it can't say good-bye: interpreters and installers are gone within moments.

    The next server finds what was finished, and makes what was not.
    """
    cache = {"MME_CACHE_DIR": str(tmp_path / "kept")}
    folder = write_model(tmp_path / "m", parameters=BROUGHT, files={"env.tar.gz": archive})
    files = {"requirements.txt": "./pkg\n", "pkg/pyproject.toml": PROJECT, "pkg/backend.py": HANGS}
    slow = write_model(tmp_path / "slow", files=files)
    first = Server(tmp_path / "first", {**PLATFORM, **cache}, exit_code=-signal.SIGKILL)
    first.__enter__()
    try:
        assert load(first, folder).status == 200
        prefix = ask(first, "m")["prefix"]
        with first.connect() as waiting:
            waiting.send(post("/models", {"model_name": "slow", "url": str(slow)}))
            eventually(lambda: sleepers(first), "an install to begin")
        worker = first.worker
        processes = still_there(below(worker.pid))
        assert len(processes) >= 5  # the fork server, the model, pip, the build, and what that started
        (first.process if end == "server" else worker).kill()
        if end == "server":  # gunicorn's worker notices that it is an orphan, and ends
            worker.kill()
        _, alive = psutil.wait_procs(processes, PATIENCE)
        assert alive == []
    finally:
        for process in still_there(below(first.process.pid)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        first.kill()
    (slow / "pkg/backend.py").write_text("raise SystemExit('not this time')")

    with Server(tmp_path / "second", {**PLATFORM, **cache}) as second:
        assert load(second, folder).status == 200
        assert ask(second, "m")["prefix"] == prefix
        assert load(second, slow).status == 400
        folder = tmp_path / "kept/environments"
        assert sorted(path.name for path in folder.iterdir()) == [
            prefix.rpartition("/")[2],
            f"{prefix.rpartition('/')[2]}.complete",
        ]
