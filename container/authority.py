"""Where something listens, as URLs and messages write it. PURE."""

from __future__ import annotations


def authority(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets: without them nobody could tell the port from it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
