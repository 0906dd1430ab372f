"""The process that refines comes after everybody else, and leaves nothing half written."""

import importlib
import subprocess
import sys

import pytest

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import MmeError
from model_handlers.onnx.handler import OnnxHandler
from serve.weights.refining import Refiner
from serve.weights.store import WeightStore

ASK = """
import os
from serve.weights.refining import _subordinate
_subordinate(os.getppid())
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
DIES = """
import os, signal
from model_handlers.onnx.handler import OnnxHandler

class Dies(OnnxHandler):
    @classmethod
    def refine_form(cls, config, form, draft):
        (draft.folder / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
WITHOUT_THE_RIGHT = ("setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice")


def test_it_stays_behind_a_server_that_comes_late_itself():
    """Where that may not be recalled from there, it refines all the same."""
    command = ["nice", "-n", "15", *WITHOUT_THE_RIGHT, sys.executable, "-c", ASK]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "15"


def test_what_it_was_writing_goes_with_it(tmp_path, write, monkeypatch):
    """Killed by whomever, it leaves no half form on the disk until the server is started again."""
    (tmp_path / "dies_of_refining.py").write_text(DIES)
    monkeypatch.syspath_prepend(tmp_path)
    handler = importlib.import_module("dies_of_refining").Dies
    config, file = ModelConfig("m"), write() / "1" / "model.onnx"
    store = WeightStore(tmp_path / "weights")
    assert store.open()
    with store.draft() as draft:
        form = store.add_written(draft, OnnxHandler.write_form(config, file, draft))
        store.keep(form)

    with pytest.raises(MmeError, match="refining ended with -9"):
        Refiner(store).refine(handler, config, form)
    assert not list(tmp_path.rglob("half"))
