"""Layer 3, the contract: HTTP, gunicorn, Flask, SageMaker, the environment. The only place that knows them."""

from __future__ import annotations

from importlib.util import find_spec


def installed_version() -> str:
    """Return which version of mme is installed; "" for a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - 30 ms, of every command

    try:
        return version("mme")
    except PackageNotFoundError:
        return ""


def is_compiled() -> bool:
    """Whether requests go through what setup.py compiles, or through its sources."""
    return find_spec("container.compiled__mypyc") is not None
