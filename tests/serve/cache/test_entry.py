"""A stay in memory counts its leases, and says when the last one ended."""

from types import SimpleNamespace

from model_handlers.base import Footprint
from serve.cache.entry import Entry, Residency
from serve.statistics import TargetStats


def residency_of(ended):
    """A stay in memory that notes in `ended` whenever it is without a lease again."""
    entry = Entry("a", "source", TargetStats())
    entry.residency = Residency(entry, SimpleNamespace(steps=()), None, lambda _: ended.append(True))
    return entry.residency


def test_the_end_of_the_last_lease_is_told_and_no_other():
    """Others learn that room may be had when the last lease ends, each time that it does."""
    ended = []
    residency = residency_of(ended)
    residency.leases = 2
    residency.release()
    assert ended == []
    residency.release()
    assert ended == [True]
    residency.leases = 1
    residency.release()
    assert ended == [True, True]


def test_a_release_is_a_use():
    """A model is as recently used as its last request ended."""
    residency = residency_of([])
    residency.leases = 1
    before = residency.entry.last_used
    residency.release()
    assert residency.entry.last_used > before


async def test_drained_is_done_when_no_lease_is_left(idle):
    """`drained` waits for the last lease; without a lease it is done at once; each asker is told anew."""
    residency = residency_of([])
    assert residency.drained().done()
    residency.leases = 2
    waiting = residency.drained()
    assert residency.drained() is waiting
    residency.release()
    await idle()
    assert not waiting.done()
    residency.release()
    assert waiting.done()
    assert residency.drained().done()
    residency.leases = 1
    assert not residency.drained().done()


def test_repr_is_fit_for_logs():
    """Host and device memory together, in megabytes."""
    residency = residency_of([])
    residency.footprint = Footprint(1_500_000, (500_000,))
    assert repr(residency) == "<Residency of <Entry a: absent, 2.0 MB, 0 leases>>"
