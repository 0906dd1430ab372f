"""The quickstart, run as it is written: each block by bash, in its order; only the port is one that is free."""

from __future__ import annotations

import re
import socket
import subprocess
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from tests.contract.server import PATIENCE, SCRIPTS, clean_environment, eventually
from tests.docs.sentences import ROOT

pytestmark = pytest.mark.skipif(not find_spec("skl2onnx"), reason="the extra demo is not installed")

TEXT = (ROOT / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
ANSWERS = """\
iris-0.tar.gz [0, 2] cache;desc=hit
iris-1.tar.gz [0, 2] cache;desc=miss
iris-1.tar.gz [0, 2] cache;desc=hit
"""  # the first was asked before


@contextmanager
def running(command: str, folder, environment):
    """What is left running in a terminal; an address is answered when this returns."""
    log = folder / "terminal.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )

    def listening():
        assert process.poll() is None, log.read_text()
        return "Listening at: http://" in log.read_text()

    try:
        eventually(listening, "the endpoint")
        yield
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0, log.read_text()


@pytest.fixture
def port():
    """A port to listen on that the system gives nobody else meanwhile: it is bound, if not listened on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


@pytest.mark.slow
def test_every_block_does_what_it_says(tmp_path, port):
    """A model is made, packed, checked, served and asked, by the command and by boto3; AWS is told what it would be."""
    _, *blocks = [block.replace("8080", port) for block in BLOCKS]
    environment = clean_environment(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    environment["PATH"] = f"{SCRIPTS}:{environment['PATH']}"
    work = tmp_path / "work"
    work.mkdir()

    def run(block: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        return done.stdout

    make, pack, serve, invoke, boto3, deploy = blocks
    run(make)
    assert "archive of 1 model, no problem" in run(pack)
    assert sorted(path.name for path in (work / "archives").iterdir()) == [f"iris-{n}.tar.gz" for n in range(3)]
    with running(serve.strip(), work, environment):
        assert '"label"' in run(invoke)
        assert re.sub(r"(desc=\w+).*", r"\1", run(boto3)) == ANSWERS
    assert '"Mode": "MultiModel"' in run(deploy)


def test_what_is_installed_first_is_there_to_be_installed():
    """The extras are the project's, and the constraints a file of it."""
    extras = re.search(r"pip install -c (\S+) '\.\[(.+)\]'", BLOCKS[0])
    assert (ROOT / extras[1]).is_file()
    declared = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2]
    assert all(re.search(rf"^{extra} =$", declared, re.MULTILINE) for extra in extras[2].split(","))
