"""Shared memory objects as clients make them, without Python's process that watches over its own."""

from __future__ import annotations

import mmap
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from container.steps.shared_memory import Regions

if TYPE_CHECKING:
    from collections.abc import Iterator

OBJECTS = Path("/dev/shm")  # noqa: S108 - where shm_open makes them
PREFIX = "mme-test-"


class SharedObject(NamedTuple):
    """One: the key that a client tells, and its bytes."""

    key: str
    buf: mmap.mmap

    @property
    def path(self) -> Path:
        """Where it is found."""
        return OBJECTS / self.key.removeprefix("/")


def new_key() -> str:
    """A key that nobody else has."""
    return f"/{PREFIX}{secrets.token_hex(6)}"


def registered(name: str, shared: SharedObject) -> Regions:
    """Regions of which one is all of an object."""
    regions = Regions(allowed=True)
    regions.register(name, {"key": shared.key, "byte_size": len(shared.buf)})
    return regions


@contextmanager
def shared_object(size: int) -> Iterator[SharedObject]:
    """One of zeros, for as long as this lasts."""
    key = new_key()
    path = OBJECTS / key.removeprefix("/")
    path.write_bytes(bytes(size))
    try:
        with path.open("r+b") as file:
            buf = mmap.mmap(file.fileno(), size)
        with buf:
            yield SharedObject(key, buf)
    finally:
        path.unlink()
