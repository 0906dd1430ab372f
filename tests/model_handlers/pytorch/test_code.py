"""Models that are code and weights, as Triton's PyTorch backend takes them, and its Python backend by a platform."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.pytorch import CodeHandler, TorchHandler
from model_handlers.registry import find_backend, handler_for, told_by_file
from model_handlers.tensor import FP32, TensorSpec

CODE = """
import torch
from factors import FACTOR
from torch.nn import Linear, Module

class Net(Module):
    def __init__(self):
        super().__init__()
        self.inner = Zoom()
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x, y):
        return self.inner(x) - y, {shape}

class Zoom(Module):
    def forward(self, x):
        return x * FACTOR
""".replace("{shape}", "x + self.shift")
INPUTS = (TensorSpec("second", FP32, (2,)), TensorSpec("x", FP32, (2,)))  # by their order, whatever they are called
OUTPUTS = (TensorSpec("OUTPUT__0", FP32, (2,)), TensorSpec("OUTPUT__1", FP32, (2,)))


@pytest.fixture
def version(torch, tmp_path):
    """A version's directory with code, and a module that it imports."""
    (tmp_path / "model.py").write_text(CODE)
    (tmp_path / "factors.py").write_text("FACTOR = 10")
    return tmp_path


def answers(handler):
    """What it answers for [1, 2] and [3, 4]."""
    given = {"second": np.array([[1, 2]], np.float32), "x": np.array([[3, 4]], np.float32)}
    return [array.tolist() for array in handler.execute(given, [spec.name for spec in OUTPUTS])]


def test_code_is_a_model(version, load):
    """Inputs are its arguments in the configuration's order; what it imported is forgotten with it."""
    handler = load(version / "model.py", INPUTS, OUTPUTS)
    assert answers(handler) == [[[7, 16]], [[1, 2]]]
    assert "factors" in sys.modules
    handler.close()
    assert "factors" not in sys.modules


def test_each_computes_with_its_own_modules(version, load, tmp_path_factory):
    """Though another one in its process has imported one of that name; those beside none of its own stay."""
    first = load(version / "model.py", INPUTS, OUTPUTS)
    other = tmp_path_factory.mktemp("other")
    (other / "model.py").write_text(CODE)
    (other / "factors.py").write_text("FACTOR = 100")
    second = load(other / "model.py", INPUTS, OUTPUTS)

    assert (answers(first)[0], answers(second)[0]) == ([[7, 16]], [[97, 196]])
    first.close()
    assert sys.modules["factors"].FACTOR == 100
    second.close()
    assert "factors" not in sys.modules


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("file", ["model.py", "model.pt"])
def test_weights_beside_it_are_its_own(torch, version, load, zipped, file):
    """A state_dict, in either form of torch.save, whichever of the two files the configuration means."""
    torch.save({"shift": torch.tensor([0.5])}, version / "model.pt", _use_new_zipfile_serialization=zipped)
    assert answers(load(version / file, INPUTS, OUTPUTS)) == [[[7, 16]], [[1.5, 2.5]]]


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [({"other": 1.0}, "Missing key"), (ValueError(), "Weights only load failed")],
)
def test_weights_that_are_none_are_refused(torch, version, load, weights, sentence):
    """Those of another module, and a pickle of anything but tensors, which is not run."""
    torch.save(weights, version / "model.pt")
    with pytest.raises(MmeError, match=sentence) as caught:
        load(version / "model.pt", INPUTS, OUTPUTS)
    assert caught.value.kind is Kind.INVALID_MODEL


def test_code_without_a_module_is_refused(version, load):
    """In Triton's words, with the file."""
    (version / "model.py").write_text("from torch.nn import Linear")
    with pytest.raises(MmeError, match=r"Cannot find a subclass of torch\.nn\.Module in .*model\.py"):
        load(version / "model.py", INPUTS, OUTPUTS)


def test_inputs_and_outputs_have_to_be_declared(version, load):
    """Code is not run to learn them."""
    with pytest.raises(MmeError, match="declare both in config"):
        CodeHandler.autocomplete(ModelConfig("m", backend="pytorch", inputs=INPUTS), version / "model.py")
    with pytest.raises(MmeError, match="declare both in config"):
        load(version / "model.py", INPUTS)
    config = ModelConfig("m", backend="pytorch", inputs=INPUTS, outputs=OUTPUTS)
    assert CodeHandler.autocomplete(config, version / "model.py").outputs == OUTPUTS


@pytest.mark.parametrize(
    ("backend", "platform", "weights", "handler"),
    [
        ("pytorch", "pytorch", True, CodeHandler),
        ("", "pytorch", True, CodeHandler),
        ("python", "pytorch", True, CodeHandler),
        ("pytorch", "", False, CodeHandler),
        ("pytorch", "", True, TorchHandler),  # which looks what it is
    ],
)
def test_the_configuration_and_the_files_tell(version, backend, platform, weights, handler):
    """Backend, platform, or the only file that is there."""
    if weights:
        (version / "model.pt").touch()
    found = find_backend(backend, platform, "m", version)
    found = found if platform else told_by_file(found, version)
    assert handler_for(found) is handler


def test_a_python_model_with_that_platform_stays_one(version):
    """Its class tells."""
    (version / "model.py").write_text("class TritonPythonModel: pass")
    assert find_backend("python", "pytorch", "m", version).name == "python"
