"""A way to start models, and a look for descriptors, threads and memory left."""

import contextlib
import gc
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that children, too, find isolated_models

from model_handlers.base import CPU
from model_handlers.config.model_config import ModelConfig
from model_handlers.worker.start import start_isolated


@pytest.fixture(scope="module", autouse=True)
def old_objects_aside():
    """What frameworks made before, a second's work, is not looked through whenever a test here collects garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held():
    """Descriptors, threads and mapped segments of this process, each by what only it has."""
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "mme-segment" in line]
    return {*_descriptors(), *threading.enumerate(), *maps}


def _descriptors():
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed while we look
            yield entry.name, str(entry.readlink())


@pytest.fixture
def nothing_held(fork_server, loop_thread, nothing_left_behind):
    """Fails a test that leaves a descriptor, a thread (a daemon too) or a segment behind.

    What others left here before, an S3 server's connections for one, may go meanwhile.
    """
    before = held()
    yield
    until = time.monotonic() + 60
    while (left := held() - before) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert not left


@pytest.fixture
def start(tmp_path, nothing_held, home):
    """Starts models by handler class, and closes those that the test did not."""
    started = []

    def start(handler_class, device=CPU, model_file=None, config=None, environment=None, shared=None, **parameters):
        config = config or ModelConfig("m", parameters=parameters)
        file = model_file or tmp_path / "model.txt"
        handler = start_isolated(handler_class, config, file, device, "m_0_0", environment, shared=shared)
        started.append(handler)
        return handler

    yield start
    for handler in started:
        handler.close()
