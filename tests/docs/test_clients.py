"""What `docs/clients.md` shows is run against a real server of the quickstart's model."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.contract.models import lay_out, pack
from tests.contract.server import PATIENCE, Server
from tests.docs.sentences import ROOT

pytestmark = pytest.mark.skipif(not find_spec("skl2onnx"), reason="the extra demo is not installed")

TEXT = (ROOT / "docs" / "clients.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The quickstart's model, made as it says, in a store."""
    folder = tmp_path_factory.mktemp("clients")
    code = re.search(r"python - <<'EOF'\n(.*?)EOF", QUICKSTART, re.DOTALL)[1]
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=PATIENCE)
    model = lay_out(folder / "iris-0", (folder / "iris.onnx").read_bytes())
    pack(model, folder / "archives" / "iris-0.tar.gz")
    with Server(folder / "server", {"MME_MODEL_STORE": str(folder / "archives")}) as server:
        yield server


def _here(text, server):
    return text.replace("localhost:8080", f"127.0.0.1:{server.port}")


def test_the_model_is_told_and_answers_curl(server):
    """By both commands, the second of which sends what Triton's protocol calls a request."""
    metadata, answer = (_curl(_here(command, server)) for command in re.findall(r"    (curl .*?)\n\n", TEXT, re.DOTALL))

    assert [tensor["name"] for tensor in metadata["inputs"] + metadata["outputs"]] == ["X", "label", "probabilities"]
    assert answer["outputs"][0]["data"] == [0, 2]


def test_the_snippets_work(server):
    """As they stand, but for the port: the second makes a body that the end of the first sends."""
    first, second = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    _, sent, rest = first.partition("content_type = ")

    assert _python(_here(first + second + sent + rest, server)) == ["[[0]", " [2]]"] * 3


def _curl(command):
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=PATIENCE, check=True)
    return json.loads(done.stdout)


def _python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()
