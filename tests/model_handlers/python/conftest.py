"""Models as their authors write them, loaded into this process."""

import textwrap

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.pbtxt import parse_config
from model_handlers.errors import MmeError
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelRequest

VECTORS = """
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "B" data_type: TYPE_FP32 dims: [ 2 ] optional: true } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "DIFF" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""

HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"


def body_of(execute):
    """A model.py whose `execute(self, requests)` has this body."""
    body = textwrap.indent(textwrap.dedent(execute).strip(), " " * 8)
    return f"{HEAD}class TritonPythonModel:\n    def execute(self, requests):\n{body}\n"


def each(answer):
    """One whose `answer(request)`, the body given, makes each response."""
    body = textwrap.indent(textwrap.dedent(answer).strip(), " " * 4)
    return (
        f"{HEAD}def answer(request):\n{body}\n\n"
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [answer(r) for r in requests]\n"
    )


def request_of(outputs=("SUM", "DIFF"), *, id="r", parameters=None, timeout_us=0, **inputs):  # noqa: A002
    """A request with these inputs; lists become FP32."""
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.array(value, np.float32) for name, value in inputs.items()
    }
    return ModelRequest(arrays, tuple(outputs), id, parameters or {}, timeout_us)


class Models:
    """Writes models below a directory, loads them, and closes what is still open in the end."""

    def __init__(self, root):
        self.root = root
        self._open = []

    def write(self, source, config=VECTORS, *, name="m", version=1, files=None):
        """The model's directory: the configuration, model.py in the version, and other files by their paths."""
        directory = self.root / name
        contents = {f"{version}/model.py": textwrap.dedent(source), **(files or {})}
        for path, content in contents.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return parse_config(config, model=name), directory / str(version) / "model.py"

    def load(self, source, config=VECTORS, *, device=CPU, lane="m_0_0", **where):
        """The handler of such a model."""
        parsed, file = self.write(source, config, **where)
        handler = PythonHandler.load(parsed, file, device, lane)
        self._open.append(handler)
        return handler

    @staticmethod
    def author(handler):
        """The author's object that a handler in this process has made."""
        return handler.host.author

    def refused(self, source, config=VECTORS, **where):
        """The error of a model that cannot be loaded."""
        with pytest.raises(MmeError) as caught:
            self.load(source, config, **where)
        return caught.value

    def close(self, handler):
        """Close one before the end of the test."""
        self._open.remove(handler)
        handler.close()

    def close_all(self):
        """Close what is open."""
        while self._open:
            self._open.pop().close()


@pytest.fixture
def models(tmp_path):
    """See `Models`."""
    models = Models(tmp_path)
    yield models
    models.close_all()


class Kit:
    """The above by one name, for tests that cannot import from here."""

    VECTORS = VECTORS
    HEAD = HEAD
    body = staticmethod(body_of)
    each = staticmethod(each)
    request = staticmethod(request_of)


@pytest.fixture(scope="session")
def kit():
    """See `Kit`."""
    return Kit
