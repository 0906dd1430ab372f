"""New inputs from kept ones: a few changes of bytes, of words, or of parts between separators. Plain and quick."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    Change = Callable[["Mutator", bytes, bytes], bytes]

NUMBERS = (0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63)
_TEXTS = (
    *(b"%d" % number for number in NUMBERS),
    b"9" * 30,
    b"1e400",
    b"NaN",
    b"-0",
    b"0.5",
    b"0x10",
    b"null",
    b"ffff",
)
_BYTES = b"\0\1\x7f\x80\xff\r\n\t \"'\\,:;{}[]()/%#=+-0"
_SEPARATORS = (b"\n", b",", b" ", b"\r\n", b"\0", b":")
_DIGITS = re.compile(rb"[0-9]+")
_SHORT = 16  # bytes of most spans


class Mutator:
    """Changes bytes.

    Args:
        random: what decides.
        words: that mean something to what reads the bytes.
        most: bytes of an input.
    """

    def __init__(self, random: Random, words: Sequence[bytes], most: int) -> None:
        self._random = random.random
        self._words = (*words, *_TEXTS)
        self._most = most

    def below(self, end: int) -> int:
        """A number in [0, end)."""
        return int(self._random() * end)

    def mutated(self, pool: Sequence[bytes]) -> bytes:
        """One of the pool with one to four changes, with some of another one perhaps."""
        random = self._random
        data = pool[int(random() * len(pool))]
        other = pool[int(random() * len(pool))]
        for _ in range(1 + int(random() * random() * 4)):
            data = _CHANGES[int(random() * len(_CHANGES))](self, data, other)
        return data[: self._most]

    def span(self, data: bytes) -> tuple[int, int]:
        """Where a part of the data begins and ends, which is short as a rule."""
        start = self.below(len(data) + 1)
        size = self.below(_SHORT if self._random() < 0.8 else len(data) + 1)
        return start, min(start + size, len(data))

    def flip(self, data: bytes, _other: bytes) -> bytes:
        """Another bit."""
        if not data:
            return b"\0"
        at = self.below(len(data))
        return b"%b%c%b" % (data[:at], data[at] ^ 1 << self.below(8), data[at + 1 :])

    def byte(self, data: bytes, _other: bytes) -> bytes:
        """Another byte, of those that mean much."""
        at = self.below(len(data) + 1)
        return b"%b%c%b" % (data[:at], _BYTES[self.below(len(_BYTES))], data[at + 1 :])

    def drop(self, data: bytes, _other: bytes) -> bytes:
        """Without a part."""
        start, end = self.span(data)
        return data[:start] + data[end:]

    def repeat(self, data: bytes, _other: bytes) -> bytes:
        """A part more than once."""
        start, end = self.span(data)
        times = 2 if self._random() < 0.9 else self.below(100)
        return data[:start] + data[start:end] * min(times, 1 + self._most // (end - start + 1)) + data[end:]

    def insert(self, data: bytes, _other: bytes) -> bytes:
        """A word more."""
        at = self.below(len(data) + 1)
        return data[:at] + self._words[self.below(len(self._words))] + data[at:]

    def replace(self, data: bytes, _other: bytes) -> bytes:
        """A word in place of something."""
        start, end = self.span(data)
        return data[:start] + self._words[self.below(len(self._words))] + data[end:]

    def number(self, data: bytes, _other: bytes) -> bytes:
        """Another number."""
        found = _DIGITS.search(data, self.below(len(data) + 1)) or _DIGITS.search(data)
        if found is None:
            return data
        return data[: found.start()] + _TEXTS[self.below(len(_TEXTS))] + data[found.end() :]

    def integer(self, data: bytes, _other: bytes) -> bytes:
        """Another number in binary."""
        size = (1, 2, 4, 8)[self.below(4)]
        at = self.below(len(data) + 1)
        value = NUMBERS[self.below(len(NUMBERS))] & (1 << 8 * size) - 1
        return data[:at] + value.to_bytes(size, "little" if self._random() < 0.5 else "big") + data[at + size :]

    def splice(self, data: bytes, other: bytes) -> bytes:
        """The beginning of one, the end of the other."""
        return data[: self.below(len(data) + 1)] + other[self.below(len(other) + 1) :]

    def copy(self, data: bytes, other: bytes) -> bytes:
        """With a part of the other."""
        start, end = self.span(other)
        at = self.below(len(data) + 1)
        return data[:at] + other[start:end] + data[at:]

    def rearrange(self, data: bytes, other: bytes) -> bytes:
        """Parts between separators in another order, twice, not at all, or with one of the other's."""
        separator = _SEPARATORS[self.below(len(_SEPARATORS))]
        parts = data.split(separator, 200)
        at, to = self.below(len(parts)), self.below(len(parts))
        how = self.below(4)
        if how == 0:
            parts[at], parts[to] = parts[to], parts[at]
        elif how == 1:
            parts.insert(to, parts[at])
        elif how == 2:
            del parts[at]
        else:
            others = other.split(separator, 200)
            parts[at] = others[self.below(len(others))]
        return separator.join(parts)


_CHANGES: tuple[Change, ...] = (
    Mutator.flip,
    Mutator.flip,
    Mutator.byte,
    Mutator.drop,
    Mutator.repeat,
    Mutator.insert,
    Mutator.replace,
    Mutator.number,
    Mutator.integer,
    Mutator.splice,
    Mutator.copy,
    Mutator.rearrange,
)
