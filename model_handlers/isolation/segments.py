"""Shared memory without a name: anonymous files whose descriptors the two processes share.

A memfd lies in no folder, so that nothing is left to remove however its holders die, and no size of /dev/shm limits
it. Sealed against shrinking: a process that truncated it could otherwise kill the other one by SIGBUS.

A segment grows by both sides mapping it anew, larger; who still reads the old mapping goes on reading the same pages.
`lend` gives out the segment's bytes as an array for one batch. numpy lets every view of an array keep that array alive
(`base` of a view of a view is the first array again, since that one owns no memory but stands on the mapping), so the
segment is busy for as long as the lent array lives, and no longer: a weak reference tells. When the process gives a
segment up meanwhile, the mapping goes with the last view.

Used by one thread at a time in each process; views may be dropped on any thread.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.isolation import memfd

if TYPE_CHECKING:
    from model_handlers.tensor import Array

_SPARE = 2  # free segments kept beside the one that is taken
_WINDOW = 64  # batches over which a need counts as recent
_KEPT = 1 << 20  # a segment of this size is no burden
_EXCESS = 4  # times the recent need: growth doubles, so twice is usual


@dataclass(slots=True)
class Sizes:
    """How large segments are made. One for the process, set before the first of them is made.

    Attributes:
        smallest: bytes of a new segment; pages that no tensor touches cost nothing.
        growth: bytes by which one grows at least; it doubles where that is more.
    """

    smallest: int = 64 << 10
    growth: int = 0


SIZES = Sizes()


class Segment:
    """One piece of shared memory, mapped here.

    Attributes:
        id: what the two sides call it; never used again.
        fd: its descriptor.
        size: bytes mapped.
        batch: the number of the last batch in it.
        out: whether that is on its way.
    """

    __deletable__ = ("_mapping",)  # which compiled classes have to say

    def __init__(self, id: int, fd: int, size: int) -> None:  # noqa: A002 - the word for it
        self.id = id
        self.fd = fd
        self.size = size
        self.batch = 0
        self.out = False
        self._mapping = mmap.mmap(fd, size)
        self._lent: weakref.ref[Array] | None = None

    def __repr__(self) -> str:
        return f"<Segment {self.id}: {self.size} bytes{', busy' if self.busy else ''}>"

    @classmethod
    def create(cls, id: int, size: int) -> Segment:  # noqa: A002
        """New shared memory of at least `size` bytes. Pages cost memory once they are touched."""
        size = _page_rounded(max(size, SIZES.smallest))
        fd = memfd.create("mme-segment")
        try:
            os.ftruncate(fd, size)
            memfd.seal(fd)
            return cls(id, fd, size)
        except BaseException:
            os.close(fd)
            raise

    def ensure(self, size: int) -> None:
        """Grow to at least `size` bytes, at least doubling."""
        if size > self.size:
            size = _page_rounded(max(size, 2 * self.size, self.size + SIZES.growth))
            os.ftruncate(self.fd, size)
            self.follow(size)

    def follow(self, size: int) -> None:
        """Map what the other side has grown.

        Raises:
            ValueError: it has not.
        """
        if size > self.size:
            self._mapping = mmap.mmap(self.fd, size)  # refuses more than the file has
            self.size = size

    def memory(self) -> memoryview:
        """The bytes, to write into. To be released before the segment is closed."""
        return memoryview(self._mapping)

    def lend(self, *, writable: bool = False) -> Array:
        """The bytes as an array, read-only as a rule; until it and its views are gone the segment is busy."""
        memory = memoryview(self._mapping)
        array: Array = np.frombuffer(memory if writable else memory.toreadonly(), np.uint8)
        self._lent = weakref.ref(array)
        return array

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way in it, or anybody still looks at what was lent."""
        return self.out or (self._lent is not None and self._lent() is not None)

    def close(self) -> None:
        """Give it up; views that still live keep their mapping until they go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self._mapping


class SegmentPool:
    """The segments that the serving process shares with one child."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._last_id = 0
        self._need = self._recent_need = self._batches = 0
        self.retired: list[int] = []

    def __len__(self) -> int:
        return len(self._segments)

    def take(self, size: int) -> tuple[Segment, bool]:
        """A free segment of at least `size` bytes, and whether the child has yet to be given its descriptor.

        Raises:
            OSError: the system has no more memory or descriptors for us.
        """
        free = sorted((segment for segment in self._segments if not segment.busy), key=lambda segment: segment.size)
        while len(free) > 1 + _SPARE:
            self.retire(free.pop(0))
        for segment in free:
            if segment.size >= size:
                return segment, False
        if free:
            free[-1].ensure(size)
            return free[-1], False
        self._last_id += 1
        segment = Segment.create(self._last_id, size)
        self._segments.append(segment)
        return segment, True

    def used(self, size: int) -> None:
        """A batch took this many bytes. Now and then, segments far larger than any recent batch are given back."""
        self._need = max(self._need, size)
        self._batches += 1
        if self._batches == _WINDOW:
            enough = max(_KEPT, _EXCESS * max(self._need, self._recent_need))
            for segment in [each for each in self._segments if each.size > enough and not each.out]:
                self.retire(segment)
            self._recent_need, self._need, self._batches = self._need, 0, 0

    def retire(self, segment: Segment) -> None:
        """Use it no more; `retired` tells the child with the next message."""
        self._segments.remove(segment)
        self.retired.append(segment.id)
        segment.close()

    def give_up(self, segment: Segment) -> None:
        """The child keeps it for itself."""
        self._segments.remove(segment)
        segment.close()

    def close(self) -> None:
        """Give all of them up."""
        while self._segments:
            self._segments.pop().close()


def _page_rounded(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
