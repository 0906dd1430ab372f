"""Bytes on the wire ↔ inference requests and responses. No socket, no route and no status in this package."""
