"""TensorFlow Serving's JSON: rows (`instances`) and columns (`inputs`) to arrays, and arrays to what is answered. PURE.

Strings of bytes are `{"b64": …}` both ways. For inputs of floating types null is NaN.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.python.script.csv_text import value_of
from model_handlers.tensor import BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from model_handlers.tensor import Array, TensorSpec

_BINARY = "b64"
_OF_BYTES = "_bytes"  # how the name of an output ends whose strings are no text


class Cells(list[Any]):
    """Rows of CSV as `instances`: what each cell means alone, and how it was written, for inputs that are text.

    Attributes:
        words: the cells as they came.
    """

    def __init__(self, words: list[list[str]]) -> None:
        super().__init__([_value(row[0]) if len(row) == 1 else list(map(_value, row)) for row in words])
        self.words = words

    def array(self, spec: TensorSpec, *, batches: bool) -> Array:
        """The array of the one input: a column, unless that has no dimension but that of rows.

        Raises:
            ValueError: with the row and the column of what is no such number.
        """
        rank = len(spec.dims if spec.reshape is None else spec.reshape) + batches
        alone = len(self.words[0]) == 1
        values: list[Any] = self
        if spec.data_type is BYTES:
            values = [row[0] for row in self.words] if alone else self.words
        else:
            self._check_numbers()
        return _array([[value] for value in values] if alone and rank > 1 else values, spec)

    def _check_numbers(self) -> None:
        for at, row in enumerate(self, 1):
            cells = row if isinstance(row, list) else [row]
            wrong = [column for column, cell in enumerate(cells, 1) if isinstance(cell, str)]
            if wrong:
                raise ValueError(f"row {at}, column {wrong[0]}: {cells[wrong[0] - 1]!r:.80} is no number")


def rows_of(instances: Any, specs: Sequence[TensorSpec], *, batches: bool = False) -> dict[str, Array]:
    """Each input's array, from rows: values of the one input, or objects of all inputs.

    Args:
        instances: the rows.
        specs: of the inputs.
        batches: whether their dimensions leave out that of rows.

    Raises:
        ValueError, TypeError: they are not rows of these inputs.
    """
    if not isinstance(instances, list) or not instances:
        raise ValueError("'instances' has to be a list of rows, and not an empty one")
    if isinstance(instances, Cells):
        spec = _only(specs)
        return {spec.name: instances.array(spec, batches=batches)}
    named = isinstance(instances[0], dict) and set(instances[0]) != {_BINARY}
    if not named:
        return {_only(specs).name: _array(instances, _only(specs))}
    names = {spec.name for spec in specs}
    for row in instances:
        if not isinstance(row, dict) or set(row) != names:
            raise ValueError(f"each of 'instances' has to be an object of {', '.join(sorted(names))}")
    return {spec.name: _array([row[spec.name] for row in instances], spec) for spec in specs}


def columns_of(inputs: Any, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Each input's array, from one whole tensor of the one input, or an object of one of each.

    Raises:
        ValueError, TypeError: they are not these inputs.
    """
    if not isinstance(inputs, dict) or set(inputs) == {_BINARY}:
        return {_only(specs).name: _array(inputs, _only(specs))}
    names = {spec.name for spec in specs}
    if set(inputs) != names:
        raise ValueError(f"'inputs' has to be an object of {', '.join(sorted(names))}")
    return {spec.name: _array(inputs[spec.name], spec) for spec in specs}


def outcome(results: Mapping[str, Array], given: Mapping[str, Array], *, rows: bool) -> dict[str, Any]:
    """The document of an answer: `predictions` row by row, or whole `outputs`; without names where there is one.

    Raises:
        ValueError: an output has not as many rows as the inputs.
    """
    plain = {name: _plain(array, name) for name, array in results.items()}
    if not rows:
        return {"outputs": next(iter(plain.values())) if len(plain) == 1 else plain}
    count = len(next(iter(given.values())))
    wrong = [name for name, array in results.items() if array.ndim == 0 or len(array) != count]
    if wrong:
        raise ValueError(f"output '{wrong[0]}' is not of {count} rows, as the instances are: ask with 'inputs' instead")
    if len(plain) == 1:
        return {"predictions": next(iter(plain.values()))}
    return {"predictions": [{name: values[row] for name, values in plain.items()} for row in range(count)]}


def _only(specs: Sequence[TensorSpec]) -> TensorSpec:
    if len(specs) != 1:
        raise ValueError(f"the model has several inputs: name each, {', '.join(spec.name for spec in specs)}")
    return specs[0]


def _array(values: Any, spec: TensorSpec) -> Array:
    if spec.data_type is BYTES:
        return np.array(_as_bytes(values), np.object_)
    array = np.array(values)
    if array.dtype.kind == "O" and spec.data_type.dtype.kind == "f":
        array = _with_gaps(array)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and spec.data_type.dtype.kind in "biu"):
        raise ValueError(f"input '{spec.name}' is of {spec.data_type}, and not all that came is such a number")
    if array.dtype.kind in "iu" and spec.data_type.dtype.kind in "iu":
        bounds = np.iinfo(spec.data_type.dtype)
        if array.size and not bounds.min <= array.min() <= array.max() <= bounds.max:
            raise ValueError(f"input '{spec.name}' is of {spec.data_type}, which can't hold all that came")
    with np.errstate(over="ignore"):
        return array.astype(spec.data_type.dtype)


def _with_gaps(array: Array) -> Array:
    """Numbers with null among them, which is NaN; anything else as it is."""
    kinds = set(map(type, array.ravel().tolist()))
    return array.astype(np.float64) if kinds <= {int, float, type(None)} else array


def _value(cell: str) -> Any:
    """A cell as JSON has it: a whole number, another one, null where it is empty, or text."""
    value = value_of(cell)
    if isinstance(value, str):
        return value
    if np.isnan(value) and not cell.strip():
        return None
    word = cell.strip()
    return int(word) if word.lstrip("+-").isdecimal() else value


def _as_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_bytes(each) for each in value]
    if isinstance(value, dict) and set(value) == {_BINARY}:
        return base64.b64decode(value[_BINARY], validate=True)
    if not isinstance(value, str):
        raise TypeError(f'a string, or {{"{_BINARY}": …}}, is expected in the place of {value!r:.80}')
    return value.encode()


def _plain(array: Array, name: str) -> Any:
    """An array of numbers as it is, one of strings as lists."""
    if array.dtype.kind != "O":
        return np.ascontiguousarray(array) if array.ndim else array[()]
    return _text(array.tolist(), binary=name.endswith(_OF_BYTES))


def _text(value: Any, *, binary: bool) -> Any:
    if isinstance(value, list):
        return [_text(each, binary=binary) for each in value]
    if not binary:
        try:
            return value.decode()
        except UnicodeDecodeError:  # TensorFlow Serving would write what no parser reads
            pass
    return {_BINARY: base64.b64encode(value).decode()}
