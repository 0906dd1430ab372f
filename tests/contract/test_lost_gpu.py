"""A serving process that loses a GPU ends for another one, as long as that helps. The GPU is a stand-in that fails."""

from __future__ import annotations

from tests.contract import models
from tests.contract.server import alive, eventually
from tests.processes import is_over

# Answers until it is sent a 7; from then on nothing in this process does, as after a kernel that went wrong.
_BRITTLE = """
from model_handlers.base import Handler
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.system.devices import lost_process

LOST = []


class Brittle(Handler):
    backend = "brittle"
    default_filename = "handler.py"

    @classmethod
    def autocomplete(cls, config, model_file):
        return normalise(config)

    @classmethod
    def load(cls, config, model_file, device, lane):
        return cls(normalise(config))

    def execute(self, inputs, outputs):
        if LOST or inputs["X"][0] == 7:
            LOST.append(True)
            raise lost_process(MmeError(Kind.EXECUTION_FAILED, "the kernel failed"), "CUDA error 700")
        return [inputs["X"]]

    def close(self):
        pass
"""
_CONFIG = """
backend: "brittle"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
parameters { key: "MME_PLACEMENT" value: { string_value: "inline" } }
"""


def test_who_loses_a_gpu_is_replaced_and_a_gpu_that_stays_lost_fails_the_ping(serve, tmp_path):
    """Its requests are told why; the next process knows all models. The fourth time /ping fails, and the rest goes on."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    brittle = models.lay_out(tmp_path / "brittle" / "model", _BRITTLE, _CONFIG, file="handler.py")
    plus = models.lay_out(tmp_path / "plus" / "model", models.plus(1))
    for name, url in (("brittle", brittle), ("plus", plus)):
        assert server.ask("POST", "/models", {"model_name": name, "url": str(url)}).status == 200

    def ask(number):
        tensor = {"name": "X", "shape": [1], "datatype": "INT32", "data": [number]}
        return server.ask("POST", "/models/brittle/invoke", {"inputs": [tensor]})

    def plus_answers():
        return models.y(server.ask("POST", "/models/plus/invoke", models.ONE).json) == [2, 3, 4, 5]

    for time in range(4):
        before = server.worker
        assert ask(1).status == 200
        assert plus_answers()
        refusal = ask(7)
        assert refusal.status == 500
        assert "in this process the GPU answers nothing but errors now (CUDA error 700)" in refusal.body.decode()
        if time < 3:
            eventually(lambda before=before: is_over(before), "its end")
            eventually(lambda: alive(server), "another worker")

    eventually(lambda: server.ask("GET", "/ping").status == 503, "a ping that fails")
    assert server.worker == before
    assert plus_answers()
    assert ask(1).status == 500
    assert server.ask("GET", "/v2/health/ready").status != 200
    assert server.stop() == 0
