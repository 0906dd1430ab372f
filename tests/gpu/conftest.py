"""Tests that need a GPU: `make test-gpu`. Elsewhere they are skipped."""

from __future__ import annotations

import pytest

from model_handlers.system import devices


def pytest_collection_modifyitems(items):
    """All of these have the marker, and no use without a GPU."""
    absent = pytest.mark.skip(reason="no GPU is here") if not devices.gpus() else None
    for item in items:
        if item.nodeid.startswith("tests/gpu/"):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.slow)
            if absent is not None:
                item.add_marker(absent)
