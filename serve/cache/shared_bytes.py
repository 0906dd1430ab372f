"""Who is charged for files that several models map: each file once. PURE.

The first model that maps a file is charged for it. When that one goes, the charge goes to the next that mapped it, and
the file's bytes are free when the last one goes. So the charges of all models together are never less than what they
take, and a model that comes to files which are there already costs only what is its own.

What comes back when several go is less than their charges, where somebody who stays maps the same: `jointly` tells.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

M = TypeVar("M")


class Joint(NamedTuple):
    """What a model maps together with others.

    Attributes:
        pieces: number → bytes; those files are one piece that the same models map.
        charged: how many of these bytes it is charged for.
        part: how many that were if all of them paid alike.
    """

    pieces: Mapping[int, int]
    charged: int
    part: int


_ALONE = Joint({}, 0, 0)


class SharedBytes(Generic[M]):
    """Files by name, their bytes, and the models that map them, in the order in which they came."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._users: dict[str, dict[M, None]] = {}
        self._files: dict[M, list[str]] = {}  # of each model
        self._joint: dict[M, Joint] | None = {}  # None where it has to be worked out anew

    def __repr__(self) -> str:
        return f"<SharedBytes {len(self._files)} models map {sum(self._bytes.values()) / 1e6:.1f} MB>"

    def beyond(self, files: Mapping[str, int]) -> int:
        """Bytes of those files that nobody maps yet."""
        return sum(size for file, size in files.items() if file not in self._users)

    def map(self, model: M, files: Mapping[str, int]) -> int:
        """A model, which maps nothing so far, maps these files; returns the bytes that it is charged for."""
        if not files:
            return 0
        self._joint = None
        charge = self.beyond(files)
        self._files[model] = list(files)
        for file, size in files.items():
            self._bytes.setdefault(file, size)
            self._users.setdefault(file, {})[model] = None
        return charge

    def unmap(self, model: M) -> dict[M, int]:
        """A model maps nothing any more; returns who is charged for how many bytes more from now on."""
        heirs: dict[M, int] = {}
        if model in self._files:
            self._joint = None
        for file in self._files.pop(model, ()):
            users = self._users[file]
            was_charged = next(iter(users)) == model
            del users[model]
            if not users:
                del self._users[file], self._bytes[file]
            elif was_charged:
                heir = next(iter(users))
                heirs[heir] = heirs.get(heir, 0) + self._bytes[file]
        return heirs

    def maps(self, model: M, files: Mapping[str, int]) -> bool:
        """Whether a model maps these files, and no others."""
        return self._files.get(model, []) == list(files)

    def charge(self, model: M) -> int:
        """Bytes that a model is charged for now."""
        return sum(self._bytes[file] for file in self._files.get(model, ()) if next(iter(self._users[file])) == model)

    def jointly(self, model: M) -> Joint:
        """What a model maps that others map as well."""
        if self._joint is None:
            self._joint = self._worked_out()
        return self._joint.get(model, _ALONE)

    def _worked_out(self) -> dict[M, Joint]:
        """By model; copies of one model map a hundred files together, which are one piece to whoever counts them."""
        sizes: dict[tuple[M, ...], int] = defaultdict(int)
        for file, users in self._users.items():
            if len(users) > 1:
                sizes[tuple(users)] += self._bytes[file]
        pieces: dict[M, dict[int, int]] = defaultdict(dict)
        charged: dict[M, int] = defaultdict(int)
        parts: dict[M, int] = defaultdict(int)
        for number, (together, size) in enumerate(sizes.items()):
            charged[together[0]] += size
            for user in together:
                pieces[user][number] = size
                parts[user] += size // len(together)
        return {model: Joint(of_it, charged[model], parts[model]) for model, of_it in pieces.items()}
