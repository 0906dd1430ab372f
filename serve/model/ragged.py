"""Ragged batches: tensors of different shapes joined flat, what the model is told of them, and the way back. PURE."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.config.model_config import BatchInputKind
from model_handlers.tensor import element_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.tensor import Array

    Shapes = Sequence[tuple[int, ...]]


def flat(arrays: Sequence[Array]) -> Array:
    """The elements of all, one request's behind the other's."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def batch_input(kind: BatchInputKind, shapes: Shapes, dtype: np.dtype[Any], *, batches: bool) -> Array:
    """What a model is told of the batch.

    Args:
        kind: what it wants to know.
        shapes: the full shape of each request's source.
        dtype: of the result.
        batches: whether the first dimension of a shape is the batch's.
    """
    counts = [element_count(shape) for shape in shapes]
    match kind:
        case BatchInputKind.ELEMENT_COUNT:
            return np.array(counts, dtype)
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT:
            return np.array(list(itertools.accumulate(counts)), dtype)
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            return np.array(list(itertools.accumulate(counts, initial=0)), dtype)
        case BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(max(counts), dtype)
    items = [item for shape in shapes for item in _items(shape, batches=batches)]
    table = np.array(items, dtype)
    return table.reshape(-1) if kind is BatchInputKind.ITEM_SHAPE_FLATTEN else table


def _items(shape: tuple[int, ...], *, batches: bool) -> list[tuple[int, ...]]:
    """The shape of each item of a request."""
    return [shape[1:]] * shape[0] if batches else [shape]


def split(array: Array, shapes: Shapes) -> list[Array] | None:
    """The elements that are each request's, in its shape; None where there are more or fewer than that takes."""
    ends = list(itertools.accumulate((element_count(shape) for shape in shapes), initial=0))
    if array.size != ends[-1]:
        return None
    elements = array.reshape(-1)
    return [
        elements[start:end].reshape(shape) for (start, end), shape in zip(itertools.pairwise(ends), shapes, strict=True)
    ]
