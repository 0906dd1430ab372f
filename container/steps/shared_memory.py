"""Regions of memory that clients share with the server, by name: Triton's extension, whatever the protocol.

A region is a part of a POSIX shared memory object that a client made, and whose key it tells. It is opened here, never
made, and read and written by `pread` and `pwrite`, never mapped: the owner can cut the object short at any moment, and
a process that then touches a mapping of it is killed by SIGBUS. A read is one copy, as receiving a body is; what was
read and checked does not change any more. The event loop reads and writes small tensors itself, and leaves large ones
to a thread.

A region that is unregistered is unknown at once; a request that has found it before keeps it open until it is answered.

Knows no protocol. On the event loop, but for reading and writing.
"""

from __future__ import annotations

import os
import stat
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from container.codec import NeedsThread
from model_handlers.errors import Kind, MmeError, invalid_argument, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER = "/dev/shm"  # noqa: S108 - where Linux has the objects that shm_open makes
_RESERVED = "triton_python_backend_shm_region_"  # Triton's own, which may be running beside us
_MOST_BYTES = 2**63 - 1
AT_ONCE = 1 << 20  # bytes of a tensor that the event loop copies, in 0.2 ms; a thread copies what is larger
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


class Region:
    """A part of a shared memory object, open for as long as this is held; the descriptor is its own to close."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, offset: int, size: int) -> bytes:
        start, data = self.offset + offset, b""
        try:
            while len(data) < size:  # more than once only beyond what the system reads at a time: 2 GiB
                part = os.pread(self._descriptor, size - len(data), start + len(data))
                if not part:
                    raise self._cut_short()
                data = data + part if data else part
        except MemoryError:
            raise out_of_memory(f"{size} bytes of shared memory region '{self.name}' do not fit into memory") from None
        return data

    def write(self, offset: int, data: bytes | memoryview) -> None:
        start, left = self.offset + offset, memoryview(data)
        if os.fstat(self._descriptor).st_size < start + len(left):
            raise self._cut_short()
        try:
            while left:
                done = os.pwrite(self._descriptor, left, start)
                start, left = start + done, left[done:]
        except OSError as error:
            reason = f"shared memory region '{self.name}' can not be written: {error.strerror}"
            raise MmeError(Kind.INTERNAL, reason) from None

    def _cut_short(self) -> MmeError:
        return invalid_argument(
            f"Invalid offset + byte size for shared memory region: '{self.name}': its object '{self.key}' has become "
            "shorter since it was registered"
        )


class Place(NamedTuple):
    """Where in a region a tensor lies."""

    region: Region
    offset: int
    byte_size: int

    def read(self) -> bytes:
        return self.region.read(self.offset, self.byte_size)


class Regions:
    """The regions of one kind that are registered, where clients are allowed to share any: of "system" memory alone."""

    def __init__(self, kind: str = "system", *, allowed: bool = False) -> None:
        self._kind = kind
        self.allowed = allowed
        self._waits = False  # for tensors of any size
        self._regions: dict[str, Region] = {}

    def register(self, name: str, wanted: Mapping[str, Any]) -> None:
        """Take a region that requests may name; `wanted` has its `key`, `byte_size` and `offset` (or 0)."""
        self._check_allowed()
        if not name:
            raise invalid_argument(f"'region name' is necessary to register {self._kind} shared memory region")
        if self._kind == "cuda":
            raise MmeError(
                Kind.UNSUPPORTED,
                f"CUDA shared memory is not served: region '{name}' can not be registered; share system memory",
            )
        for field in ("key", "byte_size"):
            if field not in wanted:
                raise invalid_argument(f"Shared memory register request has no '{field}' field")
        key, offset = wanted["key"], _natural(wanted.get("offset", 0), "offset", name)
        byte_size = _natural(wanted["byte_size"], "byte_size", name)
        if name in self._regions:
            raise MmeError(Kind.CONFLICT, f"shared memory region '{name}' already in manager")
        self._regions[name] = _opened(name, key, offset, byte_size)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or with "" all of them; one that is unknown is forgotten already."""
        self._check_allowed()
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def rows(self, name: str = "") -> list[dict[str, Any]]:
        """What is registered: one region, or with "" all of them by name."""
        if name and name not in self._regions:
            raise _unknown(name, f"{self._kind} ")
        found = [self._regions[name]] if name else [self._regions[each] for each in sorted(self._regions)]
        return [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size} for each in found
        ]

    def place(self, name: str, offset: int, byte_size: int) -> Place:
        region = self._regions.get(name)
        if region is None:
            raise _unknown(name, "")
        if offset >= region.byte_size:
            raise invalid_argument(f"Invalid offset for shared memory region: '{name}'")
        if offset + byte_size > region.byte_size:
            raise invalid_argument(f"Invalid offset + byte size for shared memory region: '{name}'")
        return Place(region, offset, byte_size)

    def read(self, place: Place) -> bytes:
        if place.byte_size > AT_ONCE and not self._waits:
            raise NeedsThread
        return place.read()

    def held(self) -> Regions:
        """Those that there are now, whichever are unregistered meanwhile, for a thread that reads for one request."""
        held = Regions(self._kind, allowed=self.allowed)
        held._regions, held._waits = dict(self._regions), True
        return held

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise MmeError(Kind.UNSUPPORTED, DISABLED)


def _natural(value: Any, field: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_BYTES:
        raise invalid_argument(f"'{field}' of shared memory region '{name}' must be a number of bytes, got {value!r}")
    return value


def _opened(name: str, key: Any, offset: int, byte_size: int) -> Region:
    descriptor = _open(name, key)
    there = os.fstat(descriptor)
    if not stat.S_ISREG(there.st_mode) or not 0 < byte_size <= there.st_size - offset:
        os.close(descriptor)
        raise invalid_argument(
            f"failed to register shared memory region '{name}': invalid args: its object '{key}' has {there.st_size} "
            f"bytes, and {byte_size} from byte {offset} on are none of them"
        )
    return Region(name, key, offset, byte_size, descriptor)


def _open(name: str, key: Any) -> int:
    if not isinstance(key, str):
        raise invalid_argument(f"'key' of shared memory region '{name}' must be a string, got {key!r}")
    file = key.removeprefix("/")
    if file in {"", ".", ".."} or "/" in file or "\0" in file:
        raise invalid_argument(
            f"Unable to open shared memory region: '{key}': a key is the name of a shared memory object, not a path"
        )
    if file.startswith(_RESERVED):
        raise invalid_argument(
            f"shared memory region '{name}' can not have key '{key}': keys that begin with '{_RESERVED}' are reserved"
        )
    try:
        # no link is followed, and no pipe waited for, that another process has put there
        return os.open(f"{_FOLDER}/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        reason = f"Unable to open shared memory region: '{key}': {error.strerror}"
        raise MmeError(Kind.INTERNAL, reason) from None


def _unknown(name: str, kind: str) -> MmeError:
    return MmeError(Kind.NOT_FOUND, f"Unable to find {kind}shared memory region: '{name}'")
