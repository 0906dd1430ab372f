"""What must hold of a cache whenever its event loop is at rest."""

from model_handlers.base import Footprint
from serve.cache.lifecycle import State


def check_integrity(cache):
    """The bookkeeping adds up."""
    for entry in cache.all_entries():
        held = entry.state in {State.READY, State.UNLOADING}
        assert (entry.resident is not None) == held, entry
        assert held or entry.footprint == Footprint(), entry
        assert entry.leases >= 0, entry
        assert entry.footprint.host >= cache.shared.charge(entry), entry
        if held:
            assert cache.serves(entry.name, entry.resident) == (entry.state is State.READY), entry
    assert cache.resident_count == sum(entry.state is State.READY for entry in cache.all_entries())
    assert min((cache.room.reserved.host, *cache.room.reserved.devices)) >= 0, cache.room
