"""The methods of shared memory: regions are told, registered and unregistered. On the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.grpc import grpc_service_pb2 as pb
from container.grpc.messages import parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from container.shared_memory import CudaRegions, Regions

    Method = Callable[[bytes, Any], Coroutine[Any, Any, bytes]]


def memory_methods(kind: str, regions: Regions | CudaRegions) -> dict[str, Method]:
    """Those of one kind of shared memory, System or Cuda, by name."""
    service = f"{kind}SharedMemory"

    def asked(deed: str, data: bytes) -> Any:
        return parsed(getattr(pb, f"{service}{deed}Request"), data)

    async def status(data: bytes, _context: Any) -> bytes:
        told = getattr(pb, f"{service}StatusResponse")()
        for row in regions.rows(asked("Status", data).name):
            told.regions[row["name"]].MergeFrom(type(told).RegionStatus(**row))
        return bytes(told.SerializeToString())

    async def register(data: bytes, _context: Any) -> bytes:
        request = asked("Register", data)
        wanted = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
        regions.register(wanted.pop("name"), wanted)
        return b""

    async def unregister(data: bytes, _context: Any) -> bytes:
        regions.unregister(asked("Unregister", data).name)
        return b""

    return {f"{service}{each.__name__.capitalize()}": each for each in (status, register, unregister)}
