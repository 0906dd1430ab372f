"""Python models that take memory, each in a process of its own, and an engine of them: real processes, real bytes."""

import asyncio

import numpy as np

from model_handlers.base import Footprint
from model_handlers.errors import MmeError
from model_handlers.tensor import UINT8
from serve.request import InferenceRequest, Layout
from tests.serve import engines

MB = 10**6
# While it loads it takes `load` megabytes, a few at a time, and keeps all but `spare` of them. The first element of X
# says how many more megabytes it is to keep from then on, the second how many tenths of seconds the answer takes.
_SOURCE = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kept = []
        for _ in range({load} // 4):
            self.kept.append(np.ones(4_000_000, np.uint8))
            time.sleep({pause})
        del self.kept[({load} - {spare}) // 4 :]

    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, given):
        self.kept += [np.ones(1_000_000, np.uint8) for _ in range(int(given[0]))]
        time.sleep(int(given[1]) / 10 if len(given) > 1 else 0)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", given + 1)])
"""
_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_UINT8 dims: [ -1 ] }
"""


def write_hungry(repository, name, load=0, spare=0, pause=0.0):
    """Such a model in a repository: megabytes, and seconds between each few of them."""
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(_SOURCE.format(load=load, spare=spare, pause=pause))
    (version.parent / "config.pbtxt").write_text(_CONFIG)


def engine_of(folder, megabytes, **options):
    """An engine of the models in `folder / "models"`; closed and audited afterwards."""
    return engines.engine_of(folder, Footprint(megabytes * MB), repository=folder / "models", **options)


async def ask(engine, name, *, size=1, keep=0, tenths=0):
    """The answer to a request of so many bytes, which has the model keep so many megabytes more."""
    given = np.zeros(max(size, 2 if tenths else 1), np.uint8)
    given[:2] = (keep, tenths)[: len(given)]
    answer = asyncio.get_running_loop().create_future()
    layout = Layout((("X", UINT8, given.shape),), ())
    request = InferenceRequest(layout, [given], lambda _, result: answer.set_result(result))
    if not engine.submit(name, None, request):
        await engine.submit_cold(name, None, request)
    response = await answer
    if isinstance(response, MmeError):
        raise response
    assert response.outputs[0][2][0] == keep + 1
    return response


def host_bytes(engine, name):
    """What the cache counts for a model."""
    return engine.cache.entries[name].footprint.host
