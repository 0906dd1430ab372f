"""What `docs/sequences.md` shows is served by a real server."""

import re
import subprocess

from tests.contract.server import PATIENCE, Server
from tests.docs.sentences import ROOT

TEXT = (ROOT / "docs" / "sequences.md").read_text()


def test_the_model_adds_up(tmp_path):
    """Asked as the first lines ask it, but for the port; then again, as another request of the sequence."""
    config, model = re.search(r"```\n(.*?)```\n\n```python\n(.*?)```", TEXT, re.DOTALL).groups()
    folder = tmp_path / "repository" / "sums"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(model)
    command = re.search(r"    (curl .*?)\n\n", TEXT, re.DOTALL)[1]

    environ = {"MME_MODEL_REPOSITORY": str(tmp_path / "repository"), "MME_PING_MODE": "ready"}
    with Server(tmp_path / "server", environ) as server:
        first = command.replace("localhost:8080", f"127.0.0.1:{server.port}")
        sums = [_sum(first), _sum(first.replace(', "sequence_start": true', ""))]

    assert sums == ["3.0", "6.0"]


def _sum(command):
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=False)
    return re.search(r'"data":\[(.*?)\]', done.stdout)[1]
