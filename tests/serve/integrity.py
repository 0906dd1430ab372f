"""What must hold of a cache whenever its event loop is at rest."""

from model_handlers.base import Footprint
from serve.cache.lifecycle import State


def check_integrity(cache):
    """The bookkeeping adds up."""
    for entry in cache._everybody():
        held = entry.state in {State.READY, State.UNLOADING}
        assert (entry.resident is not None) == held, entry
        assert held or entry.footprint == Footprint(), entry
        assert entry.leases >= 0, entry
        assert entry.footprint.host >= cache.shared.charge(entry), entry
        assert (cache._ready.get(entry.name) is entry) == (entry.state is State.READY), entry
    assert min((cache.room.reserved.host, *cache.room.reserved.devices)) >= 0, cache.room
