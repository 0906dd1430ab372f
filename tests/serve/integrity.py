"""What must hold of a cache whenever its event loop is at rest."""

from tests.serve.cache.listed import Listed
from tests.serve.inside import books_of, residents_of


def check_integrity(cache):
    """The bookkeeping adds up."""
    for residency in cache.residents.own:
        entry = residency.entry
        assert residency.leases >= 0, entry
        assert residency.footprint.host >= cache.residents.shared.charge(residency), entry
        assert cache.ready.serves(residency.target) != residency.leaving, entry
        assert residency is entry.residency or residency in entry.retiring, entry
    for entry in cache.entries.values():
        assert entry.state.serves == (entry.resident is not None and cache.ready.serves(entry.resident)), entry
    assert len(cache.ready.models) == sum(entry.state.serves for entry in cache.entries.values())
    books = books_of(cache)
    listed = Listed(lambda: residents_of(cache), cache.room.budget)
    assert books.taken == listed.taken
    for kept, summed in ((books.staying, listed.staying), (books.pinned, listed.pinned)):
        assert (kept.count, kept.total, kept.users) == (summed.count, summed.total, summed.users)
    assert min((cache.room.reserved.host, *cache.room.reserved.devices)) >= 0, cache.room
