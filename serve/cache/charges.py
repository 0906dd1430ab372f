"""What models are charged for: bytes of their own, and files that they are the first to map. On the event loop only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from model_handlers.base import Footprint
from serve.cache.shared_bytes import SharedBytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serve.cache.cache_entry import Entry


class Charges:
    """The footprints of entries, files that several of them map being counted once.

    Attributes:
        shared: those files.
    """

    def __init__(self) -> None:
        self.shared: SharedBytes[Entry[Any]] = SharedBytes()
        self._expected: Counter[str] = Counter()  # files, by loads under way to which they are promised

    def counted(self, footprint: Footprint) -> Footprint:
        """What a model would be charged for: files that others map already, or are about to, cost nothing."""
        files = {file: size for file, size in footprint.shared.items() if not self._expected[file]}
        return Footprint(footprint.host + self.shared.beyond(files), footprint.devices)

    def expect(self, files: Iterable[str]) -> None:
        """A load is under way that these are promised to."""
        self._expected.update(files)

    def expect_no_more(self, files: Iterable[str]) -> None:
        """It is over."""
        self._expected.subtract(files)
        self._expected = +self._expected

    def charge(self, entry: Entry[Any], footprint: Footprint) -> None:
        """A model takes this from now on."""
        charge = self.shared.map(entry, footprint.shared)
        entry.footprint = Footprint(footprint.host + charge, footprint.devices)

    def recharge(self, entry: Entry[Any], footprint: Footprint) -> None:
        """It takes this instead. Who is charged for files stays so, where they are the same."""
        if self.shared.maps(entry, footprint.shared):
            entry.footprint = Footprint(footprint.host + self.shared.charge(entry), footprint.devices)
        else:
            self.discharge(entry)
            self.charge(entry, footprint)

    def discharge(self, entry: Entry[Any]) -> None:
        """It takes nothing any more; what it was charged for and others map still, they are charged for."""
        for heir, size in self.shared.unmap(entry).items():
            heir.footprint += Footprint(size)
