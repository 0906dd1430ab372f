"""The elements of a large array in JSON, added piece by piece as the array is read, and kept as numpy has them. PURE.

What there is to know of such an array before its data type is: which types its elements have, how many there are, how
far its numbers go, and whether it is nested evenly. All of it adds up over pieces. Not compiled: between two pieces
Python lets other threads run, which C does not.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.tensor import BYTES

if TYPE_CHECKING:
    from model_handlers.tensor import Array, DataType

DEEPEST = 60  # levels of lists; what is nested deeper is read as a whole, and refused by whoever reads it
_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint64)
# The elements that some data type takes: others need not be kept, whatever the type is they are refused.
_TAKEN: tuple[set[type], ...] = ({bool}, {int, float, type(None)}, {str})
_TOO_MANY = 2  # different lengths of lists at one level, which is all that anybody asks


def turn() -> None:
    """Other threads' turn, if they wait: Python looks for them when it calls something, and compiled code never."""


class TooDeep(Exception):  # noqa: N818 - it says what the array is
    """There are more levels than `DEEPEST`."""


class Elements:
    """What an array of JSON holds.

    Attributes:
        types: of its elements, however deep they lie.
        count: how many there are.
        depth: how many levels of lists there are, 1 for a flat one.
    """

    def __init__(self) -> None:
        self.types: set[type] = set()
        self.count = 0
        self.depth = 0
        self._pieces: list[Any] = []
        self._array: tuple[DataType, Array | None] | None = None
        self._low, self._high = 0, 0  # of integers
        self._mixed = False  # some list holds both lists and elements
        self._leaves: set[int] = set()  # the levels at which elements lie
        self._lengths: dict[int, set[int]] = {}  # of lists, by their level
        self._open: dict[int, int] = {}  # the same of those that go on in the next piece, so far

    def add(self, piece: list[Any], before: int, behind: int) -> None:
        """The next piece of it, nested as the whole is.

        Args:
            piece: what lies between two commas, in as many lists as are open there.
            before: how many lists the piece before has left open: so many of this one's first are no new ones.
            behind: how many lists go on in the next piece.

        Raises:
            TooDeep: this can't be told any more.
        """
        lists, depth, mixed = [piece], 1, False
        while True:
            self._measure(lists, depth, before, behind)
            items = lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))
            types = set(map(type, items))
            if list not in types:
                break
            if len(types) > 1:
                mixed = self._mixed = True
                items = [item for item in items if type(item) is list]
            lists, depth = items, depth + 1
            if depth > DEEPEST:
                raise TooDeep
        self.depth = max(self.depth, depth)
        if mixed:
            items = _flat(piece)
            types = set(map(type, items))
        elif items:
            self._leaves.add(depth)
        self._keep(items, types)

    def _measure(self, lists: list[list[Any]], depth: int, before: int, behind: int) -> None:
        lengths = list(map(len, lists))
        if before >= depth:
            lengths[0] += self._open[depth] - (before > depth)  # whose first item goes on as well
        if behind >= depth:
            self._open[depth] = lengths.pop()
        known = self._lengths.setdefault(depth, set())
        if len(known) < _TOO_MANY:
            known.update(lengths)

    def _keep(self, items: list[Any], types: set[type]) -> None:
        self.types |= types
        self.count += len(items)
        if not any(self.types <= taken for taken in _TAKEN):
            self._pieces.clear()
        elif items:
            self._pieces.append(self._kept(items, types))

    def _kept(self, items: list[Any], types: set[type]) -> Any:
        """Elements of one piece, as small as they are without becoming others."""
        if types == {str}:
            return [item.encode() for item in items]
        if types == {bool}:
            return np.array(items, np.bool_)
        if float in types or type(None) in types:  # null among numbers is NaN
            return np.array(items, np.float64)
        low, high = min(items), max(items)
        self._low, self._high = min(self._low, low), max(self._high, high)
        for dtype in _INTEGERS:
            limits = np.iinfo(dtype)
            if limits.min <= low and high <= limits.max:
                return np.array(items, dtype)
        return np.array(items, np.float64)  # no type of integers holds them all

    @property
    def uneven(self) -> bool:
        """Whether lists of one level differ in length, or hold lists here and elements there."""
        return (
            self._mixed
            or any(self.depth > level for level in self._leaves)
            or any(len(lengths) > 1 for lengths in self._lengths.values())
        )

    @property
    def alone(self) -> bool:
        """Whether each inner list holds one thing, so that the elements count as if they were not nested."""
        return all(lengths <= {1} for level, lengths in self._lengths.items() if level > 1)

    def array(self, data_type: DataType) -> Array | None:
        """The elements, one behind the other; None where the type does not hold them. Of one type: see `read_as`."""
        if self._array is None:
            self._array = data_type, self._made(data_type)
        return self._array[1]

    @property
    def read_as(self) -> DataType | None:
        """The type of whose array was asked, which is all that is left of them then."""
        return None if self._array is None else self._array[0]

    def _made(self, data_type: DataType) -> Array | None:
        dtype = data_type.dtype
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if self._low < limits.min or self._high > limits.max:
                return None
        pieces, self._pieces = self._pieces[::-1], []
        if len(pieces) == 1 and data_type is not BYTES and pieces[0].dtype == dtype:
            whole: Array = pieces[0]
            return whole
        array, start = np.empty(self.count, dtype), 0
        with np.errstate(over="raise"):
            while pieces:
                piece = pieces.pop()
                if dtype.kind == "f" and piece.dtype.kind != "f":
                    piece = piece.astype(np.float64)  # as Python's numbers become one: rounded twice
                try:
                    array[start : start + len(piece)] = piece
                except FloatingPointError:
                    return None
                start += len(piece)
        return array


def _flat(items: list[Any]) -> list[Any]:
    """The elements in their order, of lists that hold lists here and elements there."""
    found: list[Any] = []
    for item in items:
        if type(item) is list:
            found += _flat(item)
        else:
            found.append(item)
    return found
