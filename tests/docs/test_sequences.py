"""What `docs/sequences.md` shows is served by a real server."""

import re
import subprocess
import sys

import pytest

from tests.contract.server import PATIENCE, Server
from tests.docs.sentences import ROOT

TEXT = (ROOT / "docs" / "sequences.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the model that the first block makes."""
    folder = tmp_path_factory.mktemp("sequences")
    setup, _, _ = re.search(r"```bash\n(.*?)```", TEXT, re.DOTALL)[1].rpartition("mme serve")
    subprocess.run(["bash", "-e", "-c", setup], cwd=folder, check=True)
    environ = {"MME_MODEL_REPOSITORY": str(folder / "repository"), "MME_PING_MODE": "ready"}
    with Server(folder / "server", environ) as server:
        yield server


def test_the_model_adds_up(server):
    """Asked as the page asks it, but for the port; then again, as another request of the sequence."""
    command = re.search(r"    (curl .*?)\n\n", TEXT, re.DOTALL)[1]

    first = command.replace("localhost:8080", f"127.0.0.1:{server.port}")
    sums = [_sum(first), _sum(first.replace(', "sequence_start": true', ""))]

    assert sums == ["3.0", "6.0"]


def test_a_session_adds_up(server):
    """By boto3, as the page has it, but for the port."""
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    code = snippet.replace("localhost:8080", f"127.0.0.1:{server.port}")

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert (done.stdout, done.stderr) == ("[6.0]\n", "")


def _sum(command):
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=False)
    return re.search(r'"data":\[(.*?)\]', done.stdout)[1]
