"""Triton's classification extension: an output as its highest values, each with its place and its name. PURE.

[[0.1, 0.7, 0.2]]  →  [["0.700000:1:dog", "0.200000:2:bird"]]      the two highest of three classes
[[1, 7, 2]]        →  [["7:1:dog", "2:2:bird"]]                    whole numbers are written whole
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from model_handlers.errors import invalid_argument
from model_handlers.tensor import BYTES
from serve.request import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from model_handlers.tensor import Array

_MOST_ELEMENTS = 1_000_000


def classified(
    response: InferenceResponse, wanted: Mapping[str, int], labels: Mapping[str, Sequence[str]], *, batches: bool
) -> InferenceResponse:
    """The response with classes in place of tensors.

    Args:
        response: as the model gave it.
        wanted: output → so many classes of each element of the batch, those with the highest values.
        labels: output → names of its classes, as far as there are any.
        batches: whether the first dimension of outputs is the batch.

    Raises:
        MmeError: INVALID_ARGUMENT for an output that has no order, or is too large.
    """
    outputs = []
    for name, data_type, array in response.outputs:
        if name not in wanted:
            outputs.append((name, data_type, array))
            continue
        if array.dtype.kind not in "iuf" or data_type.name == "BF16":
            raise invalid_argument(
                f"class result not available for output '{name}' due to unsupported type '{data_type.name}'"
            )
        if array.size > _MOST_ELEMENTS:
            raise invalid_argument(f"output '{name}' has {array.size} elements: classification output tensor too large")
        rows = array.reshape(*(array.shape[:1] or (1,)), -1) if batches else array.reshape(1, -1)
        classes = _classes(rows, wanted[name], labels.get(name, ()))
        outputs.append((name, BYTES, classes if batches else classes[0]))
    shown = InferenceResponse(
        response.model_name, response.model_version, outputs, response.id, response.timings, response.parameters
    )
    shown.final = response.final
    return shown


def _classes(rows: Array, count: int, labels: Sequence[str]) -> Array:
    """[rows, classes], highest first; of equal values the first one first."""
    whole = rows.dtype.kind in "iu"
    falling = ~rows if whole else -rows.astype(np.float64)  # ~ turns the order of whole numbers round, and keeps each
    order = np.argsort(falling, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(rows, order, axis=1)
    texts = np.empty(order.size, dtype=np.object_)
    texts[:] = [
        f"{value if whole else f'{value:.6f}'}:{index}{f':{name}' if (name := _name(labels, index)) else ''}".encode()
        for value, index in zip(values.ravel().tolist(), order.ravel().tolist(), strict=True)
    ]
    return texts.reshape(order.shape)


def _name(labels: Sequence[str], index: int) -> str:
    """Of a class; '' for one without, whether its line is empty or there is none."""
    return labels[index] if index < len(labels) else ""
