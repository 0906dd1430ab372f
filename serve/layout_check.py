"""Does a request's layout fit a model? PURE. Asked once a layout, in Triton's order and with Triton's words.

A layout that fits yields what the scheduler has to know of every request that shares it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_argument
from model_handlers.tensor import shape_matches

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from model_handlers.config import ModelConfig
    from model_handlers.tensor import TensorSpec
    from serve.request import Layout

_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a fitting layout means to the scheduler.

    Attributes:
        batch_size: the batch dimension, 1 for a model without one.
        order: for each input of the model, its position in the layout; -1 for an optional one left out.
        signature: requests may share a batch when theirs are equal.
    """

    batch_size: int
    order: tuple[int, ...]
    signature: Hashable


def check_layout(layout: Layout, config: ModelConfig) -> Checked:
    """Check names, types, batch dimension and shapes of a layout.

    Raises:
        MmeError: INVALID_ARGUMENT, naming the model and the tensor that is wrong.
    """
    positions = _positions(layout, config)
    for index, (name, data_type, _shape) in enumerate(layout.inputs):
        spec = config.input(name)
        if spec is None:
            raise invalid_argument(
                f"unexpected inference input '{name}' for model '{config.name}', allowed inputs are: "
                f"{_names(config.inputs)}"
            )
        if data_type is not spec.data_type:
            raise invalid_argument(
                f"inference input '{name}' data-type is '{layout.inputs[index][1].name}', but model "
                f"'{config.name}' expects '{spec.data_type.name}'"
            )
    batch_size = _batch_size(layout, config)
    for name, _data_type, shape in layout.inputs:
        _check_shape(name, shape, config)
    _check_outputs(layout, config)
    order = tuple(positions.get(spec.name, -1) for spec in config.inputs)
    return Checked(batch_size, order, _signature(layout, config, order))


def _positions(layout: Layout, config: ModelConfig) -> dict[str, int]:
    positions: dict[str, int] = {}
    for index, (name, _, _) in enumerate(layout.inputs):
        if name in positions:
            raise invalid_argument(f"input '{name}' already exists in request for model '{config.name}'")
        positions[name] = index
    required = [spec.name for spec in config.inputs if not spec.optional]
    missing = [name for name in required if name not in positions]
    if missing or len(positions) > len(config.inputs):
        optional = len(required) < len(config.inputs)
        expected = f"number of inputs between {len(required)} and {len(config.inputs)}" if optional else None
        raise invalid_argument(
            f"expected {expected or f'{len(config.inputs)} inputs'} but got {len(positions)} inputs for model "
            f"'{config.name}'. Got input(s) {_quoted(positions)}, but missing required input(s) {_quoted(missing)}. "
            "Please provide all required input(s)."
        )
    return positions


def _batch_size(layout: Layout, config: ModelConfig) -> int:
    if config.max_batch_size == 0:
        return 1
    sizes = [(name, shape[0] if shape else 0) for name, _, shape in layout.inputs]
    first = sizes[0][1] if sizes else 1
    for name, size in sizes:
        if size != first:
            raise invalid_argument(f"input '{name}' batch size does not match other inputs for '{config.name}'")
    if first > config.max_batch_size:
        raise invalid_argument(f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'")
    return max(first, 1)


def _check_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> None:
    spec = config.input(name)
    expected = spec.shape(config.max_batch_size) if spec is not None else ()
    batched_empty = config.max_batch_size > 0 and bool(shape) and shape[0] == 0
    if not shape_matches(shape, expected) or batched_empty:
        raise invalid_argument(
            f"unexpected shape for input '{name}' for model '{config.name}'. Expected {_brackets(expected)}, "
            f"got {_brackets(shape)}." + (_BATCH_NOTE if config.max_batch_size > 0 else "")
        )


def _check_outputs(layout: Layout, config: ModelConfig) -> None:
    for index, name in enumerate(layout.outputs):
        if config.output(name) is None:
            raise invalid_argument(
                f"unexpected inference output '{name}' for model '{config.name}', allowed outputs are: "
                f"{_names(config.outputs)}"
            )
        if name in layout.outputs[:index]:
            raise invalid_argument(f"output '{name}' already exists in request for model '{config.name}'")


def _signature(layout: Layout, config: ModelConfig, order: tuple[int, ...]) -> Hashable:
    """The shapes that must be equal within a batch, and which optional inputs are there."""
    variable = tuple(
        layout.inputs[position][2][1:]
        for spec, position in zip(config.inputs, order, strict=True)
        if position >= 0 and -1 in spec.dims
    )
    present = tuple(position >= 0 for position in order) if any(spec.optional for spec in config.inputs) else ()
    return (variable, present)


def _names(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _brackets(shape: Iterable[int]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"
