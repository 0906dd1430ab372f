"""The address to listen on where none is set: every interface in a container, else loopback. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EVERYWHERE, LOOPBACK = "0.0.0.0", "127.0.0.1"  # noqa: S104 - in a container, whose ports are opened from outside
_PLATFORMS = ("AZUREML_MODEL_DIR", "KUBERNETES_SERVICE_HOST")
_MARKS = ("/.dockerenv", "/run/.containerenv")  # Docker's and Podman's


class Address(NamedTuple):
    """Where to listen.

    Attributes:
        host: the address.
        reason: why, to follow the address and a colon.
    """

    host: str
    reason: str


def listening_address(environ: Mapping[str, str], exists: Callable[[str], bool], pid: int) -> Address:
    """Return where to listen.

    Args:
        environ: variables, flags among them.
        exists: whether there is a file.
        pid: the process's own number.
    """
    if given := environ.get("MME_HOST", "").strip():
        return Address(given, "--host/MME_HOST says so")
    variables = (name for name in sorted(environ) if name.startswith("SAGEMAKER_") or name in _PLATFORMS)
    if name := next(variables, ""):
        return Address(EVERYWHERE, f"all interfaces, since {name} is set")
    if mark := next((mark for mark in _MARKS if exists(mark)), ""):
        return Address(EVERYWHERE, f"all interfaces, since there is {mark}, as in a container")
    if pid == 1:
        return Address(EVERYWHERE, "all interfaces, since this is process 1, as in a container")
    return Address(LOOPBACK, "this machine alone, since nothing tells of a container; --host/MME_HOST says otherwise")
