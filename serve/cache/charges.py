"""What models are charged for: bytes of their own, and files that they are the first to map. On the event loop only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from model_handlers.base import Footprint
from serve.cache.shared_bytes import SharedBytes, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from serve.cache.entry import Entry


class Payer(Protocol):
    """A load under way that has bytes for files promised to it."""

    def relieve(self, files: Iterable[str]) -> None:
        """Somebody else has a promise for these by now, or maps them."""


class Charges:
    """The footprints of entries, files that several of them map being counted once.

    Attributes:
        charged: the entries that are charged, which are those in memory, and what is each one's own.
        taken: bytes of all of them.
        staying: those that are not on their way out.
        pinned: those of them that stay whoever needs the room.
        shared: those files.
    """

    def __init__(self) -> None:
        self.charged: dict[Entry[Any], Footprint] = {}
        self.taken = Footprint()
        self.staying = Tally()
        self.pinned = Tally()
        self._leaving: set[Entry[Any]] = set()
        self.shared: SharedBytes[Entry[Any]] = SharedBytes()
        self._payers: dict[str, Payer] = {}  # of files that nobody maps yet

    def counted(self, footprint: Footprint) -> Footprint:
        """What a model would be charged for: files that others map already, or are about to, cost nothing."""
        return Footprint(footprint.host + sum(self.unpaid(footprint.shared).values()), footprint.devices)

    def unpaid(self, files: Mapping[str, int]) -> dict[str, int]:
        """Those of them that nobody maps, and that no load under way has a promise for."""
        new = {file: size for file, size in files.items() if file not in self._payers}
        return {file: size for file, size in new.items() if self.shared.beyond({file: size})}

    def promised(self, payer: Payer, files: Mapping[str, int]) -> None:
        """A load has a promise for these; where others have one by now, or map them, it needs none."""
        unpaid = self.unpaid(files)
        self._payers |= dict.fromkeys(unpaid, payer)
        payer.relieve(files.keys() - unpaid.keys())

    def ended(self, payer: Payer, files: Iterable[str]) -> None:
        """Its promise is not for these any more."""
        for file in files:
            if self._payers.get(file) is payer:
                del self._payers[file]

    def charge(self, entry: Entry[Any], footprint: Footprint) -> None:
        """A model takes this from now on."""
        for file in footprint.shared.keys() & self._payers.keys():
            self._payers.pop(file).relieve([file])
        charge = self.shared.map(entry, footprint.shared)
        self._own(entry, footprint)
        self._set(entry, Footprint(footprint.host + charge, footprint.devices))

    def recharge(self, entry: Entry[Any], footprint: Footprint) -> None:
        """It takes this instead. Who is charged for files stays so, where they are the same."""
        if self.shared.maps(entry, footprint.shared):
            self._disown(entry)
            self._own(entry, footprint)
            self._set(entry, Footprint(footprint.host + self.shared.charge(entry), footprint.devices))
        else:
            self._discharge(entry)
            self.charge(entry, footprint)

    def leaves(self, entry: Entry[Any]) -> None:
        """It is on its way out: what it takes comes back without anybody's doing."""
        self._disown(entry)
        self._leaving.add(entry)

    def discharge(self, entry: Entry[Any]) -> None:
        """It takes nothing any more; what it was charged for and others map still, they are charged for."""
        self._discharge(entry)
        self._leaving.discard(entry)

    def _discharge(self, entry: Entry[Any]) -> None:
        self._disown(entry)
        self._set(entry, Footprint())
        del self.charged[entry]
        for heir, size in self.shared.unmap(entry).items():
            self._set(heir, heir.footprint + Footprint(size))

    def _own(self, entry: Entry[Any], footprint: Footprint) -> None:
        own = self.charged[entry] = Footprint(footprint.host, footprint.devices)
        for tally in self._tallies(entry):
            tally.add(own, self.shared.files(entry))

    def _disown(self, entry: Entry[Any]) -> None:
        for tally in self._tallies(entry):
            tally.remove(self.charged[entry], self.shared.files(entry))

    def _tallies(self, entry: Entry[Any]) -> tuple[Tally, ...]:
        if entry in self._leaving:
            return ()
        return (self.staying, self.pinned) if entry.pinned else (self.staying,)

    def _set(self, entry: Entry[Any], charge: Footprint) -> None:
        self.taken += charge - entry.footprint
        entry.footprint = charge
