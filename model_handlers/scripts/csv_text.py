"""The one reader and the one writer of CSV, by Python's csv module. PURE.

Rows of cells, always two-dimensional: one column stays a column. A cell means what it would mean alone: a number, NaN
where it is empty, else text. `#` is a character, and quotes quote.
"""

from __future__ import annotations

import csv
import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan)", re.ASCII | re.IGNORECASE
)
_BYTE_ORDER_MARK = "\ufeff"


def text_of(body: bytes | str) -> str:
    """A body as text, without a byte order mark.

    Raises:
        ValueError: it is not UTF-8, or holds bytes that no text has.
    """
    text = body if isinstance(body, str) else bytes(body).decode()
    if "\0" in text:
        raise ValueError("it holds a NUL byte, as no text does")
    return text.removeprefix(_BYTE_ORDER_MARK)


def cells_of(body: bytes | str, separator: str = ",") -> list[list[str]]:
    """The rows of a body, all of as many cells. Empty lines at its beginning and its end are no rows.

    Raises:
        ValueError: it is no CSV, or its rows differ in length; an empty line between rows, which may be one or none.
    """
    text = text_of(body).strip("\r\n")
    if not text.strip():
        raise ValueError("it holds no row")
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # documents are longer than Python's 128 KiB
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True):
            if not row:
                raise ValueError(f'the line behind row {len(rows)} is empty: write an empty cell as ""')
            if rows and len(row) != len(rows[0]):
                first, this = len(rows[0]), len(row)
                raise ValueError(
                    f"its rows are not all of one length: row 1 has {first} cells, row {len(rows) + 1} has {this}"
                )
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"row {len(rows) + 1}: {error}") from None
    return rows


def number(word: str) -> float | None:
    """The number that a word is, None where it is none, or larger than any. Of digits, as everywhere but in Python."""
    if not _NUMBER.fullmatch(word.strip()):
        return None
    try:
        value = float(word)
    except ValueError:  # a separator such as U+001F is space to `strip` alone
        return None
    return None if value in (np.inf, -np.inf) and "n" not in word.lower() else value


def value_of(cell: str) -> float | str:
    """What a cell means."""
    if not cell or cell.isspace():
        return np.nan
    value = number(cell)
    return cell if value is None else value


def table_of(body: bytes | str, separator: str = ",") -> NDArray[Any]:
    """The rows of a body as an array: of 64-bit floats where all cells are numbers or empty, else of objects.

    Raises:
        ValueError: see `cells_of`.
    """
    rows = cells_of(body, separator)
    values = [[value_of(cell) for cell in row] for row in rows]
    if any(isinstance(value, str) for row in values for value in row):
        return np.array(values, np.object_)
    return np.array(values, np.float64)


def written(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV: cells with a comma, a quote or the end of a line are quoted."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
