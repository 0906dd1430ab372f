"""Shared memory without a name: anonymous files whose descriptors the two processes share.

A memfd lies in no folder, so that nothing is left to remove however its holders die, and no size of /dev/shm limits
it. Sealed against shrinking: a process that truncated it could otherwise kill the other one by SIGBUS.

A segment grows by both sides mapping it anew, larger; who still reads the old mapping goes on reading the same pages.
`lend` gives out the segment's bytes as an array for one batch. numpy lets every view of an array keep that array alive
(`base` of a view of a view is the first array again, since that one owns no memory but stands on the mapping), so the
segment is busy for as long as the lent array lives, and no longer: a weak reference tells. When the process gives a
segment up meanwhile, the mapping goes with the last view.

Pages that a large batch touched stay until somebody gives them back: `SegmentPool.rest`, called now and then, makes
holes behind what batches needed of late. Both sides keep their mappings, and touch new pages when they need them.

Used by one thread at a time in each process; views may be dropped on any thread.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.worker import memfd

if TYPE_CHECKING:
    from model_handlers.tensor import Array

_SPARE = 2  # free segments kept beside the one that is taken
_WINDOW = 64  # batches over which a need counts as recent
_KEPT = 1 << 20  # a segment of this size is no burden
_RESTING = 64 << 10  # bytes that each segment keeps while nobody uses it: a small batch finds its pages
_BLOCK = 512  # what fstat counts in
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
        resting: whether pages of it are being given back.
    """

    __deletable__ = ("_mapping",)  # which compiled classes have to say

    def __init__(self, id: int, fd: int, size: int) -> None:  # noqa: A002 - the word for it
        self.id = id
        self.fd = fd
        self.size = size
        self.batch = 0
        self.out = False
        self.resting = False
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
    def taken(self) -> int:
        """Bytes of memory that it takes, whoever touched them."""
        return os.fstat(self.fd).st_blocks * _BLOCK

    def hole(self, beyond: int) -> Hole:
        """What gives back the pages behind its first bytes, of whole pages; until it was made nobody takes the segment.

        Raises:
            OSError: the system has no descriptor for it.
        """
        hole = Hole(self, os.dup(self.fd), beyond, self.size - beyond)
        self.resting = True
        return hole

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way in it, pages are given back, or anybody still looks at what was lent."""
        return self.out or self.resting or (self._lent is not None and self._lent() is not None)

    def close(self) -> None:
        """Give it up; views that still live keep their mapping until they go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self._mapping


class Hole:
    """Pages of a segment that are to be given back to the system, on both sides. To be made once, on any thread.

    It takes a quarter of a millisecond for each megabyte, so nobody waits for it: the descriptor is its own, and the
    segment may be closed meanwhile.
    """

    def __init__(self, segment: Segment, fd: int, start: int, size: int) -> None:
        self._segment = segment
        self._fd = fd
        self._start = start
        self._size = size

    def make(self) -> None:
        """Give them back; they read as zeros from now on."""
        try:
            with contextlib.suppress(OSError):  # a system that can't do that keeps them
                memfd.punch(self._fd, self._start, self._size)
        finally:
            os.close(self._fd)
            self._segment.resting = False


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

    def rest(self, *, idle: bool) -> tuple[list[Hole], bool]:
        """What gives back pages that no batch of late needed: none since the last time but one, or none if `idle`.

        Returns:
            the holes to be made, and whether every segment could be looked at: nobody used one, or held views of it.
        """
        enough = _page_rounded(max(_RESTING, 0 if idle else max(self._need, self._recent_need)))
        self._recent_need, self._need, self._batches = self._need, 0, 0
        free = [segment for segment in self._segments if not segment.busy]
        holes: list[Hole] = []
        with contextlib.suppress(OSError):
            holes += (segment.hole(enough) for segment in free if segment.taken > enough)
        return holes, len(free) == len(self._segments)

    @property
    def taken(self) -> int:
        """Bytes of memory that all of them take."""
        return sum([segment.taken for segment in self._segments])

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
