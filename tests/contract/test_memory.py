"""The server in a control group of little memory: what can't be is refused before the kernel has to kill anybody."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model_handlers.worker.process import read_count
from tests.cgroups import small_group
from tests.contract.server import SCRIPTS, Server
from tests.serve.hungry import write_hungry

pytestmark = pytest.mark.usefixtures("begun_by_exec")

MB = 1_000_000
BODY = {"inputs": [{"name": "X", "shape": [3], "datatype": "UINT8", "data": [0, 1, 2]}]}
# Puts itself into the group that is named first, and becomes the rest of its arguments.
JOINS = """
import os
import sys
from pathlib import Path

Path(sys.argv[1], "cgroup.procs").write_text("0")
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture(scope="module")
def group():
    """A control group of 600 MB."""
    with small_group(600 * MB) as folder:
        yield folder


def kills(group):
    """Processes of it that the kernel has killed for want of memory."""
    return read_count([group / "memory.events", group / "memory.oom_control"])


@pytest.mark.parametrize("platform", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_model_that_no_memory_holds_is_refused_and_nobody_is_killed(group, tmp_path, platform):
    """507 while it loads; the model beside it answers all the while, and what is loaded then finds the memory free."""
    base = tmp_path / "models"
    write_hungry(base, "light")
    write_hungry(base, "huge", load=4000, pause=0.005)
    write_hungry(base, "next", load=200)
    command = (Path(sys.executable).name, "-c", JOINS, str(group), str(SCRIPTS / "serve"))
    mode = (
        {"SAGEMAKER_MULTI_MODEL": "true"}
        if platform
        else {"MME_MODEL_REPOSITORY": str(base), "MME_MODEL_CONTROL_MODE": "explicit"}
    )
    environ = {"MME_MEMORY_BUDGET": "50%", **mode}

    def load(name):
        body = {"model_name": name, "url": str(base / name)}
        return (
            server.ask("POST", "/models", body)
            if platform
            else server.ask("POST", f"/v2/repository/models/{name}/load")
        )

    with Server(tmp_path / "server", environ, command=command) as server, ThreadPoolExecutor(1) as pool:
        assert load("light").status == 200
        loading = pool.submit(load, "huge")
        answers = 0
        while not loading.done():
            assert server.ask("POST", "/v2/models/light/infer", BODY).status == 200
            answers += 1
        assert loading.result().status == 507
        assert "and was still loading" in loading.result().error
        assert answers > 1
        assert load("next").status == 200
        assert server.ask("POST", "/v2/models/light/infer", BODY).status == 200
    assert kills(group) == 0
