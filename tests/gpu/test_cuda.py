"""CUDA as engines of TensorRT use it, and which GPUs it shows: needs a driver and cuda-python, and no framework.

Never yet run on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices
from model_handlers.tensorrt import engine

pytest.importorskip("cuda.bindings.runtime")
SIZE = 256 << 20
ROWS = np.arange(3000, dtype=np.float32).reshape(1000, 3)
COUNTED = """
import json, uuid
from cuda.bindings import runtime
from model_handlers import gpus
found = [gpu.uuid for gpu in gpus.gpus()]
error, count = runtime.cudaGetDeviceCount()
shown = [runtime.cudaGetDeviceProperties(index)[1].uuid.bytes for index in range(count if not int(error) else 0)]
print(json.dumps([found, [str(uuid.UUID(bytes=bytes(each[:16]))) for each in shown]]))
"""


@pytest.fixture
def stream():
    """One on the first device, with memory of both kinds."""
    engine.set_device(0)
    made = engine.CudaStream(), engine.DeviceMemory(), engine.HostMemory(), engine.HostMemory()
    yield made
    for each in made[1:]:
        each.close()
    made[0].close()


def there_and_back(stream, device, out, back, rows):
    """Copy to the device and back by pinned memory, in one stream."""
    out.reserve(rows.nbytes)
    back.reserve(rows.nbytes)
    device.reserve(rows.nbytes)
    out.view(rows.shape, rows.dtype)[...] = rows
    stream.to_device(device, out, rows.nbytes)
    stream.to_host(back, device, rows.nbytes)
    stream.wait()
    return back.view(rows.shape, rows.dtype).copy()


def test_what_goes_to_the_device_comes_back(stream):
    """More of it too, for which the memory grows."""
    for count in (1, 1000, 1 << 20):
        rows = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)

        np.testing.assert_array_equal(there_and_back(*stream, rows), rows)


def test_memory_of_the_device_is_given_back(stream):
    """By CUDA's own count."""
    before = engine.free_memory()
    stream[1].reserve(SIZE)
    assert before - engine.free_memory() >= SIZE

    stream[1].close()
    assert engine.free_memory() > before - SIZE // 2


def test_want_of_memory_is_told_and_passes(stream):
    """More than any device has is OUT_OF_MEMORY, and what follows goes on as if nothing had been."""
    with pytest.raises(MmeError, match="the GPU has no memory left") as caught:
        stream[1].reserve(1 << 50)

    assert caught.value.kind is Kind.OUT_OF_MEMORY
    np.testing.assert_array_equal(there_and_back(*stream, ROWS), ROWS)


def test_threads_have_streams_of_their_own():
    """Each sets its device, as instances do, and gets what it sent."""
    wrong = []

    def run(index):
        engine.set_device(0)
        made = engine.CudaStream(), engine.DeviceMemory(), engine.HostMemory(), engine.HostMemory()
        wrong.extend(_ for _ in range(50) if not np.array_equal(there_and_back(*made, ROWS + index), ROWS + index))
        for each in made[1:]:
            each.close()
        made[0].close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


@pytest.mark.parametrize("wanted", [None, "0", "", "-1", "0,0", "0,99", "99,0", "nonsense", "{uuid}", "{uuid:.9}"])
def test_cuda_shows_the_gpus_that_we_count(wanted):
    """CUDA_VISIBLE_DEVICES means to us what it means to CUDA: as many, the same, in the same order."""
    environ = {name: value for name, value in os.environ.items() if name != devices.VARIABLE}
    if wanted is not None:
        environ[devices.VARIABLE] = wanted.format(uuid=devices.gpus()[0].uuid)
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr

    ours, cudas = json.loads(done.stdout)
    assert [name.partition("-")[2] for name in ours] == cudas
