"""Tensors between models of which only one batches: a batch dimension of 1 comes or goes. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig
    from model_handlers.tensor import Array


def fitted(config: ModelConfig, name: str, array: Array, *, batched: bool) -> Array:
    """A tensor as a model takes it for its input of that name; `batched`: whether it has a batch dimension now."""
    spec = config.input(name)
    if config.max_batch_size > 0:
        return array if batched else array[None]
    if batched and spec is not None and array.ndim == len(spec.dims) + 1 and array.shape[0] == 1:
        row: Array = array[0]
        return row
    return array


def with_batch(array: Array, *, batched: bool, wanted: bool) -> Array:
    """A tensor with a batch dimension, or without one."""
    if wanted == batched:
        return array
    if wanted:
        return array[None]
    row: Array = array[0] if array.ndim and array.shape[0] == 1 else array
    return row
