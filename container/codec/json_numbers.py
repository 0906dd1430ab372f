"""Large arrays of numbers in a request's JSON, read slice by slice, so that other threads have their turn. PURE.

orjson lets no other thread run while it reads, nor does numpy while it makes an array of a list: half a second for tens
of megabytes. An array of numbers holds no quote and no brace, which tells where it ends. It is taken out of the text,
of which little is left then; its brackets say how it is nested, and mean nothing else:

    {"inputs": [{"name": "X", "data": [[1, 2, 3], [4, 5, 6]]}]}
    {"inputs": [{"name": "X", "data": "5f…0"}]}     and     [[,,],[,,]]     and     1, 2, 3     4, 5, 6

What can't be read so is read as a whole, which finds out what is wrong with it or that nothing is; unless that would
take long, too: then it is refused. Between two slices a thread sleeps, if only for a moment: numpy gives Python's lock
away and takes it back faster than a thread that waits for it wakes up, and does so again and again.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from container.codec.request import beyond_json, find, json_object, turn
from model_handlers.config.bounds import MAX_ITEMS
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Loads = Callable[[bytes], Any]

MOST_WHOLE = 16 << 20  # bytes of JSON that are read at once,
MOST_VALUES = 500_000  # and values, each with a comma behind it, and characters behind a backslash
_PIECE = 1 << 17  # bytes that are read at a time, in less than a millisecond,
_LONGEST = 1 << 18  # up to the next comma: one number of more, or blanks around it, would keep others waiting
_ARRAY = 1 << 10  # of a text that is an array worth taking out
_STRETCH = 1 << 18  # bytes that are looked through at a time
_DEEPEST = 64  # levels of arrays
_KEY = b'"data"'
_OPENING = re.compile(rb"\s{0,64}:\s{0,64}\[")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_SPACE = b" \t\n\r\f\v"
_BLANKS = bytes.maketrans(b"[]", b"  ")


class NotNumbers(Exception):  # noqa: N818 - what was taken for arrays of numbers is none
    """The text has to be read as a whole.

    Attributes:
        reason: what is wrong with it, if that is known.
    """

    def __init__(self, reason: MmeError | None = None) -> None:
        super().__init__()
        self.reason = reason


class Numbers:
    """An array of numbers, booleans or null in a text, evenly nested.

    Attributes:
        count: how many there are.
    """

    def __init__(self, text: bytes, start: int, end: int, loads: Loads) -> None:
        self.count = _count(text, start, end)
        self._text, self._start, self._end = text, start, end
        self._loads = loads

    def slices(self) -> Iterator[list[Any]]:
        """Read them, so many at a time.

        Raises:
            NotNumbers: they are none.
        """
        text, at = self._text, self._start
        while at < self._end:
            cut = text.find(b",", at + _PIECE, self._end)
            cut = self._end if cut < 0 else cut
            if cut - at > _LONGEST:
                raise NotNumbers
            piece = text[at:cut]
            if b"[" in piece or b"]" in piece:
                if _is_astray(piece):
                    raise NotNumbers
                piece = piece.translate(_BLANKS)
            values = _loaded(self._loads, b"[%b]" % piece)
            if not values:  # between two commas, or behind the last
                raise NotNumbers
            yield values
            turn()
            at = cut + 1


def with_numbers(text: bytes, *, beyond: bool = False) -> dict[str, Any]:
    """Return the object that a request's JSON is, with `Numbers` for large `data` of its inputs.

    Args:
        text: it.
        beyond: whether it holds NaN or infinities; then all of it is read by the parser that knows them.

    Raises:
        NotNumbers: it has to be read as a whole.
    """
    loads = beyond_json if beyond else orjson.loads
    spans = list(_spans(text))
    mark = secrets.token_hex(16)  # no client can have written it
    rest, at = [], 0
    for number, (start, end) in enumerate(spans):
        rest += [text[at:start], b'"%b%d"' % (mark.encode(), number)]
        at = end
    left = b"".join((*rest, text[at:]))
    if not spans or not is_quick(left):
        raise NotNumbers
    document = _loaded(loads, left)
    inputs = document.get("inputs") if isinstance(document, dict) else None
    found = 0
    for item in inputs if isinstance(inputs, list) else ():
        data = item.get("data") if isinstance(item, dict) else None
        if isinstance(data, str) and data.startswith(mark):
            item["data"] = Numbers(text, *spans[int(data[len(mark) :])], loads)
            found += 1
    if found != len(spans):  # one lies elsewhere, or in a field that another one of the same name has replaced
        raise NotNumbers
    return document  # type: ignore[no-any-return]  # an object, since it has inputs


def whole(text: bytes, form: str, reason: MmeError | None = None) -> dict[str, Any]:
    """Return the object that a request's JSON is; see `json_object`.

    Raises:
        MmeError: as there; `reason`, or TOO_LARGE, where others would have to wait for that.
    """
    if is_quick(text):
        document = json_object(text, form)
        turn()
        return document
    raise reason or MmeError(
        Kind.TOO_LARGE,
        f"the request's {len(text)} bytes of JSON are more than are read at once: beside evenly nested arrays of "
        f"numbers in 'data' it may have {MOST_WHOLE >> 20} MiB and {MOST_VALUES} values; send tensors as binary data",
    )


def is_quick(text: bytes) -> bool:
    """Return whether reading the text as a whole would not keep other threads waiting for long."""
    if len(text) > MOST_WHOLE:
        return False
    values = 0
    for at in range(0, len(text), _STRETCH):
        values += text.count(b",", at, at + _STRETCH) + text.count(b"\\", at, at + _STRETCH)
        if values > MOST_VALUES:
            return False
    return True


def _is_astray(piece: bytes) -> bool:
    """Return whether a bracket lies where no array of numbers begins or ends, of text between commas.

    Some number has an opening bracket behind it, then, or a closing one before it, and next to that lies what lies
    next to it in no array of numbers: `[,` or `,]` or `[]`.
    """
    text = np.frombuffer(b",%b," % piece.translate(None, _SPACE), np.uint8)
    commas = text == ord(",")
    opening, closing = commas | (text == ord("[")), commas | (text == ord("]"))
    return bool((opening[:-1] & closing[1:]).any())


def _loaded(loads: Loads, text: bytes) -> Any:
    try:
        return loads(text)
    except (ValueError, TypeError, RecursionError):
        raise NotNumbers from None


def _spans(text: bytes) -> Iterator[tuple[int, int]]:
    """Where what may be an array of numbers begins and ends."""
    at, seen = find(text, _KEY), 0
    while at >= 0:
        at, seen = at + len(_KEY), seen + 1
        if seen > MAX_ITEMS:  # as many inputs as no request may have
            raise NotNumbers
        opening = _OPENING.match(text, at)
        if opening is not None:
            start = opening.end() - 1
            quote = text.find(b'"', start)
            brace = text.find(b"}", start, quote if quote >= 0 else len(text))
            at = brace if brace >= 0 else quote if quote >= 0 else len(text)
            end = text.rfind(b"]", start, at) + 1
            if end - start >= _ARRAY:
                yield start, end
        at = find(text, _KEY, at)


def _count(text: bytes, start: int, end: int) -> int:
    """How many elements an array has, by its commas; its brackets are those of an even one, or it is none."""
    parts, commas = [], 0
    for at in range(start, end, _STRETCH):
        part = text[at : min(at + _STRETCH, end)].translate(None, _NO_STRUCTURE)
        commas += part.count(b",")
        parts.append(part)
    structure = b"".join(parts)
    if structure != _even(structure):
        raise NotNumbers
    return commas + 1


def _even(structure: bytes) -> bytes:
    """Return the brackets and commas of the even array that begins as this one does."""
    depth = len(structure) - len(structure.lstrip(b"["))
    row = structure[depth - 1 : structure.find(b"]") + 1]
    if not 1 <= depth <= _DEEPEST or row.count(b"[") != 1:
        raise NotNumbers
    for level in range(depth - 1, 0, -1):  # arrays of rows, those that are open first, and so on
        closing = b"]" * (depth - level + 1)
        size = structure.find(closing) + len(closing) - (level - 1)
        count, over = divmod(size - 1, len(row) + 1)
        if over or count < 1:
            raise NotNumbers
        row = b"[%b]" % ((row + b",") * count)[:-1]
    return row
