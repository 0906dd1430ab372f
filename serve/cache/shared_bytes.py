"""Who is charged for files that several models map: each file once. PURE.

The first model that maps a file is charged for it. When that one goes, the charge goes to the next that mapped it, and
the file's bytes are free when the last one goes. So the charges of all models together are never less than what they
take, and a model that comes to files which are there already costs only what is its own.

What comes back when several go is less than their charges, where somebody who stays maps the same: a `Tally` tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from model_handlers.base import Footprint

if TYPE_CHECKING:
    from collections.abc import Mapping

M = TypeVar("M")


class SharedBytes(Generic[M]):
    """Files by name, their bytes, and the models that map them, in the order in which they came."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._users: dict[str, dict[M, None]] = {}
        self._files: dict[M, dict[str, int]] = {}  # of each model

    def __repr__(self) -> str:
        return f"<SharedBytes {len(self._files)} models map {sum(self._bytes.values()) / 1e6:.1f} MB>"

    def beyond(self, files: Mapping[str, int]) -> int:
        """Bytes of those files that nobody maps yet."""
        return sum(size for file, size in files.items() if file not in self._users)

    def map(self, model: M, files: Mapping[str, int]) -> int:
        """A model, which maps nothing so far, maps these files; returns the bytes that it is charged for."""
        if not files:
            return 0
        charge = self.beyond(files)
        self._files[model] = {file: self._bytes.setdefault(file, size) for file, size in files.items()}
        for file in files:
            self._users.setdefault(file, {})[model] = None
        return charge

    def unmap(self, model: M) -> dict[M, int]:
        """A model maps nothing any more; returns who is charged for how many bytes more from now on."""
        heirs: dict[M, int] = {}
        for file, size in self._files.pop(model, {}).items():
            users = self._users[file]
            was_charged = next(iter(users)) == model
            del users[model]
            if not users:
                del self._users[file], self._bytes[file]
            elif was_charged:
                heir = next(iter(users))
                heirs[heir] = heirs.get(heir, 0) + size
        return heirs

    def files(self, model: M) -> Mapping[str, int]:
        """What a model maps, and the bytes of each: those that the first had it with who maps it."""
        return self._files.get(model, {})

    def maps(self, model: M, files: Mapping[str, int]) -> bool:
        """Whether a model maps these files, and no others."""
        return list(self.files(model)) == list(files)

    def charge(self, model: M) -> int:
        """Bytes that a model is charged for now."""
        return sum(size for file, size in self.files(model).items() if next(iter(self._users[file])) == model)

    def part(self, model: M) -> int:
        """Bytes that it were charged for if all who map a file paid alike."""
        return sum(size // len(self._users[file]) for file, size in self.files(model).items())

    def beside(self, model: M) -> set[M]:
        """Those who map any of the files that a model maps, itself too."""
        return {user for file in self.files(model) for user in self._users[file]}


class Tally:
    """What some models take together: each its own, and each file that any of them maps once.

    Attributes:
        count: models.
        total: bytes.
        users: file → how many of them map it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = Footprint()
        self.users: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Tally of {self.count} models, {self.total}>"

    def add(self, own: Footprint, files: Mapping[str, int]) -> None:
        """One more, that maps these files."""
        self.count += 1
        self.total += own
        for file, size in files.items():
            users = self.users.get(file, 0)
            self.users[file] = users + 1
            if not users:
                self.total += Footprint(size)

    def remove(self, own: Footprint, files: Mapping[str, int]) -> None:
        """One of them leaves."""
        self.count -= 1
        self.total -= own
        for file, size in files.items():
            self.users[file] -= 1
            if not self.users[file]:
                del self.users[file]
                self.total -= Footprint(size)
