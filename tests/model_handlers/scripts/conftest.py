"""Scripts as their authors write them, loaded into this process."""

import json
import textwrap

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import MmeError
from model_handlers.requests import ModelRequest
from model_handlers.scripts.host import ScriptHandler

JSON = "application/json"
HEAD = "def model_fn(model_dir): return 'the model'\n"
TELLS = """
import json
def told(*given):
    return json.dumps([type(each).__name__ + ":" + (each.decode() if isinstance(each, bytes) else str(each)) for each in given])
"""


class Loaded:
    """One script's model, to be asked with bodies."""

    def __init__(self, handler):
        self.handler = handler

    def ask(self, body=b"", content_type=JSON, accept="", **parameters):
        """Body and parameters of the answer.

        Raises:
            MmeError: the answer is one.
        """
        said = {"content_type": content_type, "accept": accept, **parameters}
        array = np.frombuffer(body.encode() if isinstance(body, str) else body, np.uint8)
        request = ModelRequest({"BODY": array}, ("BODY",), "r1", {k: v for k, v in said.items() if v != ""})
        (answer,) = self.handler.execute_requests([request])
        if isinstance(answer, MmeError):
            raise answer
        assert answer.outputs["BODY"].dtype == np.uint8
        assert answer.outputs["BODY"].ndim == 1
        return answer.outputs["BODY"].tobytes(), dict(answer.parameters)

    def body(self, *arguments, **parameters):
        """The body of the answer."""
        return self.ask(*arguments, **parameters)[0]

    def told(self, *arguments, **parameters):
        """The document of JSON that the answer is."""
        return json.loads(self.body(*arguments, **parameters))

    def refused(self, *arguments, **parameters):
        """The error that the answer is."""
        with pytest.raises(MmeError) as caught:
            self.ask(*arguments, **parameters)
        return caught.value


class Scripts:
    """Writes models below a directory, loads them, and closes what is still open in the end.

    Attributes:
        HEAD: a `model_fn` that returns 'the model'.
    """

    HEAD = HEAD

    def __init__(self, root):
        self.root = root
        self._open = []

    def tells(self, source, head=HEAD):
        """A script that may answer `told(…)`: the types and values of what it was given."""
        return TELLS + head + source

    def write(self, source, *, name="m", files=None, script="code/inference.py"):
        """The model's directory: the script, and other files by their paths."""
        directory = self.root / name
        contents = {script: textwrap.dedent(source), **(files or {})}
        for path, content in contents.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return directory

    def load(
        self, source, *, device=CPU, name="m", parameters=None, script="code/inference.py", files=None, decoupled=False
    ):
        """The model of such a script."""
        directory = self.write(source, name=name, files=files, script=script)
        config = ModelConfig(
            name, "sagemaker", default_model_filename=script, parameters=parameters or {}, decoupled=decoupled
        )
        handler = ScriptHandler.load(config, directory / script, device, f"{name}_0_0")
        self._open.append(handler)
        return Loaded(handler)

    def refused(self, source, **where):
        """The error of a script that can't be loaded."""
        with pytest.raises(MmeError) as caught:
            self.load(source, **where)
        return caught.value

    def close(self, loaded):
        """Close one before the end of the test."""
        self._open.remove(loaded.handler)
        loaded.handler.close()

    def close_all(self):
        """Close what is open."""
        while self._open:
            self._open.pop().close()


@pytest.fixture
def scripts(tmp_path):
    """See `Scripts`."""
    scripts = Scripts(tmp_path)
    yield scripts
    scripts.close_all()
