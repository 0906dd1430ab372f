"""A handler.py beside a model: its class, its model file, and what is said of one that is none."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref

import numpy as np
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.custom import FileHandler
from model_handlers.errors import Kind, MmeError

HEAD = """
import numpy as np
import beside
from model_handlers.base import Handler
from model_handlers.config.validate import normalise
"""
CLASS = """
class Adds(Handler):
    backend = "adds"
    default_filename = "number.txt"

    def __init__(self, config, number):
        super().__init__(config)
        self.number = number

    @classmethod
    def autocomplete(cls, config, model_file):
        return normalise(config)

    @classmethod
    def load(cls, config, model_file, device, lane):
        return cls(config, float(model_file.read_text()) + beside.MORE)

    def execute(self, inputs, outputs):
        return [inputs["X"] + self.number for name in outputs]

    def close(self):
        pass
"""


@pytest.fixture
def version(tmp_path, monkeypatch):
    """A function that writes handler.py into a model's version directory; what is imported from there goes in the end."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    (folder / "number.txt").write_text("3")
    (folder / "weights").mkdir()
    (folder / "weights" / "other.txt").write_text("5")
    (folder / "beside.py").write_text("MORE = 0.5")

    def write(source):
        (folder / "handler.py").write_text(textwrap.dedent(HEAD + source))
        return folder

    yield write
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def load(folder, handler=FileHandler, file="handler.py", **fields):
    """Load what lies there."""
    return handler.load(ModelConfig("m", backend="adds", **fields), folder / file, CPU, "m_0_0")


def test_its_class_loads_its_own_file(version):
    """The class's default_filename, in the version's directory; it imports what lies beside it."""
    handler = load(version(CLASS))

    assert handler.execute({"X": np.ones(2)}, ["Y"])[0].tolist() == [4.5, 4.5]


def test_its_file_is_forgotten_when_it_is_closed(version):
    """Nothing of it stays in a process that goes on, and the handler itself goes at once."""
    folder = version(CLASS)
    paths, modules = list(sys.path), set(sys.modules)
    handler = load(folder)
    gone = weakref.ref(handler)
    assert set(sys.modules) - modules >= {type(handler).__module__}
    handler.close()
    gc.disable()
    try:
        del handler
        assert gone() is None
    finally:
        gc.enable()

    assert sys.path == paths
    assert not [name for name in set(sys.modules) - modules if name.startswith(("handler_of", "beside"))]


def test_the_configuration_may_name_another_file(version):
    """default_model_filename wins, wherever in the version's directory it is."""
    handler = load(version(CLASS), file="weights/other.txt", default_model_filename="weights/other.txt")

    assert handler.execute({"X": np.ones(2)}, ["Y"])[0].tolist() == [6.5, 6.5]


def test_of_several_classes_the_backend_s_is_taken(version):
    """A file may define handlers for several backends."""
    folder = version(CLASS + '\nclass Other(Adds):\n    backend = "other"\n')

    assert type(load(folder)).__name__ == "Adds"


REFUSED = {
    "no class": ("", r"must define one subclass .* whose backend is 'adds'; it defines none"),
    "two classes": (
        CLASS + "\nclass Again(Adds):\n    pass\n",
        r"must define one subclass .* it defines Adds, Again",
    ),
    "one that raises": ("raise RuntimeError('no luck')", r"failed while .*handler.py was imported"),
    "one that exits": ("raise SystemExit(3)", r"failed while .*handler.py was imported"),
    "one that hides that it sees requests": (
        CLASS + "\nAdds.execute_requests = lambda self, requests: []",
        "must define 'execute_requests' in the class itself",
    ),
    "one without execute": (
        CLASS.replace("def execute(", "def run("),
        "class Adds in handler.py has no execute; a handler has autocomplete, load, execute and close",
    ),
    "one without two": (
        CLASS.replace("def close(", "def end(").replace("def autocomplete(", "def complete("),
        "class Adds in handler.py has no autocomplete and no close",
    ),
    "one that only seems to": (
        CLASS + "\nclass Beside:\n    def execute_requests(self, requests): ...\n",
        "must define 'execute_requests' in the class itself",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_can_t_serve_is_refused(case, version):
    """The sentence names the model and what the file lacks."""
    source, sentence = REFUSED[case]
    with pytest.raises(MmeError, match=sentence) as caught:
        load(version(source))

    assert caught.value.kind is Kind.INVALID_MODEL
    assert "model 'm'" in caught.value.message
