"""The methods of shared memory: regions are told, registered and unregistered. On the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.grpc import grpc_service_pb2 as pb
from container.grpc.messages import parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from container.shared_memory import CudaRegions, Regions

    Method = Callable[[bytes, Any], Coroutine[Any, Any, bytes]]


def system_methods(regions: Regions) -> dict[str, Method]:
    """Those of system shared memory, by name."""

    async def status(data: bytes, _context: Any) -> bytes:
        told = pb.SystemSharedMemoryStatusResponse()
        for row in regions.rows(parsed(pb.SystemSharedMemoryStatusRequest, data).name):
            told.regions[row["name"]].MergeFrom(pb.SystemSharedMemoryStatusResponse.RegionStatus(**row))
        return told.SerializeToString()

    async def register(data: bytes, _context: Any) -> bytes:
        request = parsed(pb.SystemSharedMemoryRegisterRequest, data)
        wanted = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
        regions.register(request.name, wanted)
        return b""

    async def unregister(data: bytes, _context: Any) -> bytes:
        regions.unregister(parsed(pb.SystemSharedMemoryUnregisterRequest, data).name)
        return b""

    return _named("System", status, register, unregister)


def cuda_methods(regions: CudaRegions) -> dict[str, Method]:
    """Those of CUDA shared memory, by name."""

    async def status(data: bytes, _context: Any) -> bytes:
        regions.rows(parsed(pb.CudaSharedMemoryStatusRequest, data).name)
        return b""

    async def register(data: bytes, _context: Any) -> bytes:
        regions.register(parsed(pb.CudaSharedMemoryRegisterRequest, data).name, {})
        return b""

    async def unregister(data: bytes, _context: Any) -> bytes:
        regions.unregister(parsed(pb.CudaSharedMemoryUnregisterRequest, data).name)
        return b""

    return _named("Cuda", status, register, unregister)


def _named(kind: str, status: Method, register: Method, unregister: Method) -> dict[str, Method]:
    return {
        f"{kind}SharedMemoryStatus": status,
        f"{kind}SharedMemoryRegister": register,
        f"{kind}SharedMemoryUnregister": unregister,
    }
