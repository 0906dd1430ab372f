"""Real models, made by PyTorch here, and handlers over them in this process."""

from __future__ import annotations

import getpass
import warnings

import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.pytorch import TorchHandler
from tests.frameworks import framework

_WARNINGS = (
    r"ignore:`torch\.jit\.:DeprecationWarning",  # for those who export models; we serve what was exported
    "ignore:The given NumPy array is not writable:UserWarning",  # as the handler has it once it imports PyTorch
)


def pytest_collection_modifyitems(items):
    """Warnings are errors in all tests; these are none."""
    for item in items:
        if item.nodeid.startswith("tests/model_handlers/pytorch/"):
            for warning in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def torch(private_temporary_folder):
    """The framework, or no test at all; random numbers are the same in every run."""
    torch = framework("torch")
    torch.manual_seed(7)
    # made by itself when it first exports or reads an exported program, and never removed
    (private_temporary_folder / f"torchinductor_{getpass.getuser()}").mkdir(exist_ok=True)
    return torch


@pytest.fixture
def save(torch, tmp_path):
    """Saves a module as TorchScript, by what its source says or by what it did with examples; returns the file."""

    def save(module, *examples):
        path = tmp_path / "model.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all of torch.jit is deprecated
            made = torch.jit.trace(module, examples) if examples else torch.jit.script(module)
            made.save(path)
        return path

    return save


@pytest.fixture
def load():
    """Loads a file with the inputs and outputs that a configuration declares."""
    loaded = []

    def load(path, inputs=(), outputs=(), max_batch_size=8, **parameters):
        config = ModelConfig(
            "m", backend="pytorch", max_batch_size=max_batch_size, inputs=inputs, outputs=outputs, parameters=parameters
        )
        loaded.append(TorchHandler.load(config, path, CPU))
        return loaded[-1]

    yield load
    for handler in loaded:
        handler.close()
