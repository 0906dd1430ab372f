"""What requests of every form say of a tensor, checked: data type, shape, bytes, wanted classes. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.config.bounds import MAX_ITEMS
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.tensor import BY_NAME, BYTES, MAX_DIMS, MAX_ELEMENTS, decode_bytes_elements, element_count

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, DataType


class NoInputsError(MmeError):
    """JSON without `inputs`, as other servers take it: {"instances": …}. Kind INVALID_ARGUMENT."""

    def __init__(self, expected: str = "") -> None:
        super().__init__(
            Kind.INVALID_ARGUMENT,
            f"the request must have 'inputs': an array of objects with name, shape, datatype and data{expected}",
        )

    def of(self, config: ModelConfig) -> MmeError:
        """The same with the inputs that the model takes."""
        shapes = ", ".join(
            f"'{spec.name}' {spec.data_type} {list(spec.shape(config.max_batch_size))}" for spec in config.inputs
        )
        return NoInputsError(f"; model '{config.name}' takes {shapes}")


def check_number(items: Sized, what: str) -> None:
    """Refuse a request of so many inputs, outputs or parameters that others would wait for it.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if len(items) > MAX_ITEMS:
        raise invalid_argument(f"a request may have at most {MAX_ITEMS} {what}, got {len(items)}")


def described(name: Any, datatype: Any, shape: Any) -> tuple[str, DataType, tuple[int, ...]]:
    """Name, data type and shape of an input, whatever a client put there.

    Raises:
        MmeError: INVALID_ARGUMENT naming what is wrong.
    """
    if not isinstance(name, str) or not name:
        raise invalid_argument("every input must have a 'name'")
    data_type = BY_NAME.get(datatype) if isinstance(datatype, str) else None
    if data_type is None and datatype is None:
        raise invalid_argument(f"input '{name}' has no 'datatype': give one of {', '.join(BY_NAME)}")
    if data_type is None:
        known = ", ".join(BY_NAME)
        raise invalid_argument(f"input '{name}' has datatype {datatype!r:.100}; the protocol knows {known}")
    return name, data_type, _shape(shape, name)


def _shape(shape: Any, name: str) -> tuple[int, ...]:
    if not isinstance(shape, list):
        raise invalid_argument(f"input '{name}' must have a 'shape', an array of integers such as [1, 4]")
    if len(shape) > MAX_DIMS:
        raise invalid_argument(f"input '{name}' must have a 'shape' of at most {MAX_DIMS} dimensions")
    total = 1
    for dim in shape:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise invalid_argument(f"'shape' of input '{name}' must hold integers of 0 or more, got {dim!r:.100}")
        total *= max(dim, 1)  # nothing at all of something huge is too much for numpy as well
    if total > MAX_ELEMENTS:
        raise invalid_argument(f"'shape' of input '{name}' has too many elements: {shape}")
    return tuple(shape)


def check_size(size: int, name: str, data_type: DataType, shape: Sequence[int]) -> None:
    """Check that so many bytes are a tensor; of BYTES only its elements tell.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    expected = element_count(shape) * data_type.itemsize
    if data_type is not BYTES and size != expected:
        raise invalid_argument(
            f"input byte size mismatch for input '{name}'. Expected {expected} "
            f"for shape {list(shape)} of {data_type.name}, got {size}"
        )


def view(
    buffer: bytes, start: int, end: int, name: str, data_type: DataType, shape: tuple[int, ...], model: str
) -> Array:
    """The tensor that lies at a place of a buffer: without a copy, but for BYTES.

    Raises:
        MmeError: INVALID_ARGUMENT when BYTES do not hold as many elements as the shape says.
    """
    if data_type is BYTES:
        window = memoryview(buffer)[start:end]
        return decode_bytes_elements(window, element_count(shape), name, model).reshape(shape)
    return np.ndarray(shape, data_type.dtype, buffer, start)


def output_name(name: Any) -> str:
    """The name of a requested output.

    Raises:
        MmeError: INVALID_ARGUMENT when it is none.
    """
    if not isinstance(name, str) or not name:
        raise invalid_argument("every requested output must have a 'name'")
    return name


def wanted_classes(count: Any, name: str) -> dict[str, int]:
    """Output → number of classes, {} for none.

    Raises:
        MmeError: INVALID_ARGUMENT when it is no number.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise invalid_argument(f"'classification' of output '{name}' must be a number of classes, got {count!r:.100}")
    return {name: count} if count else {}
