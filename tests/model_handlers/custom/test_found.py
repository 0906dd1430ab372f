"""Backends that installed packages register, and those that archives bring: what is known before they run."""

from __future__ import annotations

import sys
import textwrap

import pytest

from model_handlers import registry
from model_handlers.base import Placement
from model_handlers.config.model_config import ModelConfig
from model_handlers.custom import FileHandler
from model_handlers.errors import Kind, MmeError
from model_handlers.registry import find_backend, handler_for

MODULE = """
from model_handlers.base import Handler

class Parrot(Handler):
    backend = "parrot"
    default_filename = "model.parrot"

class Mute:
    pass
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package that registers backends."""

    def install(**backends):
        module = f"parrots_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(MODULE)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{kind}" for name, kind in backends.items()]
        (info / "entry_points.txt").write_text("\n".join(["[mme.handlers]", *lines]))
        monkeypatch.syspath_prepend(str(tmp_path))
        return module

    registry.registered_backend.cache_clear()
    yield install
    registry.registered_backend.cache_clear()
    for name in [name for name in sys.modules if name.startswith("parrots_")]:
        del sys.modules[name]


def test_an_installed_package_registers_a_backend(install):
    """An entry point is all that it takes: the backend is found by its name, with its own model file."""
    module = install(parrot="Parrot")
    backend = find_backend("parrot", "", "m")

    assert backend.filename == "model.parrot"
    assert handler_for(backend) is sys.modules[module].Parrot


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Nobody", r"which can't be imported: AttributeError"),
        ("Mute", r"which is no subclass of model_handlers.base.Handler"),
    ],
)
def test_a_package_that_registers_no_handler_is_named(kind, sentence, install):
    """Whoever runs the server learns which package it is."""
    module = install(parrot=kind)
    with pytest.raises(MmeError, match=sentence) as caught:
        find_backend("parrot", "", "m")

    assert caught.value.kind is Kind.UNSUPPORTED
    assert f"backend 'parrot' is registered by the package '{module}'" in caught.value.message


def test_a_package_can_t_replace_a_backend(install):
    """Those of the table come first."""
    install(onnxruntime="Parrot")

    assert find_backend("onnxruntime", "", "m").filename == "model.onnx"


def test_a_name_that_nobody_serves(install, tmp_path):
    """The sentence says both ways to bring a backend."""
    with pytest.raises(MmeError, match=r"a package that registers it, or a handler.py beside the model") as caught:
        find_backend("parrot", "", "m", tmp_path)

    assert caught.value.kind is Kind.INVALID_MODEL


SOURCES = {
    "no method": ("class A:\n    pass", False),
    "the method": ("class A:\n    def execute_requests(self, requests): ...", True),
    "in the second class": ("class A:\n    x = 1\nclass B:\n    def execute_requests(self, requests): ...", True),
    "outside of a class": ("def execute_requests(self, requests): ...", False),
    "another method": ("class A:\n    def execute(self, inputs, outputs): ...", False),
    "no Python": ("class A", False),
    "a zero byte": ("class A:\n    '\0'", False),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_file_beside_the_model_is_read_and_not_run(case, tmp_path):
    """Whether it sees requests is known from the text; where it runs is a process of its own."""
    source, expected = SOURCES[case]
    (tmp_path / "handler.py").write_text(f"raise SystemExit('never')\n{source}")
    backend = find_backend("anything", "", "m", tmp_path)

    traits = handler_for(backend).traits(ModelConfig("m"), tmp_path / "handler.py")
    assert (handler_for(backend), traits.sees_requests, traits.placement) == (FileHandler, expected, Placement.PROCESS)


def test_pack_checks_a_handler_s_syntax(tmp_path):
    """A file that is no Python is refused before it is uploaded; one that declares nothing can't be checked further."""
    (tmp_path / "handler.py").write_text("def f(:")
    with pytest.raises(MmeError, match=r"handler.py line 1: SyntaxError"):
        FileHandler.autocomplete(ModelConfig("m"), tmp_path / "handler.py")

    (tmp_path / "handler.py").write_text(textwrap.dedent(MODULE))
    with pytest.raises(MmeError, match=r"is completed by its own handler.py, which only a load runs") as caught:
        FileHandler.autocomplete(ModelConfig("m"), tmp_path / "handler.py")

    assert caught.value.kind is Kind.UNSUPPORTED
