"""What must hold of a cache whenever its event loop is at rest."""

from model_handlers.base import Footprint
from serve.cache.entry import State
from tests.serve.cache.listed import Listed
from tests.serve.inside import books_of, residents_of


def check_integrity(cache):
    """The bookkeeping adds up."""
    for entry in cache.all_entries():
        held = entry.state in {State.READY, State.UNLOADING}
        assert (entry.resident is not None) == held, entry
        assert held or entry.footprint == Footprint(), entry
        assert entry.leases >= 0, entry
        assert entry.footprint.host >= cache.residents.shared.charge(entry), entry
        if held:
            assert cache.serves(entry.name, entry.resident) == (entry.state is State.READY), entry
    assert cache.resident_count == sum(entry.state is State.READY for entry in cache.all_entries())
    books = books_of(cache)
    listed = Listed(lambda: residents_of(cache), cache.room.budget)
    assert books.taken == listed.taken
    for kept, summed in ((books.staying, listed.staying), (books.pinned, listed.pinned)):
        assert (kept.count, kept.total, kept.users) == (summed.count, summed.total, summed.users)
    assert min((cache.room.reserved.host, *cache.room.reserved.devices)) >= 0, cache.room
