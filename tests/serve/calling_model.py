"""A model that runs the code that its requests bring, and tells what that leaves in `told`. Loaded as a model.py."""

# ruff: noqa: S102, BLE001, F401 - it does as it is told

import asyncio
import gc
import json
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def pairs(*numbers):
    """The input of a model that doubles: rows of two."""
    return pb_utils.Tensor("x", np.array([[number, number] for number in numbers], np.float32))


def words(text):
    """The input of a model that does as it is told."""
    return pb_utils.Tensor("DO", np.array([text], object))


def request_of(model, *inputs, **fields):
    """A request of another model."""
    return pb_utils.InferenceRequest(model_name=model, inputs=list(inputs), **fields)


def short(response):
    """A response in short: its error, or its outputs."""
    if response.has_error():
        return [response.error().code(), response.error().message()]
    return {tensor.name(): plain(tensor.as_numpy()) for tensor in response.output_tensors()}


def plain(array):
    """An array as JSON has it."""
    return [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]


def refused(action, *arguments, **keywords):
    """What calling this raises."""
    try:
        action(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.begun = [refused(request_of("double", pairs(1)).exec), pb_utils.is_model_ready("nobody")]

    def execute(self, requests):
        if self.decoupled:
            for request in requests:
                threading.Thread(target=self.send, args=(request, request.get_response_sender()), daemon=True).start()
            return None
        return [self.response(request) for request in requests]

    def send(self, request, sender):
        sender.send(self.response(request), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self, request):
        code = textwrap.dedent(request.inputs()[0].as_numpy()[0].decode())
        scope = {**globals(), "request": request, "model": self}
        exec(code, scope)
        told = json.dumps(scope.get("told"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([told], object))])

    def finalize(self):
        directory = Path(pb_utils.get_model_dir())
        told = [refused(request_of("double", pairs(1)).exec), refused(pb_utils.load_model, "double")]
        (directory / "finalized").write_text("\n".join(told))


async def gathered(*calls):
    """The responses to several calls at once."""
    return [short(response) for response in await asyncio.gather(*calls)]


def run(main):
    """A coroutine on a loop of its own."""
    return asyncio.run(main())
