"""What the tests of several frameworks share."""

from __future__ import annotations

import pytest

from model_handlers.tensor import BY_NAME, TensorSpec


@pytest.fixture(scope="session")
def specs():
    """Specs by name, each of (type, dims)."""

    def specs(**tensors):
        return tuple(TensorSpec(name, BY_NAME[kind], tuple(dims)) for name, (kind, dims) in tensors.items())

    return specs
