"""Tensors that lie in regions of shared memory: what requests say of them, read and written where they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.codec.fields import check_size, view
from container.steps.shared_memory import DISABLED
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from container.steps.shared_memory import Place, Regions
    from model_handlers.tensor import Array, DataType

REGION = "shared_memory_region"
_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"
NO_PLACES: dict[str, Place] = {}  # never filled


def names_region(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor's parameters say that it lies in a region.

    Raises:
        MmeError: INVALID_ARGUMENT for a place in a region that has no name.
    """
    if REGION in parameters:
        return True
    for field in (_SIZE, _OFFSET):
        if field in parameters:
            raise invalid_argument(f"'{field}' can not be specified without '{REGION}' parameter for tensor '{name}'")
    return False


def shared_input(
    regions: Regions, parameters: Mapping[str, Any], name: str, data_type: DataType, shape: tuple[int, ...], model: str
) -> Array:
    """The tensor that an input's parameters name, as it is now.

    Raises:
        MmeError: UNSUPPORTED where clients share no memory, NOT_FOUND, INVALID_ARGUMENT, OUT_OF_MEMORY.
        Unread: see `Regions.read`.
    """
    place = _place(regions, parameters, f"input '{name}'")
    check_size(place.byte_size, name, data_type, shape)
    data = regions.read(place)
    return view(data, 0, len(data), name, data_type, shape, model)


def shared_output(regions: Regions, parameters: Mapping[str, Any], name: str) -> Place:
    """Where an output is to be written.

    Raises:
        MmeError: UNSUPPORTED where clients share no memory, NOT_FOUND, INVALID_ARGUMENT.
    """
    for other in ("classification", "binary_data"):
        if parameters.get(other):
            raise invalid_argument(f"output '{name}' can not be in a shared memory region and have '{other}' as well")
    return _place(regions, parameters, f"output '{name}'")


def write_output(place: Place, name: str, data: bytes | memoryview) -> None:
    """Write an output's bytes to its place.

    A response says nothing of the place, which its client knows: of parameters of an output Triton's C++ client takes
    `binary_data_size` alone, and gives the whole response up.

    Raises:
        MmeError: INTERNAL when there is too little room for it; INVALID_ARGUMENT when the region has become shorter.
    """
    region, offset, room = place
    if len(data) > room:
        raise MmeError(
            Kind.INTERNAL,
            f"shared memory size specified with the request for output '{name}' ({room} bytes) should be at least "
            f"{len(data)} bytes to hold the results",
        )
    region.write(offset, data)


def _place(regions: Regions, parameters: Mapping[str, Any], what: str) -> Place:
    if not regions.allowed:
        raise MmeError(Kind.UNSUPPORTED, f"{what} names a shared memory region. {DISABLED}")
    region = parameters[REGION]
    if not isinstance(region, str):
        raise invalid_argument(f"'{REGION}' of {what} must be a string, got {region!r}")
    if _SIZE not in parameters:
        raise invalid_argument(f"{what} has '{REGION}' and no '{_SIZE}'")
    size, offset = (_natural(parameters.get(field, 0), field, what) for field in (_SIZE, _OFFSET))
    return regions.place(region, offset, size)


def _natural(value: Any, field: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise invalid_argument(f"'{field}' of {what} must be a number of bytes, got {value!r:.100}")
    return value
