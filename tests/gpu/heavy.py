"""Models that are nothing but weights, in a repository, and servers whose budget holds a few of them.

Which kind of memory the weights lie in is told by who uses it, so that what the tests do can be tried without a GPU.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_handlers.onnx.handler import RUNTIME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.contract.server import Server


WIDTH = 1024
# On a machine with a GPU too, `make test` has the ONNX Runtime for CPUs.
BUILT_FOR_GPUS = pytest.mark.skipif(not RUNTIME.gpu_capable(), reason="ONNX Runtime is not for GPUs: make test-gpu")


def lay_out(folder: Path, megabytes: int, *, kind: str, pinned: bool = False, backend: str = "onnxruntime") -> None:
    """A model whose weights take so much, for instances of a kind (`GPU` or `CPU`): y [n, 1] is what x [n, 1024] sums to."""
    columns = megabytes * (1 << 20) // (4 * WIDTH)
    weights = np.full((WIDTH, columns), 1 / columns, np.float32)
    (folder / "1").mkdir(parents=True)
    tensors = ""
    if backend == "pytorch":
        _save_by_pytorch(weights, folder / "1" / "model.pt")
        tensors = f"""
            input {{ name: "x" data_type: TYPE_FP32 dims: {WIDTH} }}
            output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
        """
    else:
        _save_by_onnx(weights, folder / "1" / "model.onnx")
    pin = 'parameters { key: "MME_PIN" value: { string_value: "true" } }' if pinned else ""
    (folder / "config.pbtxt").write_text(
        f'backend: "{backend}" max_batch_size: 8 instance_group {{ kind: KIND_{kind} count: 1 }} {pin} {tensors}'
    )


def _save_by_onnx(weights: np.ndarray, path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["wide"]),
        helper.make_node("ReduceSum", ["wide", "axes"], ["y"], keepdims=1),
    ]
    constants = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array([1], np.int64), "axes")]
    tensors = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])] for name, size in (("x", WIDTH), ("y", 1))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *tensors, constants), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    onnx.save(model, path)


def _save_by_pytorch(weights: np.ndarray, path: Path) -> None:
    import torch  # noqa: PLC0415 - of the tests that use it

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.from_numpy(weights))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, self.w).sum(1, keepdim=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of torch.jit is deprecated
        torch.jit.trace(Wide(), torch.ones(1, WIDTH)).save(path)


class Crowd:
    """A server, and what it says of its models' memory.

    Args:
        server: running.
        kind: `host` or `device`.
        used: bytes that the driver, or the system, says are in use.
    """

    def __init__(self, server: Server, kind: str, used: Callable[[], int]) -> None:
        self.server = server
        self.used = used
        self._kind = kind

    def ask(self, model: str) -> int:
        """Have the model sum up ones, whether it is in memory or not; returns the status of the answer."""
        tensor = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": [1.0] * WIDTH}
        answer = self.server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
        if answer.status == 200:
            (found,) = answer.json["outputs"]
            np.testing.assert_allclose(found["data"], [WIDTH], rtol=1e-3)
        return answer.status

    def load(self, model: str) -> int:
        """Ask for it to be loaded by SageMaker's way: 507 means memory."""
        return self.ask(model)

    def bytes_of(self, model: str) -> float:
        """What the model is charged for, 0 where it is not in memory."""
        return self.server.metric("mme_model_memory_bytes", model=model, kind=self._kind)

    def resident(self, models: list[str]) -> list[str]:
        """Those that are in memory."""
        return [model for model in models if self.bytes_of(model)]
