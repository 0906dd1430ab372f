"""What `docs/grpc.md` shows is run against a real server."""

import re
import subprocess
import sys

from tests.contract import models
from tests.contract.server import PATIENCE, Server
from tests.docs.sentences import ROOT


def test_the_snippet_works(tmp_path):
    """As it stands, but for the port."""
    models.lay_out(tmp_path / "repository" / "plus", models.plus(1), "max_batch_size: 8\n")
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "grpc.md").read_text(), re.DOTALL)
    environ = {"MME_MODEL_REPOSITORY": str(tmp_path / "repository"), "MME_PING_MODE": "ready", "MME_GRPC_PORT": "0"}

    with Server(tmp_path / "server", environ) as server:
        code = snippet.replace("localhost:8001", server.grpc_address)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    assert done.stderr == ""
    assert done.stdout.strip() == "[[2. 2. 2. 2.]]"
