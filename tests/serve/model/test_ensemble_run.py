"""Tensors between models of which only one batches."""

import numpy as np
import pytest

from model_handlers.tensor import FP32, TensorSpec
from serve.model.ensemble import fitted


@pytest.mark.parametrize(
    ("dims", "batches", "shape", "fits"),
    [
        ((4,), True, (4,), (1, 4)),
        ((4,), True, (3, 4), (3, 4)),
        ((-1, 4), True, (3, 4), (1, 3, 4)),
        ((4,), False, (1, 4), (4,)),
        ((-1, 4), False, (3, 4), (3, 4)),
        ((1, 4), False, (1, 4), (1, 4)),
        ((1, 4), False, (1, 1, 4), (1, 4)),
        ((4,), False, (3, 4), (3, 4)),
    ],
    ids=[
        "one row becomes a batch",
        "rows are a batch",
        "one matrix becomes a batch",
        "a batch of one becomes its row",
        "a batch is rows",
        "a batch of one is a matrix",
        "a batch of one becomes its matrix",
        "a batch of several has no row",
    ],
)
def test_a_tensor_fits_its_reader(dims, batches, shape, fits):
    """A dimension comes or goes only where one is too few or too many; what fits neither way stays as it is."""
    assert fitted(TensorSpec("x", FP32, dims), np.zeros(shape, np.float32), batches=batches).shape == fits


def test_a_tensor_that_its_reader_does_not_know_stays_as_it_is():
    """The reader refuses it by its name."""
    assert fitted(None, np.zeros((2, 3)), batches=True).shape == (2, 3)
