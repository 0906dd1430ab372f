"""Which version of mme is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version; "" for a checkout that was never installed."""
    try:
        return version("mme")
    except PackageNotFoundError:
        return ""
