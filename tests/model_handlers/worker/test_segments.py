"""Shared memory: busy for as long as anybody looks at it, and not a moment longer."""

import gc
import os
import threading

import numpy as np
import pytest

from model_handlers.worker import memory
from model_handlers.worker.memory import Segment, SegmentPool

MIB = 1 << 20


@pytest.fixture
def pool():
    """An empty pool."""
    pool = SegmentPool()
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[10:20],
        lambda a: a[10:20][3:5][:1],
        lambda a: a[:64].view("f4").reshape(4, 4).T[::2],
        lambda a: memoryview(a[:4]),
        lambda a: memoryview(a.view("f8"))[2:3],
        lambda a: np.lib.stride_tricks.as_strided(a, (2, 2), (1, 1)),
        lambda a: np.broadcast_to(a[:4], (3, 4)),
        lambda a: a[:4].view(np.matrix)[0, 1:],
        lambda a: np.asarray(memoryview(a[:4])),
        lambda a: iter(a[:4]),
    ],
)
def test_busy_while_a_view_lives(pool, view):
    """Views of views, of other types, strides and subclasses, and buffers of them, keep the segment busy."""
    segment, _ = pool.take(4096)
    kept = view(segment.lend())
    gc.collect()
    assert segment.busy
    assert pool.take(4096)[0] is not segment
    del kept
    gc.collect()

    assert not segment.busy


def test_copies_do_not_keep_it_busy(pool):
    """A copy is no view."""
    segment, _ = pool.take(4096)
    kept = segment.lend()[:10].copy()

    assert not segment.busy
    assert pool.take(4096) == (segment, False)
    assert kept.size == 10


def test_a_view_may_go_on_another_thread(pool):
    """The last view of a result goes where the response was sent."""
    segment, _ = pool.take(4096)
    views = [segment.lend()[:10]]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()

    assert not segment.busy


def test_two_sides(pool):
    """What one mapping writes the other reads, after either of them grew too."""
    ours, fresh = pool.take(100)
    theirs = Segment(ours.id, os.dup(ours.fd), ours.size)
    assert fresh
    old = theirs.lend()
    ours.memory()[5] = 7
    assert old[5] == 7
    theirs.ensure(3 * MIB)
    theirs.memory()[3 * MIB - 1] = 9
    ours.follow(theirs.size)

    assert ours.lend()[3 * MIB - 1] == 9
    ours.memory()[5] = 8
    assert old[5] == 8
    theirs.close()


def test_growth_doubles(pool):
    """A segment that must grow at least doubles, and keeps whole pages."""
    segment, _ = pool.take(1)
    assert segment.size == 64 << 10
    segment.ensure(segment.size + 1)
    assert segment.size == 128 << 10
    segment.ensure(5 * MIB + 1)

    assert segment.size == 5 * MIB + os.sysconf("SC_PAGESIZE")


def test_sizes_can_be_asked_for(monkeypatch):
    """A new segment has at least the smallest size, and grows by at least the growth."""
    monkeypatch.setattr(memory.SIZES, "smallest", 1 << 20)
    monkeypatch.setattr(memory.SIZES, "growth", 4 << 20)
    pool = SegmentPool()
    segment, _ = pool.take(1)
    first = segment.size
    segment.ensure(first + 1)
    grown = segment.size
    pool.close()

    assert (first, grown) == (1 << 20, 5 << 20)


def test_the_other_side_can_not_shrink_it(pool):
    """A truncated segment would kill whoever reads it: the system refuses."""
    segment, _ = pool.take(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


def test_more_than_there_is_can_not_be_mapped(pool):
    """A size that the other side only claims is an error."""
    segment, _ = pool.take(4096)
    with pytest.raises(ValueError, match="length"):
        segment.follow(MIB)


def test_spare_segments_are_few(pool):
    """When many results at once are let go, most of their segments are given back."""
    kept = [pool.take(4096)[0].lend() for _ in range(10)]
    assert len(pool) == 10
    kept.clear()
    pool.take(4096)

    assert len(pool) == 3
    assert len(pool.retired) == 7


def test_far_too_large_segments_are_given_back(pool):
    """A segment much larger than the batches of late is given back; one of a usual size is not."""
    large, _ = pool.take(64 * MIB)
    pool.used(64 * MIB)
    for _ in range(63 + 64):
        assert pool.take(MIB) == (large, False)
        pool.used(MIB)
    assert len(pool) == 1  # two windows ago at most: recent
    for _ in range(64):
        pool.used(MIB)

    assert pool.retired == [large.id]
    assert large.fd == -1
    small, fresh = pool.take(MIB)
    assert fresh
    assert small.id != large.id


def test_closed_under_a_view(pool):
    """A view of a closed segment can still be read."""
    segment, _ = pool.take(4096)
    segment.memory()[0] = 5
    kept = segment.lend()[:1]
    pool.close()
    segment.close()

    assert kept[0] == 5


def test_an_idle_pool_retires_what_batches_made_large(pool):
    """Both sides give it up; a small one is kept for the next batch."""
    large, _ = pool.take(16 * MIB)
    large.out = True
    small, _ = pool.take(4096)
    large.out = False
    large.lend(writable=True)[:] = 1
    small.memory()[0] = 1

    assert not pool.busy
    pool.rest()
    assert pool.taken < MIB
    assert pool.take_retired() == [large.id]
    assert pool.take_retired() == []
    assert pool.take(4096) == (small, False)


def test_a_segment_that_is_looked_at_is_kept(pool):
    """No answer turns into zeros; it is told that there is more to give back."""
    segment, _ = pool.take(16 * MIB)
    segment.lend(writable=True)[:] = 1
    kept = segment.lend()[-MIB:]

    assert pool.busy
    pool.rest()
    assert pool.taken == 16 * MIB
    assert int(kept.sum()) == MIB
    del kept
    assert not pool.busy
    pool.rest()
    assert pool.taken == 0


def test_a_segment_on_its_way_is_kept(pool):
    """What was sent and not answered yet may be read at any time."""
    segment, _ = pool.take(16 * MIB)
    segment.lend(writable=True)[:] = 1
    segment.out = True

    assert pool.busy
    pool.rest()
    assert pool.taken == 16 * MIB
