"""Bytes on the wire ↔ inference requests and responses. No socket, no route and no status in this package."""


class NeedsThread(Exception):  # noqa: N818 - it says what is to be done, and is no error
    """Reading a request would keep the event loop from others: a thread has to do it, see `Regions.held`."""
