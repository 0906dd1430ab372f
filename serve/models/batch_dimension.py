"""Tensors between models of which only one batches: a batch dimension of 1 comes or goes where it has to. PURE.

A model without batching may as well read or write what is a batch to the other one: of a tensor that has as many
dimensions as its reader takes, the first is the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_handlers.tensor import Array, TensorSpec


def fitted(spec: TensorSpec | None, array: Array, *, batches: bool) -> Array:
    """A tensor as its reader takes it, who knows it as `spec`, and `batches` or does not.

    One that the reader does not know, or that fits neither way, is left as it is: its reader tells what is wrong.
    """
    if spec is None:
        return array
    dims = len(spec.dims)
    if batches and array.ndim == dims:
        return array[None]
    if not batches and array.ndim == dims + 1 and array.shape[0] == 1:
        row: Array = array[0]
        return row
    return array
