"""Arrays to PyTorch's tensors and back. Runs where models execute.

An input shares the array's memory where the device is the CPU. BF16, whose bits numpy carries as UINT16, is seen anew
on either side; BYTES are lists of `str`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.tensor import BF16, BY_DTYPE_NAME, BYTES, DataType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.tensor import Array, TensorSpec


def data_type(dtype: Any) -> DataType | None:
    """The protocol's type for one of torch's, None where it has none. By its name, which needs no framework."""
    return BY_DTYPE_NAME.get(str(dtype).removeprefix("torch."))


def to_tensor(torch: Any, array: Array, spec: TensorSpec, device: Any) -> Any:
    """An input as a tensor on a device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    if spec.data_type is BF16:
        tensor = tensor.view(torch.bfloat16)
    return tensor if device is None else tensor.to(device)


def to_strings(array: Array, spec: TensorSpec, model: str) -> list[str]:
    """An input of strings, row by row.

    Raises:
        MmeError: INVALID_ARGUMENT where one is no UTF-8.
    """
    try:
        return [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise invalid_argument(
            f"input '{spec.name}' for model '{model}' must hold UTF-8 text, as strings in PyTorch are: {error}"
        ) from None


def from_result(torch: Any, result: Any, spec: TensorSpec, rows: int | None, model: str) -> Array:
    """A result as the array of an output; `rows` are those of the batch, None where the model has no batches.

    Raises:
        MmeError: EXECUTION_FAILED where it is no tensor, or one of another type than declared.
    """
    found: DataType | None = None
    array: Array | None = None
    if isinstance(result, (list, tuple)) and all(isinstance(element, str) for element in result):
        found, array = BYTES, _strings(result, spec, rows)
    elif isinstance(result, torch.Tensor) and not result.is_sparse:
        found = data_type(result.dtype)
        if found is not None:
            tensor = result.detach().cpu().resolve_conj().resolve_neg()
            array = (tensor.view(torch.uint16) if found is BF16 else tensor).numpy()
    if found is not spec.data_type or array is None:
        shown = found.config_name if found is not None else _kind(torch, result)
        raise MmeError(
            Kind.EXECUTION_FAILED,
            f"model '{model}': unexpected datatype {shown} for inference output '{spec.name}', expecting "
            f"{spec.data_type.config_name}: correct its data_type in config.pbtxt",
        )
    return array


def _kind(torch: Any, result: Any) -> str:
    return f"{result.dtype} tensor" if isinstance(result, torch.Tensor) else type(result).__name__


def _strings(strings: Sequence[str], spec: TensorSpec, rows: int | None) -> Array:
    """A list has one dimension: the shape is the output's, where the strings fill it."""
    array = np.empty(len(strings), dtype=np.object_)
    array[:] = [text.encode() for text in strings]
    inner = spec.dims if spec.reshape is None else spec.reshape
    try:
        return array.reshape(inner if rows is None else (rows, *inner))
    except ValueError:
        return array
