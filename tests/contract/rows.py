"""Rows through a model of a framework, by several clients, against what the framework itself answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.contract.server import Server

ROWS = np.random.default_rng(5).normal(size=(12, 3)).astype(np.float32)


def infer(server: Server, model: str, tensors: tuple[str, str], rows: np.ndarray) -> np.ndarray | str:
    """What a model with these names of input and output answers to rows, or the error."""
    name, output = tensors
    tensor = {"name": name, "shape": rows.shape, "datatype": "FP32", "data": rows.ravel().tolist()}
    answer = server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    if answer.status != 200:
        return answer.error
    (found,) = answer.json["outputs"]
    assert found["name"] == output
    return np.reshape(found["data"], found["shape"])


def assert_each_gets_its_own(
    server: Server, model: str, tensors: tuple[str, str], cuts: list[tuple[int, int]], expected: np.ndarray
) -> None:
    """Clients that send cuts of ROWS at the same time get what is expected of theirs."""
    with ThreadPoolExecutor(len(cuts)) as pool:
        found = list(pool.map(lambda cut: infer(server, model, tensors, ROWS[slice(*cut)]), cuts))

    for cut, answer in zip(cuts, found, strict=True):
        np.testing.assert_allclose(answer, expected[slice(*cut)], rtol=1e-4, atol=1e-5)
