"""Does a request's layout fit a model? PURE. Asked once a layout, in Triton's order and with Triton's words."""

from __future__ import annotations

import math
from collections.abc import Hashable  # noqa: TC003 - a compiled dataclass looks at its types
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.config.model_config import Guess
from model_handlers.errors import MmeError, invalid_argument
from model_handlers.tensor import shape_matches
from serve.request import Bounded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import TensorSpec
    from serve.request import Layout
    from serve.statistics import ModelStats

KNOWN_LAYOUTS = 1024  # remembered per model; a client that sends ever new shapes must not grow us
KNOWN_BYTES = 1 << 20  # that they may take: a client may ask for an output many times
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a fitting layout means to the scheduler."""

    batch_size: int  # the batch dimension, 1 for a model without one, or where inputs differ in what may be none
    order: tuple[int, ...]  # for each input of the model, its position in the layout; -1 for an optional one left out
    # requests may share a batch when theirs are equal; NaN, which equals nothing, for those that may not
    signature: Hashable


class ValidatedLayouts(Bounded):
    """The layouts that fit one model; what is looked up and not there is checked.

    Raises:
        MmeError: on looking one up, see `check_layout`.
    """

    def __init__(self, config: ModelConfig, stats: ModelStats) -> None:
        super().__init__(KNOWN_LAYOUTS, KNOWN_BYTES)
        self._config = config.author_view()  # an error names an ensemble's step as its author does
        self._stats = stats

    def __missing__(self, layout: Layout) -> Checked:
        try:
            checked = check_layout(layout, self._config)
        except MmeError as error:
            self._stats.failed(error.kind, 0)
            raise
        self.keep(layout, checked, layout.weight())
        return checked


def check_layout(layout: Layout, config: ModelConfig) -> Checked:
    """Check names, types, batch dimension and shapes of a layout.

    Raises:
        MmeError: INVALID_ARGUMENT, naming the model and the tensor that is wrong.
    """
    specs = {spec.name: spec for spec in config.inputs}
    positions = _positions(layout, config)
    for name, data_type, _shape in layout.inputs:
        if data_type is not specs[name].data_type:
            raise invalid_argument(
                f"inference input '{name}' data-type is '{data_type.name}', but model '{config.name}' expects "
                f"'{specs[name].data_type.name}'"
            )
    batch_size = _batch_size(layout, config)
    alike = batch_size is not None
    for name, _data_type, shape in layout.inputs:
        _check_shape(shape, specs[name], config)
    _check_outputs(layout, config)
    order = tuple(positions.get(spec.name, -1) for spec in config.inputs)
    return Checked(batch_size or 1, order, _signature(layout, config, order) if alike else math.nan)


def _positions(layout: Layout, config: ModelConfig) -> dict[str, int]:
    positions: dict[str, int] = {}
    for index, (name, _, _) in enumerate(layout.inputs):
        if name in positions:
            raise invalid_argument(f"input '{name}' already exists in request for model '{config.name}'")
        positions[name] = index
    required = [spec.name for spec in config.inputs if not spec.optional]
    missing = [name for name in required if name not in positions]
    if not len(required) <= len(positions) <= len(config.inputs):
        raise _wrong_count(positions, missing, len(required), config)
    for name in positions:
        if config.input(name) is None:
            raise invalid_argument(
                f"unexpected inference input '{name}' for model '{config.name}', allowed inputs are: "
                f"{_names(config.inputs)}"
            )
    if missing:  # as many as there are required ones, but some of them optional
        raise _wrong_count(positions, missing, len(required), config)
    return positions


def _wrong_count(got: Collection[str], missing: Collection[str], required: int, config: ModelConfig) -> MmeError:
    total = len(config.inputs)
    others = [name for name in got if config.input(name) is None]
    unknown = f" Allowed inputs are: {_names(config.inputs)}." if others else ""
    expected = f"{total} inputs" if required == total else f"number of inputs between {required} and {total}"
    return invalid_argument(
        f"expected {expected} but got {len(got)} inputs for model '{config.name}'. Got input(s) {_quoted(got)}, but "
        f"missing required input(s) {_quoted(missing)}. Please provide all required input(s).{unknown}"
    )


def _batch_size(layout: Layout, config: ModelConfig) -> int | None:
    """The rows of a request; None where its inputs differ in a first dimension that may be no batch.

    Of a model of which that is guessed the first dimension is the client's: only what the server joins is bounded.
    """
    if config.max_batch_size == 0:
        return 1
    sizes = [(name, shape[0] if shape else None) for name, _, shape in layout.inputs]
    first = sizes[0][1] if sizes else 1
    for name, size in sizes:
        if size != first and config.guess in {Guess.OTHER, Guess.UNKNOWN}:
            return None
        if size != first:
            raise invalid_argument(f"input '{name}' batch size does not match other inputs for '{config.name}'")
    if first is None:  # the check of the shape will say so
        return 1
    if first < 1:
        raise invalid_argument(f"inference request batch-size must be >= 1 for '{config.name}'")
    if first > config.max_batch_size and config.guess is Guess.NONE:
        raise invalid_argument(f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'")
    return first


def _check_shape(shape: tuple[int, ...], spec: TensorSpec, config: ModelConfig) -> None:
    expected = spec.shape(config.max_batch_size)
    if not shape and spec.is_scalar and not config.max_batch_size:
        return
    if not shape_matches(shape, expected):
        raise invalid_argument(
            f"unexpected shape for input '{spec.name}' for model '{config.name}'. Expected {_brackets(expected)}, "
            f"got {_brackets(shape)}." + (_BATCH_NOTE if config.max_batch_size > 0 else "")
        )


def _check_outputs(layout: Layout, config: ModelConfig) -> None:
    for name in layout.outputs:
        if config.output(name) is None:
            raise invalid_argument(
                f"unexpected inference output '{name}' for model '{config.name}', allowed outputs are: "
                f"{_names(config.outputs)}"
            )


def _signature(layout: Layout, config: ModelConfig, order: tuple[int, ...]) -> Hashable:
    variable = tuple(
        layout.inputs[position][2][1:]
        for spec, position in zip(config.inputs, order, strict=True)
        if position >= 0 and -1 in spec.dims and not spec.allow_ragged_batch
    )
    present = tuple(position >= 0 for position in order) if any(spec.optional for spec in config.inputs) else ()
    return (variable, present)


def _names(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _brackets(shape: Iterable[int]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"
