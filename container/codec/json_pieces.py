"""Large JSON of requests, read piece by piece: what takes long are the arrays of tensors' elements. PURE.

orjson lets no other thread run while it reads, nor does numpy while it makes an array of a list, which is a second for
tens of megabytes. So the elements are taken out of the text first. What is left is small, and is read as it is with
something else in the place of each array; and each array is cut at commas, and read in pieces that take less than a
millisecond:

    {"inputs": [{"name": "X", "data": [[1, 2, 3], [4, 5, 6]]}]}
    {"inputs": [{"name": "X", "data": ["5f…", 0]}]}               and   [[1, 2, 3], [4]]   [[5, 6]]

If what is left is JSON and all pieces are, so is the text, and it means what they mean: an array may stand wherever
another may. Nothing depends on a piece having been found rightly but how long it takes: what is not JSON in pieces is
read as a whole, which finds out what is wrong with it, or that nothing is.

Not compiled: see `elements`.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from container.codec.elements import DEEPEST, Elements, TooDeep
from container.codec.fields import FORM_OF_GENERATE, FORM_OF_INFER, beyond_json, goes_beyond, json_object, not_json
from container.codec.json_data import gather
from model_handlers.tensor import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from model_handlers.tensor import DataType

    Loads = Callable[[bytes], Any]
    Place = tuple[dict[str, Any], str]

LARGE = 1 << 18  # bytes of JSON from which a thread reads it: up to there the loop does, in half a millisecond or three
_PIECE = 1 << 16  # bytes that are read at a time
_ARRAY = 1 << 10  # of a text that is an array worth taking out
_STRETCH = 1 << 20  # that are looked through at a time
_BACKSLASH = ord("\\")
_COMMAS = (b",", b", ")  # as most write them between two strings
_OTHERS = (b"\\", b"[", b"]", b"{", b"}", b":")  # what may be in strings, too, but then these are looked at one by one
_SPACES = 64  # bytes in which a colon and a bracket are looked for
_OPENING = re.compile(rb"\s*:\s*\[")
_COLON = re.compile(rb"\s*:")


class _Found(NamedTuple):
    """Where an array lies in a text; commas at which it may be cut, each with how many lists are open there."""

    start: int
    end: int
    cuts: list[tuple[int, int]]


class _NotFound(Exception):  # noqa: N818 - what was taken for arrays is none, or not where it is wanted
    """The text has to be read as a whole."""


def read_infer(text: bytes, pause: Callable[[], None]) -> dict[str, Any]:
    """As `json_object`, but that large `data` of inputs are `Elements`, from which their arrays have been made.

    Args:
        text: of a request of infer.
        pause: called between pieces.

    Raises:
        MmeError: as there, and what `pause` raises.
    """
    document = _read(text, FORM_OF_INFER, b"data", _data_of_inputs, pause)
    for item, key in _data_of_inputs(document):
        data_type = BY_NAME.get(kind) if isinstance(kind := item.get("datatype"), str) else None
        if isinstance(elements := item[key], Elements) and data_type is not None:
            gather(elements, data_type)
    return document


def read_generate(types: Mapping[str, DataType], text: bytes, pause: Callable[[], None]) -> dict[str, Any]:
    """As `read_infer`, for the flat objects of `generate`: large arrays under any of its keys, and of `parameters`.

    Args:
        types: of the model's inputs, by name, if they are known; else the arrays are made when they are asked for.
        text: of a request of generate.
        pause: called between pieces.
    """
    document = _read(text, FORM_OF_GENERATE, None, _values, pause)
    for item, key in _values(document):
        if isinstance(elements := item[key], Elements) and key in types:
            gather(elements, types[key])
    return document


def _data_of_inputs(document: dict[str, Any]) -> Iterator[Place]:
    inputs = document.get("inputs")
    for item in inputs if isinstance(inputs, list) else ():
        if isinstance(item, dict) and "data" in item:
            yield item, "data"


def _values(document: dict[str, Any]) -> Iterator[Place]:
    parameters = document.get("parameters")
    for item in (document, parameters) if isinstance(parameters, dict) else (document,):
        for key in item:
            yield item, key


def _read(
    text: bytes,
    form: str,
    key: bytes | None,
    places: Callable[[dict[str, Any]], Iterator[Place]],
    pause: Callable[[], None],
) -> dict[str, Any]:
    found = list(_arrays(text, key and b'"%b"' % key, pause))
    if found:
        try:
            return _put_together(text, found, orjson.loads, places, pause)
        except orjson.JSONDecodeError:
            if goes_beyond(text):
                return _read_beyond(text, form, found, places, pause)
        except (_NotFound, TooDeep):
            pass
    pause()
    return json_object(text, form)


def _read_beyond(
    text: bytes,
    form: str,
    found: list[_Found],
    places: Callable[[dict[str, Any]], Iterator[Place]],
    pause: Callable[[], None],
) -> dict[str, Any]:
    """Text that holds NaN or infinities: all of it is read by the parser that knows them, whose numbers go less far."""
    try:
        return _put_together(text, found, beyond_json, places, pause)
    except (_NotFound, TooDeep):
        return json_object(text, form)
    except (ValueError, TypeError, RecursionError):
        pause()
        raise not_json(text) from None


def _put_together(
    text: bytes,
    found: list[_Found],
    loads: Loads,
    places: Callable[[dict[str, Any]], Iterator[Place]],
    pause: Callable[[], None],
) -> dict[str, Any]:
    mark = secrets.token_hex(16)  # nobody can have written it
    rest, at = [], 0
    for number, array in enumerate(found):
        rest += [text[at : array.start], b'["%b",%d]' % (mark.encode(), number)]
        at = array.end
    document = loads(b"".join((*rest, text[at:])))
    if not isinstance(document, dict):
        raise _NotFound
    wanted = 0
    for item, key in list(places(document)):
        value = item[key]
        if type(value) is list and len(value) == 2 and value[0] == mark:
            item[key] = _elements(text, found[value[1]], loads, pause)
            wanted += 1
    if wanted != len(found):  # one lies elsewhere, or in a field that another one of the same name has replaced
        raise _NotFound
    return document


def _elements(text: bytes, array: _Found, loads: Loads, pause: Callable[[], None]) -> Elements:
    elements, at, before = Elements(), array.start, 0
    for cut, behind in (*array.cuts, (array.end, 0)):
        pause()
        piece = loads(b"%b%b%b" % (b"[" * before, text[at:cut], b"]" * behind))
        if not (_holds_something(piece, before, 0) and _holds_something(piece, behind, -1)):  # beside a comma
            raise _NotFound
        elements.add(piece, before, behind)
        at, before = cut + 1, behind
    return elements


def _holds_something(piece: list[Any], lists: int, end: int) -> bool:
    """Whether there is anything in the innermost of the lists that a cut went through, first (0) or last (-1) ones."""
    for _ in range(lists - 1):
        piece = piece[end]
    return lists == 0 or bool(piece)


# -- where the arrays are --------------------------------------------------------------------------------------------


def _arrays(text: bytes, key: bytes | None, pause: Callable[[], None]) -> Iterator[_Found]:
    """The arrays that are values of this key, in quotes (None for any), long, and hold no objects."""
    search = _Search(text)
    string, at, paused = 0, 0, 0  # where the last string began, and what is behind it
    while at >= 0:
        quote = text.find(b'"', at)
        end = len(text) if quote < 0 else quote
        if search.start >= 0 and (found := search.go_on(string, at, end)) is not None:
            yield found
        if search.start < 0 and (key is None or (at == string + len(key) and text.startswith(key, string))):
            found = search.begin(at, end)
            if found is not None:
                yield found
        if quote < 0:
            return
        string, at = quote, _behind_string(text, quote)
        if search.start >= 0 and at >= search.looks_on:
            at = search.skip(at)
        if at - paused > _STRETCH:
            paused = at
            pause()


class _Search:
    """Looks for the end of an array in the gaps between strings, where alone brackets mean something.

    Attributes:
        start: where the array begins, -1 while there is none.
        looks_on: where it is worth a look whether many strings can be skipped.
    """

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.start = -1
        self.looks_on = 0
        self._depth = 0  # at the end of the gaps so far
        self._last = 0  # the last cut
        self._cuts: list[tuple[int, int]] = []

    def begin(self, at: int, end: int) -> _Found | None:
        """Begin an array, if the gap behind its key has one; the array if that is all of it."""
        opening = _OPENING.match(self._text[at : min(at + _SPACES, end)])
        if opening is None:
            return None
        self.start = self._last = at + opening.end() - 1
        self._depth, self._cuts = 0, []
        return self._look(self.start, end)

    def go_on(self, string: int, at: int, end: int) -> _Found | None:
        """Look into a gap, and at what string was before it; the array if it has ended there or before."""
        gap = self._text[at : min(end, at + 3)]
        if gap in _COMMAS:
            if at - self._last >= _PIECE:
                self._cuts.append((at, self._depth))
                self._last = at
            return None
        if _COLON.match(self._text[at : min(at + _SPACES, end)]):  # the string is a key
            return self._ended(string)
        return self._look(at, end)

    def skip(self, at: int) -> int:
        """What is behind the last string of the next piece, if that holds nothing but strings and commas; else `at`."""
        piece = self._text[at : at + _PIECE]
        self.looks_on = at + len(piece)
        if any(sign in piece for sign in _OTHERS):
            return at
        if piece.count(b'"') % 2 == 1:  # the last one begins a string that ends further on
            piece = piece[: piece.rfind(b'"')]
        return at + piece.rfind(b'"') + 1

    def _look(self, at: int, end: int) -> _Found | None:
        text = self._text
        stop = _other(text, at, end)
        while (cut := text.find(b",", max(self._last + _PIECE, at), stop)) >= 0:
            self._depth += _opened(text, at, cut)
            self._cuts.append((cut, self._depth))
            self._last = at = cut
        self._depth += _opened(text, at, stop)
        return self._ended(stop) if stop < end or end == len(text) else None

    def _ended(self, stop: int) -> _Found | None:
        """The array, which ends before this place, if it is one that can be cut."""
        start, self.start = self.start, -1
        end = self._text.rfind(b"]", start, stop) + 1
        cuts = [(place, depth) for place, depth in self._cuts if place < end]
        if end - start < _ARRAY or self._depth != 0 or not all(1 <= depth <= DEEPEST for _, depth in cuts):
            return None
        return _Found(start, end, cuts)


def _other(text: bytes, start: int, end: int) -> int:
    """Where the first sign is that arrays of arrays have not; the end if there is none."""
    for at in range(start, end, _STRETCH):
        stop = min(at + _STRETCH, end)
        places = [place for sign in (b"{", b"}", b":") if (place := text.find(sign, at, stop)) >= 0]
        if places:
            return min(places)
    return end


def _opened(text: bytes, start: int, end: int) -> int:
    return text.count(b"[", start, end) - text.count(b"]", start, end)


def _behind_string(text: bytes, quote: int) -> int:
    """What is behind the string that begins there; -1 if it does not end."""
    end = text.find(b'"', quote + 1)
    while end >= 0:
        before = end - 1
        while text[before] == _BACKSLASH:
            before -= 1
        if (end - before) % 2 == 1:  # each two of them are one backslash
            return end + 1
        end = text.find(b'"', end + 1)
    return -1
