"""Which version of mme is installed, and whether the path of a request is compiled."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def installed_version() -> str:
    """The version; "" for a checkout that was never installed."""
    try:
        return version("mme")
    except PackageNotFoundError:
        return ""


def is_compiled() -> bool:
    """Whether requests go through what setup.py compiles, or through its sources."""
    return find_spec("container.compiled__mypyc") is not None
