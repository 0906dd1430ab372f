"""The quickstart, run as it is written: each block by bash, in its order; only the port is one that is free.

What `docs/clients.md` shows is run against a server of its model.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from tests.contract.models import lay_out, pack
from tests.contract.server import PATIENCE, SCRIPTS, Server, clean_environment, eventually
from tests.docs.sentences import ROOT

pytestmark = pytest.mark.skipif(not find_spec("skl2onnx"), reason="the extra demo is not installed")

TEXT = (ROOT / "docs" / "quickstart.md").read_text()
CLIENTS = (ROOT / "docs" / "clients.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
ANSWERS = """\
iris-0.tar.gz [0, 2] cache;desc=hit
iris-1.tar.gz [0, 2] cache;desc=miss
iris-1.tar.gz [0, 2] cache;desc=hit
"""  # the first was asked before


def _environment(work):
    """With a home beside that folder."""
    environment = clean_environment(work.parent, XDG_CACHE_HOME=str(work.parent / "cache"))
    environment["PATH"] = f"{SCRIPTS}:{environment['PATH']}"
    return environment


@contextmanager
def running(command: str, work):
    """What is left running in a terminal; an address is answered when this returns."""
    log = work / "terminal.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=work, env=_environment(work), stdout=output, stderr=subprocess.STDOUT
        )

    def listening():
        assert process.poll() is None, log.read_text()
        # beside a line of the container's, at a port of its own
        return f":{command.rsplit(maxsplit=1)[-1]}" in "".join(re.findall("Listening at: (.*)", log.read_text()))

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


def run(block: str, work) -> str:
    """What a block prints in that folder."""
    done = subprocess.run(
        ["bash", "-e", "-c", block],
        cwd=work,
        env=_environment(work),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the model that the quickstart makes."""
    work = tmp_path_factory.mktemp("quickstart") / "work"
    work.mkdir()
    run(BLOCKS[1], work)
    return work


@pytest.mark.slow
def test_every_block_does_what_it_says(work, port):
    """A model is packed, checked, served and asked, by the command and by boto3; AWS is told what it would be."""
    pack, serve, invoke, boto3, deploy = (block.replace("8080", port) for block in BLOCKS[2:])
    assert "archive of 1 model, no problem" in run(pack, work)
    assert sorted(path.name for path in (work / "archives").iterdir()) == [f"iris-{n}.tar.gz" for n in range(3)]
    with running(serve.strip(), work):
        assert '"label"' in run(invoke, work)
        assert re.sub(r"(desc=\w+).*", r"\1", run(boto3, work)) == ANSWERS
    assert '"Mode": "MultiModel"' in run(deploy, work)


def test_what_is_installed_first_is_there_to_be_installed():
    """The extras are the project's, and the constraints a file of it."""
    extras = re.search(r"pip install -c (\S+) '\.\[(.+)\]'", BLOCKS[0])
    assert (ROOT / extras[1]).is_file()
    declared = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2]
    assert all(re.search(rf"^{extra} =$", declared, re.MULTILINE) for extra in extras[2].split(","))


# -- docs/clients.md ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory, work):
    """The quickstart's model in a store."""
    folder = tmp_path_factory.mktemp("clients")
    model = lay_out(folder / "iris-0", (work / "iris.onnx").read_bytes())
    pack(model, folder / "archives" / "iris-0.tar.gz")
    with Server(folder / "server", {"MME_MODEL_STORE": str(folder / "archives")}) as server:
        yield server


def _here(text, server):
    return text.replace("localhost:8080", f"127.0.0.1:{server.port}")


def test_the_model_is_told_and_answers_curl(server):
    """By both commands, the second of which sends what Triton's protocol calls a request."""
    metadata, answer = (
        _curl(_here(command, server)) for command in re.findall(r"    (curl .*?)\n\n", CLIENTS, re.DOTALL)
    )

    assert [tensor["name"] for tensor in metadata["inputs"] + metadata["outputs"]] == ["X", "label", "probabilities"]
    assert answer["outputs"][0]["data"] == [0, 2]


def test_the_snippets_work(server):
    """As they stand, but for the port: the second makes a body that the end of the first sends."""
    first, second = re.findall(r"```python\n(.*?)```", CLIENTS, re.DOTALL)
    _, sent, rest = first.partition("content_type = ")

    assert _python(_here(first + second + sent + rest, server)) == ["[[0]", " [2]]"] * 3


def _curl(command):
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=PATIENCE, check=True)
    return json.loads(done.stdout)


def _python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()
