"""An entry counts its leases, and says when the last one ended."""

import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from serve.cache.entry import Entry
from serve.statistics import TargetStats


def entry_of(ended):
    """An entry that notes in `ended` whenever it is without a lease again."""
    return Entry("a", "source", TargetStats(), lambda _: ended.append(True))


def test_the_end_of_the_last_lease_is_told_and_no_other():
    """Others learn that room may be had when the last lease ends, each time that it does."""
    ended = []
    entry = entry_of(ended)
    entry.leases = 2
    entry.release()
    assert ended == []
    entry.release()
    assert ended == [True]
    entry.leases = 1
    entry.release()
    assert ended == [True, True]


def test_a_release_is_a_use():
    """A model is as recently used as its last request ended."""
    entry = entry_of([])
    entry.leases = 1
    before = entry.last_used
    entry.release()
    assert entry.last_used > before


async def test_drained_is_done_when_no_lease_is_left(idle):
    """`drained` waits for the last lease; without a lease it is done at once; each asker is told anew."""
    entry = entry_of([])
    assert entry.drained().done()
    entry.leases = 2
    waiting = entry.drained()
    assert entry.drained() is waiting
    entry.release()
    await idle()
    assert not waiting.done()
    entry.release()
    assert waiting.done()
    assert entry.drained().done()
    entry.leases = 1
    assert not entry.drained().done()


def test_using_a_model_that_is_not_there_is_a_bug_of_ours():
    """Without a resident there is nothing to use, and no guess is made."""
    with pytest.raises(MmeError, match="'a' is used without a lease") as caught:
        entry_of([]).leased()
    assert caught.value.kind is Kind.INTERNAL


def test_repr_is_fit_for_logs():
    """Host and device memory together, in megabytes."""
    entry = entry_of([])
    entry.footprint = Footprint(1_500_000, (500_000,))
    assert repr(entry) == "<Entry a: UNAVAILABLE, 2.0 MB, 0 leases>"
