"""Counts from 1 to what a request asks for, a response for each number, as a language model answers word by word."""

from __future__ import annotations

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """COUNT, INT32 [1], and PAUSE, seconds as FP32 [1] → COUNT times NUMBER, INT32 [1]."""

    async def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Answer all requests side by side; the next ones need not wait for these."""
        await asyncio.gather(*(self.count(request) for request in requests))

    async def count(self, request: pb_utils.InferenceRequest) -> None:
        """Answer one request."""
        sender = request.get_response_sender()
        count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
        pause = float(pb_utils.get_input_tensor_by_name(request, "PAUSE").as_numpy()[0])
        for number in range(1, count + 1):
            if sender.is_cancelled():  # nobody listens any more
                break
            await asyncio.sleep(pause)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([number], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
