"""TensorFlow's models in processes of their own, forked from one that has imported TensorFlow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import MmeError
from model_handlers.tensorflow import PRELOAD, SavedModelHandler
from model_handlers.worker.fork_client import FORKS, forks_with
from model_handlers.worker.start import start_isolated
from tests.model_handlers.tensorflow.conftest import WEIGHTS

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module", autouse=True)
def fork_server(tf):
    """It lives as long as the process that serves: it is no leak of a test."""
    server = forks_with(PRELOAD)
    server.ensure_running()
    yield server
    server.stop()
    FORKS.stop()


def test_a_model_in_a_process(models, fork_server):
    """Its answers are TensorFlow's own; the framework is shared with all such processes, and the process ends."""
    config = ModelConfig("m", max_batch_size=8, parameters={"TF_NUM_INTRA_THREADS": "1", "TF_NUM_INTER_THREADS": "1"})
    handlers = [start_isolated(SavedModelHandler, config, models.saved, CPU, f"m_0_{lane}") for lane in range(2)]
    processes = [psutil.Process(handler.child.pid) for handler in handlers]
    try:
        for handler, rows in zip(handlers, (1, 8), strict=True):
            x = np.random.default_rng(7).standard_normal((rows, 4), "f4")
            np.testing.assert_allclose(handler.execute({"x": x}, ["y"])[0], x @ WEIGHTS, rtol=1e-4, atol=1e-5)
            assert handler.memory().host < 120 << 20
        assert {process.parent().pid for process in processes} == {fork_server.pid}
        assert "tensorflow" in Path(f"/proc/{fork_server.pid}/maps").read_text()
    finally:
        for handler in handlers:
            handler.close()

    assert not any(process.is_running() for process in processes)


def test_a_model_that_keeps_what_it_was_given(models):
    """What a variable holds of one batch is not written over by those that follow."""
    config = ModelConfig("m", max_batch_size=8, parameters={"TF_SIGNATURE_DEF": "remembers"})
    handler = start_isolated(SavedModelHandler, config, models.saved, CPU, "m_0_0")
    batches = [np.full((2, 4), number, "f4") for number in range(5)]
    try:
        before = [handler.execute({"x": batch}, ["before"])[0].copy() for batch in batches]
    finally:
        handler.close()

    for kept, batch in zip(before[1:], batches, strict=False):
        np.testing.assert_array_equal(kept, batch)


def test_a_model_without_a_signature_in_a_process(models):
    """The refusal is the same sentence as in this process."""
    with pytest.raises(MmeError, match="has no signature 'serving_default': found none"):
        start_isolated(SavedModelHandler, ModelConfig("m"), models.bare, CPU, "m_0_0")
