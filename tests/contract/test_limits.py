"""A server that may have few threads, processes and files: what is there serves, and the rest is told which limit to raise."""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.cgroups import few_tasks
from tests.contract import models
from tests.contract.server import SCRIPTS, Server, alive, eventually, post
from tests.frameworks import framework

pytestmark = pytest.mark.usefixtures("begun_by_exec")

PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
"""
TREES = """
backend: "fil"
instance_group [ { count: 4 } ]
parameters { key: "model_type" value { string_value: "lightgbm" } }
parameters { key: "cpu_nthread" value { string_value: "4" } }
"""
# Does as the first argument says, and becomes the rest of them.
FIRST = """
import os
import resource
import sys

exec(sys.argv[1])
os.execv(sys.argv[2], sys.argv[2:])
"""
PLENTY = 24  # models, more than any of these servers can have


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A store of ONNX models and as many Python models: onnx-0, python-0, …."""
    source, store = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store")
    onnx = models.pack(models.lay_out(source / "onnx", models.plus(0)), source / "onnx.tar.gz")
    directory = models.lay_out(source / "python", b"", CONFIG)
    (directory / "1/model.onnx").unlink()
    (directory / "1/model.py").write_text(PYTHON)
    python = models.pack(directory, source / "python.tar.gz")
    for number in range(PLENTY):
        for archive in (onnx, python):
            (store / f"{archive.name[:-7]}-{number}.tar.gz").hardlink_to(archive)
    return store


@pytest.fixture(scope="module")
def trees(archives, tmp_path_factory):
    """An archive of that store, trees of LightGBM on four threads: its name, a request, and what the trees answer."""
    lightgbm = framework("lightgbm")
    rows = np.random.default_rng(1).random((600, 2))
    options = {"num_leaves": 31, "verbose": -1, "num_threads": 1}
    booster = lightgbm.train(options, lightgbm.Dataset(rows, rows[:, 0]), 20)
    directory = models.lay_out(tmp_path_factory.mktemp("trees") / "trees", booster.model_to_string(), TREES)
    (directory / "1/model.py").rename(directory / "1/model.txt")
    models.pack(directory, archives / "trees.tar.gz")
    tensor = {"name": "input__0", "shape": rows.shape, "datatype": "FP32", "data": rows.ravel().tolist()}
    return "trees", {"inputs": [tensor]}, booster.predict(rows, num_threads=1)


def limited(tmp_path, archives, first, **environ):
    """A server of the store that does something before it begins."""
    command = (Path(sys.executable).name, "-c", FIRST, first, str(SCRIPTS / "serve"))
    return Server(tmp_path / "server", {"MME_MODEL_STORE": str(archives), **environ}, command=command)


def invoke(server, target):
    """Ask a model."""
    return server.ask("POST", "/invocations", models.ONE, X_Amzn_SageMaker_Target_Model=f"{target}.tar.gz")


def fill(server, kinds):
    """Ask one model after another until one is refused; those that answered, that one, and what was said.

    On one connection: for another there may be no room.
    """
    there = []
    with server.connect() as connection:
        for kind, number in ((kind, number) for number in range(PLENTY) for kind in kinds):
            target = f"{kind}-{number}"
            named = {"X_Amzn_SageMaker_Target_Model": f"{target}.tar.gz"}
            answer = connection.send(post("/invocations", models.ONE, **named)).answer()
            if answer.status != 200:
                return there, target, answer
            there.append(target)
    raise AssertionError("every model found room")


def test_a_full_control_group_refuses_models_and_makes_room_for_them(tmp_path, archives):
    """503 names the limit; what is there answers, is unloaded though there was no unload before, and others come."""
    with (
        few_tasks(40) as group,
        limited(tmp_path, archives, f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')") as server,
    ):
        there, refused, answer = fill(server, ("python", "onnx"))
        assert answer.status == 503
        assert "raise the limit of processes and threads" in answer.error
        for target in there:
            assert invoke(server, target).status == 200

        for target in there[:6]:
            assert server.ask("DELETE", f"/models/{target}.tar.gz").status == 200
        assert invoke(server, refused).status == 200


@pytest.mark.long
def test_trees_compute_where_no_thread_can_be_started(tmp_path, archives, trees):
    """Their threads are there since the load: no instance that executes for the first time ends the server."""
    name, request, expected = trees
    named = {"X_Amzn_SageMaker_Target_Model": f"{name}.tar.gz"}
    with (
        few_tasks(60) as group,
        limited(tmp_path, archives, f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')") as server,
    ):
        assert server.ask("POST", "/invocations", request, **named).status == 200
        fill(server, ("python", "onnx"))
        worker = server.worker.pid
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: server.ask("POST", "/invocations", request, **named), range(24)))
        for answer in answers:
            np.testing.assert_allclose(answer.json["outputs"][0]["data"], expected, rtol=1e-4)
        assert server.worker.pid == worker
        assert server.ask("GET", "/ping").status == 200


def test_open_files_that_run_out_are_told(tmp_path, archives):
    """A model that needs more gets a 503 with the limit's name; of connections that are closed unanswered the log tells."""
    with limited(tmp_path, archives, "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))") as server:
        there, _, answer = fill(server, ("python",))
        assert answer.status == 503
        assert "raise the limit of open files (ulimit -n)" in answer.error
        kept = [server.connect() for _ in range(100)]
        eventually(lambda: "all 100 files that the server may have open are open" in server.log, "a warning")
        for connection in kept:
            connection.close()
        eventually(lambda: alive(server), "a connection with an answer")
        assert invoke(server, there[0]).status == 200


def test_a_load_that_can_open_no_file_is_told(tmp_path, archives):
    """Whichever file it is: nothing is said of the disk or the archive, and the same load succeeds once there is room."""
    with (
        limited(
            tmp_path, archives, "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))", MME_MAX_CONNECTIONS="1000"
        ) as server,
        server.connect() as connection,
    ):
        assert invoke(server, "onnx-0").status == 200
        kept = [server.connect() for _ in range(100)]
        eventually(lambda: "all 100 files that the server may have open are open" in server.log, "a warning")
        said = set()
        named = {"X_Amzn_SageMaker_Target_Model": "onnx-1.tar.gz"}
        while (answer := connection.send(post("/invocations", models.ONE, **named)).answer()).status != 200:
            assert answer.status == 503, answer.error
            assert "raise the limit of open files (ulimit -n)" in answer.error
            said.add(answer.error.partition(":")[0])
            kept.pop(0).close()
        for each in kept:
            each.close()
        assert any("cannot be opened" in sentence or "cannot be read" in sentence for sentence in said)
        assert any("cannot be unpacked" in sentence for sentence in said)

        eventually(lambda: alive(server), "a connection with an answer")
        assert invoke(server, "onnx-2").status == 200
        assert server.staging() == []


def test_the_server_may_have_as_many_files_open_as_it_is_allowed(tmp_path, archives):
    """The soft limit, 1024 on many systems, is raised to the hard one."""
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    with limited(tmp_path, archives, f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))") as server:
        assert invoke(server, "python-0").status == 200
        for process in (server.worker, *server.processes):
            assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
