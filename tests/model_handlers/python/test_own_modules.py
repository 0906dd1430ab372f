"""An author's module names are the author's, whatever the server and what it imports are called."""

from __future__ import annotations

import builtins
import sys
import textwrap

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.config.pbtxt import parse_config
from model_handlers.custom import FileHandler
from model_handlers.python.author_code import OwnModules
from model_handlers.python.handler import PythonHandler
from model_handlers.requests import ModelRequest
from model_handlers.scripts.host import ScriptHandler
from model_handlers.worker.start import start_isolated

pytestmark = pytest.mark.usefixtures("fork_server", "home")
NAMES = ["serve", "container", "mme", "utils", "config", "app", "model_handlers", "psutil", "orjson"]
BARE = [
    "serve",
    "container",
    "model_handlers",
    "mme",
]  # folders without __init__.py, which other packages of a name hide
IMPORTS = """
import importlib
{statements}

def words():
    found = [{found}]
    {lazy}
    return found + [later]
"""
STATEMENTS = """
import {0}
import {0}.deep.errors as errors_of_{0}
from {0} import deep as deep_{0}, WORD as word_{0}
from {0}.deep import *
"""
FOUND = "{0}.WORD, {0}.deep.errors.WORD, errors_of_{0}.WORD, deep_{0}.errors.WORD, word_{0}, stars"
PACKAGE = {
    "__init__.py": "from .deep.errors import WORD\nfrom . import deep",
    "deep/__init__.py": "__all__ = ['errors', 'stars']\nstars = 'mine'",
    "deep/errors.py": "from .. import deep\nfrom ..other import WORD",
    "other.py": "WORD = 'mine'",
}
SCRIPT = """
def model_fn(model_dir):
    return words()

def predict_fn(data, model):
    return [*model, *words()]
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        said = np.array([word.encode() for word in words()], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)]) for _ in requests]
"""


def imports(names):
    """The beginning of a file that imports the author's modules of these names in every way."""
    return IMPORTS.format(
        statements="".join(STATEMENTS.format(name) for name in names),
        found=", ".join(FOUND.format(name) for name in names),
        lazy=f"from {names[0]}.deep.errors import WORD as later",
    )


def put(folder, names):
    """Packages of these names."""
    for name in names:
        for path, text in PACKAGE.items():
            file = folder / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


@pytest.fixture(params=["in this process", "in one of its own"])
def load(request, tmp_path):
    """A function that loads a model from a folder."""
    loaded = []

    def start(kind, config, file):
        if request.param == "in this process":
            handler = kind.load(config, file, CPU, "m_0_0")
        else:
            handler = start_isolated(kind, config, file, CPU, "m_0_0")
        loaded.append(handler)
        return handler

    yield start
    for handler in loaded:
        handler.close()


def script_of(load, folder, text):
    """What a script says that lies in a folder with its modules."""
    (folder / "code").mkdir(parents=True, exist_ok=True)
    (folder / "code" / "inference.py").write_text(text)
    config = ModelConfig("m", "sagemaker", default_model_filename="code/inference.py")
    handler = load(ScriptHandler, config, folder / "code" / "inference.py")
    body = {"BODY": np.frombuffer(b"[1]", np.uint8)}
    [answer] = handler.execute_requests([ModelRequest(body, ("BODY",), "", {"content_type": "application/json"})])
    return answer.outputs["BODY"].tobytes().decode()


@pytest.mark.parametrize("places", ["code", "code/lib", "."])
def test_a_script_finds_its_own_modules(load, tmp_path, places):
    """Beside it, in code/lib and beside the model; now and later; and the server's code finds the server's."""
    put(tmp_path / "m" / places, NAMES)
    ours = {name: sys.modules.get(name) for name in NAMES}
    said = script_of(load, tmp_path / "m", imports(NAMES) + SCRIPT)

    assert said.count("mine") == 2 * (6 * len(NAMES) + 1)
    assert {name: sys.modules.get(name) for name in ours if ours[name]} == {k: v for k, v in ours.items() if v}


def test_a_python_model_finds_its_own_modules(load, tmp_path):
    """In its version's folder and in the model's."""
    for folder, names in (("m/1", NAMES[:5]), ("m", NAMES[5:])):
        put(tmp_path / folder, names)
    (tmp_path / "m" / "1" / "model.py").write_text(imports(NAMES) + MODEL)
    text = 'backend: "python" output { name: "SAID" data_type: TYPE_STRING dims: -1 }'
    handler = load(PythonHandler, parse_config(text, model="m"), tmp_path / "m" / "1" / "model.py")
    [answer] = handler.execute_requests([ModelRequest({}, ("SAID",), "", {})])

    assert answer.outputs["SAID"].tolist() == [b"mine"] * (6 * len(NAMES) + 1)


@pytest.mark.parametrize("name", BARE)
def test_a_folder_of_modules_needs_no_init(load, tmp_path, name):
    """As in Python, though a package of that name lies behind it."""
    (tmp_path / "m" / "code" / name).mkdir(parents=True)
    (tmp_path / "m" / "code" / name / "words.py").write_text("WORD = 'mine'")
    said = script_of(load, tmp_path / "m", f"from {name}.words import WORD\ndef words(): return [WORD]\n{SCRIPT}")

    assert said == '["mine", "mine"]'


def test_what_is_not_there_or_raises_is_told_as_ever(tmp_path):
    """A submodule that the author does not have is not looked for among ours; a module that raises is begun again."""
    put(tmp_path, ["serve"])
    (tmp_path / "serve" / "broken.py").write_text("from . import no_such_name")
    own = OwnModules([str(tmp_path)], f"{tmp_path}/")
    inside = {"__name__": "x", "__file__": f"{tmp_path}/x.py"}
    try:
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'serve\.engine'") as missing:
            exec("import serve.engine", dict(inside))  # noqa: S102
        for _ in range(2):
            with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
                exec("import serve.broken", dict(inside))  # noqa: S102
        exec("from serve import engine", {"__name__": "y", "__file__": "/elsewhere/y.py"})  # noqa: S102
    finally:
        own.forget()
    assert missing.value.name == "serve.engine"
    assert builtins.__import__.__module__ == "builtins"


def test_a_handler_file_has_the_servers_package_whatever_lies_beside_it(tmp_path):
    """It needs that for its class; other names are its author's."""
    folder = tmp_path / "m" / "1"
    put(folder, ["model_handlers", "serve"])
    source = """
    from serve import WORD
    from model_handlers.base import Handler

    class Mine(Handler):
        backend = "mine"
        default_filename = "handler.py"

        @classmethod
        def autocomplete(cls, config, model_file):
            return config

        @classmethod
        def load(cls, config, model_file, device, lane):
            from serve.deep.errors import WORD as later
            made = cls(config)
            made.words = [WORD, later]
            return made

        def execute(self, inputs, outputs):
            return []

        def close(self):
            pass
    """
    (folder / "handler.py").write_text(textwrap.dedent(source))
    handler = FileHandler.load(ModelConfig("m", backend="mine"), folder / "handler.py", CPU, "m_0_0")
    try:
        assert handler.words == ["mine", "mine"]
    finally:
        handler.close()
