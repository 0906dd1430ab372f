"""What is done for models of torch, where it is installed."""

import io
import json

import numpy as np
import pytest

from model_handlers.errors import Kind
from tests.frameworks import framework

torch = framework("torch")
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")

DOUBLES = """
import torch
class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))
    def forward(self, rows):
        assert not self.training and torch.is_inference_mode_enabled()
        return rows * self.factor
def model_fn(model_dir): return Doubles()
"""


class Doubles(torch.nn.Module):
    """Twice what it gets."""

    def forward(self, rows):
        """Double."""
        return rows * 2


def torchscript():
    """The same as a file of TorchScript."""
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(Doubles()), stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["model.pt", "other.pth"])
def test_a_torchscript_file_needs_no_model_fn(scripts, name):
    """model.pt, or the only such file, is loaded for a script that defines nothing."""
    loaded = scripts.load("", files={name: torchscript()})

    assert json.loads(loaded.body("[[1, 2.5]]")) == [[2, 5]]


def test_a_file_that_is_no_torchscript_says_why(scripts):
    """The error is torch's."""
    error = scripts.refused("", files={"model.pt": b"PK"})

    assert error.kind is Kind.INVALID_MODEL
    assert "failed while model_fn ran: RuntimeError" in error.message


@pytest.mark.parametrize(("accept", "expected"), [("application/json", b"[[2.0, 5.0]]"), ("text/csv", b"2.0,5.0\n")])
def test_a_module_gets_tensors_and_answers_them(scripts, accept, expected):
    """In inference mode, not training, with gradients or without."""
    loaded = scripts.load(DOUBLES)

    assert loaded.body("[[1, 2.5]]", accept=accept) == expected


def test_npy_keeps_its_type(scripts):
    """Numbers of a text become 32-bit floats, those of an array stay what they are."""
    loaded = scripts.load(DOUBLES)
    stream = io.BytesIO()
    np.save(stream, np.array([1.5], np.float64))

    answer = np.load(io.BytesIO(loaded.body(stream.getvalue(), "application/x-npy", "application/x-npy")))

    assert (answer.tolist(), answer.dtype) == ([3.0], np.float64)
